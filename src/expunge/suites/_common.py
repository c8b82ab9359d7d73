"""Metrics that several suites have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expunge.metrics import (
    NATS_DOWN,
    PRIVLEAK,
    SHARE_AS_RETRAINED,
    SHARE_DOWN,
    SHARE_UP,
    Bootstrap,
    Metric,
    Scale,
    auc_metric,
    distinct_n,
    is_blank,
    is_degenerate,
    is_non_language,
    is_repeated,
    knowledge_recovery,
    mean_metric,
    min_k,
    null_metric,
    over_forgetting,
    privacy_metric,
    privleak_metric,
    reference_score,
    zlib_score,
)
from expunge.suites._measure import Measured

EMPTY_ANSWER = "empty answer or text"
EMPTY_REFERENCE = "the reference answer holds no word"
NO_TABLE = "the data has no such rows"
ATTACKS = ("loss", "zlib", "min_k", "min_k_plus", "reference")
_SHARE_MIN_K = 0.4
_BLOCKS = 50


@dataclass(frozen=True)
class Context:
    """What the metrics of one model are compared with.

    Attributes:
        bootstrap: gives the intervals.
        retrained: tables of the retrained model; None without one.
        original: tables of the model before unlearning; None without one.
        identical: the retrained model is the evaluated model itself.
    """

    bootstrap: Bootstrap
    retrained: Measured | None = None
    original: Measured | None = None
    identical: bool = False


def probability_metric(measured: Measured, table: str, name: str, scale: Scale, bootstrap: Bootstrap) -> Metric:
    """Mean over rows of exp(mean log-probability)."""
    if table not in measured.scores:
        return null_metric(name, scale, NO_TABLE)
    values = measured.column(table, "logprob_mean")
    rows = [None if value is None else float(np.exp(value)) for value in values]
    return mean_metric(name, rows, scale, unit=unit_of(table), bootstrap=bootstrap, reason=EMPTY_ANSWER)


def column_metric(measured: Measured, table: str, column: str, name: str, scale: Scale, bootstrap: Bootstrap) -> Metric:
    """Mean over rows of a column of scores."""
    if table not in measured.scores:
        return null_metric(name, scale, NO_TABLE)
    values = measured.column(table, column)
    return mean_metric(name, values, scale, unit=unit_of(table), bootstrap=bootstrap, reason=EMPTY_ANSWER)


def memorisation_metrics(measured: Measured, table: str, prefix: str, bootstrap: Bootstrap) -> list[Metric]:
    """Exact memorisation, extraction strength, violation and certificate of texts to forget."""
    return [
        column_metric(measured, table, "exact", f"{prefix}_exact_memorisation", SHARE_AS_RETRAINED, bootstrap),
        column_metric(measured, table, "suffix_exact", f"{prefix}_extraction_strength", SHARE_AS_RETRAINED, bootstrap),
        column_metric(measured, table, "violation", f"{prefix}_violation", SHARE_AS_RETRAINED, bootstrap),
        column_metric(measured, table, "certificate", f"{prefix}_certificate", NATS_DOWN, bootstrap),
    ]


def answer_metric(measured: Measured, table: str, column: str, name: str, scale: Scale, bootstrap: Bootstrap) -> Metric:
    """Mean over answers of a column."""
    answers = measured.answers.get(table)
    if answers is None:
        return null_metric(name, scale, NO_TABLE)
    values = answers.values(column)
    return mean_metric(name, values, scale, unit=unit_of(table), bootstrap=bootstrap, reason=EMPTY_REFERENCE)


def degeneration_metrics(measured: Measured, table: str, prefix: str, bootstrap: Bootstrap) -> list[Metric]:
    """Shares of answers that are none, how varied they are, and the share at the length limit."""
    answers = measured.answers.get(table)
    kinds = {
        "blank": is_blank,
        "repeated": is_repeated,
        "non_language": is_non_language,
        "degenerate": lambda text: is_degenerate(text) or is_non_language(text),
    }
    if answers is None:
        return [null_metric(f"{prefix}_{kind}", SHARE_DOWN, NO_TABLE) for kind in (*kinds, "distinct_2", "unfinished")]
    unit = unit_of(table)
    found = [
        mean_metric(
            f"{prefix}_{kind}",
            [float(test(text)) for text in answers.prediction],
            SHARE_DOWN,
            unit=unit,
            bootstrap=bootstrap,
        )
        for kind, test in kinds.items()
    ]
    found.append(_distinct(f"{prefix}_distinct_2", answers.prediction))
    unfinished = 1.0 - answers.finished.astype(np.float64)
    found.append(mean_metric(f"{prefix}_unfinished", unfinished, SHARE_AS_RETRAINED, unit=unit, bootstrap=bootstrap))
    return found


def _distinct(name: str, texts: Sequence[str]) -> Metric:
    """distinct-2 over all answers, with a jackknife interval over at most 50 blocks of answers.

    Resampled answers repeat, so that no bootstrap replicate could be as varied as the answers are.
    """
    value = distinct_n(texts, 2)
    if value is None:
        return null_metric(name, SHARE_UP, "no answer has two words")
    count = min(_BLOCKS, len(texts))
    without = [distinct_n([text for i, text in enumerate(texts) if i % count != block], 2) for block in range(count)]
    found = np.array([one for one in without if one is not None], dtype=np.float64)
    interval = None
    if len(found) > 1:
        error = float(np.sqrt((len(found) - 1) / len(found) * ((found - found.mean()) ** 2).sum()))
        interval = (max(0.0, value - 1.96 * error), min(1.0, value + 1.96 * error))
    return Metric(name, value, SHARE_UP, interval, n=len(texts))


def recovery_metric(direct: Metric, paraphrased: Metric, name: str, unit: str, bootstrap: Bootstrap) -> Metric:
    """Mean over rows of what the paraphrased question brings back."""
    if direct.per_row is None or paraphrased.per_row is None:
        return null_metric(name, SHARE_DOWN, NO_TABLE)
    rows = [knowledge_recovery(*pair) for pair in zip(direct.per_row, paraphrased.per_row, strict=True)]
    return mean_metric(name, rows, SHARE_DOWN, unit=unit, bootstrap=bootstrap, reason=EMPTY_ANSWER)


def mia_scores(measured: Measured, table: str, attack: str, reference: Measured | None) -> list[float | None] | None:
    """Scores of a table's rows under an attack, higher: more likely a member; None where the attack cannot be run."""
    means = measured.column(table, "logprob_mean")
    if attack == "loss":
        return means
    if attack == "zlib":
        return [zlib_score(*pair) for pair in zip(means, measured.column(table, "zlib"), strict=True)]
    if attack == "reference":
        if reference is None:
            return None
        return [reference_score(*pair) for pair in zip(means, reference.column(table, "logprob_mean"), strict=True)]
    column = "logprob" if attack == "min_k" else "normalised"
    return [min_k(row, _SHARE_MIN_K) for row in measured.token_rows(table, column)]


