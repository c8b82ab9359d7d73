"""The type in which a model computes, where its device is slow in that of its checkpoint.

Many processors have no instructions for bfloat16 or float16 and compute their products an order of magnitude slower
than those of float32. There, a model that keeps its own type is held in float32, and everything that leaves the process
(the saved model, its fingerprint) is in the type of the checkpoint, as if the model had never been wider.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_LOW = (torch.bfloat16, torch.float16)
# A parameter has it while it is held in a wider type than its checkpoint's.
_MARK = "_expunge_stored"


def has_instructions(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device multiplies matrices of a type at full speed, by what its processor says of itself.

    Args:
        dtype: of the matrices.
        device: where they are; one that is no CPU is taken to have them.
    """
    if dtype not in _LOW or device.type != "cpu":
        return True
    if dtype == torch.float16:
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        return _asks("_is_avx512_bf16_supported") or _asks("_is_amx_tile_supported")
    found = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(found()) if found is not None else False


def widen(model: nn.Module, device: torch.device) -> torch.dtype | None:
    """Hold weights in float32 whose type the device is slow in; each is the same number as before.

    Args:
        model: any module; changed in place. Its buffers stay.
        device: where it computes.

    Returns:
        The type of the weights that were widened; None where none was.
    """
    found = None
    for param in model.parameters():
        if not has_instructions(param.dtype, device):
            found = found or param.dtype
            setattr(param, _MARK, param.dtype)
            param.data = param.data.float()
    return found


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """The type of a weight in its checkpoint."""
    found: torch.dtype = getattr(tensor, _MARK, tensor.dtype)
    return found


def copy_marks(source: nn.Module, target: nn.Module) -> None:
    """Let a copy of a model know what its weights are in the checkpoint: `deepcopy` forgets it."""
    for param, twin in zip(source.parameters(), target.parameters(), strict=True):
        if hasattr(param, _MARK):
            setattr(twin, _MARK, stored_dtype(param))


def is_widened(model: nn.Module) -> bool:
    """Whether any weight is held in a wider type than its checkpoint's."""
    return any(hasattr(param, _MARK) for param in model.parameters())


@contextlib.contextmanager
def rounded(model: nn.Module) -> Iterator[None]:
    """Inside the block widened weights have the values that saving rounds them to; then the very tensors are back."""
    former: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for param in model.parameters():
            if hasattr(param, _MARK):
                after = param.data.to(stored_dtype(param)).to(param.dtype)
                if not torch.equal(after, param.data):
                    former.append((param, param.data))
                    param.data = after
        yield
    finally:
        for param, data in former:
            param.data = data


@contextlib.contextmanager
def narrowed(model: nn.Module) -> Iterator[None]:
    """Inside the block widened weights have the type of the checkpoint; then the very tensors are back."""
    former: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for param in model.parameters():
            if hasattr(param, _MARK):
                former.append((param, param.data))
                param.data = param.data.to(stored_dtype(param))
        yield
    finally:
        for param, data in former:
            param.data = data


def _asks(name: str) -> bool:
    """What torch says of the processor; a torch that cannot tell is taken at its word: no."""
    found = getattr(torch.cpu, name, None)
    return bool(found()) if found is not None else False
