"""The stopping rule: a small probe of the forget set, confirmed on a larger one."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expunge.errors import UsageError

STAGES = ("probe", "confirm", "full")


@dataclass(frozen=True)
class Observation:
    """Violation shares of some forget examples at one step.

    Attributes:
        step: updates done so far.
        stage: "probe", "confirm", or "full" (every forget example: decides like a confirmation, at any step).
        violations: share of tokens above τ_ρ for each example, in [0, 1].
        ids: the examples, in the same order.

    Raises:
        ValueError: nothing was observed, or a value is not a finite share.
    """

    step: int
    stage: str
    violations: Sequence[float]
    ids: Sequence[str]

    def __post_init__(self) -> None:
        """Refuse what cannot be averaged."""
        if self.stage not in STAGES:
            raise ValueError(f"stage: found {self.stage!r}, accepted is one of {', '.join(STAGES)}")
        if self.step < 0:
            raise ValueError(f"step: found {self.step}, accepted is a number from 0")
        if len(self.violations) == 0:
            raise ValueError(f"violations: found none at step {self.step}, accepted is at least one example")
        if len(self.ids) != len(self.violations):
            raise ValueError(
                f"ids: found {len(self.ids)}, accepted is one for each of {len(self.violations)} violations"
            )
        for example, value in zip(self.ids, self.violations, strict=True):
            if not (math.isfinite(value) and 0.0 <= value <= 1.0):
                raise ValueError(
                    f"violation of example {example}: found {value} at step {self.step}, accepted is 0 to 1"
                )


@dataclass(frozen=True)
class Decision:
    """What the rule made of an observation.

    Attributes:
        stop: True: training ends at this step.
        stage: what the rule asks for next: "confirm" (at the same step), "probe" (at a later step) or "done".
        reason: one sentence for a person.
        numbers: step, stage, mean, standard_error (None for one example), examples, tolerance, lowest, highest.
    """

    stop: bool
    stage: str
    reason: str
    numbers: dict[str, Any]


class StoppingRule:
    """Stop when the mean violation is within the tolerance on a small probe and, at the same step, on a larger one.

    (1/n) Σ_i V_i ≤ α on n = `probe` examples, then on n = `confirm` examples. A probe that fails costs a few short
    forward passes; only a probe that passes is paid a second look, which guards against a lucky draw.

    Args:
        tolerance: α, in [0, 1].
        probe: examples of the first look, 1 or more.
        confirm: examples of the second look, `probe` or more.
        every: looks are taken at the multiples of this number of steps (0 included: the model may have forgotten
            already).

    Raises:
        UsageError: an option is out of range.

    Example:
        >>> rule = StoppingRule(tolerance=0.5, probe=1, confirm=2, every=1)
        >>> rule.wants(3)
        1
        >>> rule.update(Observation(3, "probe", [0.4], ["a"])).stage
        'confirm'
        >>> rule.wants(3)
        2
        >>> rule.update(Observation(3, "confirm", [0.4, 0.6], ["a", "b"])).stop
        True

    References:
        MASC, arXiv 2606.02920. https://arxiv.org/abs/2606.02920
    """

    def __init__(self, tolerance: float, probe: int = 4, confirm: int = 32, every: int = 2) -> None:
        if not 0.0 <= tolerance <= 1.0:
            raise UsageError(f"tolerance: found {tolerance!r}, accepted is a number from 0 to 1")
        if probe < 1:
            raise UsageError(f"probe: found {probe!r}, accepted is a whole number from 1")
        if confirm < probe:
            raise UsageError(f"confirm: found {confirm!r}, accepted is a whole number from {probe} (probe)")
        if every < 1:
            raise UsageError(f"every: found {every!r}, accepted is a whole number from 1")
        self.tolerance = tolerance
        self.probe = probe
        self.confirm = confirm
        self.every = every
        self.stopped_at: int | None = None
        self._pending: int | None = None
        self._last: int | None = None

    @property
    def pending(self) -> bool:
        """True between a probe that passed and its confirmation."""
        return self._pending is not None

    def wants(self, step: int) -> int | None:
        """Say how many examples are to be looked at now.

        Args:
            step: updates done so far.

        Returns:
            `confirm` where a probe passed at this step, `probe` where a look is due and was not yet taken, otherwise
            None.
        """
        if self.stopped_at is not None:
            return None
        if self._pending == step:
            return self.confirm
        due = step % self.every == 0 and (self._last is None or step > self._last)
        return self.probe if due else None

    def update(self, observation: Observation) -> Decision:
        """Take in an observation and decide.

        Args:
            observation: what was measured; a confirmation belongs to the step of the probe that asked for it.

        Returns:
            The decision with its reason and numbers. Keep every one of them in the log.

        Raises:
            ValueError: the rule has stopped already, steps go backwards, or a confirmation was not asked for.
        """
        self._check_order(observation)
        numbers = self._numbers(observation)
        mean, passed = numbers["mean"], numbers["mean"] <= self.tolerance
        sign, examples = "≤" if passed else ">", numbers["examples"]
        found = f"mean violation {mean:.3f} {sign} {self.tolerance:g} on {examples} examples ({observation.stage})"
        self._last = observation.step
        self._pending = None
        if not passed:
            return Decision(False, "probe", f"step {observation.step}: {found}; training goes on", numbers)
        if observation.stage == "probe":
            self._pending = observation.step
            return Decision(
                False, "confirm", f"step {observation.step}: {found}; {self.confirm} examples decide", numbers
            )
        self.stopped_at = observation.step
        return Decision(True, "done", f"step {observation.step}: {found}; training stops", numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and position as JSON values."""
        return {
            "settings": self._settings(),
            "stopped_at": self.stopped_at,
            "pending": self._pending,
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the position of a saved rule.

        Args:
            state: what `state_dict` gave.

        Raises:
            UsageError: it was saved by a rule of other settings.
        """
        if state["settings"] != self._settings():
            raise UsageError(f"stopping rule: found saved settings {state['settings']}, accepted is {self._settings()}")
        self.stopped_at = state["stopped_at"]
        self._pending = state["pending"]
        self._last = state["last"]

    def _settings(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance, "probe": self.probe, "confirm": self.confirm, "every": self.every}

    def _check_order(self, observation: Observation) -> None:
        if self.stopped_at is not None:
            raise ValueError(
                f"step: found an observation at {observation.step}, but the rule stopped at {self.stopped_at}"
            )
        if self._last is not None and observation.step < self._last:
            raise ValueError(f"step: found {observation.step}, accepted is a number from {self._last} (the last one)")
        if observation.stage == "confirm" and self._pending != observation.step:
            raise ValueError(f"stage: found confirm at step {observation.step}, but no probe passed at that step")

    def _numbers(self, observation: Observation) -> dict[str, Any]:
        values = [float(value) for value in observation.violations]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return {
            "step": observation.step,
            "stage": observation.stage,
            "mean": math.fsum(values) / len(values),
            "standard_error": error,
            "examples": len(values),
            "tolerance": self.tolerance,
            "lowest": min(values),
            "highest": max(values),
        }


def sampling_error(alpha: float, tokens: int, z: float = 1.96) -> float:
    """Return how far a violation share of T tokens strays from α by chance: z·√(α(1 − α)/T).

    Args:
        alpha: tolerated violation share α, in [0, 1].
        tokens: labelled tokens T of the example, 1 or more.
        z: quantile of the normal distribution; 1.96 covers 95 % of the draws.

    Returns:
        Half the width of the interval, a share.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> round(sampling_error(0.5, 100), 4)
        0.098
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha: found {alpha!r}, accepted is a number from 0 to 1")
    if tokens < 1:
        raise ValueError(f"tokens: found {tokens!r}, accepted is a whole number from 1")
    if z < 0:
        raise ValueError(f"z: found {z!r}, accepted is a number from 0")
    return z * math.sqrt(alpha * (1.0 - alpha) / tokens)


def left_over(violations: Sequence[float], tokens: Sequence[int], alpha: float, z: float = 1.96) -> list[int]:
    """List the examples that are above the tolerance by more than chance explains: V_i > α + z·√(α(1 − α)/T_i).

    Args:
        violations: violation share of each example, in [0, 1].
        tokens: labelled tokens of each example.
        alpha: tolerated violation share α, in [0, 1].
        z: quantile of the normal distribution.

    Returns:
        Their indices, rising.

    Raises:
        ValueError: the lists differ in length, or a value is not a finite share.
    """
    if len(violations) != len(tokens):
        raise ValueError(f"tokens: found {len(tokens)}, accepted is one for each of {len(violations)} violations")
    for index, value in enumerate(violations):
        if not (math.isfinite(value) and 0.0 <= value <= 1.0):
            raise ValueError(f"violation {index}: found {value}, accepted is a share from 0 to 1")
    pairs = zip(violations, tokens, strict=True)
    return [index for index, (value, count) in enumerate(pairs) if value > alpha + sampling_error(alpha, count, z)]
