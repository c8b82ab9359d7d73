"""Make a causal language model forget given training examples.

Names are imported when they are first used: `import expunge` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expunge._api import resume, unlearn
    from expunge.data import read_records
    from expunge.errors import ExpungeError, RunError, UsageError
    from expunge.lm import load_model
    from expunge.scoring import generate, score
    from expunge.suites import evaluate
    from expunge.train import RunConfig, UnlearnResult

    __version__: str

# name → the module that has it
_NAMES = {
    "ExpungeError": "expunge.errors",
    "RunConfig": "expunge.train",
    "RunError": "expunge.errors",
    "UnlearnResult": "expunge.train",
    "UsageError": "expunge.errors",
    "evaluate": "expunge.suites",
    "generate": "expunge.scoring",
    "load_model": "expunge.lm",
    "read_records": "expunge.data",
    "resume": "expunge._api",
    "score": "expunge.scoring",
    "unlearn": "expunge._api",
}

__all__ = [
    "ExpungeError",
    "RunConfig",
    "RunError",
    "UnlearnResult",
    "UsageError",
    "__version__",
    "evaluate",
    "generate",
    "load_model",
    "read_records",
    "resume",
    "score",
    "unlearn",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("expunge")
    elif name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    else:
        raise AttributeError(f"module 'expunge' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
