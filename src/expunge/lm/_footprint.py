"""Memory of a forward and backward pass, counted on the meta device: every tensor's size, and none of its values."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from expunge.lm._head import Head, Split, accumulation_dtype
from expunge.lm._lora import adapter_dropouts
from expunge.lm._scan import BUFFER_BYTES, MIN_ROWS
from expunge.lm._trunk import Trunk


class Meter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make inside the block.

    Storages that were there before do not count; a storage counts once, however many tensors look at it, until the last
    of them is gone.

    Attributes:
        now: bytes that are held.
        peak: most bytes that were held at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, kinds: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and note what it made."""
        if function is torch.ops.aten._local_scalar_dense.default:
            # NOTE: there is no value to look at. Models ask whether positions are in order, masks full: they are.
            return 1
        for given in tree_iter((arguments, named)):
            if isinstance(given, Tensor):
                self._note(given, made=False)
        result = function(*arguments, **(named or {}))
        for found in tree_iter(result):
            if isinstance(found, Tensor):
                self._note(found, made=True)
        return result

    def _note(self, tensor: Tensor, *, made: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if made else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class _Flash(torch.autograd.Function):
    """Fused attention, as far as memory goes: it keeps its inputs, its output and one number a query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class FusedAttention(TorchFunctionMode):
    """Inside the block fused attention takes the memory that its kernels take; on meta it would be taken apart."""

    def __torch_function__(self, function: Any, kinds: Any, arguments: Sequence[Any] = (), named: Any = None) -> Any:
        """Replace the one function."""
        if function is torch.nn.functional.scaled_dot_product_attention:
            named = named or {}
            found = [*arguments, *(named[name] for name in ("query", "key", "value")[len(arguments) :])]
            return _Flash.apply(*found[:3])
        return function(*arguments, **(named or {}))


@dataclass(frozen=True)
class PassBytes:
    """Memory of one pass through a model, in bytes; weights and inputs are not in it.

    Attributes:
        held: after the forward pass: what the backward pass needs, and the output.
        peak: most at one time, gradients of the weights included.
    """

    held: int
    peak: int


def pass_bytes(
    split: Split, rows: int, length: int, *, first_layer: int = 0, plain: bool = False, grad: bool = True
) -> PassBytes:
    """Count what a forward pass, and with gradient its backward pass, takes beyond weights and inputs.

    One trained layer is run, then two: the others take what the second one does.

    Args:
        split: from `assumed_split`, on the meta device; weights that are trained require a gradient.
        rows: in the pass.
        length: tokens of each, padding included.
        first_layer: first trained layer (see `Trunk`).
        plain: plain attention instead of a fused kernel.
        grad: with the backward pass.

    Returns:
        The bytes. Where a model's code looks at values, which are not there, 34·d + 5·heads·length bytes a token and
        layer in 16 bits stand for its activations (arXiv 2205.05198, table 2).
    """
    model: Any = split.model
    config = model.get_base_model().config if hasattr(model, "get_base_model") else model.config
    dropouts = adapter_dropouts(model) if grad else []
    former = config._attn_implementation
    for module in dropouts:
        module.training = True
    config._attn_implementation = "eager" if plain and former == "sdpa" else former
    try:
        trunk = Trunk(split, first_layer, verify=False)
        first = trunk.first_layer
        count = config.get_text_config().num_hidden_layers - first
        with torch.set_grad_enabled(grad):
            one, two = (_run(split, trunk, rows, length, layers) for layers in (1, min(2, count)))
        more = (count - 1) * (two.held - one.held)
        # At the start of the backward pass all activations are there, at its end all gradients.
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) if grad else 0
        return PassBytes(one.held + more, max(one.peak + more, gradients + one.held))
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError):
        return _estimate(config.get_text_config(), model, rows, length, first_layer, grad)
    finally:
        config._attn_implementation = former
        for module in dropouts:
            module.training = False
        model.zero_grad()


def _run(split: Split, trunk: Trunk, rows: int, length: int, layers: int) -> PassBytes:
    """A pass through some of the layers, from the first trained one."""
    model: Any = split.model
    with trunk.only(layers), FusedAttention(), Meter() as meter:
        if trunk.first_layer:
            embedding = model.get_input_embeddings().weight
            hidden = torch.empty((rows, length, embedding.shape[1]), dtype=embedding.dtype, device="meta")
            output = trunk.upper(hidden, None)
        else:
            ids = torch.zeros((rows, length), dtype=torch.long, device="meta")
            output = split.logits(ids) if split.head is None else split.body(ids)
        held = meter.now
        if torch.is_grad_enabled():
            output.sum().backward()
        del output
    model.zero_grad()
    return PassBytes(held, meter.peak)


def _estimate(config: Any, model: Any, rows: int, length: int, first_layer: int, grad: bool) -> PassBytes:
    size = next(model.parameters()).element_size() / 2
    layers = config.num_hidden_layers - first_layer if grad else 1
    each = 34 * config.hidden_size + 5 * config.num_attention_heads * length
    found = int(size * rows * length * layers * each)
    trained = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    return PassBytes(found, found + (trained if grad else 0))


def head_bytes(tokens: int, head: Head) -> int:
    """Most bytes that the head takes for labelled tokens: the buffers of a chunk, and its gradient where it is trained.

    Args:
        tokens: labelled tokens of a pass.
        head: of the model.
    """
    vocabulary, width = head.weight.shape
    size, full = head.weight.element_size(), accumulation_dtype(head.weight.dtype).itemsize
    per_token = vocabulary * (3 * full + (size if size != full else 0))
    chunk = min(tokens * per_token, max(BUFFER_BYTES, MIN_ROWS * per_token))
    # The gradient is summed in float32, rounded, and joins that of the margin's rows.
    trained = vocabulary * width * (full + 2 * size) if head.weight.requires_grad else 0
    return chunk + tokens * width * size + trained


def rounded_up(number: int, multiple: int) -> int:
    """The next multiple of a number.

    Example:
        >>> rounded_up(33, 16)
        48
    """
    return -(-number // multiple) * multiple
