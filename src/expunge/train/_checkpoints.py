"""The checkpoints of a run: each whole or not there, the last two kept, the newest sound one read."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from expunge._files import write_whole
from expunge.errors import RunError, UsageError

KEPT = 2
_NAME = re.compile(r"state-(\d{6,})\.pt")


class Checkpoints:
    """Files `state-000123.pt`, numbered by the updates that were done.

    Args:
        folder: where they are; made with the first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._files())

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint beside its place, to the disk, and rename it; then remove all but it and the one before.

        Args:
            step: updates that were done.
            state: tensors and plain values.

        Raises:
            RunError: it cannot be written; the checkpoints before it are as they were.
        """
        target = self.folder / f"state-{step:06d}.pt"
        try:
            self.folder.mkdir(exist_ok=True)
            write_whole(target, lambda path: torch.save(state, path))
            # Later ones are of a way that was left: they were damaged, and the run went on from an earlier one.
            files = self._files()
            former = [number for number in sorted(files) if number < step]
            for number in set(files) - {step, *former[1 - KEPT :]}:
                files[number].unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            kept = f"; {self.folder} holds the checkpoint before it" if self else ""
            raise RunError(f"checkpoint: cannot write {target}: {reason}{kept}") from None

    def read(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Read the newest checkpoint that is sound. Weights only: no code is run.

        Returns:
            The state, None where there is no checkpoint yet; and a line for each one that was passed over.

        Raises:
            UsageError: there are checkpoints and none is sound.
        """
        notes: list[str] = []
        files = self._files()
        for number in sorted(files, reverse=True):
            try:
                return _load(files[number]), notes
            except Exception as error:  # torch, pickle and zipfile raise many types for a damaged file
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                notes.append(f"checkpoint {files[number].name} is damaged ({reason}); the one before it was used")
        if files:
            raise UsageError(
                f"{self.folder}: found {len(files)} checkpoints, each damaged; removing them lets "
                f"`expunge resume {self.folder.parent}` begin again"
            )
        return None, notes

    def drop(self) -> None:
        """Remove all: those of a complete run are of no use, and as large as what was trained."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _files(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        return {int(found[1]): path for path in self.folder.iterdir() if (found := _NAME.fullmatch(path.name))}


def _load(path: Path) -> dict[str, Any]:
    # NOTE: torch does not compare the checksums that it writes: a changed byte would be a changed weight.
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} is not as it was written")
    state = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(state, dict):
        raise ValueError(f"found a {type(state).__name__}")
    return state
