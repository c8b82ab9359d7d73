"""The run folder: absent, resumable or complete, never anything else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expunge._files import sync, write_whole
from expunge.errors import RunError, UsageError
from expunge.train._checkpoints import Checkpoints
from expunge.train._log import plain

RUN, LOG, RESULT, CHECKPOINTS, MODEL, SCORES = (
    "run.json",
    "log.jsonl",
    "result.json",
    "checkpoint",
    "model",
    "scores",
)


class RunFolder:
    """Paths of a run, written so that a reader never sees half a file.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        checkpoints: of the run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.checkpoints = Checkpoints(self.path / CHECKPOINTS)

    def check_free(self) -> None:
        """Refuse a folder in which something is.

        Raises:
            UsageError: it exists and is not an empty folder; says how to resume a run that can be.
        """
        if self.path.is_dir() and any(self.path.iterdir()):
            resumable = (self.path / RUN).is_file() and not (self.path / RESULT).is_file()
            hint = f"; `expunge resume {self.path}` continues it" if resumable else ""
            raise UsageError(f"out: {self.path} is not empty, accepted is a new or empty folder{hint}")
        if self.path.resolve() == Path.cwd():
            raise UsageError(f"out: {self.path} is the current folder, accepted is a new or empty folder elsewhere")
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"out: {self.path} is a file, accepted is a new or empty folder")

    def create(self, run: dict[str, Any]) -> None:
        """Make the folder with its `run.json`, aside and then renamed.

        Raises:
            RunError: it cannot be written.
        """
        aside = self.path.with_name(f".{self.path.name}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            (aside / SCORES).mkdir(parents=True)
            write_whole(aside / RUN, lambda path: path.write_text(_json(run), encoding="utf-8"))
            os.replace(aside, self.path)
            sync(self.path.parent)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(f"out: cannot write {self.path}: {error.strerror}") from None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes off the run inside the block, and remove what a killed one left half-written.

        The lock ends with the process, however it ends. Systems without `flock` have none.

        Raises:
            UsageError: another process works on this run.
        """
        with (self.path / RUN).open("rb") as file:
            if os.name == "posix":
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UsageError(
                        f"{self.path}: another process works on this run, accepted is a run that was interrupted"
                    ) from None
                except OSError:  # a file system without locks
                    pass
            for place in (self.path, self.path / SCORES, self.path / CHECKPOINTS):
                for left in [*place.glob(".*.part"), *place.glob(f".{MODEL}.*")]:
                    shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
            yield

    def read_run(self) -> dict[str, Any]:
        """Read `run.json`.

        Raises:
            UsageError: this is no run folder.
        """
        file = self.path / RUN
        if not file.is_file():
            raise UsageError(f"{self.path}: found no {RUN}, accepted is the folder of an interrupted run")
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file}: cannot be read: {error}") from None
        needed = ("config", "resolved_masc", "tolerance_source", "versions", "weights", "data", "threads")
        missing = [name for name in needed if not isinstance(values, dict) or name not in values]
        if missing:
            raise UsageError(f"{file}: found no {missing[0]}, accepted is the folder of an interrupted run")
        return values

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all.

        Raises:
            RunError: it cannot be written.
        """
        try:
            write_whole(self.path / name, lambda path: path.write_text(_json(values), encoding="utf-8"))
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror}") from None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file of this folder; None where it is not there yet."""
        file = self.path / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _json(values: dict[str, Any]) -> str:
    return json.dumps(plain(values), indent=2, ensure_ascii=False) + "\n"
