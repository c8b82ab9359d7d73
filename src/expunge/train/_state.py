"""Where the loop is, and what one update reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from expunge.errors import RunError


class StepError(RunError):
    """An update could not be made; the loop is as it was before it."""


@dataclass
class LoopState:
    """Where a run is; JSON values only.

    Attributes:
        step: updates done.
        phase: "main" until the rule stops, "rest" while training on what is left above the tolerance, "done".
        passes: finished passes over the forget examples in this phase.
        queue: examples still to come in this pass.
        items: examples of this pass.
        rest: examples above the tolerance by more than their sampling error at the last full measurement.
        violations: violation of every forget example at the last full measurement; None before the first.
        measured_at: step of that measurement.
        stopped_at: step at which the rule stopped; None: it has not.
        recent: running mean of the violation of the rows that were trained on; the step size follows it.
        reason: why the run ended, or where it is.
    """

    step: int = 0
    phase: str = "main"
    passes: int = 0
    queue: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)
    violations: list[float] | None = None
    measured_at: int | None = None
    stopped_at: int | None = None
    recent: float = 1.0
    reason: str = ""


@dataclass(frozen=True)
class StepReport:
    """What one update did; parts are means over the whole update, None where a part was not computed."""

    step: int
    forget_loss: float | None
    retain_loss: float | None
    anchor_loss: float | None
    total_loss: float
    violation: float | None
    gradient_norm: float | None
    closed: int
    updated: bool


@dataclass(frozen=True)
class Counts:
    """What one update divides by, whatever its parts: rows and tokens of the whole update."""

    forget_rows: int
    forget_tokens: int
    retain_tokens: int


@dataclass
class Sums:
    """Running sums over the parts of one update."""

    forget: float = 0.0
    anchor: float = 0.0
    retain: float = 0.0
    total: float = 0.0
    violation: float = 0.0
    closed: int = 0
    backward: bool = False