def mia_metrics(
    measured: Measured, tables: tuple[str, str], context: Context, *, prefix: str = "mia", reference: bool = True
) -> list[Metric]:
    """Member AUC of each attack, forget against holdout.

    Args:
        measured: the model's tables.
        tables: the rows to forget, and rows never seen.
        context: the retrained model is the reference of the reference attack.
        prefix: of the names.
        reference: with the reference attack.
    """
    found = []
    for attack in ATTACKS if reference else ATTACKS[:-1]:
        name = f"{prefix}_{attack}"
        if any(table not in measured.scores for table in tables):
            found.append(null_metric(name, SHARE_AS_RETRAINED, "no holdout rows (never seen) in the data"))
            continue
        sides = [mia_scores(measured, table, attack, context.retrained) for table in tables]
        if sides[0] is None or sides[1] is None:
            found.append(null_metric(name, SHARE_AS_RETRAINED, "no retrained model to serve as the reference"))
        elif attack == "reference" and context.identical:
            found.append(null_metric(name, SHARE_AS_RETRAINED, "the reference is this very model"))
        else:
            units = (unit_of(tables[0]), unit_of(tables[1]))
            found.append(auc_metric(name, sides[0], sides[1], units=units, bootstrap=context.bootstrap))
    return found


def privacy_metrics(measured: Measured, tables: tuple[str, str], context: Context) -> list[Metric]:
    """PrivLeak and the privacy score, from the AUC of min-k at 40 %."""
    if any(table not in measured.scores for table in tables):
        reason = "no holdout rows (never seen) in the data"
        return [null_metric("privleak", PRIVLEAK, reason), null_metric("privacy_score", SHARE_UP, reason)]

    def min_k_auc(model: Measured | None, name: str) -> Metric | None:
        if model is None:
            return None
        sides = [mia_scores(model, table, "min_k", None) or [] for table in tables]
        units = (unit_of(tables[0]), unit_of(tables[1]))
        return auc_metric(name, *sides, units=units, bootstrap=context.bootstrap)

    ours = min_k_auc(measured, "mia_min_k")
    theirs = min_k_auc(context.retrained, "mia_min_k of the retrained model")
    before = min_k_auc(context.original, "mia_min_k of the original model")
    assert ours is not None
    found = [privleak_metric("privleak", ours, theirs, bootstrap=context.bootstrap)]
    if theirs is None or before is None:
        missing = "retrained" if theirs is None else "original"
        found.append(null_metric("privacy_score", SHARE_UP, f"no {missing} model to compare with"))
    else:
        found.append(privacy_metric("privacy_score", (ours, theirs, before), bootstrap=context.bootstrap))
    return found


def with_references(metrics: Sequence[Metric], references: Sequence[Metric]) -> list[Metric]:
    """Put the retrained model's values beside the model's."""
    values = {metric.name: metric.value for metric in references}
    return [dataclasses.replace(metric, reference=values.get(metric.name)) for metric in metrics]


def flags_of(metrics: Sequence[Metric], attack: str = "mia_min_k") -> tuple[str, ...]:
    """Signs of over-forgetting among metrics."""
    by_name = {metric.name: metric for metric in metrics}
    degenerate = next((metric for metric in metrics if metric.name.endswith("_degenerate")), None)
    return over_forgetting(by_name.get(attack), degenerate)


def unit_of(table: str) -> str:
    """What a table's rows are: tables of the same rows differ in what follows the dot."""
    return table.partition(".")[0]
