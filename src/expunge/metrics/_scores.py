"""Metrics of token statistics, and the summary of a column with missing values."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Summary:
    """The mean of what was measured.

    Attributes:
        mean: mean of the measured values; None where there is none.
        count: measured values.
        nulls: values left out because they were not measured (None or NaN).
        reason: why values are missing; None where none is.
    """

    mean: float | None
    count: int
    nulls: int
    reason: str | None


def summarise(values: Iterable[float | None], *, reason: str = NOT_MEASURED) -> Summary:
    """Average what was measured and count what was not.

    Args:
        values: numbers; None and NaN stand for "not measured".
        reason: why values may be missing, reported when some are.

    Returns:
        Mean, counts and reason.

    Example:
        >>> summarise([1.0, None, 2.0], reason="empty reference")
        Summary(mean=1.5, count=2, nulls=1, reason='empty reference')
    """
    given = list(values)
    measured = [float(value) for value in given if value is not None and not math.isnan(value)]
    nulls = len(given) - len(measured)
    if not given:
        return Summary(None, 0, 0, "no examples")
    mean = math.fsum(measured) / len(measured) if measured else None
    return Summary(mean, len(measured), nulls, reason if nulls else None)


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the measured values, or None where nothing was measured; see `summarise` for the counts."""
    return summarise(values).mean


def probability(logprob_mean: float) -> float:
    """Return the geometric mean probability of a text's tokens: exp(1/T Σ_t log p_t).

    Range 0 to 1; for texts to forget lower is better.

    Args:
        logprob_mean: mean log-probability of the labelled tokens, in nats.

    Returns:
        A probability.

    References:
        Maini et al., TOFU: A Task of Fictitious Unlearning for LLMs, 2024, section 2.2. https://arxiv.org/abs/2401.06121
    """
    return math.exp(logprob_mean)


def certificate(margins: Sequence[float] | np.ndarray) -> float | None:
    """Bound the log-probability of a text from above by its margins: log p(y | x) ≤ Σ_t log σ(m_t).

    Holds for margins with β = 1 over any set S of competitors: σ(m_t) = p(y_t) / (p(y_t) + Σ_{v∈S} p(v)) ≥ p(y_t).

    Args:
        margins: (T,) margins of the labelled tokens, β = 1.

    Returns:
        The bound, in nats, at most 0 (lower: harder to extract); None for no tokens.

    Example:
        >>> round(certificate([0.0, 0.0]), 6)
        -1.386294

    References:
        MASC, arXiv 2606.02920, Proposition 1. https://arxiv.org/abs/2606.02920
    """
    values = np.asarray(margins, dtype=np.float64)
    if values.size == 0:
        return None
    # log σ(m) = −log(1 + e^−m), without overflow for large negative margins
    return -float(np.logaddexp(0.0, -values).sum())


def certificate_coarse(violation: float, tokens: int, rho: float) -> float | None:
    """Bound the log-probability of a text by its violation share alone: log p(y | x) ≤ (1 − V)·T·log ρ.

    (1 − V)·T tokens have m_t ≤ τ_ρ and therefore a probability of at most σ(τ_ρ) = ρ; the others have at most 1.
    Weaker than `certificate`. Holds for margins with β = 1, and for β > 1 where ρ ≥ 1/2: then Σ exp(β·z) ≤ (Σ exp z)^β,
    so m with β = 1 is at most m/β ≤ τ_ρ/β ≤ τ_ρ.

    Args:
        violation: share V of tokens with m_t > τ_ρ, in [0, 1].
        tokens: labelled tokens T.
        rho: ρ, in (0, 1).

    Returns:
        The bound, in nats, at most 0; None for no tokens.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> round(certificate_coarse(0.5, 4, 0.7), 6)
        -0.71335

    References:
        MASC, arXiv 2606.02920, Proposition 1. https://arxiv.org/abs/2606.02920
    """
    if not 0.0 < rho < 1.0:
        raise ValueError(f"rho: found {rho!r}, accepted is a number between 0 and 1, both excluded")
    if tokens == 0:
        return None
    if not 0.0 <= violation <= 1.0:
        raise ValueError(f"violation: found {violation!r}, accepted is a share from 0 to 1")
    return (1.0 - violation) * tokens * math.log(rho)


def extraction_strength(hits: Sequence[bool | int] | np.ndarray) -> float | None:
    """Return the share of an answer, counted from its end, that the model continues without an error.

    ES = 1 − min{s : hits_t = 1 for all t ≥ s} / T, with s counted from 0. Range 0 to 1; for texts to forget lower is
    better.

    Args:
        hits: (T,) whether the model's first choice is the token, given all tokens before it; answer tokens only.

    Returns:
        A share; None for no tokens.

    Example:
        >>> extraction_strength([0, 1, 1, 1])
        0.75

    References:
        Carlini et al., Extracting Training Data from Large Language Models, 2021. https://arxiv.org/abs/2012.07805
    """
    if len(hits) == 0:
        return None
    exact = 0
    for hit in reversed(hits):
        if not hit:
            break
        exact += 1
    return exact / len(hits)
