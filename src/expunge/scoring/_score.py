"""One forward pass per row: log-probabilities, margins, first choices and more at the labelled positions."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from expunge.data import Corpus
from expunge.errors import UsageError
from expunge.lm import Margin, Split, TokenStats, split_model, token_stats, token_stats_from_logits
from expunge.metrics import min_k, normalised_logprob
from expunge.scoring._forward import Places, forwards
from expunge.scoring._mode import evaluating
from expunge.scoring._table import ScoreTable
from expunge.scoring._tokens import NUMBERS, TokenTable

_SUMS = ("tokens", "logprob", "hit", "violation", "log_sigma", "suffix")
_MIN_K = 0.4


@dataclass(frozen=True)
class ScoreSettings:
    """What a pass measures.

    Attributes:
        rho: allowed token probability ρ, in (0, 1).
        k: competitors in the margin, 1 or more.
        beta: inverse temperature β of the margin, above 0.
        batch_size: rows in a forward pass, 1 or more.
        margin: False leaves out violation and certificates: the search for competitors costs as much as a layer.
        tokens: keep every token's scores, with entropy, rank and the normalised value of min-k++.

    Raises:
        UsageError: an option is out of range.
    """

    rho: float = 0.7
    k: int = 10
    beta: float = 1.0
    batch_size: int = 8
    margin: bool = True
    tokens: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.rho < 1.0:
            raise UsageError(f"rho: found {self.rho!r}, accepted is a number between 0 and 1, both excluded")
        if self.batch_size < 1:
            raise UsageError(f"batch_size: found {self.batch_size!r}, accepted is a whole number from 1")
        Margin(k=self.k, beta=self.beta)

    @property
    def tau(self) -> float:
        """τ_ρ = log(ρ / (1 − ρ))."""
        return math.log(self.rho) - math.log1p(-self.rho)


@dataclass(frozen=True)
class Scores:
    """What one pass gave.

    Attributes:
        rows: one entry a row.
        tokens: every labelled token; None unless asked for.
    """

    rows: ScoreTable
    tokens: TokenTable | None


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
    batch, in bfloat16 up to the rounding of its matrix products (about 1e-2 of a token's log-probability). Sums over
    tokens run in float64.

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
        The table, in the order of the corpus; without `min_k_plus` and `zlib` (see `score_rows`).

    Raises:
        UsageError: an option is out of range.

    References:
        MASC (violation, certificates), arXiv 2606.02920. https://arxiv.org/abs/2606.02920
    """
    settings = ScoreSettings(rho=rho, k=k, beta=beta, batch_size=batch_size)
    return score_rows(split_or_model, corpus, pad_id=pad_id, settings=settings, progress=progress).rows


