"""A model whose linear layers are quantised for the length of a block, by bitsandbytes on a CPU or CUDA."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from expunge.errors import RunError
from expunge.lm import decoder_layers

LIBRARY = "bitsandbytes"
_DEVICES = ("cpu", "cuda")
# As in LLM.int8() (arXiv 2208.07339): columns of activations above it are multiplied in the model's own type.
_OUTLIERS = 6.0
_BLOCK = 64
_FORMATS = {
    8: f"LLM.int8(), a scale a row, activations above {_OUTLIERS:g} apart",
    4: f"NF4, a float32 scale for each block of {_BLOCK}",
}


class NotMeasuredError(Exception):
    """A test cannot be run on this model or machine; the message is the reason that stands in its place."""


@dataclass(frozen=True)
class Quantised:
    """What was quantised.

    Attributes:
        bits: 8 or 4.
        library: name and version.
        format: of the quantised numbers.
        compute: type in which the products are taken.
        layers: quantised linear layers: all of the decoder's; embeddings, head and norms stay as they are.
        weights: numbers in them.
        error: ‖Q(W) − W‖ / ‖W‖ over all of them.
    """

    bits: int
    library: str
    format: str
    compute: str
    layers: int
    weights: int
    error: float


@contextlib.contextmanager
def quantised(model: nn.Module, bits: int) -> Iterator[Quantised]:
    """Inside the block the decoder's linear layers are quantised; afterwards the very layers from before are back.

    Args:
        model: a causal language model without adapters; its weights are not changed.
        bits: 8 (LLM.int8()) or 4 (NF4).

    Yields:
        What was quantised.

    Raises:
        NotMeasuredError: the library or the device is missing, or the model has no linear layers to quantise.
    """
    device = next(model.parameters()).device
    layers = _linear_layers(model, device)
    former: list[tuple[nn.Module, str, nn.Module]] = []
    with _silent():
        try:
            norms = torch.zeros(2, dtype=torch.float64)
            weights = 0
            for parent, name, layer in layers:
                weight = _weight(layer)
                compute = _compute(weight)
                new = _int8(weight, layer) if bits == 8 else _nf4(weight, layer, compute)
                norms += _norms(new, weight)
                weights += weight.numel()
                former.append((parent, name, layer))
                setattr(parent, name, new)
            version = importlib.metadata.version(LIBRARY)
            kind = str(compute).removeprefix("torch.")
            error = float((norms[0] / norms[1]).sqrt())
            yield Quantised(bits, f"{LIBRARY} {version}", _FORMATS[bits], kind, len(layers), weights, error)
        finally:
            for parent, name, layer in former:
                setattr(parent, name, layer)


def missing(device: torch.device) -> str | None:
    """Why nothing can be quantised on a device; None where it can."""
    if importlib.util.find_spec(LIBRARY) is None:
        return f"{LIBRARY} is not installed (pip install 'expunge[quantization]')"
    if device.type not in _DEVICES:
        return f"{LIBRARY} is used on {' and '.join(_DEVICES)}, the model is on {device.type}"
    return None


def _linear_layers(model: nn.Module, device: torch.device) -> list[tuple[nn.Module, str, nn.Module]]:
    """(module, name in it, linear layer) of the decoder."""
    reason = missing(device)
    if reason is not None:
        raise NotMeasuredError(reason)
    try:
        decoder = decoder_layers(model)
    except RunError as error:
        raise NotMeasuredError(str(error)) from None
    # NOTE exact types: an adapted layer is a subclass or wrapper with a forward of its own.
    found = [
        (parent, name, child)
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, Conv1D)
    ]
    if not found:
        raise NotMeasuredError("the model's decoder has no linear layer of a known kind")
    return found


def _weight(layer: Any) -> Tensor:
    """(out, in); GPT-2's layers keep theirs transposed."""
    weight: Tensor = layer.weight.detach()
    return weight.T.contiguous() if isinstance(layer, Conv1D) else weight


def _compute(weight: Tensor) -> torch.dtype:
    """The model's own type, so that only the quantisation differs; float32 where a CPU has no float16 products."""
    return torch.float32 if weight.device.type == "cpu" and weight.dtype == torch.float16 else weight.dtype


def _int8(weight: Tensor, layer: Any) -> nn.Module:
    import bitsandbytes as bnb

    new: Any = _empty(bnb.nn.Linear8bitLt, weight, layer, has_fp16_weights=False, threshold=_OUTLIERS)
    numbers: Any = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    new.weight = numbers.to(weight.device)
    return _ready(new, layer, torch.int8)


def _nf4(weight: Tensor, layer: Any, compute: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    options: dict[str, Any] = {"compress_statistics": False, "quant_type": "nf4"}
    new: Any = _empty(bnb.nn.Linear4bit, weight, layer, compute_dtype=compute, **options)
    numbers: Any = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, blocksize=_BLOCK, module=new, **options)
    new.weight = numbers.to(weight.device)
    # NOTE: on CPUs with AVX512-BF16 the first forward pass would repack the weights and compute in bfloat16.
    new.support_avx512bf16_for_cpu = False
    return _ready(new, layer, torch.uint8)


def _empty(kind: Any, weight: Tensor, layer: Any, **options: Any) -> nn.Module:
    rows, columns = weight.shape
    made: nn.Module = kind(columns, rows, bias=layer.bias is not None, device="meta", **options)
    return made


def _ready(new: Any, layer: Any, expected: torch.dtype) -> nn.Module:
    if new.weight.dtype != expected:
        raise RunError(f"{LIBRARY}: found weights of {new.weight.dtype} after quantising, accepted is {expected}")
    if layer.bias is not None:  # a copy: the library casts it in place
        new.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
    made: nn.Module = new.train(layer.training)
    return made


def _norms(new: Any, weight: Tensor) -> Tensor:
    """(‖Q(W) − W‖², ‖W‖²)."""
    import bitsandbytes.functional as functional

    if new.weight.dtype == torch.int8:
        back = functional.int8_vectorwise_dequant(new.weight.CB, new.weight.SCB)
    else:
        back = functional.dequantize_4bit(new.weight.data, new.weight.quant_state)
    exact = weight.float()
    squares = [(back.float() - exact).square().sum().item(), exact.square().sum().item()]
    return torch.tensor(squares, dtype=torch.float64)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The library tells of each cast, once a layer and forward pass."""
    logger = logging.getLogger(LIBRARY)
    former = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(former)
