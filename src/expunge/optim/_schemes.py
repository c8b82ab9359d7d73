"""Schemes: how the running averages of a rule are shared between named objectives.

`shared` keeps one average, `decoupled` one an objective, `base_delta` one base for all and one delta an objective.
Everything here works on float32 (or float64) values; storages and optimizer know nothing of the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple

from torch import Tensor

from expunge.errors import UsageError
from expunge.optim._lists import Value, larger_, plus, times
from expunge.optim._rules import Rule, Statistic, check_betas, is_number

SPLITS = ("both", "first", "second")


@dataclass(frozen=True)
class Shared:
    """One state with one count for all objectives.

    The ordinary optimizer: *Joint* where one gradient of the summed losses is given, *Alternate* where objectives take
    turns.
    """

    @property
    def name(self) -> str:
        """The scheme's name."""
        return "shared"

    @property
    def split(self) -> str:
        """No average is split."""
        return "none"


@dataclass(frozen=True)
class Decoupled:
    """A state and a count of its own for every objective (DualOptim).

    Attributes:
        split: which averages are split: "both" moments, the "first" only or the "second" only; the others are shared.

    References:
        Zhong et al., "DualOptim", 2025, arXiv 2504.15827.
    """

    split: str = "both"

    def __post_init__(self) -> None:
        """Check every value."""
        _check_split(self.split)

    @property
    def name(self) -> str:
        """The scheme's name."""
        return "decoupled"


@dataclass(frozen=True)
class BaseDelta:
    """One base for all objectives and a delta for each (DualOptim+).

    For any statistic s of the gradient of objective o (s = g, s = g²), with n base updates and t updates of o:

    B̂ = B / (1 − β_bⁿ), 0 before the first;  Δ_o ← β·Δ_o + (1 − β)·(s − B̂);  Δ̂_o = Δ_o / (1 − βᵗ);
    the rule reads κ·B̂ + Δ̂_o;  then B ← β_b·B + (1 − β_b)·s.

    Where gradients agree the base learns them and the deltas vanish; where they oppose the base vanishes and the deltas
    are what `Decoupled` keeps. For s = g² the sum can be slightly negative; rules take its absolute value.

    Attributes:
        base_betas: β_b of the first and the second moment, each in [0, 1); None for the rule's own β.
        split: which averages have base and delta: "both" moments, the "first" only or the "second" only; the others are
            shared.
        base_coefficient: κ, factor on the base where the rule reads the sum, 0 or more; 1 in the paper.
        base_first: the base is updated before the delta, which then sees B̂ with this gradient in it.
        floor: φ in [0, 1], not in the paper: a second moment is read as max(|κ·B̂ + Δ̂_o|, φ·κ·B̂). Base and delta of a
            second moment can cancel, above all while gradients shrink, and the step, divided by the root of what is
            left, grows without bound. 0 is the paper. Rounding storages have a floor of their own (`resolution`).

    References:
        Zhong, Li, Guo, Liu, "DualOptim+: Bridging Shared and Decoupled Optimizer States for Better Machine Unlearning
        in Large Language Models", ICML 2026, arXiv 2605.21539. Authors' code: https://github.com/CityU-MLO/DualOptimPlus
    """

    base_betas: tuple[float, float] | None = (0.9, 0.95)
    split: str = "both"
    base_coefficient: float = 1.0
    base_first: bool = False
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check every value."""
        _check_split(self.split)
        if self.base_betas is not None:
            object.__setattr__(self, "base_betas", check_betas("base_betas", self.base_betas))
        if not is_number(self.base_coefficient) or self.base_coefficient < 0:
            raise UsageError(f"base_coefficient: found {self.base_coefficient!r}, accepted is a number from 0")
        if not is_number(self.floor) or not 0.0 <= self.floor <= 1.0:
            raise UsageError(f"floor: found {self.floor!r}, accepted is a number from 0 to 1")

    @property
    def name(self) -> str:
        """The scheme's name."""
        return "base_delta"


Scheme = Shared | Decoupled | BaseDelta
SCHEMES: dict[str, type[Scheme]] = {"base_delta": BaseDelta, "decoupled": Decoupled, "shared": Shared}


