"""Where the loop is, and what one update reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from expunge.errors import RunError


class StepError(RunError):
    """An update could not be made; the loop is as it was before it, unless `partial`.

    Attributes:
        partial: earlier turns of the update have changed the weights.
    """

    partial = False


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
    """What one update did; parts are means over the whole update, None where a part was not computed.

    Attributes:
        step: number of the update, from 1.
        forget_loss: the forget term, before its weight; for a term that `ascends` the cross-entropy, in nats.
        retain_loss: the retain term, before its weight; with several retain turns their mean.
        anchor_loss: KL of the anchor, in nats a token.
        total_loss: what was minimised: the weighted sum.
        retain_weight: weight of the retain term.
        violation: mean violation of the forget rows that were trained on, where the objective computes margins.
        gradient_norm: norm of the gradient that was applied; with several turns that of the first.
        forget_gradient_norm: norm of the forget term's gradient; None where the parts were not taken apart.
        retain_gradient_norm: norm of the retain term's gradient; with several turns their mean.
        cosine: between the gradients of the two terms, in [−1, 1]: of this update where they were taken apart, of the
            running averages where the optimizer keeps one for each; None otherwise.
        base_norm: norm of the optimizer's shared base relative to the average gradient, by objective.
        delta_norm: norm of each objective's delta relative to its average gradient.
        closed: forget rows whose gate was closed.
        updated: whether the weights were changed.
    """

    step: int
    forget_loss: float | None
    retain_loss: float | None
    anchor_loss: float | None
    total_loss: float
    retain_weight: float
    violation: float | None
    gradient_norm: float | None
    forget_gradient_norm: float | None
    retain_gradient_norm: float | None
    cosine: float | None
    base_norm: dict[str, float | None] | None
    delta_norm: dict[str, float | None] | None
    closed: int
    updated: bool


@dataclass
class Sums:
    """Running sums over the parts of one update."""

    forget: float = 0.0
    anchor: float | None = None
    retain: float = 0.0
    total: float = 0.0
    violation: float | None = None
    closed: int = 0
    backward: bool = False
