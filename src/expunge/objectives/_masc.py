"""The MASC forget term (a hinge on token margins), the KL retain term, and random answer suffixes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from expunge.errors import UsageError

IGNORE_INDEX = -100


class SumCount(NamedTuple):
    """A sum and what it is to be divided by, kept apart so that micro-batches can be joined before the division.

    Attributes:
        total: scalar, at least float32, attached to the graph.
        terms: number of terms in the sum.
    """

    total: Tensor
    terms: int

    def mean(self) -> Tensor:
        """Return total / terms, scalar; a zero attached to the graph where nothing was counted."""
        return self.total / max(self.terms, 1)


@dataclass(frozen=True)
class HingeResult:
    """What `masc_hinge` found.

    Attributes:
        loss: scalar, mean over the rows that have tokens; equals `total / count`.
        total: scalar, sum over those rows. One update of several micro-batches divides the sum of the totals by the
            sum of the counts.
        count: rows that have tokens (rows closed by the gate are counted: they contribute zero to the mean).
        excluded: rows without a token; not part of the mean.
        closed: rows whose gate is closed.
        per_row: (n_rows,) attached contribution of each row: zero where excluded or closed.
        violation: (n_rows,) detached share of tokens with margin above τ_ρ, in [0, 1]; NaN for rows without tokens
            (not measured).
    """

    loss: Tensor
    total: Tensor
    count: int
    excluded: int
    closed: int
    per_row: Tensor
    violation: Tensor


def threshold(rho: float) -> float:
    """Return the margin τ_ρ = log(ρ / (1 − ρ)) below which a token's probability is at most ρ.

    The margin is m = β·z_y − log Σ_{v∈S} exp(β·z_v); for β = 1 the target's probability within S ∪ {y} is σ(m), so m
    ≤ τ_ρ means p(y) ≤ ρ.

    Args:
        rho: allowed token probability ρ, in (0, 1).

    Returns:
        τ_ρ, in logits.

    Raises:
        UsageError: rho is not in (0, 1).

    Example:
        >>> round(threshold(0.7), 4)
        0.8473
    """
    if not 0.0 < rho < 1.0:
        raise UsageError(f"rho: found {rho!r}, accepted is a number between 0 and 1, both excluded")
    return math.log(rho) - math.log1p(-rho)


def masc_hinge(
    margins: Tensor,
    rows: Tensor,
    n_rows: int,
    *,
    rho: float = 0.7,
    eta: float = 0.25,
    gate: float | Tensor | None = None,
    spared: Tensor | None = None,
) -> HingeResult:
    """Mean over rows of the mean hinge of the token margins above a safe level.

    L = E_rows [ 1/T Σ_t max(0, m_t − (τ_ρ − η)) / η ],  τ_ρ = log(ρ / (1 − ρ))

    A token at m_t = τ_ρ costs 1 and a token at or below τ_ρ − η costs 0, so a row's loss bounds its violation share
    (tokens with m_t > τ_ρ) from above. With `gate`, a row whose violation share is at most that tolerance contributes
    zero, until it rises above it again.

    Args:
        margins: (N,) margins of the labelled tokens, any floating dtype; half precision is computed in float32.
        rows: (N,) int64, the row each token belongs to, in [0, n_rows).
        n_rows: rows in the batch, with or without tokens.
        rho: allowed token probability ρ, in (0, 1).
        eta: width η of the hinge below τ_ρ, in logits, above 0.
        gate: tolerated violation share α in [0, 1], for all rows or (n_rows,) one each; None for no gate.
        spared: (N,) bool, tokens that cost nothing, though they count among a row's T tokens and in its violation; None
            for none.

    Returns:
        The loss, its sum and count, and both numbers per row. Without a single token the loss is a zero attached to
        `margins`.

    Raises:
        UsageError: an option is out of range.
        ValueError: the tensors do not fit each other.

    Example:
        >>> margins = torch.tensor([2.0, 0.0, -5.0])
        >>> result = masc_hinge(margins, torch.tensor([0, 0, 2]), 3, rho=0.5, eta=1.0)
        >>> result.loss.item(), result.count, result.excluded
        (1.0, 2, 1)

    References:
        MASC, arXiv 2606.02920. https://arxiv.org/abs/2606.02920
    """
    tau = threshold(rho)
    if not (math.isfinite(eta) and eta > 0.0):
        raise UsageError(f"eta: found {eta!r}, accepted is a number above 0")
    if isinstance(gate, Tensor):
        if gate.shape != (n_rows,) or not bool(((gate >= 0) & (gate <= 1)).all()):
            raise ValueError(f"gate: found a tensor of shape {tuple(gate.shape)}, accepted is ({n_rows},) of shares")
        gate = gate.to(margins.device)
    elif gate is not None and not 0.0 <= gate <= 1.0:
        raise UsageError(f"gate: found {gate!r}, accepted is a number from 0 to 1, or none")
    _check_rows(margins, rows, n_rows)
    values = _at_least_float32(margins)
    tokens = torch.zeros(n_rows, dtype=values.dtype, device=values.device).index_add(0, rows, torch.ones_like(values))
    counted = tokens > 0
    divisor = tokens.clamp(min=1)

    def mean_per_row(per_token: Tensor) -> Tensor:
        return torch.zeros(n_rows, dtype=values.dtype, device=values.device).index_add(0, rows, per_token) / divisor

    hinge = (values - (tau - eta)).clamp(min=0) / eta
    if spared is not None:
        if spared.shape != margins.shape or spared.dtype != torch.bool:
            raise ValueError(f"spared: found {spared.dtype} of shape {tuple(spared.shape)}, accepted is (N,) bool")
        hinge = hinge.masked_fill(spared, 0.0)
    per_row = mean_per_row(hinge)
    violation = mean_per_row((values.detach() > tau).to(values.dtype))
    closed = torch.zeros_like(counted) if gate is None else counted & (violation <= gate)
    per_row = torch.where(closed, torch.zeros_like(per_row), per_row)
    total, count = per_row.sum(), int(counted.sum())
    return HingeResult(
        loss=total / max(count, 1),
        total=total,
        count=count,
        excluded=n_rows - count,
        closed=int(closed.sum()),
        per_row=per_row,
        violation=violation.masked_fill(~counted, math.nan),
    )


def kl_sum(kl: Tensor) -> SumCount:
    """Sum the token KLs and count them.

    Σ_t KL_t,  KL_t = Σ_v π₀(v)·(log π₀(v) − log π_θ(v)): the reference model comes first, the sum runs over the whole
    vocabulary.

    Args:
        kl: (N,) KL of each labelled token, in nats. Padding and unlabelled tokens are not in it.

    Returns:
        The sum (at least float32) and N. One update divides the sum of all its micro-batches by the tokens of all its
        micro-batches.
    """
    if kl.dim() != 1:
        raise ValueError(f"kl: found shape {tuple(kl.shape)}, accepted is (N,)")
    return SumCount(_at_least_float32(kl).sum(), kl.shape[0])


def mean_kl(kl: Tensor) -> Tensor:
    """Average the token KLs over the labelled tokens: 1/N Σ_t KL(π₀ ‖ π_θ)_t.

    Args:
        kl: (N,) KL of each labelled token, in nats.

    Returns:
        A scalar, in nats a token; a zero attached to `kl` where N = 0.

    Example:
        >>> round(mean_kl(torch.tensor([0.2, 0.4])).item(), 6)
        0.3
    """
    return kl_sum(kl).mean()


def suffix_start(
    n_labelled: int,
    *,
    cut: tuple[float, float] | None,
    min_prefix: int,
    min_suffix: int,
    generator: torch.Generator,
) -> int:
    """Draw where the trained suffix of an answer starts.

    s = ⌊u·n⌋ with u ~ U(lo, hi), then moved so that the prefix s has at least `min_prefix` and the suffix n − s at
    least `min_suffix` tokens. A row too short for both is used whole (0). One number is drawn for each call with a
    `cut`, also for short rows: the stream depends on the number of calls only.

    Args:
        n_labelled: labelled tokens n of the row.
        cut: (lo, hi) with 0 ≤ lo ≤ hi ≤ 1, shares of the labelled tokens; None for the whole answer.
        min_prefix: fewest labelled tokens left out of the loss.
        min_suffix: fewest labelled tokens kept in the loss.
        generator: source of the draw, on the CPU.

    Returns:
        Number of leading labelled tokens to leave out, in [0, n_labelled].

    Raises:
        UsageError: an option is out of range.
    """
    if cut is None:
        return 0
    low, high = cut
    if not 0.0 <= low <= high <= 1.0:
        raise UsageError(f"cut: found {cut!r}, accepted are two shares from 0 to 1 in rising order")
    if n_labelled < 0 or min_prefix < 0 or min_suffix < 0:
        raise UsageError(
            f"n_labelled, min_prefix, min_suffix: found {n_labelled}, {min_prefix}, {min_suffix}, "
            "accepted are numbers from 0"
        )
    share = low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()
    if n_labelled < min_prefix + min_suffix:
        return 0
    return min(max(math.floor(share * n_labelled), min_prefix), n_labelled - min_suffix)


def apply_suffix(labels: Sequence[int], start: int) -> tuple[int, ...]:
    """Take the first `start` labelled tokens of a row out of the loss.

    Args:
        labels: labels of one row, −100 where not labelled.
        start: how many of the labelled tokens, from the left, become −100.

    Returns:
        New labels of the same length.

    Raises:
        ValueError: start is negative, or so large that no label would be left.

    Example:
        >>> apply_suffix((-100, 5, 6, 7), 2)
        (-100, -100, -100, 7)
    """
    places = [index for index, label in enumerate(labels) if label != IGNORE_INDEX]
    if start < 0 or (start > 0 and start >= len(places)):
        raise ValueError(f"start: found {start}, accepted is 0 to {max(len(places) - 1, 0)} for this row")
    hidden = set(places[:start])
    return tuple(IGNORE_INDEX if index in hidden else int(label) for index, label in enumerate(labels))


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _check_rows(margins: Tensor, rows: Tensor, n_rows: int) -> None:
    if margins.dim() != 1 or rows.shape != margins.shape:
        raise ValueError(
            f"margins, rows: found shapes {tuple(margins.shape)}, {tuple(rows.shape)}, accepted is (N,) for both"
        )
    if rows.dtype != torch.int64:
        raise ValueError(f"rows: found {rows.dtype}, accepted is torch.int64")
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= n_rows):
        raise ValueError(f"rows: found {int(rows.min())} to {int(rows.max())}, accepted is 0 to {n_rows - 1}")