def check_fit(scheme: Scheme, rule: Rule) -> None:
    """Refuse a scheme that would have no effect, or only part of one, with a rule.

    Raises:
        UsageError: the rule tracks nothing, or not the moment that `split` names.
    """
    if isinstance(scheme, Shared):
        return
    moments = {statistic.moment for member in rule.members for statistic in member.statistics}
    if not all(member.statistics for member in rule.members):
        raise UsageError(
            f"scheme: found {scheme.name!r} with rule {rule.name!r} that tracks no statistic, accepted is 'shared'"
        )
    if scheme.split != "both" and moments != {1, 2}:
        only = "first" if moments == {1} else "second"
        raise UsageError(
            f"split: found {scheme.split!r} with rule {rule.name!r} that has only a {only} moment, accepted is 'both'"
        )


class Cell(NamedTuple):
    """One stored average: where it is kept and what it may hold.

    Attributes:
        key: its key in the state: the statistic's name for a shared average or a base, with "/objective" behind it for
            an objective's own average or delta.
        signed: whether it can be negative.
    """

    key: str
    signed: bool


class Layout(NamedTuple):
    """The stored averages of one statistic for one objective.

    Attributes:
        statistic: what is averaged.
        own: the shared average, the objective's own average, or its delta.
        base: the base; None without one.
        count_key: key of the count that belongs to `own`.
    """

    statistic: Statistic
    own: Cell
    base: Cell | None
    count_key: str


def layouts(scheme: Scheme, rule: Rule, objective: str) -> tuple[Layout, ...]:
    """Where the averages of a rule are kept for one objective, in the rule's order."""
    found = []
    for statistic in rule.statistics:
        signed = statistic.moment == 1
        if not _is_split(scheme, statistic):
            found.append(Layout(statistic, Cell(statistic.name, signed), None, "step"))
            continue
        key, count = f"{statistic.name}/{objective}", f"step/{objective}"
        if isinstance(scheme, BaseDelta):
            # A delta is a difference: it has both signs for every statistic.
            found.append(Layout(statistic, Cell(key, True), Cell(statistic.name, signed), count))
        else:
            found.append(Layout(statistic, Cell(key, signed), None, count))
    return tuple(found)


def count_keys(found: tuple[Layout, ...]) -> tuple[str, ...]:
    """Keys of the counts: "step" counts the updates of all objectives, "step/objective" those of one.

    A rule without statistics has "step" too: stochastic rounding of weights draws by it.
    """
    keys = [layout.count_key for layout in found]
    if not keys or any(layout.base is not None for layout in found):
        keys.append("step")
    return tuple(sorted(set(keys)))


class Term(NamedTuple):
    """The numbers of one average in one update; equal terms can be computed together.

    Attributes:
        weight: 1 − β of `own`.
        scale: what `own` is multiplied by where the rule reads it; 0 where it is still empty.
        base_weight: 1 − β_b.
        base_scale: 1 / (1 − β_bⁿ) for the delta's input; 0 where the base is still empty.
        base_read: κ times that, where the rule reads the sum.
        base_first: the base is updated before the delta.
        read_before: the rule reads the values from before this gradient.
        floor: what the rule reads is in absolute value at least this part of the base; 0 for no such limit.
    """

    weight: float
    scale: float
    base_weight: float = 0.0
    base_scale: float = 0.0
    base_read: float = 0.0
    base_first: bool = False
    read_before: bool = False
    floor: float = 0.0


