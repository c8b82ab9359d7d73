"""LoRA: choosing and checking targets, attaching adapters, switching them off, merging one layer in float32."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from expunge.errors import UsageError
from expunge.lm._quiet import quiet

ALL_LINEAR = "all-linear"

# Attention projections by family, tried in this order; the first whose every name matches a linear layer is taken.
_ATTENTION = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # Llama, Qwen, Mistral, Gemma
    ("q_proj", "k_proj", "v_proj", "out_proj"),  # OPT, GPT-J, GPT-Neo
    ("q_proj", "k_proj", "v_proj", "dense"),  # Phi-2
    ("qkv_proj", "o_proj"),  # Phi-3
    ("c_attn", "attn.c_proj"),  # GPT-2
    ("query_key_value", "attention.dense"),  # GPT-NeoX
    ("query_key_value", "self_attention.dense"),  # BLOOM, Falcon
)


@dataclass(frozen=True)
class LoraReport:
    """What was adapted, for the run's log and the report.

    Attributes:
        rank: rank of the update.
        alpha: the update is scaled by alpha / rank.
        dropout: dropout on the adapters' input, in training only.
        targets: the patterns that choose the layers, sorted.
        layers: indices of the adapted blocks; None means all.
        modules: number of adapted linear layers.
        trainable: number of trainable weights.
        total: number of all weights, adapters included; tied weights count once.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    layers: tuple[int, ...] | None
    modules: int
    trainable: int
    total: int


