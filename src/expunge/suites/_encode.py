"""From a plan's texts to token rows, each distinct one once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from expunge.data import IGNORE, Row, encode_records, token_ids
from expunge.errors import UsageError
from expunge.lm import LoadedModel
from expunge.scoring import ScoreSettings
from expunge.suites._plan import LEVELS, Plan, Text, TextTable


@dataclass(frozen=True)
class MeasureSettings:
    """How texts become tokens, and what is measured of them.

    Attributes:
        template: "chat", "plain" or a text with {prompt} and {completion} (see `expunge.data.encode_records`).
        system: text of a system turn; None adds none.
        max_length: longest row in tokens, 2 or more; longer raw texts are windows, longer prompts lose their start.
        max_new_tokens: longest answer, 1 or more.
        batch_size: rows in a forward pass; answers are generated in batches of four times as many.
        rho: allowed token probability ρ of the violation rate.
        k: competitors in the margin.
        beta: inverse temperature of the margin.

    Raises:
        UsageError: an option is out of range.
    """

    template: str = "chat"
    system: str | None = None
    max_length: int = 1024
    max_new_tokens: int = 80
    batch_size: int = 16
    rho: float = 0.7
    k: int = 10
    beta: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}: found {getattr(self, name)!r}, accepted is a whole number from {least}")
        ScoreSettings(rho=self.rho, k=self.k, beta=self.beta, batch_size=self.batch_size)


@dataclass
class Encoded:
    """Distinct rows of all tables, and where each table's rows are among them.

    Attributes:
        rows: the distinct rows.
        level: for each, the highest level (index in `LEVELS`) that a table asks for.
        places: for each table, (index of the distinct row, id, record) of its rows.
        dropped: texts with nothing to score.
        truncated: rows whose prompt lost its start.
    """

    rows: list[Row] = field(default_factory=list)
    level: list[int] = field(default_factory=list)
    places: dict[str, list[tuple[int, str, int]]] = field(default_factory=dict)
    dropped: int = 0
    truncated: int = 0


def fitting(loaded: LoadedModel, settings: MeasureSettings) -> MeasureSettings:
    """Lengths that the model's positions allow."""
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if limit is None:
        return settings
    new = min(settings.max_new_tokens, max(1, limit // 2))
    return dataclasses.replace(settings, max_length=min(settings.max_length, limit), max_new_tokens=new)


def encode_plan(loaded: LoadedModel, plan: Plan, settings: MeasureSettings) -> Encoded:
    """Turn a plan's texts into token rows, each distinct one once.

    Raises:
        UsageError: a text does not fit the template or the length.
    """
    tokenizer, settings = loaded.tokenizer, fitting(loaded, settings)
    found = Encoded()
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for table in plan.texts:
        rows = _table_rows(tokenizer, table, settings, found)
        for row in rows:
            index = known.setdefault((row.input_ids, row.labels), len(found.rows))
            if index == len(found.rows):
                found.rows.append(dataclasses.replace(row, id=str(index), record=index))
                found.level.append(0)
            found.level[index] = max(found.level[index], LEVELS.index(table.level))
            found.places.setdefault(table.name, []).append((index, table.rows[row.record].id, row.record))
        found.places.setdefault(table.name, [])
    return found


def _table_rows(tokenizer: Any, table: TextTable, settings: MeasureSettings, found: Encoded) -> list[Row]:
    if any(text.continues is not None for text in table.rows):
        rows = [_continuation(tokenizer, text, index, settings.max_length) for index, text in enumerate(table.rows)]
        found.dropped += sum(row is None for row in rows)
        return [row for row in rows if row is not None]
    corpus = encode_records(
        [text.record for text in table.rows],
        tokenizer,
        template=settings.template,
        system=settings.system,
        max_length=settings.max_length,
        name=table.name,
    )
    found.dropped += len(corpus.dropped)
    found.truncated += corpus.truncated
    return list(corpus.rows)


def _continuation(tokenizer: Any, text: Text, index: int, max_length: int) -> Row | None:
    """A raw text after another; the first is what both encodings have in common."""
    before = text.continues or ""
    start = token_ids(tokenizer(before, verbose=False))
    ids = token_ids(tokenizer(before + (text.record.text or ""), verbose=False))
    shared = next(
        (i for i, (one, other) in enumerate(zip(start, ids, strict=False)) if one != other), min(len(start), len(ids))
    )
    shared = max(shared, 1)
    answer = ids[shared:][: text.limit][: max_length - 1]
    if not answer:
        return None
    prompt = end_of(tokenizer, ids[:shared], max_length - len(answer))
    return Row(text.id, index, (*prompt, *answer), (*[IGNORE] * len(prompt), *answer), len(prompt))


def end_of(tokenizer: Any, ids: list[int], room: int) -> list[int]:
    """The end of a prompt that is too long; models are used to a first token that is always the same, so BOS stays."""
    if len(ids) <= room:
        return ids
    bos = getattr(tokenizer, "bos_token_id", None)
    if room >= 2 and bos is not None and ids[0] == bos:
        return [bos, *ids[len(ids) - room + 1 :]]
    return ids[len(ids) - room :]
