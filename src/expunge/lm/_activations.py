"""The output of one decoder layer, taken out of a forward pass by a hook that is always removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from expunge.errors import RunError, UsageError


class _Stop(Exception):
    """Ends a forward pass after the layer whose output was wanted."""


class LayerOutput:
    """Where `layer_output` puts what it sees.

    Attributes:
        layer: index of the layer, counted from 0.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._hidden: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """(B, T, d) output of the layer in the latest forward pass, before the final norm, attached to its graph.

        Raises:
            RunError: no forward pass has reached the layer.
        """
        if self._hidden is None:
            raise RunError(f"layer {self.layer}: found no output, accepted is a forward pass through it in the block")
        return self._hidden


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Find the list of decoder layers: the module list as long as `num_hidden_layers` of the configuration says.

    Args:
        model: a causal language model, with or without a PEFT wrapper around it.

    Returns:
        The model's own list.

    Raises:
        RunError: there is none, or more than one that could be it; the message names the model's class.
    """
    plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config: Any = getattr(plain, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(config, "num_hidden_layers", None)
    inner = getattr(plain, getattr(plain, "base_model_prefix", "") or "model", None)
    for modules in (inner.children() if isinstance(inner, nn.Module) else (), plain.modules()):
        found = [module for module in modules if isinstance(module, nn.ModuleList) and len(module) == count]
        if len(found) == 1:
            return found[0]
    raise RunError(
        f"{type(plain).__name__}: found no single list of decoder layers, accepted is a model with one list of "
        f"{count} modules (num_hidden_layers)"
    )


def layer_index(model: nn.Module, layer: int) -> int:
    """Number of a decoder layer counted from 0.

    Args:
        model: a causal language model, with or without a PEFT wrapper around it.
        layer: from 0; negative ones count from the end (−1 is the last).

    Raises:
        UsageError: the model has no such layer; the line names it and the range.
        RunError: the model's layers were not found.
    """
    count = len(decoder_layers(model))
    if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
        raise UsageError(f"layer: found {layer!r}, accepted is {-count} to {count - 1} (the model has {count} layers)")
    return layer % count


@contextmanager
def layer_output(model: nn.Module, layer: int, *, stop: bool = False) -> Iterator[LayerOutput]:
    """Capture the output of one decoder layer in the forward passes of a block.

    The hook is removed when the block ends, also by an error. Gradients flow through what was captured, as they do
    through the model. Of several forward passes the latest counts. With re-entrant gradient checkpointing a layer runs
    without gradient; use the other kind.

    Args:
        model: a causal language model, with or without a PEFT wrapper around it.
        layer: index of the layer, from 0; negative ones count from the end (−1 is the last).
        stop: end the forward pass, and with it the block, once the layer has run: the layers above it and the head cost
            nothing. Nothing that follows the forward pass in the block is run.

    Yields:
        A `LayerOutput`; read its `hidden` after the forward pass.

    Raises:
        UsageError: the model has no such layer; the line names it and the range.
        RunError: the model's layers were not found.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> with layer_output(model, -2, stop=True) as found:
        ...     _ = model(torch.zeros(1, 3, dtype=torch.long))
        >>> found.layer, found.hidden.shape
        (0, torch.Size([1, 3, 8]))
    """
    layers = decoder_layers(model)
    captured = LayerOutput(layer_index(model, layer))

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        captured._hidden = output[0] if isinstance(output, tuple) else output
        if stop:
            raise _Stop

    handle = layers[layer].register_forward_hook(keep)
    try:
        yield captured
    except _Stop:
        pass
    finally:
        handle.remove()
