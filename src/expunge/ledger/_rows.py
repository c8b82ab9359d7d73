"""Keyed hashes of texts, each of which can be opened alone.

Every hash has a key of its own, derived from the ledger's secret: tag = HMAC(HMAC(secret, place), text). To prove that
a text was in a request, the owner of the ledger hands over the key of that one hash; nothing else becomes guessable,
and equal texts in two requests have unlike hashes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Match:
    """A text that was found in a request.

    Attributes:
        number: of the entry.
        request: its name.
        row: which row of the request, counted from 0.
        part: "text" (the whole example) or "answer".
        key: opens this one hash.
    """

    number: int
    request: str
    row: int
    part: str
    key: str


def normalised(text: str) -> str:
    """Text as it is hashed: Unicode NFC, runs of white space as one space, none at the ends."""
    # NOTE: imported here since the room of the data loads torch, which reading a ledger does not need.
    from expunge.data import normalise

    return normalise(text)


def key_of(secret: bytes, salt: str, row: int, part: str) -> bytes:
    """The key of one hash."""
    return hmac.new(secret, f"expunge-ledger/1 row\n{salt}\n{row}\n{part}".encode(), hashlib.sha256).digest()


def tag_of(key: bytes, text: str) -> str:
    """The keyed hash of a normalised text, 64 hexadecimal digits."""
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def commit(secret: bytes, salt: str, rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Hash every part of every row."""
    return [
        {part: tag_of(key_of(secret, salt, row, part), normalised(text)) for part, text in parts.items()}
        for row, parts in enumerate(rows)
    ]


def find(secret: bytes, fields: Mapping[str, Any], text: str) -> list[Match]:
    """Where a text is in an entry.

    Args:
        secret: of the ledger.
        fields: of the entry.
        text: as a person has it; normalised here.
    """
    wanted, rows = normalised(text), fields["rows"]
    found = []
    for row, tags in enumerate(rows["tags"]):
        for part, tag in tags.items():
            key = key_of(secret, rows["salt"], row, part)
            if hmac.compare_digest(tag_of(key, wanted), tag):
                found.append(Match(fields["number"], fields["request"], row, part, key.hex()))
    return found
