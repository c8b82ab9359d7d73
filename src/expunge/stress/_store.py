"""Finished tests on disk: one file each, under the key of what they were done with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from expunge.errors import UsageError
from expunge.stress._tests import Job, Outcome
from expunge.suites import MeasureSettings, Plan, Stamp, check_comparable, hash_of, write_json, writing

RESULT, TESTS = "stress.json", "tests"


def write_outcome(folder: Path, job: Job, stamp: Stamp, outcome: Outcome, seconds: float) -> None:
    """Write what a test gave: ids and numbers, no text.

    Args:
        folder: of the model.
        job: what was done.
        stamp: with which model, data and lengths.
        outcome: what it gave.
        seconds: that it took.

    Raises:
        RunError: it cannot be written.
    """
    with writing(folder):
        (folder / TESTS).mkdir(parents=True, exist_ok=True)
        values = {"test": job.test, "options": job.options, "stamp": dataclasses.asdict(stamp)}
        write_json(_file(folder, job, stamp.key), values | dataclasses.asdict(outcome) | {"seconds": seconds})


def read_outcome(folder: Path, job: Job, stamp: Stamp) -> Outcome | None:
    """A finished test of the same model, data, lengths and options; None where there is none.

    Raises:
        UsageError: its file cannot be read.
    """
    file = _file(folder, job, stamp.key)
    return _outcome(file, _read(file)) if file.is_file() else None


class StoredTests:
    """Tests in a results folder, whatever model they are of.

    Args:
        folder: with a finished `stress.json`.
        plan: the rows that are tested now.
        settings: how they are measured now.
        option: what messages call the folder.

    Raises:
        UsageError: they are of other rows, or were measured with other settings.
    """

    def __init__(self, folder: Path, plan: Plan, settings: MeasureSettings, option: str) -> None:
        self.fingerprint = str(_read(folder / RESULT).get("fingerprint"))
        self._files = {file: _read(file) for file in sorted((folder / TESTS).glob("*.json"))}
        for values in self._files.values():
            try:
                stamp = Stamp(**values["stamp"])
            except (KeyError, TypeError):
                raise _unreadable(folder) from None
            check_comparable(str(folder), stamp, plan, settings, option)

    def find(self, job: Job) -> Outcome | None:
        """What a test with the same options gave; None where it was not done."""
        for file, values in self._files.items():
            same = (values.get("test"), values.get("options")) == (job.test, json.loads(json.dumps(job.options)))
            if same and values["stamp"]["fingerprint"] == self.fingerprint:
                return _outcome(file, values)
        return None


def stored_tests(spec: str, plan: Plan, settings: MeasureSettings, option: str) -> StoredTests | None:
    """Results that stand in the place of a model; None where the text names a model."""
    folder = Path(spec).expanduser()
    return StoredTests(folder, plan, settings, option) if (folder / RESULT).is_file() else None


def check_folder(folder: Path, fingerprint: str | None = None) -> None:
    """Refuse a results folder that is a file, or has a finished result of another model.

    Args:
        folder: where results go.
        fingerprint: of the model; None: not known yet.

    Raises:
        UsageError: it is refused.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"out: {folder} is a file, accepted is a folder")
    file = folder / RESULT
    if fingerprint is not None and file.is_file() and _read(file).get("fingerprint") != fingerprint:
        raise UsageError(f"out: {folder} has results of another model, accepted is a new folder, or one of this model")


def _file(folder: Path, job: Job, key: str) -> Path:
    return folder / TESTS / f"{job.test}-{hash_of([key, job.test, job.options])[:16]}.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise _unreadable(file) from None
    if not isinstance(values, dict):
        raise _unreadable(file)
    return values


def _outcome(file: Path, values: dict[str, Any]) -> Outcome:
    try:
        return Outcome(values["values"], values["details"], tuple(values["notes"]))
    except (KeyError, TypeError):
        raise _unreadable(file) from None


def _unreadable(file: Path) -> UsageError:
    return UsageError(f"{file}: found no result of a stress test, accepted is one written by expunge")
