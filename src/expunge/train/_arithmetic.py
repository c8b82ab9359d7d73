"""Task arithmetic on the weights of a run: what tuning added is taken off."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import PeftModel
from torch import Tensor

from expunge.objectives import task_vector
from expunge.train._prepare import Trainable


def base_weights(trainable: Trainable) -> dict[str, Tensor]:
    """The weights θ that tuning starts from: copies; with an adapter none, since its update starts at zero.

    Args:
        trainable: before the first update.
    """
    if isinstance(trainable.model, PeftModel):
        return {}
    weights = zip(trainable.names, trainable.masters.params, strict=True)
    return {name: weight.detach().clone() for name, weight in weights}


@torch.no_grad()
def subtract_tuning(trainable: Trainable, base: Mapping[str, Tensor], scale: float) -> None:
    """Replace θ_tuned by θ − scale·(θ_tuned − θ), in the model and its masters.

    Args:
        trainable: after tuning.
        base: what `base_weights` gave before it.
        scale: 0 or more.
    """
    masters = trainable.masters
    tuned: dict[str, Tensor] = dict(zip(trainable.names, masters.masters, strict=True))
    if isinstance(trainable.model, PeftModel):  # the update is B·A, and B was zero: A stays
        tuned = {name: weight for name, weight in tuned.items() if "lora_B" in name}
        base = {name: torch.zeros_like(weight) for name, weight in tuned.items()}
    for name, weight in task_vector(base, tuned, scale).items():
        tuned[name].copy_(weight)
    masters.to_model()
