"""What a suite needs of a model: texts to score and questions to ask, named before anything is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from expunge.data import Message, Record

Level = Literal["likelihood", "margin", "tokens"]
Cut = Literal["first_answer", "few_shot", "none"]
LEVELS: tuple[Level, ...] = ("likelihood", "margin", "tokens")


@dataclass(frozen=True)
class Text:
    """A text to score.

    Attributes:
        id: of the row; unique within its table.
        record: a chat, whose answer is scored, or raw text, all of which is.
        continues: raw text that `record`'s raw text continues; then only that is scored.
        limit: most tokens of it that are scored; None: all.
    """

    id: str
    record: Record
    continues: str | None = None
    limit: int | None = None


@dataclass(frozen=True)
class TextTable:
    """Texts that become one table of scores.

    Attributes:
        name: of the table and its file.
        rows: the texts.
        level: "likelihood" (log-probabilities and hits), "margin" (violation and certificates too) or "tokens"
            (everything, kept per token).
    """

    name: str
    rows: tuple[Text, ...]
    level: Level = "likelihood"


@dataclass(frozen=True)
class Question:
    """Something to ask.

    Attributes:
        id: of the row; unique within its table.
        prompt: the question, or raw text to continue.
        reference: the true answer.
        record: the whole chat, where it has turns before the question; None: the question is all.
    """

    id: str
    prompt: str
    reference: str
    record: Record | None = None


@dataclass(frozen=True)
class QuestionTable:
    """Questions that become one table of answers.

    Attributes:
        name: of the table and its file.
        rows: the questions.
        raw: prompts are raw text to continue; else each is a user's turn in the chat template.
        max_new_tokens: length limit of an answer; None takes that of the settings.
        cut: which part of a continuation is the answer.
        reference_tokens: the reference is cut to this many tokens; None: all of it counts.
        scored: name of the table with the likelihood of the references; None: none.
    """

    name: str
    rows: tuple[Question, ...]
    raw: bool = False
    max_new_tokens: int | None = None
    cut: Cut = "first_answer"
    reference_tokens: int | None = None
    scored: str | None = None


@dataclass(frozen=True)
class Plan:
    """All that a suite needs.

    Attributes:
        suite: name of the suite.
        texts: tables of texts.
        questions: tables of questions.
        notes: what a user should know about the data, such as a part that is missing.
    """

    suite: str
    texts: tuple[TextTable, ...]
    questions: tuple[QuestionTable, ...]
    notes: tuple[str, ...] = ()

    def ids(self, name: str) -> tuple[str, ...]:
        """Ids of a table's rows; empty where the data has no such table."""
        for texts in self.texts:
            if texts.name == name:
                return tuple(row.id for row in texts.rows)
        for asked in self.questions:
            if asked.name == name:
                return tuple(row.id for row in asked.rows)
        return ()

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each table's content, whatever file it came from."""
        found = {}
        for texts in self.texts:
            rows = [[row.id, _turns(row.record), row.continues, row.limit] for row in texts.rows]
            found[texts.name] = _hash([texts.level, rows])
        for asked in self.questions:
            questions = [[row.id, row.record and _turns(row.record), row.prompt, row.reference] for row in asked.rows]
            found[f"{asked.name}?"] = _hash(
                [asked.raw, asked.max_new_tokens, asked.cut, asked.reference_tokens, questions]
            )
        return found


def chat(identity: str, question: str, answer: str) -> Text:
    """A question with an answer to score."""
    return Text(identity, Record(identity, (Message("user", question), Message("assistant", answer)), None))


def raw(identity: str, text: str) -> Text:
    """A raw text to score."""
    return Text(identity, Record(identity, None, text))


def _turns(record: Record) -> list[list[str]] | str | None:
    if record.messages is None:
        return record.text
    return [[message.role, message.content] for message in record.messages]


def _hash(value: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
