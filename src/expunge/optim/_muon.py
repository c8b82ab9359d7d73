"""Muon: an orthogonalised average of the gradient for 2-D weights, another rule for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from expunge.errors import UsageError
from expunge.optim._lists import Value
from expunge.optim._rules import AdamW, Rule, Statistic, check_beta, check_positive, looks_like_embedding

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NOT_MATRICES = ("*embed*", "*lm_head*", "*head.weight", "*wte*", "*wpe*")


@dataclass(frozen=True)
class Muon(Rule):
    """Muon for 2-D weights, another rule for the rest: d = c · NS(g + μ-lookahead), NS ≈ U·Vᵀ of the average U·S·Vᵀ.

    m ← μ·m + (1 − μ)·g; with Nesterov μ·m + (1 − μ)·g is orthogonalised, else m, by five Newton–Schulz iterations.
    Embeddings, heads and everything that is not 2-D use `other`, as its authors do. A parameter without a name is taken
    for an embedding where it has at least 16,384 rows and 8 times as many rows as columns.

    Attributes:
        momentum: μ, in [0, 1).
        nesterov: look ahead.
        adjust: "match_rms_adamw": c = 0.2·√max(rows, columns), so that one learning rate suits both rules (default
            here); "original": c = √max(1, rows / columns), as the authors, with a learning rate about a hundred times
            AdamW's.
        steps: Newton–Schulz iterations, 1 or more.
        dtype: in which they run; bfloat16 as the authors.
        other: rule for the rest.
        other_lr_scale: factor on the learning rate for the rest.
        not_matrices: name patterns (`fnmatch`) of 2-D weights that `other` updates.

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
        https://kellerjordan.github.io/posts/muon/; Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982.
    """

    foreach = True
    matrix = True
    momentum: float = 0.95
    nesterov: bool = True
    adjust: str = "match_rms_adamw"
    steps: int = 5
    dtype: torch.dtype = torch.bfloat16
    other: Rule = field(default_factory=AdamW)
    other_lr_scale: float = 1.0
    not_matrices: tuple[str, ...] = NOT_MATRICES

    def __post_init__(self) -> None:
        """Check every value."""
        check_beta("momentum", self.momentum)
        check_positive("other_lr_scale", self.other_lr_scale)
        object.__setattr__(self, "not_matrices", tuple(self.not_matrices))
        if self.adjust not in ("match_rms_adamw", "original"):
            raise UsageError(f"adjust: found {self.adjust!r}, accepted is 'match_rms_adamw' or 'original'")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise UsageError(f"steps: found {self.steps!r}, accepted is a whole number from 1")
        if not self.dtype.is_floating_point or self.dtype.itemsize < 2:
            raise UsageError(f"dtype: found {self.dtype}, accepted is a floating dtype of at least 16 bits")
        if not isinstance(self.other, Rule) or self.other.matrix:
            raise UsageError(f"other: found {self.other!r}, accepted is a rule that works element by element")

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """exp_avg (g), without debiasing."""
        return (Statistic("exp_avg", self.momentum, debias=False),)

    @property
    def members(self) -> tuple[Rule, ...]:
        """Itself and `other`."""
        return self, self.other

    def select(self, name: str | None, shape: Sequence[int]) -> Rule:
        """Itself for 2-D weights that are no embedding or head, else `other`."""
        if len(shape) != 2:
            return self.other
        if name is None:
            return self.other if looks_like_embedding(shape) else self
        return self.other if any(fnmatchcase(name, pattern) for pattern in self.not_matrices) else self

    def lr_factor(self, selected: Rule) -> float:
        """`other_lr_scale` for the rest."""
        return 1.0 if selected is self else self.other_lr_scale

    def direction(self, grad: Value, averages: Sequence[Value]) -> Value:
        """What is orthogonalised: μ·m + (1 − μ)·g, or m."""
        return averages[0].lerp_(grad, 1.0 - self.momentum) if self.nesterov else averages[0]

    def finish(self, direction: Tensor) -> Tensor:
        """The orthogonalised matrix times c."""
        rows, columns = direction.shape
        scale = (
            0.2 * math.sqrt(max(rows, columns))
            if self.adjust == "match_rms_adamw"
            else math.sqrt(max(1.0, rows / columns))
        )
        return orthogonalise(direction, self.steps, self.dtype).mul_(scale)


def orthogonalise(matrix: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Approximate U·Vᵀ of the singular value decomposition U·S·Vᵀ by a quintic Newton–Schulz iteration.

    X ← X / ‖X‖_F, then `steps` times X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ. The coefficients maximise the slope at
    zero, so the singular values end in about [0.7, 1.2] rather than at 1.

    Args:
        matrix: (rows, columns), any floating dtype; a zero matrix gives zeros.
        steps: iterations.
        dtype: in which they run.

    Returns:
        (rows, columns), in the dtype of `matrix`.
    """
    a, b, c = NS_COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype, copy=True).contiguous()
