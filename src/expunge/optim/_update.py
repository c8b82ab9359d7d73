"""One update: gradient into averages, averages into a direction, direction into the weights.

The equations are in `_schemes.py` and `_rules.py`; here is the order in which memory is read. Three ways compute the
same: piece by piece, so that all operations on a piece stay in the processor's cache (the fast one on CPUs); a whole
tensor at a time (plain); many tensors at a time (`torch._foreach`, the fast one on CUDA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from expunge.optim._lists import TensorList, Value, times
from expunge.optim._rules import Rule, Statistic
from expunge.optim._schemes import Term, Work, advance
from expunge.optim._storage import Codec, Stored, cut_to_bfloat16_
from expunge.optim._workspace import Workspace

# Values a thread works on at a time: most of a piece's tensors and scratch stay in a cache of 2 MB, and a call costs
# little beside its work. From 32,768 to 65,536 float32 takes the same time, 8 bits 5 % less.
PIECE_PER_THREAD = 65536
CUDA_PIECE = 1 << 24


class Kept(NamedTuple):
    """What is stored of one average, with the numbers of this update.

    Attributes:
        statistic: what is averaged.
        numbers: the numbers of this update.
        own: shared average, objective's own average, or delta.
        base: base; None without one.
    """

    statistic: Statistic
    numbers: Term
    own: Stored
    base: Stored | None


@dataclass(frozen=True)
class Item:
    """One parameter in one update.

    Attributes:
        param: its local values.
        grad: its local gradient, of the same shape.
        rule: how the averages become a direction.
        codec: how the averages are kept.
        kept: the averages, in the rule's order.
        lr: learning rate of this update.
        weight_decay: weight decay of this update.
        draw: selects random numbers; another one for every parameter and update.
        round_param: bfloat16 weights are rounded stochastically.
        finish: from the local piece of the direction to the local piece of the final one; None for rules that work
            element by element.
    """

    param: Tensor
    grad: Tensor
    rule: Rule
    codec: Codec
    kept: tuple[Kept, ...]
    lr: float
    weight_decay: float
    draw: int
    round_param: bool
    finish: Callable[[Tensor], Tensor] | None

    @property
    def dtype(self) -> torch.dtype:
        """In which the update is computed."""
        return torch.float64 if self.param.dtype == torch.float64 else torch.float32


def update(item: Item, room: Workspace, piece: int | None) -> None:
    """Update one parameter.

    Args:
        item: the parameter.
        room: scratch memory on its device.
        piece: values at a time; None for all of them.
    """
    param, size = item.param.reshape(-1), item.param.numel()
    grad = item.grad.reshape(-1)
    direction = torch.empty(size, dtype=room.dtype, device=room.device) if item.finish is not None else None
    for span in _spans(size, piece, item.codec.block):
        weights = _in_room(param[span], room, "weights")
        part = _in_room(grad[span], room, "grad")
        if item.rule.coupled_decay and item.weight_decay:
            part = torch.add(part, weights, alpha=item.weight_decay, out=room.take("grad", part.numel()))
        averages = [_average(kept, index, part, span, item, room) for index, kept in enumerate(item.kept)]
        found = item.rule.direction(part, averages)
        if direction is not None:
            direction[span].copy_(found)
        else:
            _apply(item, weights, found)
            _write_back(item, param[span], weights, room, span.start)
    if item.finish is not None and direction is not None:
        whole = item.finish(direction.view(item.param.shape)).reshape(-1)
        for span in _spans(size, piece, 1):
            weights = _in_room(param[span], room, "weights")
            _apply(item, weights, whole[span])
            _write_back(item, param[span], weights, room, span.start)
    if not item.param.is_contiguous():
        item.param.copy_(param.view(item.param.shape))


def update_together(items: Sequence[Item]) -> None:
    """Update many parameters at once.

    Args:
        items: parameters for which `can_join` holds, with one `join_key`.
    """
    first = items[0]
    weights = TensorList([item.param for item in items])
    grad = TensorList([item.grad for item in items])
    if first.rule.coupled_decay and first.weight_decay:
        grad = grad.clone().add_(weights, alpha=first.weight_decay)
    averages = []
    for index, kept in enumerate(first.kept):
        own = TensorList([item.kept[index].own.values.view(item.param.shape) for item in items])
        bases = [item.kept[index].base for item in items]
        base = TensorList(
            [stored.values.view(item.param.shape) for stored, item in zip(bases, items, strict=True) if stored]
        )
        work = Work(own, base if kept.base is not None else None)
        averages.append(advance(kept.numbers, _statistic(kept.statistic, grad, None), work))
    found = first.rule.direction(grad, averages)
    if first.finish is None:
        _apply(first, weights, found)
        return
    for item, direction in zip(items, found.tensors, strict=True):
        assert item.finish is not None
        _apply(item, item.param, item.finish(direction))


def can_join(item: Item) -> bool:
    """Whether `update_together` can take a parameter: float32 or float64 throughout, and a rule made for it."""
    return (
        item.rule.foreach
        and item.codec.direct
        and item.param.dtype == item.dtype == item.grad.dtype
        and all(kept.statistic.of is None for kept in item.kept)
    )


def join_key(item: Item) -> tuple[object, ...]:
    """Parameters with the same key can be updated together."""
    numbers = tuple(kept.numbers for kept in item.kept)
    return (item.rule, numbers, item.lr, item.weight_decay, item.param.device, item.param.dtype)


def _average(kept: Kept, index: int, grad: Tensor, span: slice, item: Item, room: Workspace) -> Tensor:
    size = grad.numel()
    own = item.codec.load(kept.own, span, room, "own")
    base = None if kept.base is None else item.codec.load(kept.base, span, room, "base")
    work = Work(own, base, room.take(f"average{index}", size), room.take("scratch", size))
    read = advance(kept.numbers, _statistic(kept.statistic, grad, room.take("statistic", size)), work)
    if not item.codec.direct:
        draw = hash((item.draw, index, span.start))
        item.codec.save(kept.own, span, own, room, draw)
        if kept.base is not None and base is not None:
            item.codec.save(kept.base, span, base, room, draw ^ 0x5BD1)
    return read


def _statistic(statistic: Statistic, grad: Value, out: Tensor | None) -> Value:
    if statistic.of is not None and isinstance(grad, Tensor):
        return statistic.of(grad)
    return grad if statistic.moment == 1 else times(grad, grad, out)


def _apply(item: Item, weights: Value, direction: Value) -> None:
    if item.weight_decay and not item.rule.coupled_decay:
        weights.mul_(1.0 - item.lr * item.weight_decay)
    weights.add_(direction, alpha=-item.lr)


def _in_room(part: Tensor, room: Workspace, slot: str) -> Tensor:
    return part if part.dtype == room.dtype else room.take(slot, part.numel()).copy_(part)


def _write_back(item: Item, part: Tensor, weights: Tensor, room: Workspace, start: int) -> None:
    if part.dtype == weights.dtype:
        return
    if item.round_param and part.dtype == torch.bfloat16:
        cut_to_bfloat16_(weights, room.noise_bits(weights.numel(), hash((item.draw, -1, start))))
    part.copy_(weights)


def _spans(size: int, piece: int | None, block: int) -> Iterator[slice]:
    step = max(size, 1) if piece is None else -(-piece // block) * block
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
