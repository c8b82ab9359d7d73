"""Update rules: which statistics of the gradient are tracked, and how they become a direction.

A rule is a small frozen object without state and without tensors: the scheme decides how the statistics are shared
between objectives, the storage how they are kept. A rule of your own is a subclass of `Rule` with two methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from expunge.errors import UsageError
from expunge.optim._lists import Value


@dataclass(frozen=True)
class Statistic:
    """One running average that a rule reads: a ← β·a + (1 − β)·s, s a function of the gradient.

    Attributes:
        name: its name in the optimizer's state, as PyTorch names it where PyTorch has it ("exp_avg").
        beta: decay β, in [0, 1).
        moment: 1 for a statistic with signs (s = g), 2 for one that is never negative (s = g²). It selects the
            scheme's base β and `split`, and the code book of a quantised storage.
        of: s as a function of the gradient, without writing into it; None for g (moment 1) or g² (moment 2).
        debias: the average is divided by 1 − βᵗ in `shared` and `decoupled`. `base_delta` always does so: a delta is
            the difference to the base, which is one only between unbiased averages.
        read_before: the rule gets the average as it was before this gradient (Lion), not after.
    """

    name: str
    beta: float
    moment: int = 1
    of: Callable[[Tensor], Tensor] | None = None
    debias: bool = True
    read_before: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        if not self.name.isidentifier() or self.name == "step":
            raise UsageError(f"Statistic.name: found {self.name!r}, accepted is an identifier other than 'step'")
        check_beta(f"beta of {self.name}", self.beta)
        if self.moment not in (1, 2):
            raise UsageError(f"Statistic.moment: found {self.moment!r}, accepted is 1 or 2")


class Rule:
    """What a rule offers; subclasses are frozen dataclasses.

    Attributes:
        foreach: `direction` uses only in-place methods that `TensorList` has, so that many tensors can be updated at
            once.
        matrix: `finish` needs the whole 2-D weight; the optimizer then gathers a sharded one.
    """

    foreach: ClassVar[bool] = False
    matrix: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The rule's name in messages and saved states."""
        return type(self).__name__.lower()

    @property
    def members(self) -> tuple[Rule, ...]:
        """The rules that `select` can give."""
        return (self,)

    @property
    def coupled_decay(self) -> bool:
        """Whether weight decay is added to the gradient (L2) instead of shrinking the weight."""
        return False

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The averages `direction` reads, in its order."""
        raise NotImplementedError

    def direction(self, grad: Value, averages: Sequence[Value]) -> Value:
        """The direction d of the update w ← w − lr·d, element by element.

        Args:
            grad: gradient, at least float32, any shape (the optimizer calls with flat pieces); not to be written to.
            averages: one tensor a statistic, shaped as `grad`; they belong to the rule, which may overwrite them. An
                average of moment 2 can be slightly negative under `base_delta`: take its absolute value.

        Returns:
            d, shaped as `grad`; may be one of `averages`, not `grad`.
        """
        raise NotImplementedError

    def finish(self, direction: Tensor) -> Tensor:
        """The last step of a `matrix` rule: from the whole (rows, columns) direction to the one that is applied."""
        return direction

    def select(self, name: str | None, shape: Sequence[int]) -> Rule:
        """The rule for one parameter: its name (None where unnamed) and its full shape. Most rules: themselves."""
        return self

    def lr_factor(self, selected: Rule) -> float:
        """Factor on the learning rate of the parameters for which `select` gave `selected`."""
        return 1.0


@dataclass(frozen=True)
class AdamW(Rule):
    """AdamW: d = m̂ / (√|v̂| + ε), weight decay decoupled.

    Attributes:
        betas: decay of the first (g) and the second moment (g²), each in [0, 1).
        eps: ε, above 0.

    References:
        Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, arXiv 1711.05101.
    """

    foreach = True
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Check every value."""
        object.__setattr__(self, "betas", check_betas("betas", self.betas))
        check_positive("eps", self.eps)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """exp_avg (g) and exp_avg_sq (g²)."""
        return Statistic("exp_avg", self.betas[0]), Statistic("exp_avg_sq", self.betas[1], moment=2)

    def direction(self, grad: Value, averages: Sequence[Value]) -> Value:
        """m̂ / (√|v̂| + ε)."""
        first, second = averages
        return first.div_(second.abs_().sqrt_().add_(self.eps))


@dataclass(frozen=True)
class Adam(AdamW):
    """Adam with L2: as `AdamW`, with weight decay added to the gradient (g + λw) before the moments.

    References:
        Kingma, Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, arXiv 1412.6980.
    """

    @property
    def coupled_decay(self) -> bool:
        """L2."""
        return True


