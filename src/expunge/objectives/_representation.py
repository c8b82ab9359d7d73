"""Terms of one decoder layer's output (RMU) and the random direction they steer to."""

import torch
from torch import Tensor

from expunge.objectives._aggregate import at_least_float32, token_total
from expunge.objectives._masc import SumCount


def rmu(activation: Tensor, direction: Tensor, rows: Tensor, n_rows: int, *, c: float = 6.5) -> SumCount:
    """Representation misdirection: steer a layer's output on the tokens to forget to a fixed random vector.

    L = 1/N Σ_t ‖h_t − c·u‖² / d

    Args:
        activation: (N, d) output h_t of the layer at the labelled tokens' positions.
        direction: (d,) fixed unit vector u (see `rmu_direction`).
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.
        c: length c of the vector to steer to, any finite number; a few times the norm of h.

    Returns:
        Sum and number of tokens.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> hidden, u = torch.tensor([[1.0, 0.0]]), torch.tensor([1.0, 0.0])
        >>> rmu(hidden, u, torch.tensor([0]), 1, c=3.0).mean().item()
        2.0

    References:
        Li et al., The WMDP Benchmark: Measuring and Reducing Malicious Use With Unlearning, 2024,
        https://arxiv.org/abs/2403.03218 (forget loss of RMU). The paper has no 1/d, its code does (a mean squared
        error), and there the weights c = 6.5, α = 1200 for Zephyr-7B belong to the latter. That code averages over all
        positions, padding included; here over labelled tokens.
    """
    if activation.dim() != 2 or direction.shape != activation.shape[1:]:
        raise ValueError(
            f"activation, direction: found shapes {tuple(activation.shape)}, {tuple(direction.shape)}, "
            "accepted is (N, d) and (d,)"
        )
    hidden = at_least_float32(activation)
    return token_total((hidden - c * direction.to(hidden).detach()).square().mean(1))


def rmu_retain(activation: Tensor, ref_activation: Tensor, rows: Tensor, n_rows: int) -> SumCount:
    """Keep a layer's output on the tokens to retain where it was.

    L = 1/N Σ_t ‖h_t − h₀_t‖² / d

    Args:
        activation: (N, d) output h_t of the layer at the labelled tokens' positions.
        ref_activation: (N, d) the same of the model before unlearning; no gradient reaches it.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.

    Returns:
        Sum and number of tokens.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> hidden = torch.tensor([[1.0, 0.0]])
        >>> rmu_retain(hidden, torch.zeros(1, 2), torch.tensor([0]), 1).mean().item()
        0.5

    References:
        Li et al., 2024, https://arxiv.org/abs/2403.03218 (retain loss of RMU); 1/d as in its code.
    """
    if activation.dim() != 2 or ref_activation.shape != activation.shape:
        raise ValueError(
            f"activation, ref_activation: found shapes {tuple(activation.shape)}, {tuple(ref_activation.shape)}, "
            "accepted is (N, d) for both"
        )
    hidden = at_least_float32(activation)
    return token_total((hidden - ref_activation.to(hidden).detach()).square().mean(1))


def rmu_direction(d: int, seed: int) -> Tensor:
    """Draw the unit vector of RMU: entries uniform in [0, 1), divided by their norm.

    All entries are positive, so two draws have a cosine near 3/4: that is how its authors draw it.

    Args:
        d: size of the hidden states, 1 or more.
        seed: seed of the draw; the global random state stays as it is.

    Returns:
        (d,) float32 on the CPU, of norm 1.

    Raises:
        ValueError: d is below 1.

    Example:
        >>> round(rmu_direction(64, 0).norm().item(), 4)
        1.0

    References:
        Li et al., 2024, https://arxiv.org/abs/2403.03218 (a random unit vector with entries uniform in [0, 1)). The RMU
        of Wang et al., 2025 (https://github.com/tmlr-group/G-effect, ef368ee) leaves out the division by the norm: its
        vector is longer by about √(d/3).
    """
    if d < 1:
        raise ValueError(f"d: found {d}, accepted is a whole number from 1")
    draw = torch.rand(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (draw / draw.norm()).float()
