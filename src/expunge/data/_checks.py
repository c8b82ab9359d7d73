"""What the data to forget and the data to keep have in common."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from expunge.data._records import Record, one_line
from expunge.errors import UsageError


@dataclass(frozen=True)
class DataReport:
    """What `check_pair` found.

    Attributes:
        forget_rows: rows to forget.
        retain_rows: rows to keep.
        overlap_ids: ids of the forget rows that are also among the retain rows, in order.
        duplicate_forget: forget rows that repeat an earlier forget row.
        duplicate_retain: retain rows that repeat an earlier retain row.
        identical: both hold the same examples.
    """

    forget_rows: int
    retain_rows: int
    overlap_ids: tuple[str, ...]
    duplicate_forget: int
    duplicate_retain: int
    identical: bool


def normalise(text: str) -> str:
    r"""Text for comparing: Unicode NFC, runs of white space as one space, none at the ends; case is kept.

    Example:
        >>> normalise(" Who  is\tA? ")
        'Who is A?'
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def _key(record: Record) -> tuple[str, ...]:
    """Identity of an example: its turns but for the system's, or its text."""
    if record.messages is None:
        return ("text", normalise(record.answer))
    turns = [message for message in record.messages if message.role != "system"]
    return tuple(part for turn in turns for part in (turn.role, normalise(turn.content)))


def check_pair(
    forget: Sequence[Record],
    retain: Sequence[Record],
    *,
    allow_overlap: bool = False,
    names: tuple[str, str] = ("forget", "retain"),
) -> DataReport:
    """Compare two sets of records after Unicode and white-space normalisation.

    Two rows are the same if all their turns (system turns aside), or their texts, are the same.

    Args:
        forget: the rows to forget.
        retain: the rows to keep, or a holdout set.
        allow_overlap: report shared rows instead of refusing them.
        names: what the message calls the two.

    Raises:
        UsageError: rows are in both and `allow_overlap` is False. The message has counts and ids, not the rows.
    """
    forget_keys = [_key(record) for record in forget]
    retain_keys = [_key(record) for record in retain]
    kept = set(retain_keys)
    overlap = tuple(record.id for record, key in zip(forget, forget_keys, strict=True) if key in kept)
    report = DataReport(
        forget_rows=len(forget),
        retain_rows=len(retain),
        overlap_ids=overlap,
        duplicate_forget=len(forget_keys) - len(set(forget_keys)),
        duplicate_retain=len(retain_keys) - len(kept),
        identical=bool(kept) and set(forget_keys) == kept,
    )
    if overlap and not allow_overlap:
        one, other = names
        shown = ", ".join(one_line(identity, 40) for identity in overlap[:5]) + (", …" if len(overlap) > 5 else "")
        same = f"; {one} and {other} are identical" if report.identical else ""
        raise UsageError(
            f"{len(overlap)} of {len(forget)} {one} rows are also among the {len(retain)} {other} rows "
            f"(ids {shown}){same}; remove them from one of the two, or pass --allow-overlap"
        )
    return report