def term(scheme: Scheme, layout: Layout, own_count: int, base_count: int, resolution: float = 0.0) -> Term:
    """The numbers for one average.

    Where base and delta are stored with rounding, their sum is not known below the rounding of the base. A second
    moment whose base and delta cancel would come out anywhere near zero, and the rule divides by its root: it is read
    as at least `resolution` times the base. Exact storages have no such limit.

    Args:
        scheme: the scheme.
        layout: the average.
        own_count: updates of `own` before this one.
        base_count: updates of the base before this one.
        resolution: relative rounding error of the storage; 0 where it is exact.
    """
    statistic = layout.statistic
    beta, before = statistic.beta, statistic.read_before
    read_count = own_count if before else own_count + 1
    if layout.base is None or not isinstance(scheme, BaseDelta):
        scale = _debias(beta, read_count) if statistic.debias else 1.0
        return Term(1.0 - beta, scale, read_before=before)
    base_beta = _base_beta(scheme, statistic)
    base_scale = _debias(base_beta, base_count + int(scheme.base_first))
    base_read = scheme.base_coefficient * (_debias(base_beta, base_count) if before else base_scale)
    return Term(
        weight=1.0 - beta,
        scale=_debias(beta, read_count),
        base_weight=1.0 - base_beta,
        base_scale=base_scale,
        base_read=base_read,
        base_first=scheme.base_first,
        read_before=before,
        floor=max(resolution, scheme.floor) * base_read if statistic.moment == 2 else 0.0,
    )


class Work(NamedTuple, Generic[Value]):
    """The values of one average in one update.

    Attributes:
        own: the shared average, the objective's own, or its delta; updated in place.
        base: the base, updated in place; None without one.
        out: room for what the rule reads; None for a `TensorList`, which takes its own.
        spare: room for what lies between, likewise.
    """

    own: Value
    base: Value | None
    out: Tensor | None = None
    spare: Tensor | None = None


def advance(numbers: Term, statistic: Value, work: Work[Value]) -> Value:
    """Take one value of the statistic into its averages, and give what the rule reads.

    Args:
        numbers: the numbers of this update.
        statistic: s, not written to.
        work: the averages, updated in place.

    Returns:
        The average as the rule reads it, in tensors of its own.
    """
    own, base = work.own, work.base
    if numbers.read_before:
        read = _read(numbers, work)
    if base is not None and numbers.base_first:
        base.lerp_(statistic, numbers.base_weight)
    own.lerp_(statistic, numbers.weight)
    if base is not None and numbers.base_scale:
        own.sub_(base, alpha=numbers.weight * numbers.base_scale)
    if not numbers.read_before:
        read = _read(numbers, work)
    if base is not None and not numbers.base_first:
        base.lerp_(statistic, numbers.base_weight)
    return read


def mean_scales(scheme: Scheme, layout: Layout, state: Mapping[str, Tensor]) -> tuple[float, float]:
    """What `own` and the base are to be multiplied by for unbiased averages, from the counts in a state."""
    own = _debias(layout.statistic.beta, int(state[layout.count_key].item()))
    if layout.base is None or not isinstance(scheme, BaseDelta):
        return own, 0.0
    return own, _debias(_base_beta(scheme, layout.statistic), int(state["step"].item()))


def _base_beta(scheme: BaseDelta, statistic: Statistic) -> float:
    return statistic.beta if scheme.base_betas is None else scheme.base_betas[statistic.moment - 1]


def _read(numbers: Term, work: Work[Value]) -> Value:
    own, base, out, spare = work
    if base is None or not numbers.base_read:
        return times(own, numbers.scale, out)
    if numbers.scale == 1.0:
        read = plus(own, base, numbers.base_read, out)
    else:
        read = times(own, numbers.scale, out).add_(base, alpha=numbers.base_read)
    if numbers.floor:
        larger_(read.abs_(), times(base, numbers.floor, spare))
    return read


def _debias(beta: float, count: int) -> float:
    """1 / (1 − β^count); 0 for an average that is still empty; exactly 1 once float32 no longer sees a difference."""
    if count == 0:
        return 0.0
    scale = 1.0 / (1.0 - beta**count)
    return 1.0 if scale - 1.0 < 2.0**-26 else scale


def _is_split(scheme: Scheme, statistic: Statistic) -> bool:
    if isinstance(scheme, Shared):
        return False
    return scheme.split == "both" or scheme.split == SPLITS[statistic.moment]


def _check_split(split: object) -> None:
    if split not in SPLITS:
        raise UsageError(f"split: found {split!r}, accepted is one of {', '.join(SPLITS)}")
