"""What changes while training: the step size, and from where on an example gets no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from expunge.stopping import sampling_error
from expunge.train._recipe import Recipe
from expunge.train._state import LoopState

# Smallest factor of a tapered step size.
_LEAST_STEP = 0.5
# Where the gate of an example left after the stop closes, in sampling errors above α; at 1 it would be within.
_REST_GATE = 0.8


def step_scale(recipe: Recipe, state: LoopState, alpha: float) -> float:
    """Factor of the step size: warmup, then the taper.

    Args:
        recipe: gives both.
        state: its step, phase and recent violation.
        alpha: tolerance α, in [0, 1].

    Returns:
        A factor in (0, 1].
    """
    scale = min(1.0, (state.step + 1) / recipe.warmup) if recipe.warmup else 1.0
    if recipe.taper is None:
        return scale
    if state.phase == "rest":
        return scale * _LEAST_STEP
    left = (state.recent - alpha) / max(recipe.taper * (1 - alpha), 1e-6)
    return scale * min(1.0, max(_LEAST_STEP, left))


def gates(phase: str, tokens: Sequence[int], *, alpha: float, slack: int) -> list[float]:
    """The violation at which each row's gate closes: α; for what is left after the stop, α and most of its error.

    In the main phase the mean has to come down to α. After it only single examples are left, and pushing these below α
    would push all the others far below.

    Args:
        phase: "main" or "rest".
        tokens: labelled tokens of each row.
        alpha: tolerance α, in [0, 1].
        slack: tokens more that have to be within.

    Returns:
        One share for each row, in [α, 1].
    """
    if phase == "main":
        return [alpha] * len(tokens)
    found = (alpha + _REST_GATE * sampling_error(alpha, count) - slack / count for count in tokens)
    return [min(1.0, max(alpha, gate)) for gate in found]
