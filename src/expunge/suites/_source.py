"""Finding a benchmark's files: a local folder in the layout it is distributed in, or a dataset on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expunge.data import read_rows
from expunge.errors import UsageError

_ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".txt")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SLICE = re.compile(r"(\d*):(\d*)")


class Source:
    """The data of a suite.

    Args:
        place: a folder, or a hub name "owner/name" where there is no such folder.
        rows: for each part of the data, which rows to take, as "start:end".

    Raises:
        UsageError: nothing there, or a selection that cannot be read.
    """

    def __init__(self, place: str | Path, rows: Mapping[str, str] | None = None) -> None:
        self.place = str(place)
        self.folder = Path(place).expanduser()
        self.is_folder = self.folder.is_dir()
        if not self.is_folder:
            missing = self.folder.exists() or (self.folder.parent.exists() and self.folder.parent != Path())
            if missing or _HUB.fullmatch(self.place) is None:
                raise UsageError(f"data: found no folder {self.place}, accepted is a folder or a hub name owner/name")
        self.slices = {name: _slice(name, text) for name, text in (rows or {}).items()}
        self._used: set[str] = set()

    def files(self, pattern: str) -> list[str]:
        """Names, without ending, of the folder's data files that match a pattern; empty on the hub."""
        if not self.is_folder:
            return []
        found = {path.name.removesuffix(path.suffix) for path in self.folder.iterdir() if path.suffix in _ENDINGS}
        return sorted(name for name in found if re.fullmatch(pattern, name))

    def find(self, name: str) -> Path | None:
        """The file of a table, such as "knowmem/forget_qa"; None where the folder has none."""
        if not self.is_folder:
            return None
        return next((path for end in _ENDINGS if (path := self.folder / f"{name}{end}").is_file()), None)

    def rows(self, part: str, name: str, *, needed: bool = False) -> list[dict[str, Any]] | None:
        """Rows of a table, those selected for the part.

        Args:
            part: what selections call it, such as "forget".
            name: of the table: a file, or on the hub a configuration, or a configuration and a split after a slash.
            needed: whether a missing table is an error.

        Returns:
            The rows; None where there is no such table.

        Raises:
            UsageError: a needed table is missing, a file cannot be read, or the selection leaves no row.
        """
        path = self.find(name)
        if path is not None:
            return self.select(part, read_rows(path, name=part, allow_hub=False))
        if self.is_folder:
            if needed:
                raise UsageError(f"data: found no {name}.jsonl (or .json, .parquet, .csv) in {self.place}")
            return None
        configuration, _, split = name.partition("/")
        try:
            return self.select(part, read_rows(f"{self.place}:{configuration}", name=part, split=split or "train"))
        except UsageError:
            if needed:
                raise
            return None

    def select(self, part: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take the rows selected for a part; each gets its number in the table as "#"."""
        numbered = [row | {"#": number} for number, row in enumerate(rows)]
        self._used.add(part)
        if part not in self.slices:
            return numbered
        chosen = numbered[self.slices[part]]
        if not chosen:
            raise UsageError(f"rows: {part} has {len(rows)} rows, the selection leaves none")
        return chosen

    def check_used(self, known: tuple[str, ...]) -> None:
        """Refuse selections of parts that no suite part is called.

        Raises:
            UsageError: names the first.
        """
        for part in self.slices:
            if part not in known:
                raise UsageError(f"rows: found {part!r}, accepted is one of {', '.join(known)}")
            if part not in self._used:
                raise UsageError(f"rows: a selection for {part!r} was given, but the data has no such part")


def text_of(row: Mapping[str, Any], column: str, part: str) -> str:
    """A text column of a row.

    Raises:
        UsageError: it is missing or no text; the message does not show the row.
    """
    value = row.get(column)
    if not isinstance(value, str):
        found = "none" if value is None else type(value).__name__
        raise UsageError(f"{part}: row {row['#'] + 1} (counted from 1): column {column} is {found}, a text is needed")
    return value


def texts_of(row: Mapping[str, Any], column: str, part: str) -> list[str]:
    """A column with a list of texts, or one text.

    Raises:
        UsageError: it is missing or holds something else.
    """
    value = row.get(column)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{part}: row {row['#'] + 1} (counted from 1): column {column} is no list of texts")
    return value


def row_id(row: Mapping[str, Any]) -> str:
    """The row's own id, else its number in the table."""
    own = row.get("id")
    return str(own) if isinstance(own, str | int) and not isinstance(own, bool) else str(row["#"])


def _slice(name: str, text: str) -> slice:
    match = _SLICE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"rows: {name}: found {text!r}, accepted is START:END, such as 0:100")
    start, end = (int(value) if value else None for value in match.groups())
    return slice(start, end)
