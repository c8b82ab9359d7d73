"""Bytes of optimizer states, counted and planned."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from expunge.optim import _sharding
from expunge.optim._optimizer import ObjectiveOptimizer
from expunge.optim._schemes import count_keys, layouts


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in an optimizer's state on this process; of any PyTorch optimizer.

    Args:
        optimizer: after its first step (before it, most have no state).

    Returns:
        Bytes, counts and scales included.
    """
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                part = _sharding.local(value)
                total += part.numel() * part.element_size()
    return total


def planned_state_bytes(optimizer: ObjectiveOptimizer, objectives: Iterable[str] = ("forget", "retain")) -> int:
    """Bytes that the states will have on this process once every objective has given a gradient to every parameter.

    From shapes alone: parameters may be on the meta device.

    Args:
        optimizer: before or after its first step.
        objectives: the names that `step` will be given.

    Returns:
        What `state_bytes` will count.
    """
    names, total = tuple(objectives), 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            plan = optimizer.plan(param)
            shape = _sharding.local(param).shape
            tensors = plan.codec.shapes(shape, param.dtype)
            each = sum(math.prod(size) * dtype.itemsize for size, dtype in tensors.values())
            cells: set[str] = set()
            counts: set[str] = set()
            for name in names:
                found = layouts(optimizer.scheme, plan.rule, name)
                counts.update(count_keys(found))
                cells.update(cell.key for layout in found for cell in (layout.own, layout.base) if cell is not None)
            total += len(cells) * each + len(counts) * torch.float32.itemsize
    return total
