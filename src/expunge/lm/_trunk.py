"""A body cut before its first trained layer, so that what lies below is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from expunge.lm._head import Head, Split


class _Stop(Exception):
    """Ends a forward pass at the layer whose input was wanted."""


class Trunk:
    """A body cut before its first trained layer: `lower` never changes while training, `upper` does.

    Args:
        split: the model.
        first_layer: index of the first layer that is trained; 0 = the whole body is.
        verify: compare the cut body with the whole one; False for a model on the meta device, which has no values.

    Attributes:
        first_layer: as given, or 0 where this body cannot be cut: its layers were not found, differ in their attention
            (sliding and full), or the cut body did not give what the whole one gives.
    """

    def __init__(self, split: Split, first_layer: int = 0, *, verify: bool = True) -> None:
        self.split = split
        self.first_layer = 0
        self._name, self._all = _find_layers(split)
        self._upper = self._all
        if first_layer > 0 and self._all is not None and first_layer < len(self._all) and not _mixed_attention(split):
            self.first_layer = first_layer
            self._upper = self._all[first_layer:]
            if verify and not self._agrees():
                self.first_layer = 0

    @torch.no_grad()
    def lower(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Input of the first trained layer, (B, T, d), without gradient."""
        found: list[Tensor] = []

        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(args[0] if args else kwargs["hidden_states"])
            raise _Stop

        assert self._all is not None
        handle = self._all[self.first_layer].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            self.split.body(input_ids, attention_mask)
        except _Stop:
            pass
        finally:
            handle.remove()
        return found[0]

    def upper(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Hidden states after the final norm, (B, T, d), from the input of the first trained layer."""
        inner = cast(Any, self.split.inner)
        inner._modules[self._name] = self._upper
        try:
            output = inner(inputs_embeds=hidden, attention_mask=attention_mask, use_cache=False)
        finally:
            inner._modules[self._name] = self._all
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    @contextmanager
    def only(self, layers: int) -> Iterator[None]:
        """Inside the block the body has this many layers, from the first trained one; what they give has no meaning.

        Raises:
            RuntimeError: the layers of this body were not found.
        """
        if self._all is None:
            raise RuntimeError(f"{type(self.split.model).__name__}: its layers were not found")
        inner, first = cast(Any, self.split.inner), self.first_layer
        whole, self._upper = self._all, self._all[first : first + layers]
        inner._modules[self._name] = self._upper
        try:
            yield
        finally:
            inner._modules[self._name] = whole
            self._upper = whole[first:] if first else whole

    def _agrees(self) -> bool:
        device = cast(Head, self.split.head).weight.device
        vocabulary = cast(Head, self.split.head).weight.shape[0]
        ids = torch.randint(vocabulary, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        with evaluating(self.split.model), torch.no_grad():
            try:
                whole = self.split.body(ids, mask)
                cut = self.upper(self.lower(ids, mask), mask)
            except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError):
                return False
        keep = mask.bool()
        # Not bit by bit: kernels may choose another order of sums for other shapes.
        scale = float(whole[keep].abs().max())
        tolerance = 1e-5 if whole.dtype in (torch.float32, torch.float64) else 0.02
        return float((whole[keep] - cut[keep]).abs().max()) <= tolerance * max(scale, 1.0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block every module is in evaluation mode; those that were training train again afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _find_layers(split: Split) -> tuple[str, nn.ModuleList | None]:
    """The list of decoder layers: the module list as long as the configuration says, and its name in its owner."""
    if split.inner is None:
        return "", None
    count = getattr(_config(split), "num_hidden_layers", None)
    for name, module in split.inner.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    return "", None


def _mixed_attention(split: Split) -> bool:
    kinds = getattr(_config(split), "layer_types", None)
    return kinds is not None and len(set(kinds)) > 1


def _config(split: Split) -> Any:
    config = cast(Any, split.inner).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
