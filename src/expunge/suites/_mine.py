"""The user's own data: what to forget and to keep, and optionally paraphrased questions and rows never seen."""

from __future__ import annotations

from collections.abc import Sequence

from expunge.data import Message, Record, read_records
from expunge.errors import UsageError
from expunge.metrics import SHARE_AS_RETRAINED, SHARE_UP, Metric, forget_quality, null_metric
from expunge.suites._common import (
    NO_TABLE,
    Context,
    answer_metric,
    column_metric,
    degeneration_metrics,
    memorisation_metrics,
    mia_metrics,
    privacy_metrics,
    probability_metric,
    recovery_metric,
)
from expunge.suites._measure import Measured
from expunge.suites._plan import Plan, Question, QuestionTable, Text, TextTable
from expunge.suites._source import Source

PARTS = ("forget", "retain", "paraphrase", "holdout")


def read(source: Source, split: str | None = None) -> Plan:
    """Read `forget`, `retain`, `paraphrase` and `holdout` of a folder, in any format `expunge unlearn` reads.

    Paraphrased questions come from the forget file's column `paraphrase`, or from the file `paraphrase`, whose rows
    have the forget rows' ids, the question in other words and the same answer.

    Args:
        source: the folder.
        split: not used by this suite.

    Raises:
        UsageError: no rows to forget, a file that cannot be read, or a paraphrase of no forget row.
    """
    if split is not None:
        raise UsageError("split: the suite mine has none; it is for tofu")
    if not source.is_folder:
        raise UsageError(f"data: found {source.place}, accepted is a folder with forget and retain files")
    forget = _records(source, "forget")
    if forget is None:
        raise UsageError(f"data: found no forget file in {source.place} (forget.jsonl, .json, .parquet, .csv or .txt)")
    retain, holdout = _records(source, "retain"), _records(source, "holdout")
    otherwise = _paraphrased(source, forget)
    source.check_used(PARTS)
    texts = [TextTable("forget", _texts(forget), "tokens")]
    questions = _questions("forget", forget)
    if retain is not None:
        texts.append(TextTable("retain", _texts(retain), "margin"))
        questions += _questions("retain", retain)
    if holdout is not None:
        texts.append(TextTable("holdout", _texts(holdout), "tokens"))
    if otherwise:
        texts.append(TextTable("forget.asked_otherwise", _texts(otherwise)))
        questions.append(QuestionTable("forget.answers_otherwise", _asked(otherwise), scored="forget.asked_otherwise"))
    there = {table.name for table in texts} | ({"paraphrase"} if otherwise else set())
    notes = [f"the data has no {part}: what needs it is not measured" for part in PARTS if part not in there]
    return Plan("mine", tuple(texts), tuple(questions), tuple(notes))


def _records(source: Source, part: str) -> list[Record] | None:
    path = source.find(part)
    if path is None:
        return None
    records = read_records(path, name=part, allow_hub=False)
    chosen = source.select(part, [{"record": record} for record in records])
    return [row["record"] for row in chosen]


def _paraphrased(source: Source, forget: Sequence[Record]) -> list[Record]:
    own = [
        Record(record.id, (*record.messages[:-2], Message("user", record.paraphrase), record.messages[-1]), None)
        for record in forget
        if record.paraphrase and record.messages is not None and len(record.messages) > 1
    ]
    given = _records(source, "paraphrase")
    if given is None:
        return own
    ids = {record.id for record in forget}
    strange = [record.id for record in given if record.id not in ids]
    if strange and "forget" not in source.slices:
        raise UsageError(
            f"paraphrase: {len(strange)} rows have ids that no forget row has; ids must be those of forget"
        )
    return [record for record in given if record.id in ids and record.messages is not None]


def _texts(records: Sequence[Record]) -> tuple[Text, ...]:
    return tuple(Text(record.id, record) for record in records)


def _questions(part: str, records: Sequence[Record]) -> list[QuestionTable]:
    """One question a chat; raw text is scored only."""
    asked = _asked(records)
    return [QuestionTable(f"{part}.answers", asked, scored=part)] if asked else []


def _asked(records: Sequence[Record]) -> tuple[Question, ...]:
    return tuple(
        Question(record.id, record.prompt, record.answer, record)
        for record in records
        if record.prompt is not None and record.answer.strip()
    )


def metrics(measured: Measured, context: Context) -> list[Metric]:
    """All metrics of a model.

    Args:
        measured: its tables.
        context: what it is compared with.
    """
    bootstrap = context.bootstrap
    tables = ("forget", "holdout")
    rouge = answer_metric(measured, "forget.answers", "rouge_l", "forget_rouge_l", SHARE_AS_RETRAINED, bootstrap)
    otherwise = answer_metric(
        measured, "forget.answers_otherwise", "rouge_l", "forget_rouge_l_otherwise", SHARE_AS_RETRAINED, bootstrap
    )
    theirs = None if context.retrained is None else context.retrained.column("forget", "logprob_mean")
    quality = forget_quality(
        measured.column("forget", "logprob_mean"),
        theirs,
        bootstrap=bootstrap,
        identical=context.identical,
        prefix="forget_likeness",
    )
    recovery = null_metric("forget_knowledge_recovery", SHARE_AS_RETRAINED, NO_TABLE)
    if _same_rows(measured):
        recovery = recovery_metric(rouge, otherwise, "forget_knowledge_recovery", "forget", bootstrap)
    return [
        quality.p,
        quality.log10_p,
        quality.statistic,
        probability_metric(measured, "forget", "forget_probability", SHARE_AS_RETRAINED, bootstrap),
        rouge,
        *memorisation_metrics(measured, "forget", "forget", bootstrap),
        probability_metric(
            measured, "forget.asked_otherwise", "forget_probability_otherwise", SHARE_AS_RETRAINED, bootstrap
        ),
        otherwise,
        recovery,
        *mia_metrics(measured, tables, context),
        *privacy_metrics(measured, tables, context),
        *degeneration_metrics(measured, "forget.answers", "forget", bootstrap),
        probability_metric(measured, "retain", "retain_probability", SHARE_UP, bootstrap),
        answer_metric(measured, "retain.answers", "rouge_l", "retain_rouge_l", SHARE_UP, bootstrap),
        column_metric(measured, "retain", "exact", "retain_exact_memorisation", SHARE_UP, bootstrap),
    ]


def _same_rows(measured: Measured) -> bool:
    """Whether every question has its paraphrase, in the same order."""
    return measured.plan.ids("forget.answers") == measured.plan.ids("forget.answers_otherwise")