def default_targets(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the attention projections of this architecture; all linear layers where the family is not known.

    Args:
        model: a causal language model without adapters.

    Returns:
        Target patterns for `add_lora`, for example `("c_attn", "attn.c_proj")` for GPT-2.
    """
    names = list(_linear_names(model))
    for candidate in _ATTENTION:
        if all(any(_matches(name, pattern) for name in names) for pattern in candidate):
            return candidate
    return _suffixes(names)


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.05,
    targets: Sequence[str] | str | None = None,
    layers: Sequence[int] | None = None,
) -> PeftModel:
    """Attach trainable low-rank adapters to chosen linear layers; every other weight is frozen.

    A layer's output becomes W x + (alpha / rank) · B A x with B = 0 at the start, so nothing changes before training.
    Adapters have the type of the model's weights: float32 adapters on a bfloat16 body cost most of its speed, and
    `MasterWeights` keeps small updates.

    Args:
        model: the model; its layers are replaced in place.
        rank: rank of the update, at least 1.
        alpha: scale numerator, above 0.
        dropout: dropout on the adapters' input, in [0, 1).
        targets: patterns, each a layer's name or its ending after a dot (`"q_proj"`, `"attn.c_proj"`); `"all-linear"`
            means every linear layer but the output head; None takes `default_targets(model)`.
        layers: indices of the blocks to adapt; None adapts all.

    Returns:
        The PEFT model, in evaluation mode; `lora_report` counts its weights.

    Raises:
        UsageError: an option is out of range, a pattern matches no linear layer, or asks for the head or an embedding.
    """
    if isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise UsageError("lora: the model already has adapters; merge them first")
    _check_numbers(rank, alpha, dropout)
    chosen = _resolve_targets(model, targets)
    adapted = [name for name in _linear_names(model) if any(_matches(name, pattern) for pattern in chosen)]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT annotates int; a float works
        lora_dropout=dropout,
        target_modules=sorted(chosen),
        layers_to_transform=_check_layers(model, layers),
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in adapted),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with quiet():
        try:
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise UsageError(f"lora targets {list(chosen)}, layers {layers}: {error}") from None
    match_adapter_dtype(wrapped)
    if lora_report(wrapped).trainable == 0:
        raise UsageError(f"lora targets {list(chosen)}, layers {layers}: no trainable weights")
    return wrapped.eval()


def lora_report(model: PeftModel) -> LoraReport:
    """Settings and weight counts of a model made by `add_lora`."""
    config: Any = model.peft_config[model.active_adapter]
    layers = config.layers_to_transform
    params = list(model.parameters())
    return LoraReport(
        rank=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        targets=tuple(sorted(config.target_modules)),
        layers=None if layers is None else tuple(layers),
        modules=sum(isinstance(module, BaseTunerLayer) for module in model.modules()),
        trainable=sum(param.numel() for param in params if param.requires_grad),
        total=sum(param.numel() for param in params),
    )


@contextlib.contextmanager
def adapter_disabled(model: PeftModel) -> Iterator[None]:
    """Inside the block the model is the frozen reference: adapters off, dropout off (evaluation mode).

    Training flags and `requires_grad` are restored on leaving. Gradients are the caller's choice (`torch.no_grad()`).

    Raises:
        UsageError: the model has no adapters, so there is nothing to switch off.
    """
    if not isinstance(model, PeftModel):
        raise UsageError("adapter_disabled: the model has no adapters")
    # NOTE: layer by layer, not `model.disable_adapter()`: that walks the model for a status report each time, which
    # took over half of a run's time on SmolLM2-135M.
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, BaseTunerLayer)]
    training = [module for module in modules if module.training]
    grads = [(param, param.requires_grad) for layer in layers for param in layer.parameters()]
    for module in training:
        module.training = False
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for module in training:
            module.training = True
        for param, flag in grads:
            param.requires_grad_(flag)


def adapter_dropouts(model: nn.Module) -> list[nn.Module]:
    """The dropout layers of the adapters, not those of the model itself; empty where adapters have none."""
    return [
        module
        for layer in model.modules()
        if isinstance(layer, BaseTunerLayer)
        for module in getattr(layer, "lora_dropout", {}).values()
        if isinstance(module, nn.Dropout)
    ]


@torch.no_grad()
def weight_update(layer: BaseTunerLayer) -> Tensor:
    """The update ΔW of one adapted layer in float32, by PEFT's own rule on a float32 copy; the layer is not changed.

    Args:
        layer: a LoRA layer whose adapters are not merged.

    Returns:
        A new float32 tensor in the layout of the base weight, so that W + ΔW is the merged weight.
    """
    twin: Any = copy.deepcopy(layer).float()  # type: ignore[attr-defined]  # tuner layers are modules
    updates = [twin.get_delta_weight(name) for name in twin.active_adapters if name in twin.lora_A]
    return torch.stack(updates).sum(dim=0)


def match_adapter_dtype(model: PeftModel) -> None:
    """Give every adapter weight the type of the layer it sits on."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            dtype = module.get_base_layer().weight.dtype
            for name in module.adapter_layer_names:
                getattr(module, name).to(dtype)


def _check_numbers(rank: int, alpha: float, dropout: float) -> None:
    if rank < 1 or rank != int(rank):
        raise UsageError(f"lora rank: found {rank}, accepted are whole numbers from 1")
    if not alpha > 0:
        raise UsageError(f"lora alpha: found {alpha}, accepted are numbers above 0")
    if not 0 <= dropout < 1:
        raise UsageError(f"lora dropout: found {dropout}, accepted are numbers from 0 to below 1")


def _check_layers(model: PreTrainedModel, layers: Sequence[int] | None) -> list[int] | None:
    if layers is None:
        return None
    count = model.config.get_text_config().num_hidden_layers
    wrong = [index for index in layers if not 0 <= index < count]
    if wrong or not layers:
        raise UsageError(f"lora layers: found {wrong or 'none'}, accepted are block indices from 0 to {count - 1}")
    return sorted(set(layers))


def _resolve_targets(model: PreTrainedModel, targets: Sequence[str] | str | None) -> tuple[str, ...]:
    names = list(_linear_names(model))
    if targets is None:
        return default_targets(model)
    if targets == ALL_LINEAR or list(targets) == [ALL_LINEAR]:
        return _suffixes(names)
    chosen = (targets,) if isinstance(targets, str) else tuple(targets)
    _refuse_head(model, chosen)
    missing = [pattern for pattern in chosen if not any(_matches(name, pattern) for name in names)]
    if missing or not chosen:
        raise UsageError(
            f"lora targets: {', '.join(map(repr, missing)) or 'none given'} matches no linear layer; this model has "
            f"{', '.join(_suffixes(names))} (or '{ALL_LINEAR}')"
        )
    return chosen


def _refuse_head(model: PreTrainedModel, chosen: Sequence[str]) -> None:
    special = [module for module in (model.get_output_embeddings(), model.get_input_embeddings()) if module is not None]
    weights = [module.weight for module in special]
    tied = len(weights) == 2 and weights[0] is weights[1]
    for name, module in model.named_modules():
        if not any(module is one for one in special) and not isinstance(module, nn.Embedding):
            continue
        for pattern in chosen:
            if _matches(name, pattern):
                why = "it is tied: head and embedding share one weight" if tied else "head and embeddings stay frozen"
                raise UsageError(f"lora targets: '{pattern}' is not adapted ({why}); name layers inside the blocks")


def _linear_names(model: PreTrainedModel) -> Iterator[str]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            yield name


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}")


def _suffixes(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))
