"""MUSE: news or books to forget; verbatim and knowledge memorisation, privacy leakage, utility."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expunge.data import Record
from expunge.errors import UsageError
from expunge.metrics import SHARE_AS_RETRAINED, SHARE_UP, Metric, few_shot_prompt
from expunge.suites._common import (
    Context,
    answer_metric,
    degeneration_metrics,
    memorisation_metrics,
    mia_metrics,
    privacy_metrics,
)
from expunge.suites._measure import Measured
from expunge.suites._plan import Plan, Question, QuestionTable, Text, TextTable, raw
from expunge.suites._source import Source, row_id, text_of

PARTS = ("verbmem", "knowmem_forget", "knowmem_retain", "forget", "holdout")
_VERBATIM_TOKENS = 128
_KNOWLEDGE_TOKENS = 32
# The retain files are called so by the benchmark's authors; its hub datasets have the shorter name.
_RETAIN = ("retain2_qa", "retain_qa")


def read(source: Source, split: str | None = None) -> Plan:
    """Read MUSE in its own layout: `verbmem/forget`, `knowmem/*_qa` with `*_qa_icl`, `privleak/forget` and `holdout`.

    Args:
        source: the folder or hub dataset.
        split: not used by this suite.

    Raises:
        UsageError: a split is given, no part is there, or a file cannot be read.
    """
    if split is not None:
        raise UsageError("split: the suite muse has none; it is for tofu")
    texts: list[TextTable] = []
    questions: list[QuestionTable] = []
    verbatim = source.rows("verbmem", "verbmem/forget")
    if verbatim is not None:
        texts.append(TextTable("verbmem", tuple(_continuation(row) for row in verbatim), "margin"))
        asked = tuple(Question(row_id(row), text_of(row, "prompt", "verbmem"), _gt(row)) for row in verbatim)
        questions.append(
            QuestionTable(
                "verbmem.answers",
                asked,
                raw=True,
                max_new_tokens=_VERBATIM_TOKENS,
                cut="none",
                reference_tokens=_VERBATIM_TOKENS,
                scored="verbmem",
            )
        )
    for part, names in (("knowmem_forget", ("forget_qa",)), ("knowmem_retain", _RETAIN)):
        questions += _knowledge(source, part, names)
    for part in ("forget", "holdout"):
        rows = source.rows(part, f"privleak/{part}")
        if rows is not None:
            found = tuple(raw(row_id(row), text_of(row, "text", part)) for row in rows)
            texts.append(TextTable(part, found, "tokens"))
    if not texts and not questions:
        raise UsageError(f"data: found no verbmem, knowmem or privleak in {source.place}, accepted is MUSE's layout")
    source.check_used(PARTS)
    there = {one.name for one in texts} | {asked.name.partition(".")[0] for asked in questions}
    notes = [f"the data has no {part}: what needs it is not measured" for part in PARTS if part not in there]
    return Plan("muse", tuple(texts), tuple(questions), tuple(notes))


def _gt(row: Mapping[str, Any]) -> str:
    return text_of(row, "gt", "verbmem")


def _continuation(row: Mapping[str, Any]) -> Text:
    record = Record(row_id(row), None, _gt(row))
    return Text(row_id(row), record, continues=text_of(row, "prompt", "verbmem"), limit=_VERBATIM_TOKENS)


def _knowledge(source: Source, part: str, names: Sequence[str]) -> list[QuestionTable]:
    for name in names:
        rows = source.rows(part, f"knowmem/{name}")
        if rows is None:
            continue
        shots = source.rows(f"{part}_examples", f"knowmem/{name}_icl") or []
        examples = [(text_of(row, "question", part), text_of(row, "answer", part)) for row in shots]
        asked = tuple(
            Question(
                row_id(row), few_shot_prompt(examples, text_of(row, "question", part)), text_of(row, "answer", part)
            )
            for row in rows
        )
        return [QuestionTable(part, asked, raw=True, max_new_tokens=_KNOWLEDGE_TOKENS, cut="few_shot")]
    return []


def metrics(measured: Measured, context: Context) -> list[Metric]:
    """All metrics of a model.

    ROUGE-L is F1, as in the benchmark's tables (as shares, not per cent).

    Args:
        measured: its tables.
        context: what it is compared with.
    """
    bootstrap = context.bootstrap
    tables = ("forget", "holdout")
    return [
        answer_metric(measured, "verbmem.answers", "rouge_l_f1", "verbmem", SHARE_AS_RETRAINED, bootstrap),
        answer_metric(measured, "knowmem_forget", "rouge_l_f1", "knowmem", SHARE_AS_RETRAINED, bootstrap),
        *privacy_metrics(measured, tables, context),
        answer_metric(measured, "knowmem_retain", "rouge_l_f1", "utility", SHARE_UP, bootstrap),
        *mia_metrics(measured, tables, context),
        *memorisation_metrics(measured, "verbmem", "verbmem", bootstrap),
        *degeneration_metrics(measured, "verbmem.answers", "verbmem", bootstrap),
        *degeneration_metrics(measured, "knowmem_retain", "utility", bootstrap)[:4],
    ]
