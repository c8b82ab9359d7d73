"""TOFU: questions about invented authors to forget and to keep, about real authors and the world."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from expunge.data import Message, Record
from expunge.errors import UsageError
from expunge.metrics import (
    EFFICACY_TEXT_PARTS,
    SHARE_AS_RETRAINED,
    SHARE_DOWN,
    SHARE_UP,
    UTILITY_PARTS,
    UTILITY_TEXT_VALUES,
    Bootstrap,
    Metric,
    combine,
    dualoptim_utility,
    forget_quality,
    log_truth_ratio,
    mean_metric,
    model_utility,
    null_metric,
    option_probability,
    overall,
    targeted_forget_efficacy,
    truth_score,
    untargeted_forget_efficacy,
)
from expunge.suites._common import (
    EMPTY_ANSWER,
    NO_TABLE,
    Context,
    answer_metric,
    degeneration_metrics,
    memorisation_metrics,
    mia_metrics,
    privacy_metrics,
    probability_metric,
    recovery_metric,
)
from expunge.suites._measure import Measured
from expunge.suites._plan import Level, Plan, Question, QuestionTable, Text, TextTable, chat
from expunge.suites._source import Source, row_id, text_of, texts_of

PARTS = ("forget", "retain", "real_authors", "world_facts", "holdout")
_KEPT = ("retain", "real_authors", "world_facts")
_NO_PERTURBED = "no wrong answers for this row"


def read(source: Source, split: str | None = None) -> Plan:
    """Read TOFU in its own layout.

    `{split}_perturbed` has the rows to forget; `retain_perturbed`, `real_authors_perturbed` and `world_facts_perturbed`
    what is to be kept; `holdout…` or, with a selection for it, other rows of the forget file are rows never seen.

    Args:
        source: the folder or hub dataset.
        split: such as "forget10"; None: the only one in the folder, on the hub forget10.

    Raises:
        UsageError: no rows to forget, or a file that cannot be read.
    """
    texts: list[TextTable] = []
    questions: list[QuestionTable] = []
    split = split or _only_split(source)
    for part, name in (
        ("forget", split),
        ("retain", "retain"),
        ("real_authors", "real_authors"),
        ("world_facts", "world_facts"),
    ):
        rows = source.rows(part, f"{name}_perturbed", needed=part == "forget")
        if rows is not None:
            texts += _texts(part, rows)
            questions += _questions(part, rows)
    holdout = _holdout(source, split)
    if holdout is not None:
        texts.append(TextTable("holdout", tuple(_chat(row, "answer", "holdout") for row in holdout), "tokens"))
    source.check_used(PARTS)
    there = {table.name for table in texts}
    notes = [f"the data has no {part}: what needs it is not measured" for part in PARTS if part not in there]
    return Plan("tofu", tuple(texts), tuple(questions), tuple(notes))


def _only_split(source: Source) -> str:
    if not source.is_folder:
        return "forget10"
    found = source.files(r"forget\d*_perturbed")
    if len(found) != 1:
        names = ", ".join(name.removesuffix("_perturbed") for name in found) or "none"
        raise UsageError(
            f"data: found {names} to forget in {source.place}, accepted is one *_perturbed file, or --split"
        )
    return found[0].removesuffix("_perturbed")


def _holdout(source: Source, split: str) -> list[dict[str, Any]] | None:
    found = source.files(r"holdout\d*(_perturbed)?")
    if found:
        return source.rows("holdout", found[0])
    if not source.is_folder:
        return source.rows("holdout", split.replace("forget", "holdout"))
    return source.rows("holdout", f"{split}_perturbed") if "holdout" in source.slices else None


def _chat(row: Mapping[str, Any], column: str, part: str) -> Text:
    return chat(row_id(row), text_of(row, "question", part), text_of(row, column, part))


def _texts(part: str, rows: Sequence[Mapping[str, Any]]) -> list[TextTable]:
    """The tables of a part: its answers, their paraphrases, the wrong answers, the answers to paraphrased questions."""
    answers = tuple(_chat(row, "answer", part) for row in rows)
    wrong = [
        Text(f"{row_id(row)}/{number}", _record(row, answer, part))
        for row in rows
        for number, answer in enumerate(texts_of(row, "perturbed_answer", part))
    ]
    # The forget rows' tokens serve the attacks; violation of what is kept stands beside that of what is forgotten.
    level: Level = "tokens" if part == "forget" else "margin" if part == "retain" else "likelihood"
    found = [TextTable(part, answers, level), TextTable(f"{part}.perturbed", tuple(wrong))]
    if part in ("forget", "retain"):
        found.append(TextTable(f"{part}.paraphrased", tuple(_chat(row, "paraphrased_answer", part) for row in rows)))
    if part == "forget" and all(isinstance(row.get("paraphrased_question"), str) for row in rows):
        asked = tuple(chat(row_id(row), row["paraphrased_question"], text_of(row, "answer", part)) for row in rows)
        found.append(TextTable("forget.asked_otherwise", asked))
    return found


def _record(row: Mapping[str, Any], answer: str, part: str) -> Record:
    return Record(row_id(row), (Message("user", text_of(row, "question", part)), Message("assistant", answer)), None)


def _questions(part: str, rows: Sequence[Mapping[str, Any]]) -> list[QuestionTable]:
    asked = tuple(Question(row_id(row), text_of(row, "question", part), text_of(row, "answer", part)) for row in rows)
    found = [QuestionTable(f"{part}.answers", asked, scored=part)]
    if part == "forget" and all(isinstance(row.get("paraphrased_question"), str) for row in rows):
        otherwise = tuple(
            Question(row_id(row), row["paraphrased_question"], text_of(row, "answer", part)) for row in rows
        )
        found.append(QuestionTable("forget.answers_otherwise", otherwise, scored="forget.asked_otherwise"))
    return found


def metrics(measured: Measured, context: Context) -> list[Metric]:
    """All metrics of a model.

    Differences to the authors' code: ROUGE-L is taken without stemming (theirs stems English words, which raises it by
    a point or two); only the first answer of what the model writes is scored; rows that cannot be measured are left
    out and counted, where theirs count as numbers.

    Args:
        measured: its tables.
        context: what it is compared with.
    """
    bootstrap = context.bootstrap
    found = _forget(measured, context)
    for part in _KEPT:
        found += _kept(measured, part, bootstrap)
    by_name = {metric.name: metric for metric in found}
    utility = model_utility([by_name[name] for name in UTILITY_PARTS], bootstrap=bootstrap)
    return [utility, *found, *_dualoptim(by_name, bootstrap)]


def log_ratios(measured: Measured, part: str, mean: str = "geometric") -> list[float | None]:
    """Logarithm of R of each row of a part; None where an answer was not measured."""
    right = measured.column(f"{part}.paraphrased" if f"{part}.paraphrased" in measured.scores else part, "logprob_mean")
    wrong: dict[str, list[float | None]] = {}
    ids = measured.plan.ids(f"{part}.perturbed")
    for identity, value in zip(ids, measured.column(f"{part}.perturbed", "logprob_mean"), strict=True):
        wrong.setdefault(identity.rpartition("/")[0], []).append(value)
    found = []
    for identity, value in zip(measured.plan.ids(part), right, strict=True):
        values = [one for one in wrong.get(identity, []) if one is not None]
        found.append(None if value is None else log_truth_ratio(value, values, mean=mean))  # type: ignore[arg-type]
    return found


def _truth(
    measured: Measured, part: str, aggregate: Any, name: str, bootstrap: Bootstrap, mean: str = "geometric"
) -> Metric:
    scale = SHARE_AS_RETRAINED if part == "forget" else SHARE_UP
    if part not in measured.scores:
        return null_metric(name, scale, NO_TABLE)
    rows = [truth_score(ratio, aggregate) for ratio in log_ratios(measured, part, mean)]
    return mean_metric(name, rows, scale, unit=part, bootstrap=bootstrap, reason=_NO_PERTURBED)


def _forget(measured: Measured, context: Context) -> list[Metric]:
    bootstrap = context.bootstrap
    theirs = None if context.retrained is None else log_ratios(context.retrained, "forget")
    quality = forget_quality(log_ratios(measured, "forget"), theirs, bootstrap=bootstrap, identical=context.identical)
    rouge = answer_metric(measured, "forget.answers", "rouge_l", "forget_rouge_l", SHARE_AS_RETRAINED, bootstrap)
    otherwise = answer_metric(
        measured, "forget.answers_otherwise", "rouge_l", "forget_rouge_l_otherwise", SHARE_AS_RETRAINED, bootstrap
    )
    tables = ("forget", "holdout")
    return [
        quality.p,
        quality.log10_p,
        quality.statistic,
        probability_metric(measured, "forget", "forget_probability", SHARE_AS_RETRAINED, bootstrap),
        rouge,
        _truth(measured, "forget", "closer_to_one", "forget_truth_ratio", bootstrap),
        _truth(measured, "forget", "closer_to_one", "forget_truth_ratio_arithmetic", bootstrap, "arithmetic"),
        _truth(measured, "forget", "paraphrase_share", "forget_truth_ratio_paraphrase_share", bootstrap),
        *memorisation_metrics(measured, "forget", "forget", bootstrap),
        probability_metric(
            measured, "forget.asked_otherwise", "forget_probability_otherwise", SHARE_AS_RETRAINED, bootstrap
        ),
        otherwise,
        recovery_metric(rouge, otherwise, "forget_knowledge_recovery", "forget", bootstrap),
        *mia_metrics(measured, tables, context),
        *privacy_metrics(measured, tables, context),
        *degeneration_metrics(measured, "forget.answers", "forget", bootstrap),
        answer_metric(measured, "forget.answers", "entropy", "forget_token_entropy", SHARE_UP, bootstrap),
    ]


def _kept(measured: Measured, part: str, bootstrap: Bootstrap) -> list[Metric]:
    name = f"{part}_probability"
    if part == "retain":
        probability = [probability_metric(measured, part, name, SHARE_UP, bootstrap)]
    else:
        probability = [
            _options(measured, part, name, bootstrap),
            probability_metric(measured, part, f"{name}_plain", SHARE_UP, bootstrap),
        ]
    found = [
        *probability,
        answer_metric(measured, f"{part}.answers", "rouge_l", f"{part}_rouge_l", SHARE_UP, bootstrap),
        _truth(measured, part, "true_better", f"{part}_truth_ratio", bootstrap),
        answer_metric(measured, f"{part}.answers", "entropy", f"{part}_token_entropy", SHARE_UP, bootstrap),
    ]
    if part == "retain":
        extra = memorisation_metrics(measured, part, part, bootstrap)[:3]
        found += [dataclasses.replace(metric, scale=SHARE_UP) for metric in extra if metric.name != "retain_violation"]
        found += [metric for metric in extra if metric.name == "retain_violation"]
    return found


def _options(measured: Measured, part: str, name: str, bootstrap: Bootstrap) -> Metric:
    """Mean probability of the right answer among the options."""
    if part not in measured.scores:
        return null_metric(name, SHARE_UP, NO_TABLE)
    wrong: dict[str, list[float]] = {}
    ids = measured.plan.ids(f"{part}.perturbed")
    for identity, value in zip(ids, measured.column(f"{part}.perturbed", "logprob_mean"), strict=True):
        if value is not None:
            wrong.setdefault(identity.rpartition("/")[0], []).append(value)
    right = zip(measured.plan.ids(part), measured.column(part, "logprob_mean"), strict=True)
    rows = [None if value is None else option_probability(value, wrong.get(one, [])) for one, value in right]
    return mean_metric(name, rows, SHARE_UP, unit=part, bootstrap=bootstrap, reason=EMPTY_ANSWER)


def _dualoptim(by_name: Mapping[str, Metric], bootstrap: Bootstrap) -> list[Metric]:
    """DualOptim+'s values; those that need models of their own are missing, with the reason."""
    truth = combine(
        "truth_ratio", [by_name["forget_truth_ratio"]], lambda values: 1.0 - values[0], SHARE_DOWN, bootstrap=bootstrap
    )
    parts = {"rouge_l": by_name["forget_rouge_l"], "probability": by_name["forget_probability"], "truth_ratio": truth}
    untargeted = untargeted_forget_efficacy(parts, bootstrap=bootstrap)
    targeted = targeted_forget_efficacy({"token_entropy": by_name["forget_token_entropy"]}, bootstrap=bootstrap)
    utility = dualoptim_utility(by_name, bootstrap=bootstrap)
    return [
        untargeted_forget_efficacy(parts, bootstrap=bootstrap, names=EFFICACY_TEXT_PARTS),
        dualoptim_utility(by_name, bootstrap=bootstrap, values=UTILITY_TEXT_VALUES),
        untargeted,
        targeted,
        utility,
        overall(untargeted, targeted, utility, bootstrap=bootstrap),
    ]
