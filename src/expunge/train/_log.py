"""The run log: one JSON object a line, each written whole and at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from expunge._files import sync
from expunge.errors import RunError


class RunLog:
    """Appends events to `log.jsonl`.

    Args:
        path: the file; made on the first event.
        keep: bytes of an existing file to keep; what follows was written after the checkpoint that is resumed.
        listener: told of every event after it was written.
    """

    def __init__(
        self, path: Path, keep: int = 0, *, listener: Callable[[str, Mapping[str, Any]], None] | None = None
    ) -> None:
        self.path, self.listener = path, listener
        if path.exists() or keep:
            with path.open("ab") as file:
                file.truncate(min(keep, file.tell()))

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def save(self) -> int:
        """Wait until the file is on the disk; returns its position.

        Raises:
            RunError: the disk reports an error.
        """
        try:
            if self.path.exists():
                sync(self.path)
        except OSError as error:
            raise RunError(f"log: cannot write {self.path}: {error.strerror}") from None
        return self.position

    def write(self, event: str, **values: Any) -> None:
        """Append one event.

        Raises:
            RunError: the file cannot be written.
        """
        line = json.dumps({"event": event, **{key: plain(value) for key, value in values.items()}}, ensure_ascii=False)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RunError(f"log: cannot write {self.path}: {error.strerror}") from None
        if self.listener is not None:
            self.listener(event, values)


def plain(value: Any) -> Any:
    """JSON values only: a number that is not finite becomes None, since JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
