"""TOFU: truth ratio, option-normalised probability, model utility, forget quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from expunge.metrics._metric import SHARE_UP, Bootstrap, Metric, Row, Scale, as_rows, combine, null_metric

TruthMean = Literal["geometric", "arithmetic"]
TruthAggregate = Literal["closer_to_one", "true_better", "paraphrase_share"]

P_VALUE = Scale("p", 0.0, 1.0, "higher")
LOG10_P = Scale("log10 p", None, 0.0, "higher")
KS = Scale("KS distance", 0.0, 1.0, "lower")
UTILITY_PARTS = tuple(
    f"{split}_{part}"
    for split in ("retain", "real_authors", "world_facts")
    for part in ("probability", "rouge_l", "truth_ratio")
)
_KS_RESAMPLES = 200


def log_truth_ratio(paraphrase: float, perturbed: Sequence[float], *, mean: TruthMean = "geometric") -> float | None:
    """Logarithm of the truth ratio R: how likely the wrong answers are against the right one in other words.

    R = M_i(P(ã_i | q)^(1/|ã_i|)) / P(â | q)^(1/|â|), with M the mean over wrong answers. TOFU's text has the arithmetic
    mean, its code (and the published numbers) the geometric one, which is the default here.

    Args:
        paraphrase: mean log-probability of the paraphrased true answer's tokens, in nats.
        perturbed: mean log-probabilities of the wrong answers, in nats.
        mean: "geometric" or "arithmetic".

    Returns:
        log R, so that no ratio overflows; None without a wrong answer or where a value is not finite.

    Example:
        >>> round(math.exp(log_truth_ratio(-1.5, [-1.0, -3.0])), 4)
        0.6065
        >>> round(math.exp(log_truth_ratio(-1.5, [-1.0, -3.0], mean="arithmetic")), 4)
        0.9359

    References:
        Maini et al., TOFU: A Task of Fictitious Unlearning for LLMs, 2024, section 2.2. https://arxiv.org/abs/2401.06121
    """
    if mean not in ("geometric", "arithmetic"):
        raise ValueError(f"mean: found {mean!r}, accepted is geometric or arithmetic")
    if not len(perturbed) or not all(map(math.isfinite, (paraphrase, *perturbed))):
        return None
    wrong = np.asarray(perturbed, dtype=np.float64)
    average = wrong.mean() if mean == "geometric" else np.logaddexp.reduce(wrong) - math.log(len(wrong))
    return float(average) - paraphrase


def truth_score(log_ratio: float | None, aggregate: TruthAggregate) -> float | None:
    """One row's part of an aggregate truth ratio; the aggregate is the mean over rows.

    - "closer_to_one": min(R, 1/R), for texts to forget; 1 means that right and wrong answers are alike.
    - "true_better": max(0, 1 − R), for all other texts.
    - "paraphrase_share": 1 / (1 + R), the right answer's share of both.

    Args:
        log_ratio: log R.
        aggregate: the name.

    Returns:
        A number in [0, 1]; None for None.

    Example:
        >>> [round(truth_score(math.log(ratio), "closer_to_one"), 2) for ratio in (0.5, 2.0, 1.0)]
        [0.5, 0.5, 1.0]
    """
    if aggregate not in ("closer_to_one", "true_better", "paraphrase_share"):
        raise ValueError(f"aggregate: found {aggregate!r}, accepted is closer_to_one, true_better or paraphrase_share")
    if log_ratio is None:
        return None
    if aggregate == "closer_to_one":
        return math.exp(-abs(log_ratio))
    if aggregate == "true_better":
        return max(0.0, -math.expm1(min(log_ratio, 0.0)))
    return 1.0 / (1.0 + math.exp(log_ratio)) if log_ratio < 700 else 0.0


def option_probability(right: float, wrong: Sequence[float]) -> float | None:
    """Probability of the right answer among the options: p / (p + Σ_i p_i), each p length-normalised.

    Args:
        right: mean log-probability of the right answer's tokens, in nats.
        wrong: those of the wrong answers.

    Returns:
        A probability; None without a wrong answer or where a value is not finite.

    Example:
        >>> round(option_probability(-1.0, [-2.0, -3.0]), 4)
        0.6652

    References:
        Maini et al., TOFU, 2024, section 2.2 (real authors and world facts).
    """
    if not len(wrong) or not all(map(math.isfinite, (right, *wrong))):
        return None
    return math.exp(right - float(np.logaddexp.reduce(np.array([right, *wrong], dtype=np.float64))))


def harmonic_mean(values: Sequence[float | None]) -> float | None:
    """Return n / Σ 1/v: 0 where a value is 0, None where one is None or there is none.

    Raises:
        ValueError: a value is negative.

    Example:
        >>> round(harmonic_mean([0.5, 1.0, 0.25]), 4)
        0.4286
    """
    if not values or any(value is None for value in values):
        return None
    return float(_harmonic(np.array([[value] for value in values], dtype=np.float64))[0])


def _harmonic(values: np.ndarray) -> np.ndarray:
    """Harmonic mean down the columns of (k, m)."""
    if bool((values < 0).any()):
        raise ValueError(f"harmonic mean: found {values.min()}, accepted are numbers from 0")
    zero = (values == 0).any(0)
    return np.where(zero, 0.0, len(values) / (1.0 / np.where(values == 0, 1.0, values)).sum(0))


def harmonic_metric(name: str, parts: Sequence[Metric], *, bootstrap: Bootstrap) -> Metric:
    """The harmonic mean of metrics in [0, 1]: missing where one is missing, 0 where one is 0."""
    return combine(name, parts, _harmonic, SHARE_UP, bootstrap=bootstrap)


def model_utility(parts: Sequence[Metric], *, bootstrap: Bootstrap) -> Metric:
    """TOFU's model utility: the harmonic mean of nine.

    Probability (option-normalised for real authors and world facts), ROUGE-L recall and truth ratio ("true_better") on
    the retain set, real authors and world facts.

    Args:
        parts: the nine metrics, named as in `UTILITY_PARTS`, in any order.
        bootstrap: gives the interval.

    Raises:
        ValueError: other names.

    References:
        Maini et al., TOFU, 2024, section 2.2.
    """
    if sorted(part.name for part in parts) != sorted(UTILITY_PARTS):
        raise ValueError(f"parts: found {[part.name for part in parts]}, accepted are {', '.join(UTILITY_PARTS)}")
    return harmonic_metric("model_utility", parts, bootstrap=bootstrap)


@dataclass(frozen=True)
class ForgetQuality:
    """Whether two models' values per row have one distribution (two-sample Kolmogorov–Smirnov test).

    Attributes:
        p: the test's p-value, TOFU's forget quality; near 1: as if never learned.
        log10_p: its logarithm, which does not run out of digits.
        statistic: the largest distance of the two empirical distributions.
    """

    p: Metric
    log10_p: Metric
    statistic: Metric


def forget_quality(
    model: Sequence[Row],
    retrained: Sequence[Row] | None,
    *,
    bootstrap: Bootstrap,
    identical: bool = False,
    prefix: str = "forget_quality",
) -> ForgetQuality:
    """Compare the truth ratios of the rows to forget under the model and under the retrained one.

    Exact two-sided p-value (scipy's "auto": asymptotic above 10,000 rows). Bootstrap intervals of a distance are biased
    upwards, and those of p downwards: resampled rows repeat, which separates the samples further.

    Args:
        model: per-row values under the model (R or log R: the test sees their order only).
        retrained: the same under the retrained model; None gives None with the reason.
        bootstrap: gives the intervals, by at most 200 resamples.
        identical: both are the same model: p = 1 with a note.
        prefix: name of the p-value; the others get `_log10` and `_ks`.

    References:
        Maini et al., TOFU, 2024, section 2.2 (forget quality).
    """
    names = (prefix, f"{prefix}_log10", f"{prefix}_ks")
    scales = (P_VALUE, LOG10_P, KS)
    if retrained is None:
        return ForgetQuality(*map(_missing, names, scales, ["no retrained model to compare with"] * 3))
    ours = np.array([value for value in as_rows(model) if value is not None])
    theirs = np.array([value for value in as_rows(retrained) if value is not None])
    nulls = len(model) + len(retrained) - len(ours) - len(theirs)
    if not len(ours) or not len(theirs):
        return ForgetQuality(*map(_missing, names, scales, ["no row was measured"] * 3))
    note = "the retrained model is this very model (same fingerprint): p = 1 by definition" if identical else None
    values = (1.0, 0.0, 0.0) if identical else _ks(ours, theirs)
    found = np.array([]) if identical else _ks_replicates(ours, theirs, bootstrap)
    metrics = [
        Metric(
            name,
            value,
            scale,
            interval=None if identical else bootstrap.interval(found[:, column]),
            n=min(len(ours), len(theirs)),
            nulls=nulls,
            reason="rows without a value are left out" if nulls else None,
            note=note,
        )
        for column, (name, value, scale) in enumerate(zip(names, values, scales, strict=True))
    ]
    return ForgetQuality(*metrics)


def _missing(name: str, scale: Scale, reason: str) -> Metric:
    return null_metric(name, scale, reason)


def _ks(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """(p, log10 p, statistic)."""
    from scipy.stats import ks_2samp  # scipy takes a second to import

    found = ks_2samp(ours, theirs)
    p, statistic = float(found.pvalue), float(found.statistic)
    if p > 0:
        return p, min(0.0, math.log10(p)), statistic
    # Below the smallest float: the first term of Kolmogorov's series, 2·exp(−2·λ²).
    size = len(ours) * len(theirs) / (len(ours) + len(theirs))
    return p, (math.log(2.0) - 2.0 * size * statistic**2) / math.log(10.0), statistic


def _ks_replicates(ours: np.ndarray, theirs: np.ndarray, bootstrap: Bootstrap) -> np.ndarray:
    """(R', 3) replicates of p, log10 p and the statistic."""
    count = min(bootstrap.resamples, _KS_RESAMPLES)
    pairs = zip(bootstrap.draws("ks model", len(ours)), bootstrap.draws("ks retrained", len(theirs)), strict=True)
    return np.array([_ks(ours[one], theirs[other]) for one, other in islice(pairs, count)])
