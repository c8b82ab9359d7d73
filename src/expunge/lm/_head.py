"""The split of a causal language model into body (everything up to the final norm) and head (hidden state → logits)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from expunge.errors import RunError, UsageError

# Largest difference between head(body(ids)) and model(ids).logits, as a share of the largest logit: the model may round
# the bias, the scale and the softcap to its own dtype, where `Head` adds them in float32.
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_PROBE_LENGTH = 8


@dataclass(frozen=True)
class Head:
    """The last map of the model: logits = softcap(scale · (h Wᵀ + b)), where softcap(x) = cap · tanh(x / cap).

    Attributes:
        weight: (V, d), the model's own tensor, so a gradient reaches it when it requires one (tied or not).
        bias: (V,) or None.
        softcap: positive cap (Gemma 2) or None.
        scale: positive factor (Cohere: `logit_scale`; Granite: 1 / `logits_scaling`).

    Raises:
        UsageError: if scale or softcap is not positive (the order of the logits would not be the order of h Wᵀ + b).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise UsageError(f"head scale must be positive, found {self.scale}")
        if self.softcap is not None and not self.softcap > 0:
            raise UsageError(f"head softcap must be positive, found {self.softcap}")

    def compute_dtype(self, hidden: Tensor) -> torch.dtype:
        """The dtype of the matrix product: float64 if either side is float64, otherwise that of the weights."""
        double = torch.float64 in (hidden.dtype, self.weight.dtype)
        return torch.float64 if double else self.weight.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits, differentiable; for callers who can afford them. `token_stats` never builds them.

        Args:
            hidden: (..., d) hidden states after the final norm.

        Returns:
            (..., V) float32 (float64 if hidden or weights are float64). The product runs in the weights' dtype; bias,
            scale and softcap in the result's.
        """
        dtype = self.compute_dtype(hidden)
        raw = functional.linear(hidden.to(dtype), self.weight.to(dtype))
        return self.finish(raw.to(accumulation_dtype(dtype)), self.bias)

    def finish(self, raw: Tensor, bias: Tensor | None) -> Tensor:
        """Apply bias, scale and softcap to h Wᵀ, differentiably; `bias` broadcasts against `raw`."""
        logits = raw if bias is None else raw + bias.to(raw.dtype)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def finish_(self, raw: Tensor) -> Tensor:
        """As `finish` with the head's own bias, in place and without gradient: `raw` (rows, V) becomes the logits."""
        if self.bias is not None:
            raw.add_(self.bias.detach())
        if self.scale != 1.0:
            raw.mul_(self.scale)
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over the vocabulary: float64 stays, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Body(Protocol):
    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor | None, use_cache: bool) -> Any: ...


@dataclass(frozen=True)
class Split:
    """A model as body and head.

    Attributes:
        model: the model that was split, adapters included.
        head: None if the model's last step was not recognised; then use `logits` and `token_stats_from_logits`.
        inner: the part of the model that ends after the final norm; None when head is None.
    """

    model: nn.Module
    head: Head | None
    inner: nn.Module | None = None

    def body(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: (B, T) int64, right-padded.
            attention_mask: (B, T), 1 = token, 0 = padding; None: no padding.

        Returns:
            (B, T, d) in the model's dtype.

        Raises:
            RunError: if the model has no recognised head.
        """
        if self.inner is None:
            raise RunError(f"{type(self.model).__name__} has no recognised body and head: use Split.logits")
        inner = cast(_Body, self.inner)
        output = inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The model's own logits (B, T, V) in its own dtype, whatever its head looks like."""
        return cast(_Body, self.model)(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def split_model(model: nn.Module) -> Split:
    """Split a causal language model into body and head, and verify the split on eight random ids.

    Recognised: a linear output layer (with or without bias, tied or not), `final_logit_softcapping`, `logit_scale` and
    `logits_scaling` of the config. LoRA adapters in the body stay active. An adapted or quantised output layer, prompt
    tuning, and every model whose head(body(ids)) differs from model(ids).logits give `head=None`.

    Args:
        model: a `PreTrainedModel` with a language-model head, or a `PeftModel` around one.

    Returns:
        The split. The model is left as it was: training flags restored, no gradient, global random state untouched.
    """
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    candidate = _candidate(model, plain)
    if candidate is None or candidate.head is None or candidate.head.weight.is_meta or not _agrees(candidate):
        return Split(model=model, head=None)
    return candidate


def assumed_split(model: nn.Module) -> Split:
    """As `split_model`, without the check: for a model on the meta device, whose outputs have no values."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return _candidate(model, plain) or Split(model=model, head=None)


def _candidate(model: nn.Module, plain: nn.Module) -> Split | None:
    output = getattr(plain, "get_output_embeddings", lambda: None)()
    inner = getattr(plain, getattr(plain, "base_model_prefix", "") or "model", None)
    # NOTE exact type: an adapted layer is a subclass or wrapper whose `weight` alone is not the map, and whose adapter,
    # still zero at the start, would pass the probe.
    if type(output) is not nn.Linear or not isinstance(inner, nn.Module) or inner is plain:
        return None
    config = plain.config.get_text_config() if hasattr(plain.config, "get_text_config") else plain.config  # type: ignore
    divisor = getattr(config, "logits_scaling", None) or 1.0
    scale = (getattr(config, "logit_scale", None) or 1.0) / divisor
    softcap = getattr(config, "final_logit_softcapping", None)
    if not isinstance(scale, float | int) or scale <= 0:
        return None
    return Split(model=model, head=Head(output.weight, output.bias, softcap, float(scale)), inner=inner)


@torch.no_grad()
def _agrees(split: Split) -> bool:
    """Whether head(body(ids)) equals model(ids).logits; an exception inside the model's forward counts as no."""
    head = cast(Head, split.head)
    vocabulary = head.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, _PROBE_LENGTH), generator=generator).to(head.weight.device)
    training = [module for module in split.model.modules() if module.training]
    split.model.eval()
    try:
        expected = split.logits(ids, torch.ones_like(ids))
        found = head.logits(split.body(ids, torch.ones_like(ids)))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False
    finally:
        for module in training:
            module.training = True
    if found.shape != expected.shape:
        return False
    difference = (found - expected.to(found.dtype)).abs().max()
    return bool(difference <= _PROBE_TOLERANCE.get(head.weight.dtype, 0.0) * expected.abs().max().to(found.dtype))
