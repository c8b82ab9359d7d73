"""Silence for calls into transformers and peft: no progress bars, no log lines, no warnings; restored afterwards."""

import contextlib
import warnings
from collections.abc import Iterator

from transformers.utils import logging as hf_logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Mute transformers, huggingface_hub and Python warnings inside the block, and restore what was set before."""
    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, for quoting inside our own one-line messages."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip().rstrip(".")[:300]
    return type(error).__name__
