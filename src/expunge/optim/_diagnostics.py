"""What the states say about the objectives' gradients, without another backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from expunge.optim import _sharding
from expunge.optim._schemes import BaseDelta, Layout, Scheme, layouts, mean_scales
from expunge.optim._storage import Codec, stored
from expunge.optim._workspace import Workspace

if TYPE_CHECKING:
    from expunge.optim._optimizer import ObjectiveOptimizer

# Values at a time, a multiple of every block.
_PIECE = 1 << 20


@dataclass(frozen=True)
class Diagnostics:
    """How the averaged gradients of the objectives lie to each other.

    All from the first moment, over the parameters that have it; ĝ_o is the unbiased average gradient of objective o:
    B̂ + Δ̂_o under `base_delta` (without κ), m̂_o under `decoupled`.

    Attributes:
        objectives: names seen so far, in alphabetical order.
        cosine: ⟨ĝ_a, ĝ_b⟩ / (‖ĝ_a‖·‖ĝ_b‖) in [−1, 1] of every pair (a, b), a before b, over the parameters that have
            been updated by both. None where a norm is zero, and where the first moment is not split (`shared`,
            `split="second"`) or not tracked (RMSprop).
        base: ‖B̂‖ / ‖ĝ_o‖ of every objective, over the parameters that o has updated, 0 or more. None without a base, or
            where ‖ĝ_o‖ is zero. Towards 0 where the objectives' gradients oppose, towards 1 where they agree.
        delta: ‖Δ̂_o‖ / ‖ĝ_o‖ of every objective, as `base`. Towards 0 where they agree, towards 1 where they oppose.
    """

    objectives: tuple[str, ...]
    cosine: Mapping[tuple[str, str], float | None]
    base: Mapping[str, float | None]
    delta: Mapping[str, float | None]


class _Sums(NamedTuple):
    """Sums over parameters: products of pairs, and squares of sum, base and delta of each objective."""

    pairs: dict[tuple[str, str], Tensor]
    single: dict[str, Tensor]


@torch.no_grad()
def diagnostics(optimizer: ObjectiveOptimizer) -> Diagnostics:
    """Read the diagnostics from the states; see `Diagnostics`.

    Args:
        optimizer: after any number of steps; nothing in it changes. Where parameters are sharded every process must
            call this, and gets the numbers of the whole.
    """
    names = sorted(
        {key.split("/", 1)[1] for state in optimizer.state.values() for key in state if key.startswith("step/")}
    )
    sums = _Sums(
        {pair: torch.zeros(3, dtype=torch.float64) for pair in combinations(names, 2)},
        {name: torch.zeros(3, dtype=torch.float64) for name in names},
    )
    for group in optimizer.param_groups:
        for param in group["params"]:
            _add_parameter(optimizer, param, sums)
    with_base = isinstance(optimizer.scheme, BaseDelta)
    return Diagnostics(
        objectives=tuple(names),
        cosine={pair: _ratio(found[0], found[1] * found[2]) for pair, found in sums.pairs.items()},
        base={name: _ratio_of_norms(found[1], found[0]) if with_base else None for name, found in sums.single.items()},
        delta={name: _ratio_of_norms(found[2], found[0]) if with_base else None for name, found in sums.single.items()},
    )


def _add_parameter(optimizer: ObjectiveOptimizer, param: Tensor, sums: _Sums) -> None:
    state = optimizer.state.get(param, {})
    plan = optimizer.plan(param)
    found: dict[str, Layout] = {}
    for name in sums.single:
        for layout in layouts(optimizer.scheme, plan.rule, name):
            if layout.statistic.moment == 1 and layout.count_key != "step" and layout.own.key in state:
                found.setdefault(name, layout)
    if not found:
        return
    part = _Sums(
        {pair: torch.zeros(3, dtype=torch.float64) for pair in combinations(found, 2)},
        {name: torch.zeros(3, dtype=torch.float64) for name in found},
    )
    size = _sharding.local(param).numel()
    for start in range(0, size, _PIECE):
        span = slice(start, min(start + _PIECE, size))
        averages = {
            name: _averages(optimizer.scheme, plan.codec, state, layout, span) for name, layout in found.items()
        }
        _add_piece(averages, part)
    for pair, numbers in part.pairs.items():
        sums.pairs[pair].add_(_sharding.sum_over_shards(numbers, param))
    for name, numbers in part.single.items():
        sums.single[name].add_(_sharding.sum_over_shards(numbers, param))


def _averages(
    scheme: Scheme, codec: Codec, state: Mapping[str, Tensor], layout: Layout, span: slice
) -> tuple[Tensor, Tensor | None]:
    """Unbiased own average or delta, and unbiased base (None without one), of one span."""
    own_scale, base_scale = mean_scales(scheme, layout, state)
    kept = stored(state, layout.own.key, layout.own.signed)
    room = Workspace(kept.values.device, torch.float64 if kept.values.dtype == torch.float64 else torch.float32)
    own = codec.load(kept, span, room, "own") * own_scale
    if layout.base is None:
        return own, None
    return own, codec.load(stored(state, layout.base.key, layout.base.signed), span, room, "base") * base_scale


def _add_piece(averages: Mapping[str, tuple[Tensor, Tensor | None]], part: _Sums) -> None:
    whole = {name: (own if base is None else own + base).double() for name, (own, base) in averages.items()}
    for name, (own, base) in averages.items():
        part.single[name][0] += whole[name].square().sum().cpu()
        part.single[name][2] += own.double().square().sum().cpu()
        if base is not None:
            part.single[name][1] += base.double().square().sum().cpu()
    for (left, right), numbers in part.pairs.items():
        a, b = whole[left], whole[right]
        numbers += torch.stack([a.dot(b), a.dot(a), b.dot(b)]).cpu()


def _ratio(product: Tensor, squares: Tensor) -> float | None:
    norm = math.sqrt(float(squares))
    return max(-1.0, min(1.0, float(product) / norm)) if norm > 0.0 else None


def _ratio_of_norms(part: Tensor, whole: Tensor) -> float | None:
    return math.sqrt(float(part) / float(whole)) if float(whole) > 0.0 else None
