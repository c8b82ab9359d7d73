"""One forward pass per row: log-probabilities, margins and first choices at the labelled positions."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from expunge.data import Batch, Corpus, batches_by_length
from expunge.errors import UsageError
from expunge.lm import (
    Margin,
    Split,
    TokenStats,
    labelled_positions,
    split_model,
    token_stats,
    token_stats_from_logits,
)
from expunge.scoring._mode import evaluating
from expunge.scoring._table import ScoreTable

_SUMS = ("tokens", "logprob", "hit", "violation", "log_sigma", "suffix")


def score(
    split_or_model: Any,
    corpus: Corpus,
    *,
    pad_id: int,
    rho: float = 0.7,
    k: int = 10,
    beta: float = 1.0,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreTable:
    """Score every row of a corpus.

    For each labelled token t with logits z and target y:
    log p_t = z_y − log Σ_v exp(z_v);  m_t = β·z_y − log Σ_{v∈S_k} exp(β·z_v), S_k the k largest logits other than y;
    violation: m_t > τ_ρ = log(ρ / (1 − ρ)). See `ScoreTable` for what becomes of them.

    Only labelled positions reach the head. Rows are batched by length; in float32 a row scores the same (1e-5) in any
    batch. Sums over tokens run in float64.

    Args:
        split_or_model: a model, or its `Split` where the caller has one. Modes are restored, also after an error.
        corpus: encoded rows.
        pad_id: any valid id; it is masked.
        rho: allowed token probability ρ, in (0, 1).
        k: competitors in the margin, 1 or more.
        beta: inverse temperature β of the margin, above 0.
        batch_size: rows in a forward pass, 1 or more.
        progress: called with (rows done, rows in all) after each batch.

    Returns:
        The table, in the order of the corpus.

    Raises:
        UsageError: an option is out of range.

    References:
        MASC (violation, certificates), arXiv 2606.02920. https://arxiv.org/abs/2606.02920
    """
    if not 0.0 < rho < 1.0:
        raise UsageError(f"rho: found {rho!r}, accepted is a number between 0 and 1, both excluded")
    if batch_size < 1:
        raise UsageError(f"batch_size: found {batch_size!r}, accepted is a whole number from 1")
    margin = Margin(k=k, beta=beta)
    split = split_or_model if isinstance(split_or_model, Split) else split_model(split_or_model)
    tau = math.log(rho) - math.log1p(-rho)
    sums = {name: np.zeros(len(corpus.rows)) for name in _SUMS}
    done = 0
    with evaluating(split.model):
        for batch in batches_by_length(corpus.rows, batch_size=batch_size, pad_id=pad_id) if corpus.rows else ():
            places = list(batch.rows)
            for name, values in _batch_sums(split, batch, margin, tau).items():
                sums[name][places] = values
            done += len(places)
            if progress is not None:
                progress(done, len(corpus.rows))
    return _table(corpus, sums, rho, beta)


def _batch_sums(split: Split, batch: Batch, margin: Margin, tau: float) -> dict[str, np.ndarray]:
    """Sums over the labelled tokens of each row of a batch, (B,) float64 each."""
    rows, stats = _batch_stats(split, batch, margin)
    assert stats.logprob is not None
    assert stats.margin is not None
    assert stats.hit is not None
    margins = stats.margin.double().cpu()
    hit = stats.hit.double().cpu()
    per_token = {
        "tokens": torch.ones_like(margins),
        "logprob": stats.logprob.double().cpu(),
        "hit": hit,
        "violation": (margins > tau).double(),
        "log_sigma": functional.logsigmoid(margins),
        "suffix": _in_exact_suffix(rows, hit),
    }
    zeros = torch.zeros(len(batch.rows), dtype=torch.float64)
    return {name: zeros.index_add(0, rows, values).numpy() for name, values in per_token.items()}


def _batch_stats(split: Split, batch: Batch, margin: Margin) -> tuple[Tensor, TokenStats]:
    """Row of each labelled token (on the CPU), and its statistics."""
    device = next(split.model.parameters()).device
    rows, positions, targets = labelled_positions(batch.labels)
    place = (rows.to(device), positions.to(device))
    ids, mask, targets = batch.input_ids.to(device), batch.attention_mask.to(device), targets.to(device)
    if split.head is None:
        logits = split.logits(ids, mask)[place]
        return rows, token_stats_from_logits(logits, targets, logprob=True, margin=margin, hit=True)
    hidden = split.body(ids, mask)[place]
    return rows, token_stats(hidden, split.head, targets, logprob=True, margin=margin, hit=True)


def _in_exact_suffix(rows: Tensor, hit: Tensor) -> Tensor:
    """1.0 for tokens with no miss from themselves to the end of their row; tokens are in order of row and position."""
    misses = (1.0 - hit).flip(0).cumsum(0).flip(0)
    # misses from each token to the end of the batch, minus those of the rows below
    per_row = torch.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=hit.dtype).index_add(0, rows, 1.0 - hit)
    below = per_row.sum() - per_row.cumsum(0)
    return (misses == below[rows]).to(hit.dtype)


def _table(corpus: Corpus, sums: dict[str, np.ndarray], rho: float, beta: float) -> ScoreTable:
    tokens = sums["tokens"]
    seen = tokens > 0
    divisor = np.where(seen, tokens, 1.0)

    def measured(values: np.ndarray) -> np.ndarray:
        return np.where(seen, values, np.nan)

    # Why these conditions: see `expunge.metrics.certificate` and `certificate_coarse`.
    coarse_holds = beta == 1.0 or (beta > 1.0 and rho >= 0.5)
    return ScoreTable(
        id=tuple(row.id for row in corpus.rows),
        record=np.array([row.record for row in corpus.rows], dtype=np.int64),
        tokens=tokens.astype(np.int64),
        logprob_sum=measured(sums["logprob"]),
        logprob_mean=measured(sums["logprob"] / divisor),
        exact=measured(sums["hit"] / divisor),
        violation=measured(sums["violation"] / divisor),
        certificate=measured(sums["log_sigma"]) if beta == 1.0 else None,
        certificate_coarse=measured((tokens - sums["violation"]) * math.log(rho)) if coarse_holds else None,
        suffix_exact=measured(sums["suffix"] / divisor),
    )
