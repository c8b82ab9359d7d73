"""What a run tells while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What a run is doing, for a progress line.

    Attributes:
        stage: plan, load, teach, calibrate, before, reference, train, save or after.
        done: finished units of this stage.
        total: all units; None: not known (training ends by itself).
        violation: the number that matters, where training is on.
        tolerance: what it falls to.
        step: updates done.
        phase: "main" or "rest", while training.
        loss: nats a token, while teaching.
        bytes: what the reference takes, while it is computed.
        lines: of the plan, for a person.
    """

    stage: str
    done: int = 0
    total: int | None = None
    violation: float | None = None
    tolerance: float | None = None
    step: int | None = None
    phase: str | None = None
    loss: float | None = None
    bytes: int | None = None
    lines: tuple[str, ...] = ()


Watch = Callable[[Progress], None]