def score_rows(
    split_or_model: Any,
    corpus: Corpus,
    *,
    pad_id: int,
    settings: ScoreSettings | None = None,
    texts: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score every row of a corpus once, with what `settings` ask for (see `score` for the definitions).

    Rows that begin with the same prompt share its forward pass where the model's cache allows it.

    Args:
        split_or_model: a model, or its `Split`. Modes are restored, also after an error.
        corpus: encoded rows.
        pad_id: any valid id; it is masked.
        settings: what to measure; None: the defaults.
        texts: the labelled text of each row, for the zlib column; None leaves it out.
        progress: called with (rows done, rows in all) after each batch.

    Returns:
        The tables, in the order of the corpus.

    Raises:
        UsageError: an option is out of range, or there is not one text for each row.
    """
    settings = settings or ScoreSettings()
    if texts is not None and len(texts) != len(corpus.rows):
        raise UsageError(f"texts: found {len(texts)}, accepted is one for each of the {len(corpus.rows)} rows")
    split = split_or_model if isinstance(split_or_model, Split) else split_model(split_or_model)
    count = len(corpus.rows)
    sums = {name: np.zeros(count) for name in _SUMS}
    lowest = {name: np.full(count, math.nan) for name in ("logprob", "normalised")}
    kept: dict[int, dict[str, np.ndarray]] = {}
    done = 0
    with evaluating(split.model):
        for places in forwards(split, corpus.rows, batch_size=settings.batch_size, pad_id=pad_id):
            tokens = _token_values(split, places, settings)
            for name, values in _row_sums(places, tokens, settings).items():
                sums[name][list(places.rows)] = values
            for row, of_row in _split_rows(places, tokens):
                for name in lowest:
                    if name in of_row:
                        lowest[name][row] = _or_nan(min_k(of_row[name], _MIN_K))
                if settings.tokens:
                    kept[row] = of_row
            done += len(places.rows)
            if progress is not None:
                progress(done, count)
    sizes = None if texts is None else np.array([len(zlib.compress(text.encode())) for text in texts], dtype=float)
    rows = _table(corpus, sums, lowest, sizes, settings)
    return Scores(rows, _token_table(corpus, kept) if settings.tokens else None)


def _token_values(split: Split, places: Places, settings: ScoreSettings) -> dict[str, np.ndarray]:
    """Scores of the labelled tokens of a batch, (N,) float64 each."""
    margin = Margin(k=settings.k, beta=settings.beta) if settings.margin or settings.tokens else None
    every = settings.tokens
    wanted: dict[str, Any] = {"logprob": True, "hit": True, "margin": margin}
    wanted |= dict.fromkeys(("entropy", "moments", "rank"), every)
    found: TokenStats
    if split.head is None:
        found = token_stats_from_logits(places.hidden, places.targets, **wanted)
    else:
        found = token_stats(places.hidden, split.head, places.targets, **wanted)
    names = ("logprob", "margin", "hit", "entropy", "rank", "mean", "variance")
    values = {name: getattr(found, name) for name in names}
    arrays = {name: value.cpu().double().numpy() for name, value in values.items() if value is not None}
    if every:
        arrays["normalised"] = normalised_logprob(arrays["logprob"], arrays.pop("mean"), arrays.pop("variance"))
    return arrays


def _row_sums(places: Places, tokens: dict[str, np.ndarray], settings: ScoreSettings) -> dict[str, np.ndarray]:
    """Sums over the labelled tokens of each row of a batch, (B,) float64 each."""
    hit = torch.from_numpy(tokens["hit"])
    per_token = {
        "tokens": torch.ones_like(hit),
        "logprob": torch.from_numpy(tokens["logprob"]),
        "hit": hit,
        "suffix": _in_exact_suffix(places.owner, hit),
    }
    if "margin" in tokens:
        margins = torch.from_numpy(tokens["margin"])
        per_token["violation"] = (margins > settings.tau).double()
        per_token["log_sigma"] = functional.logsigmoid(margins)
    zeros = torch.zeros(len(places.rows), dtype=torch.float64)
    return {name: zeros.index_add(0, places.owner, values).numpy() for name, values in per_token.items()}


def _split_rows(places: Places, tokens: dict[str, np.ndarray]) -> list[tuple[int, dict[str, np.ndarray]]]:
    """(index in the corpus, its tokens' scores) of each row of a batch; a row's tokens are contiguous."""
    counts = torch.bincount(places.owner, minlength=len(places.rows))
    ends = counts.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return [
        (row, {name: values[start:end] for name, values in tokens.items()})
        for row, start, end in zip(places.rows, starts, ends, strict=True)
    ]


def _in_exact_suffix(rows: Tensor, hit: Tensor) -> Tensor:
    """1.0 for tokens with no miss from themselves to the end of their row; tokens are in order of row and position."""
    misses = (1.0 - hit).flip(0).cumsum(0).flip(0)
    # misses from each token to the end of the batch, minus those of the rows below
    per_row = torch.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=hit.dtype).index_add(0, rows, 1.0 - hit)
    below = per_row.sum() - per_row.cumsum(0)
    return (misses == below[rows]).to(hit.dtype)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _table(
    corpus: Corpus,
    sums: dict[str, np.ndarray],
    lowest: dict[str, np.ndarray],
    sizes: np.ndarray | None,
    settings: ScoreSettings,
) -> ScoreTable:
    tokens, rho, beta = sums["tokens"], settings.rho, settings.beta
    seen = tokens > 0
    divisor = np.where(seen, tokens, 1.0)
    margins = settings.margin or settings.tokens

    def measured(values: np.ndarray) -> np.ndarray:
        return np.where(seen, values, np.nan)

    # Why these conditions: see `expunge.metrics.certificate` and `certificate_coarse`.
    coarse_holds = margins and (beta == 1.0 or (beta > 1.0 and rho >= 0.5))
    return ScoreTable(
        id=tuple(row.id for row in corpus.rows),
        record=np.array([row.record for row in corpus.rows], dtype=np.int64),
        tokens=tokens.astype(np.int64),
        logprob_sum=measured(sums["logprob"]),
        logprob_mean=measured(sums["logprob"] / divisor),
        exact=measured(sums["hit"] / divisor),
        violation=measured(sums["violation"] / divisor) if margins else np.full(len(tokens), np.nan),
        certificate=measured(sums["log_sigma"]) if margins and beta == 1.0 else None,
        certificate_coarse=measured((tokens - sums["violation"]) * math.log(rho)) if coarse_holds else None,
        suffix_exact=measured(sums["suffix"] / divisor),
        min_k=lowest["logprob"],
        min_k_plus=lowest["normalised"] if settings.tokens else None,
        zlib=sizes,
    )


def _token_table(corpus: Corpus, kept: dict[int, dict[str, np.ndarray]]) -> TokenTable:
    order = range(len(corpus.rows))
    lengths = [len(kept[index]["logprob"]) for index in order]
    return TokenTable(
        tuple(row.id for row in corpus.rows),
        np.array([row.record for row in corpus.rows], dtype=np.int64),
        np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64),
        **{name: np.concatenate([np.zeros(0), *(kept[index][name] for index in order)]) for name in NUMBERS},
    )
