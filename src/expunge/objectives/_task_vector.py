"""Unlearning by weight arithmetic: subtract what further training on the forget set adds."""

import math
from collections.abc import Mapping

from torch import Tensor

from expunge.errors import UsageError
from expunge.objectives._aggregate import at_least_float32


def task_vector(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Subtract a task vector from weights: θ − s·(θ_tuned − θ).

    Args:
        base: θ, the weights to unlearn, by name.
        tuned: θ_tuned, the same model after further training on the forget set, with the same names and shapes.
        scale: s, 0 or more; 0 gives θ.

    Returns:
        New tensors by name, on the device and in the dtype of `base`; half precision is computed in float32 and rounded
        once. Tensors that are not floating point (counters, masks) are copied from `base`.

    Raises:
        UsageError: the scale is negative or not finite.
        ValueError: names or shapes differ; the message has the first of them.

    Example:
        >>> import torch
        >>> base, tuned = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.5])}
        >>> task_vector(base, tuned, 2.0)["w"].item()
        0.0

    References:
        Ilharco et al., Editing Models with Task Arithmetic, 2022, https://arxiv.org/abs/2212.04089 (forgetting via
        negation). There θ is the pretrained model; the form with θ = the model to unlearn is MUSE's (Shi et al., 2024,
        https://arxiv.org/abs/2407.06460, Task Vectors).
    """
    if isinstance(scale, bool) or not math.isfinite(scale) or scale < 0:
        raise UsageError(f"scale: found {scale!r}, accepted is a number from 0")
    for name in (*base, *tuned):
        if name not in base or name not in tuned:
            where = "base" if name not in base else "tuned"
            raise ValueError(f"{name}: found no such tensor in {where}, accepted is the same names in both")
        if base[name].shape != tuned[name].shape:
            raise ValueError(
                f"{name}: found shape {tuple(tuned[name].shape)} in tuned, accepted is {tuple(base[name].shape)}"
            )
    return {name: _negated(weight, tuned[name], scale) for name, weight in base.items()}


def _negated(weight: Tensor, tuned: Tensor, scale: float) -> Tensor:
    if not weight.is_floating_point():
        return weight.detach().clone()
    start = at_least_float32(weight.detach())
    return (start - scale * (tuned.detach().to(start) - start)).to(weight.dtype, copy=True)
