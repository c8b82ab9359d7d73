"""Refusals: what a model is to say instead of an answer, for the methods that train on it."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from expunge.data._records import Message, Record
from expunge.errors import UsageError


def read_refusals(path: str | Path | None = None) -> tuple[str, ...]:
    """Read refusal sentences, one a line; empty lines are left out.

    Args:
        path: a text file; None: the sentences that come with the package.

    Returns:
        The sentences, in order.

    Raises:
        UsageError: the file cannot be read, or holds no sentence.

    Example:
        >>> len(read_refusals()) > 20
        True
    """
    try:
        if path is None:
            text = files("expunge.data").joinpath("refusals.txt").read_text(encoding="utf-8")
        else:
            text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"refusals: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"refusals: {path} is no UTF-8 text, accepted is one sentence a line") from None
    found = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not found:
        raise UsageError(f"refusals: {path} is empty, accepted is one sentence a line")
    return found


def refuse(records: Sequence[Record], sentences: Sequence[str], *, seed: int = 0, name: str = "data") -> list[Record]:
    """Give each record a refusal as its answer.

    Which one depends on the seed and on the record's id only, so that it stays the same when others come or go.

    Args:
        records: chats; raw text has no question that could be refused.
        sentences: refusals, at least one.
        seed: of the choice.
        name: of the file, for the message of an error.

    Returns:
        One record for each, with the same id and question.

    Raises:
        UsageError: a record is raw text.
    """
    found = []
    for record in records:
        if record.messages is None:
            raise UsageError(
                f"{name}: record {record.id} is raw text; accepted for a method with refusals are questions and answers"
            )
        digest = hashlib.sha256(f"{seed}\0{record.id}".encode()).digest()
        sentence = sentences[int.from_bytes(digest[:8], "big") % len(sentences)]
        found.append(replace(record, messages=(*record.messages[:-1], Message("assistant", sentence))))
    return found
