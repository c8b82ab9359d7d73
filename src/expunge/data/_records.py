"""What one example is, and how a row of a file becomes one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from expunge.errors import UsageError

ROLES = ("system", "user", "assistant")
OPTIONAL = ("id", "paraphrase", "paraphrased_question")
# In order of preference where a file has the columns of several shapes.
SHAPES: tuple[tuple[str, ...], ...] = (
    ("messages",),
    ("prompt", "completion"),
    ("question", "answer"),
    ("prompt", "answer"),
    ("question", "completion"),
    ("text",),
)
ACCEPTED = "prompt+completion, question+answer, messages, text"
_NAMES = frozenset(name for shape in SHAPES for name in shape) | frozenset(OPTIONAL)
_LOOKS_LIKE_A_NAME = re.compile(r"[^\W\d][\w.-]{0,31}")


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: "system", "user" or "assistant".
        content: the text of the turn.
    """

    role: str
    content: str


@dataclass(frozen=True)
class Record:
    """One example to forget or to keep: either a chat (`messages`) or raw text (`text`), never both.

    Attributes:
        id: the file's own `id`, or the 0-based row number as text. Unique within one source.
        messages: the turns; the last one is the assistant's and is the answer.
        text: the raw text.
        paraphrase: the question in other words, if the file has one.

    Raises:
        ValueError: both or neither of `messages` and `text` are given, or the last turn is not the assistant's.
    """

    id: str
    messages: tuple[Message, ...] | None
    text: str | None
    paraphrase: str | None = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None):
            raise ValueError("a record has either messages or text")
        if self.messages is not None and (not self.messages or self.messages[-1].role != "assistant"):
            raise ValueError("the last message of a record is the assistant's")

    @property
    def prompt(self) -> str | None:
        """Text of the last user turn; None for raw text and for chats without a user turn."""
        for message in reversed(self.messages or ()):
            if message.role == "user":
                return message.content
        return None

    @property
    def answer(self) -> str:
        """Text of the answer, or the raw text."""
        return self.messages[-1].content if self.messages is not None else str(self.text)


def one_line(text: object, limit: int = 80) -> str:
    """Make text fit into one line of an error message: no control characters, at most `limit` characters."""
    line = "".join(char if char.isprintable() else "?" for char in str(text))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def show_names(names: Sequence[object]) -> str:
    """List column names; what does not look like a name (a CSV file without a header line) is not shown."""
    shown = [str(name) if _LOOKS_LIKE_A_NAME.fullmatch(str(name)) else "<not a name>" for name in names[:12]]
    rest = [f"and {len(names) - 12} more"] if len(names) > 12 else []
    return ", ".join(shown + rest) or "none"


def _kind(value: object) -> str:
    """Name a value's type in words, without the value."""
    if value is None:
        return "empty (null)"
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def _text(value: object, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {column} is {_kind(value)}, text is needed")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"{where}: {column} has half a character (a lone surrogate), valid Unicode is needed"
        ) from None
    return value


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        found = "an empty list" if isinstance(value, list | tuple) else _kind(value)
        raise UsageError(f"{where}: messages is {found}, a list of {{role, content}} is needed")
    turns = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, Mapping) or "role" not in turn or "content" not in turn:
            raise UsageError(f"{where}: message {number} is not an object with role and content")
        role = turn["role"]
        if role not in ROLES:
            found = show_names([role]) if isinstance(role, str) else _kind(role)
            raise UsageError(f"{where}: the role of message {number} is {found}, accepted are {', '.join(ROLES)}")
        if role == "system" and number > 1:
            raise UsageError(f"{where}: message {number} is a system turn, which is accepted only as the first message")
        turns.append(Message(role, _text(turn["content"], f"the content of message {number}", where)))
    if turns[-1].role != "assistant":
        raise UsageError(f"{where}: the last message is the {turns[-1].role}'s, the assistant's answer is needed")
    return tuple(turns)


