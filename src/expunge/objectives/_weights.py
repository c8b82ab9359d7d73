"""How the forget and the retain part of the loss are weighted: fixed, or by dual ascent on the retain loss."""

import math
from dataclasses import dataclass
from typing import Any

from expunge.errors import UsageError


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(name: str, value: object, accepted: str, ok: bool) -> None:
    if not (_finite(value) and ok):
        raise UsageError(f"{name}: found {value!r}, accepted is {accepted}")


@dataclass(frozen=True)
class FixedWeights:
    """Weights that never change: L = forget · L_f + retain · L_r.

    Attributes:
        forget: weight of the forget term, 0 or more.
        retain: weight of the retain term, 0 or more.

    Raises:
        UsageError: a weight is negative or not finite.

    Example:
        >>> weights = FixedWeights(forget=0.1, retain=1.0)
        >>> weights.update(2.0)
        1.0
    """

    forget: float = 1.0
    retain: float = 1.0

    def __post_init__(self) -> None:
        """Check both."""
        _check("forget_weight", self.forget, "a number from 0", _finite(self.forget) and self.forget >= 0)
        _check("retain_weight", self.retain, "a number from 0", _finite(self.retain) and self.retain >= 0)

    def update(self, retain_loss: float) -> float:
        """Take note of an update's retain loss, which changes nothing here.

        Args:
            retain_loss: the retain term of the whole update.

        Returns:
            The retain weight of the next update.
        """
        return self.retain

    def state_dict(self) -> dict[str, Any]:
        """Return the weights as JSON values."""
        return {"rule": "fixed", "forget": self.forget, "retain": self.retain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a saved state belongs to these weights.

        Args:
            state: what `state_dict` gave.

        Raises:
            UsageError: it was saved by another rule or with other weights.
        """
        if state != self.state_dict():
            raise UsageError(f"weights: found saved {state}, accepted is {self.state_dict()}")


class PrimalDual:
    """Forget as long as the retain loss stays below a limit: its weight is the multiplier λ of that constraint.

    min_θ L_f(θ) subject to L_r(θ) ≤ ε:  L = L_f + λ·(L_r − ε),  λ ← max(0, λ + step·(L_r − ε))

    A retain loss above the limit raises its weight, one below lowers it, down to 0. The constant λ·ε has no gradient,
    so the training loss is forget · L_f + retain · L_r with forget = 1 and retain = λ.

    Args:
        limit: ε, largest retain loss wanted, finite; for cross-entropy a little above that of the model at the start.
        step: step size of the ascent, above 0.
        initial: λ of the first update, 0 or more. The authors start at 50 to 100 for their forget loss, whose scale is
            a squared logit; where L_f is a mean log-probability, 1 is of the right order.

    Attributes:
        forget: always 1.
        retain: λ.

    Raises:
        UsageError: an option is out of range.

    Example:
        >>> weights = PrimalDual(limit=0.5, step=2.0, initial=1.0)
        >>> weights.update(0.75), weights.update(0.25), weights.update(0.0)
        (1.5, 1.0, 0.0)

    References:
        Entesari et al., Constrained Entropic Unlearning: A Primal-Dual Framework for Large Language Models, 2025,
        https://arxiv.org/abs/2506.05314. There λ may also be held during a warm-up and moved once an epoch: call
        `update` when it is to move.
    """

    forget = 1.0

    def __init__(self, limit: float, step: float = 1.0, initial: float = 1.0) -> None:
        _check("limit", limit, "a finite number", True)
        _check("step", step, "a number above 0", _finite(step) and step > 0)
        _check("initial", initial, "a number from 0", _finite(initial) and initial >= 0)
        self.limit = limit
        self.step = step
        self.initial = initial
        self.retain = float(initial)
        self.updates = 0

    def update(self, retain_loss: float) -> float:
        """Move λ by one step of dual ascent.

        Args:
            retain_loss: L_r of the whole update (or of an epoch), before it is weighted.

        Returns:
            λ, the retain weight of the next update.

        Raises:
            ValueError: the loss is not finite.
        """
        if not _finite(retain_loss):
            raise ValueError(f"retain_loss: found {retain_loss!r}, accepted is a finite number")
        self.retain = max(0.0, self.retain + self.step * (retain_loss - self.limit))
        self.updates += 1
        return self.retain

    def state_dict(self) -> dict[str, Any]:
        """Return settings and position as JSON values."""
        return {"rule": "primal-dual", "settings": self._settings(), "retain": self.retain, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the position of a saved rule.

        Args:
            state: what `state_dict` gave.

        Raises:
            UsageError: it was saved by another rule or with other settings.
        """
        mine = self.state_dict()
        if any(state.get(name) != mine[name] for name in ("rule", "settings")):
            raise UsageError(f"weights: found saved {state}, accepted is one with {self._settings()}")
        self.retain = float(state["retain"])
        self.updates = int(state["updates"])

    def _settings(self) -> dict[str, float]:
        return {"limit": self.limit, "step": self.step, "initial": self.initial}
