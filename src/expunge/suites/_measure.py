"""Running a model over a plan: each distinct row is scored once, each distinct prompt continued once."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expunge.data import Corpus, encode_prompt, token_ids
from expunge.lm import LoadedModel, split_model
from expunge.metrics import few_shot_answer, first_answer, rouge_l, token_entropy
from expunge.scoring import AnswerTable, ScoreSettings, ScoreTable, TokenTable, generate, score_rows
from expunge.suites._encode import Encoded, MeasureSettings, encode_plan, end_of, fitting
from expunge.suites._plan import LEVELS, Plan, Question, QuestionTable, TextTable

Watch = Callable[[str, int, int], None]
_CUTS: dict[str, Callable[[str], str]] = {
    "first_answer": first_answer,
    "few_shot": few_shot_answer,
    "none": str.strip,
}


@dataclass(frozen=True)
class Measured:
    """A model's tables.

    Attributes:
        plan: what was asked for.
        scores: by name of the table; rows without a token are missing.
        tokens: the same for tables of level "tokens".
        answers: by name of the table.
        fingerprint: of the weights.
        notes: what a user should know, such as prompts that were cut.
    """

    plan: Plan
    scores: dict[str, ScoreTable]
    tokens: dict[str, TokenTable]
    answers: dict[str, AnswerTable]
    fingerprint: str
    notes: tuple[str, ...] = ()

    def column(self, table: str, column: str) -> list[float | None]:
        """A column of scores for every row of the plan's table, None where a row was not measured."""
        found = self.scores.get(table)
        if found is None:
            return []
        by_id = dict(zip(found.id, found.values(column), strict=True))
        return [by_id.get(one) for one in self.plan.ids(table)]

    def token_rows(self, table: str, column: str) -> list[np.ndarray]:
        """Token values for every row of the plan's table, an empty array where a row was not measured."""
        found = self.tokens.get(table)
        if found is None:
            return []
        by_id = dict(zip(found.id, found.rows(column), strict=True))
        return [by_id.get(one, np.zeros(0)) for one in self.plan.ids(table)]


def measure(
    loaded: LoadedModel,
    plan: Plan,
    settings: MeasureSettings,
    *,
    encoded: Encoded | None = None,
    watch: Watch | None = None,
) -> Measured:
    """Score and generate all that a plan needs.

    Args:
        loaded: the model.
        plan: what is needed.
        settings: how.
        encoded: the plan's texts where the caller has them (see `encode_plan`).
        watch: called with (stage, done, in all); stages are "score" and "generate".

    Raises:
        UsageError: a text does not fit the template or the length.
    """
    encoded = encoded or encode_plan(loaded, plan, settings)
    wanted, settings = settings, fitting(loaded, settings)
    scores, tokens = _score(loaded, plan, encoded, settings, watch)
    answers, cut = _ask(loaded, plan, scores, settings, watch)
    notes = []
    if settings.max_new_tokens < wanted.max_new_tokens:
        notes.append(f"answers end after {settings.max_new_tokens} tokens: half of the model's positions")
    if encoded.dropped:
        notes.append(f"{encoded.dropped} rows have nothing to score (empty answer or text) and are counted as missing")
    if encoded.truncated or cut:
        count = encoded.truncated + cut
        notes.append(f"{count} prompts were longer than the model or max_length allow and lost their start")
    return Measured(plan, scores, tokens, answers, loaded.fingerprint, tuple(notes))


def _score(
    loaded: LoadedModel, plan: Plan, encoded: Encoded, settings: MeasureSettings, watch: Watch | None
) -> tuple[dict[str, ScoreTable], dict[str, TokenTable]]:
    split = split_model(loaded.model)
    done = 0
    parts: dict[int, tuple[ScoreTable, TokenTable | None, dict[int, int]]] = {}
    for level in sorted(set(encoded.level)):
        chosen = [index for index, one in enumerate(encoded.level) if one == level]
        corpus = Corpus(tuple(encoded.rows[index] for index in chosen), (), 0)

        def tell(count: int, _total: int, before: int = done) -> None:
            if watch is not None:
                watch("score", before + count, len(encoded.rows))

        options = ScoreSettings(
            rho=settings.rho,
            k=settings.k,
            beta=settings.beta,
            batch_size=settings.batch_size,
            margin=level >= LEVELS.index("margin"),
            tokens=level == LEVELS.index("tokens"),
        )
        found = score_rows(split, corpus, pad_id=loaded.pad_id, settings=options, progress=tell)
        parts[level] = (found.rows, found.tokens, {index: place for place, index in enumerate(chosen)})
        done += len(chosen)
    scores, tokens = {}, {}
    for table in plan.texts:
        scores[table.name] = _collect(table, encoded, parts)
        if table.level == "tokens":
            tokens[table.name] = _collect_tokens(table, encoded, parts)
    return scores, tokens


def _collect(
    table: TextTable, encoded: Encoded, parts: dict[int, tuple[ScoreTable, TokenTable | None, dict[int, int]]]
) -> ScoreTable:
    """The rows of a table out of the distinct ones, windows joined, with the compressed size of each text."""
    where = encoded.places[table.name]
    rows: list[ScoreTable] = []
    for index, identity, record in where:
        scored, _, places = parts[encoded.level[index]]
        one = scored.take([places[index]])
        rows.append(dataclasses.replace(one, id=(identity,), record=np.array([record], dtype=np.int64)))
    joined = _stack(rows).by_record()
    texts = [table.rows[record].record.answer for record in joined.record.tolist()]
    sizes = np.array([len(zlib.compress(text.encode())) for text in texts], dtype=np.float64)
    return dataclasses.replace(joined, zlib=sizes)