def check_columns(columns: Mapping[str, str] | None, name: str) -> dict[str, str]:
    """Check a mapping of our column names to the file's.

    Raises:
        UsageError: a key is not one of our names, or a value is not text.
    """
    columns = dict(columns or {})
    for ours, theirs in columns.items():
        if ours not in _NAMES:
            raise UsageError(f"{name}: column {one_line(ours)!r} is unknown, accepted are {', '.join(sorted(_NAMES))}")
        if not isinstance(theirs, str):
            raise UsageError(f"{name}: column {ours} is mapped to {_kind(theirs)}, a column name is needed")
    return columns


def _shape(found: Sequence[str], columns: Mapping[str, str], where: str) -> tuple[str, ...]:
    """Choose which columns make the example; shapes with columns the user has mapped come first."""
    missing = [theirs for theirs in columns.values() if theirs not in found]
    if missing:
        names = ", ".join(one_line(name) for name in missing)
        raise UsageError(f"{where}: column {names} not found, the file has {show_names(found)}")
    available = set(found) | set(columns)
    possible = [shape for shape in SHAPES if available.issuperset(shape)]
    if not possible:
        raise UsageError(f"{where}: found columns {show_names(found)}, accepted are {ACCEPTED}")
    return max(possible, key=lambda shape: sum(name in columns for name in shape))


def _record(row: object, shape: tuple[str, ...], columns: Mapping[str, str], number: int, where: str) -> Record:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: the row is {_kind(row)}, an object is needed")
    needed = [columns.get(name, name) for name in shape]
    for column in needed:
        if column not in row:
            raise UsageError(f"{where}: column {one_line(column)} is missing, the row has {show_names(list(row))}")
    paraphrase = next(
        (row[key] for key in (columns.get(name, name) for name in OPTIONAL[1:]) if row.get(key) is not None), None
    )
    identity = row.get(columns.get("id", "id"))
    if identity is None:
        identity = str(number)
    elif isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity) if abs(identity) < 10**30 else str(number)
    identity = _text(identity, "id", where)
    paraphrase = None if paraphrase is None else _text(paraphrase, "paraphrase", where).strip() or None
    values = [row[column] for column in needed]
    if shape == ("messages",):
        return Record(identity, _messages(values[0], where), None, paraphrase)
    texts = [_text(value, one_line(column), where) for value, column in zip(values, needed, strict=True)]
    if shape == ("text",):
        return Record(identity, None, texts[0], paraphrase)
    return Record(identity, (Message("user", texts[0]), Message("assistant", texts[1])), None, paraphrase)


def rows_to_records(
    rows: Sequence[object], columns: Mapping[str, str], *, where: str, first: int = 0, taken: set[str] | None = None
) -> list[Record]:
    """Turn the rows of one file into records.

    All rows have the shape of the first. A repeated id gets `#<row number>` appended, so that ids stay unique.

    Args:
        rows: objects with named columns, or plain strings (raw text).
        columns: our column names to the file's.
        where: how errors name the file.
        first: the 0-based number of the first row, for files that continue others.
        taken: ids already used by other files of the same source; extended in place.

    Raises:
        UsageError: wrong columns or types. The message names the row, counted from 1, and never shows its content.
    """
    taken = set() if taken is None else taken
    shape: tuple[str, ...] | None = None
    records = []
    for index, row in enumerate(rows):
        spot = f"{where}: row {index + 1} (counted from 1)"
        number = first + index
        if isinstance(row, str) and shape is None:
            record = Record(str(number), None, _text(row, "the row", spot))
        else:
            if shape is None and index > 0:
                raise UsageError(f"{spot}: the row is {_kind(row)}, the rows before are text")
            if shape is None and isinstance(row, Mapping):
                shape = _shape(list(row), columns, where)
            record = _record(row, shape or (), columns, number, spot)
        unique = record.id
        while unique in taken:
            unique = f"{unique}#{number}"
        taken.add(unique)
        records.append(record if unique == record.id else replace(record, id=unique))
    return records
