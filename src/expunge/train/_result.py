"""What a run found, before and after: numbers with their meaning, no text unless it is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from expunge.errors import UsageError
from expunge.metrics import mean_or_none
from expunge.scoring import ScoreTable


@dataclass(frozen=True)
class Answer:
    """A generated answer beside the example's own.

    Attributes:
        id: of the example.
        question: text of the last user turn; None for raw text.
        reference: the example's answer.
        before: what the model answered before; None where it was not asked.
        after: what it answers now; None where it was not asked yet.
    """

    id: str
    question: str | None
    reference: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Summary:
    """Means over the examples of one file, at one time; None = not measured.

    Attributes:
        examples: scored examples.
        probability: mean of exp(mean log-probability of the answer's tokens), in [0, 1].
        exact: share of answer tokens that are the model's first choice (greedy), in [0, 1].
        violation: share of answer tokens with margin above τ_ρ, in [0, 1].
        rouge_l: ROUGE-L recall of generated answers, in [0, 1].
        generated: examples whose answers were generated.
    """

    examples: int
    probability: float | None
    exact: float | None
    violation: float | None
    rouge_l: float | None
    generated: int


def summarise_scores(table: ScoreTable, rouge: Sequence[float | None]) -> Summary:
    """Reduce a score table and the ROUGE values of a sample to means."""
    probabilities = [None if value is None else math.exp(value) for value in table.values("logprob_mean")]
    return Summary(
        examples=len(table),
        probability=mean_or_none(probabilities),
        exact=table.mean("exact"),
        violation=table.mean("violation"),
        rouge_l=mean_or_none(list(rouge)),
        generated=len(rouge),
    )


@dataclass(frozen=True)
class Earlier:
    """What became of the examples that earlier requests made the model forget.

    Attributes:
        before: means over them before this run.
        after: the same of the saved model.
        back: ids of those that were within the tolerance before and are above it now by more than their sampling error.
    """

    before: Summary
    after: Summary
    back: list[str]


@dataclass(frozen=True)
class UnlearnResult:
    """The outcome of a run.

    Attributes:
        out: run folder.
        model: folder of the saved model or adapter.
        forgotten: the rule stopped and no example is left above the tolerance by more than its sampling error.
        reason: why training ended.
        tolerance: α.
        tolerance_source: where α came from: "option", "preset" or "holdout".
        steps: updates done.
        stopped_at: step at which the rule stopped; None: it did not.
        seconds: time by stage: load, calibrate, reference, train (probes and measurements included), save, evaluate.
        left: ids of the examples above the tolerance by more than their sampling error, measured on the saved model.
        forget_before: means over all forget examples.
        forget_after: the same of the saved model.
        retain_before: means over a sample of the retain examples; None without a retain file.
        retain_after: the same of the saved model.
        max_logit_error: largest difference of logits between the saved model, loaded again, and the one in memory.
        fingerprint: of the saved weights.
        earlier: what was forgotten before; None where no such file was given.
        notes: what the user should know.
        answers: generated answers of the samples: "forget" and "retain". In memory only, unless texts are shown.
    """

    out: str
    model: str
    forgotten: bool
    reason: str
    tolerance: float
    tolerance_source: str
    steps: int
    stopped_at: int | None
    seconds: dict[str, float]
    left: list[str]
    forget_before: Summary
    forget_after: Summary
    retain_before: Summary | None
    retain_after: Summary | None
    max_logit_error: float
    fingerprint: str
    earlier: Earlier | None = None
    notes: tuple[str, ...] = ()
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0: every example is forgotten; 3: the budget ran out before, or one of an earlier request is known again."""
        return 0 if self.forgotten and not (self.earlier and self.earlier.back) else 3

    @property
    def unlearn_seconds(self) -> float:
        """Time from the loaded model to the end of training: calibration, references, updates, probes, measurements."""
        return sum(self.seconds.get(name, 0.0) for name in ("calibrate", "reference", "train"))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> UnlearnResult:
        """What `to_dict` gave, without the answers.

        Raises:
            UsageError: a name is missing or unknown.
        """
        means = ("forget_before", "forget_after", "retain_before", "retain_after")
        found = {name: value for name, value in values.items() if name != "answers"}
        try:
            for name in means:
                found[name] = None if found[name] is None else Summary(**found[name])
            if found.get("earlier") is not None:
                earlier = found["earlier"]
                found["earlier"] = Earlier(Summary(**earlier["before"]), Summary(**earlier["after"]), earlier["back"])
            return cls(**found | {"notes": tuple(found["notes"])})
        except (KeyError, TypeError) as error:
            raise UsageError(f"result: found one of another version ({error}), accepted is one of this one") from None

    def to_dict(self, *, texts: bool) -> dict[str, Any]:
        """Return JSON values; answers only where `texts` is set."""
        values = dataclasses.asdict(self)
        if not texts:
            del values["answers"]
        return values