def _collect_tokens(
    table: TextTable, encoded: Encoded, parts: dict[int, tuple[ScoreTable, TokenTable | None, dict[int, int]]]
) -> TokenTable:
    """The tokens of a table's rows, windows joined."""
    where = encoded.places[table.name]
    _, kept, places = parts[LEVELS.index("tokens")]
    assert kept is not None
    laid = kept.take([places[index] for index, _, _ in where])
    records = np.array([record for _, _, record in where], dtype=np.int64)
    return dataclasses.replace(laid, id=tuple(one for _, one, _ in where), record=records).by_record()


def _stack(rows: Sequence[ScoreTable]) -> ScoreTable:
    """One table of several; a column that some lack holds NaN for their rows."""
    columns: dict[str, Any] = {}
    for name in ScoreTable.columns():
        parts = [getattr(row, name) for row in rows]
        if name == "id":
            columns[name] = tuple(one for part in parts for one in part)
        elif all(part is None for part in parts) and name not in ("record", "tokens"):
            columns[name] = None if rows else np.zeros(0)
        else:
            lacking = [
                np.full(len(row), math.nan) if part is None else part for row, part in zip(rows, parts, strict=True)
            ]
            columns[name] = np.concatenate(lacking) if lacking else np.zeros(0)
    columns["record"], columns["tokens"] = columns["record"].astype(np.int64), columns["tokens"].astype(np.int64)
    return ScoreTable(**columns)


def _ask(
    loaded: LoadedModel, plan: Plan, scores: dict[str, ScoreTable], settings: MeasureSettings, watch: Watch | None
) -> tuple[dict[str, AnswerTable], int]:
    """Answers by table, and how many prompts were cut."""
    asked: dict[tuple[tuple[int, ...], int], int] = {}
    places: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    cut = 0
    for table in plan.questions:
        keys = []
        for question in table.rows:
            ids, was_cut = _prompt(loaded, table, question, settings)
            cut += was_cut
            keys.append((tuple(ids), _new_tokens(loaded, table, settings)))
            asked.setdefault(keys[-1], len(asked))
        places[table.name] = keys
    outputs: dict[tuple[tuple[int, ...], int], Any] = {}
    for limit in sorted({limit for _, limit in asked}):
        chosen = [key for key in asked if key[1] == limit]

        def tell(done: int, _total: int, before: int = len(outputs)) -> None:
            if watch is not None:
                watch("generate", before + done, len(asked))

        found = generate(
            loaded.model,
            loaded.tokenizer,
            [list(ids) for ids, _ in chosen],
            pad_id=loaded.pad_id,
            max_new_tokens=limit,
            batch_size=4 * settings.batch_size,
            progress=tell,
        )
        outputs.update(zip(chosen, found, strict=True))
    answers = {
        table.name: _answers(loaded.tokenizer, table, [outputs[key] for key in places[table.name]], scores)
        for table in plan.questions
    }
    return answers, cut


def _new_tokens(loaded: LoadedModel, table: QuestionTable, settings: MeasureSettings) -> int:
    wanted = table.max_new_tokens or settings.max_new_tokens
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    return wanted if limit is None else min(wanted, max(1, limit // 2))


def _prompt(
    loaded: LoadedModel, table: QuestionTable, question: Question, settings: MeasureSettings
) -> tuple[list[int], bool]:
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    room = (
        settings.max_length if limit is None else min(settings.max_length, limit - _new_tokens(loaded, table, settings))
    )
    if table.raw:
        ids = token_ids(loaded.tokenizer(question.prompt, verbose=False))
    else:
        options: dict[str, Any] = {"template": settings.template, "system": settings.system}
        ids = encode_prompt(question.record or question.prompt, loaded.tokenizer, max_length=1 << 20, **options)
    return end_of(loaded.tokenizer, ids, room), len(ids) > room


def _answers(
    tokenizer: Any, table: QuestionTable, outputs: Sequence[Any], scores: dict[str, ScoreTable]
) -> AnswerTable:
    cut = _CUTS[table.cut]
    references = [_shortened(tokenizer, row.reference, table.reference_tokens) for row in table.rows]
    texts = [cut(output.text) for output in outputs]
    found = [rouge_l(text, reference) for text, reference in zip(texts, references, strict=True)]
    likelihood: dict[str, float] = {}
    if table.scored is not None and table.scored in scores:
        scored = scores[table.scored]
        likelihood = dict(zip(scored.id, np.exp(scored.logprob_mean).tolist(), strict=True))
    return AnswerTable(
        id=tuple(row.id for row in table.rows),
        prompt=tuple(row.prompt for row in table.rows),
        prediction=tuple(texts),
        reference=tuple(references),
        rouge_l=np.array([math.nan if one is None else one.recall for one in found], dtype=np.float64),
        rouge_l_f1=np.array([math.nan if one is None else one.f1 for one in found], dtype=np.float64),
        prob=np.array([likelihood.get(row.id, math.nan) for row in table.rows], dtype=np.float64),
        entropy=np.array([token_entropy(output.tokens) for output in outputs], dtype=np.float64),
        finished=np.array([output.finished for output in outputs], dtype=bool),
    )


def _shortened(tokenizer: Any, text: str, tokens: int | None) -> str:
    if tokens is None:
        return text
    ids = token_ids(tokenizer(text, add_special_tokens=False, verbose=False))
    return text if len(ids) <= tokens else tokenizer.decode(ids[:tokens], skip_special_tokens=True)
