"""What a stress run does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from expunge.errors import UsageError
from expunge.scoring import Sampling
from expunge.suites import EvaluateSettings

TESTS = ("int8", "int4", "relearn", "paraphrase", "prefix", "samples")
_LR = {"adapter": 2e-4, "full": 2e-5}


@dataclass(frozen=True)
class StressSettings:
    """Which tests are run, and how.

    Attributes:
        evaluate: rows, lengths, hardware, seed and resamples, as in an evaluation; its lm-eval tasks are not run.
        tests: names of `TESTS`, run in their order.
        relearn_rows: rows to forget that are taught again, 1 or more; drawn by the seed.
        relearn_steps: updates on them, 0 or more; 0 leaves the model as it is.
        relearn_batch: rows in an update.
        relearn_lr: step size at the start, falling to 0; None: 2e-4 for an adapter, 2e-5 for all weights.
        relearn_full: train all weights instead of a LoRA adapter of rank 32 on all linear layers.
        prefix: shares of the answer that are given, in per cent, from 0 to 99.
        samples: answers drawn for each question, 1 or more.
        temperature: of the draws, above 0.
        top_p: draw from the likeliest tokens that together have this probability, in (0, 1].

    Raises:
        UsageError: a name is unknown, or an option is out of range.

    References:
        Quantisation: Zhang et al., Catastrophic Failure of LLM Unlearning via Quantization, arXiv 2410.16454.
        Relearning on a part of what was forgotten: Hu et al., Unlearning or Obfuscating?, arXiv 2406.13356. Step size
        for all weights: OpenUnlearning, arXiv 2506.12618; for adapters: Dettmers et al., QLoRA, arXiv 2305.14314.
        Paraphrases: Maini et al., TOFU, arXiv 2401.06121. Prefixes: Carlini et al., Quantifying Memorization Across
        Neural Language Models, arXiv 2202.07646. Samples: Scholten et al., A Probabilistic Perspective on Unlearning
        and Alignment for Large Language Models, arXiv 2410.03523.
    """

    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    tests: tuple[str, ...] = TESTS
    relearn_rows: int = 20
    relearn_steps: int = 20
    relearn_batch: int = 8
    relearn_lr: float | None = None
    relearn_full: bool = False
    prefix: tuple[int, ...] = (0, 25, 50)
    samples: int = 8
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.tests:
            raise UsageError(f"tests: found none, accepted are {', '.join(TESTS)}")
        for name in self.tests:
            if name not in TESTS or self.tests.count(name) > 1:
                raise UsageError(f"tests: found {name!r}, accepted are unlike names of {', '.join(TESTS)}")
        for name, least in (("relearn_rows", 1), ("relearn_steps", 0), ("relearn_batch", 1), ("samples", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}: found {getattr(self, name)!r}, accepted is a whole number from {least}")
        if self.relearn_lr is not None and not 0.0 < self.relearn_lr < math.inf:
            raise UsageError(f"relearn_lr: found {self.relearn_lr!r}, accepted is a number above 0")
        for share in self.prefix:
            if not 0 <= share <= 99 or self.prefix.count(share) > 1:
                raise UsageError(f"prefix: found {share!r}, accepted are unlike whole numbers from 0 to 99, per cent")
        if "prefix" in self.tests and not self.prefix:
            raise UsageError("prefix: found none, accepted are whole numbers from 0 to 99, per cent")
        self.sampling()

    def sampling(self) -> Sampling:
        """How answers are drawn."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, seed=self.evaluate.seed)

    def options(self, test: str, share: int = 0) -> dict[str, Any]:
        """What decides the result of a test, beside model, data and lengths.

        Args:
            test: a name of `TESTS`, or "plain".
            share: of the answer that is given, for "prefix".
        """
        if test in ("int8", "int4"):
            return {"bits": int(test[3:])}
        if test == "relearn":
            way = "full" if self.relearn_full else "adapter"
            lr = _LR[way] if self.relearn_lr is None else self.relearn_lr
            found: dict[str, Any] = {"rows": self.relearn_rows, "steps": self.relearn_steps, "lr": lr, "trained": way}
            return found | {"batch": self.relearn_batch, "seed": self.evaluate.seed}
        if test == "prefix":
            return {"share": share}
        if test == "samples":
            found = {"samples": self.samples, "temperature": self.temperature, "top_p": self.top_p}
            return found | {"seed": self.evaluate.seed}
        return {}
