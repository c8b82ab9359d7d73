"""The run folder: absent, resumable or complete, never anything else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from expunge.errors import RunError, UsageError
from expunge.train._log import plain

RUN, LOG, RESULT, STATE, MODEL, SCORES = (
    "run.json",
    "log.jsonl",
    "result.json",
    "checkpoint/state.pt",
    "model",
    "scores",
)


class RunFolder:
    """Paths of a run, written so that a reader never sees half a file.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()

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
            (aside / "checkpoint").mkdir()
            (aside / RUN).write_text(_json(run), encoding="utf-8")
            os.replace(aside, self.path)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(f"out: cannot write {self.path}: {error.strerror}") from None

    def has_state(self) -> bool:
        """Whether there is a checkpoint."""
        return (self.path / STATE).is_file()

    def read_run(self) -> dict[str, Any]:
        """Read `run.json`.

        Raises:
            UsageError: this is no run folder, or the run is complete.
        """
        file = self.path / RUN
        if not file.is_file():
            raise UsageError(f"{self.path}: found no {RUN}, accepted is the folder of an interrupted run")
        if (self.path / RESULT).is_file():
            raise UsageError(f"{self.path}: this run is complete; its model is in {self.path / MODEL}")
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
        """Write a JSON file whole or not at all."""
        self._write(name, lambda path: path.write_text(_json(values), encoding="utf-8"))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file of this folder; None where it is not there yet."""
        file = self.path / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def write_state(self, state: dict[str, Any]) -> None:
        """Write the checkpoint whole or not at all."""
        self._write(STATE, lambda path: torch.save(state, path))

    def read_state(self) -> dict[str, Any] | None:
        """Read the checkpoint; None where there is none yet. Weights only: no code is run.

        Raises:
            UsageError: it cannot be read.
        """
        file = self.path / STATE
        if not file.is_file():
            return None
        try:
            return torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # torch and pickle raise many types for a damaged file
            raise UsageError(f"{file}: the checkpoint cannot be read: {str(error).splitlines()[0]}") from None

    def drop_checkpoint(self) -> None:
        """Remove the checkpoint of a complete run: it is as large as the model and no longer of use."""
        shutil.rmtree(self.path / "checkpoint", ignore_errors=True)

    def _write(self, name: str, write: Any) -> None:
        target = self.path / name
        aside = target.with_name(f".{target.name}.part")
        try:
            write(aside)
            os.replace(aside, target)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            aside.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise RunError(f"cannot write {target}: {reason}") from None


def _json(values: dict[str, Any]) -> str:
    return json.dumps(plain(values), indent=2, ensure_ascii=False) + "\n"
