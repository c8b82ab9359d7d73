"""Sharded parameters (DTensor, as FSDP2 makes them): local pieces, states beside them, whole matrices.

torch.distributed is not imported: without it no tensor can be a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this process; the tensor itself where it is not sharded."""
    return _dtensor(tensor).to_local() if is_sharded(tensor) else tensor


def beside(values: Tensor, param: Tensor) -> Tensor:
    """A state for a parameter from local values of the parameter's local shape: a DTensor where the parameter is one.

    Checkpointing then knows it by its full shape.
    """
    if not is_sharded(param):
        return values
    owner = _dtensor(param)
    return type(owner).from_local(
        values, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )


def same_placement(grad: Tensor, param: Tensor) -> bool:
    """Whether gradient and parameter are cut in the same way."""
    if is_sharded(grad) != is_sharded(param):
        return False
    return not is_sharded(param) or _dtensor(grad).placements == _dtensor(param).placements


def gather(values: Tensor, param: Tensor) -> Tensor:
    """The whole matrix from every process's local piece, shaped as the full parameter."""
    return _dtensor(beside(values, param)).full_tensor() if is_sharded(param) else values


def cut(whole: Tensor, param: Tensor) -> Tensor:
    """This process's piece of a whole matrix that every process has."""
    if not is_sharded(param):
        return whole
    owner = _dtensor(param)
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    full = type(owner).from_local(whole, owner.device_mesh, [replicate] * owner.device_mesh.ndim, run_check=False)
    return full.redistribute(placements=owner.placements).to_local()


def sum_over_shards(values: Tensor, param: Tensor) -> Tensor:
    """Sum numbers about local pieces over the processes that hold the other pieces of a parameter."""
    if not is_sharded(param):
        return values
    owner = _dtensor(param)
    for dim, placement in enumerate(owner.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(values, group=owner.device_mesh.get_group(dim))
    return values


def shape_of_shards(param: Tensor) -> Sequence[int]:
    """Shape of the local piece, also for parameters on the meta device."""
    return tuple(local(param).shape)


def _dtensor(tensor: Tensor) -> Any:
    return tensor