@dataclass(frozen=True)
class SGD(Rule):
    """SGD with momentum: d = b, b ← μ·b + g; with Nesterov d = g + μ·b.

    The average m ← μ·m + (1 − μ)·g is kept and b = m / (1 − μ): `shared` is exactly `torch.optim.SGD` (dampening 0).
    Under `base_delta`, whose averages are unbiased, b has its full length 1/(1 − μ)·g from the first update on.

    Attributes:
        momentum: μ, in [0, 1). 0 tracks nothing, so that only `shared` has a meaning.
        nesterov: look ahead; needs a momentum.
        l2: weight decay is added to the gradient, as in `torch.optim.SGD`, instead of decoupled.
    """

    foreach = True
    momentum: float = 0.9
    nesterov: bool = False
    l2: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        check_beta("momentum", self.momentum)
        if self.nesterov and self.momentum == 0.0:
            raise UsageError("nesterov: found True with momentum 0, accepted is a momentum above 0")

    @property
    def coupled_decay(self) -> bool:
        """L2 instead of decoupled weight decay."""
        return self.l2

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """exp_avg (g), without debiasing; nothing without momentum."""
        return (Statistic("exp_avg", self.momentum, debias=False),) if self.momentum else ()

    def direction(self, grad: Value, averages: Sequence[Value]) -> Value:
        """M / (1 − μ), or g + μ·m / (1 − μ)."""
        if not averages:
            return grad.clone()
        gain = 1.0 / (1.0 - self.momentum)
        if self.nesterov:
            return averages[0].mul_(self.momentum * gain).add_(grad)
        return averages[0].mul_(gain)


@dataclass(frozen=True)
class Lion(Rule):
    """Lion: d = sign(β₁·m + (1 − β₁)·g) with the average m before this gradient; then m ← β₂·m + (1 − β₂)·g.

    Attributes:
        betas: (β₁, β₂), each in [0, 1).

    References:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, arXiv 2302.06675, algorithm 2.
    """

    foreach = True
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        """Check every value."""
        object.__setattr__(self, "betas", check_betas("betas", self.betas))

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """exp_avg (g), read before its update."""
        return (Statistic("exp_avg", self.betas[1], debias=False, read_before=True),)

    def direction(self, grad: Value, averages: Sequence[Value]) -> Value:
        """sign(β₁·m + (1 − β₁)·g)."""
        return averages[0].lerp_(grad, 1.0 - self.betas[0]).sign_()


@dataclass(frozen=True)
class RMSprop(Rule):
    """RMSprop: d = g / (√|v| + ε), v ← α·v + (1 − α)·g², without debiasing and without momentum (as PyTorch's default).

    Attributes:
        alpha: decay α, in [0, 1).
        eps: ε, above 0.
        l2: weight decay is added to the gradient, as in `torch.optim.RMSprop`, instead of decoupled.
    """

    foreach = True
    alpha: float = 0.99
    eps: float = 1e-8
    l2: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        check_beta("alpha", self.alpha)
        check_positive("eps", self.eps)

    @property
    def coupled_decay(self) -> bool:
        """L2 instead of decoupled weight decay."""
        return self.l2

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """square_avg (g²), without debiasing."""
        return (Statistic("square_avg", self.alpha, moment=2, debias=False),)

    def direction(self, grad: Value, averages: Sequence[Value]) -> Value:
        """G / (√|v| + ε)."""
        return averages[0].abs_().sqrt_().add_(self.eps).reciprocal_().mul_(grad)


def looks_like_embedding(shape: Sequence[int]) -> bool:
    """Whether an unnamed 2-D weight is taken for an embedding or head: from 16,384 rows, 8 times its columns."""
    return len(shape) == 2 and shape[0] >= 16384 and shape[0] >= 8 * shape[1]


def check_betas(option: str, betas: object) -> tuple[float, float]:
    """`betas` as a tuple of two decays; UsageError otherwise."""
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise UsageError(f"{option}: found {betas!r}, accepted are two numbers in [0, 1)")
    for beta in betas:
        check_beta(option, beta)
    return float(betas[0]), float(betas[1])


def is_number(value: object) -> bool:
    """Whether a value is a finite real number (True and False are none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_beta(option: str, beta: object) -> None:
    """Refuse a decay outside [0, 1)."""
    if not (is_number(beta) and 0.0 <= beta < 1.0):  # type: ignore[operator]
        raise UsageError(f"{option}: found {beta!r}, accepted is a number in [0, 1)")


def check_positive(option: str, value: object) -> None:
    """Refuse what is not a number above 0."""
    if not (is_number(value) and value > 0.0):  # type: ignore[operator]
        raise UsageError(f"{option}: found {value!r}, accepted is a number above 0")
