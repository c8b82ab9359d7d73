"""The rows of a target as files, checked before anything runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.compare._study import Part, Study, Target
from expunge.data import Record, check_pair, is_hub_name, read_records, read_rows
from expunge.errors import RunError, UsageError
from expunge.suites import SUITES, EvaluateSettings, Source, check_spec

_WEIGHTS = (".safetensors", ".gguf", ".bin")
_CONFIGS = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class Placed:
    """A target with everything that its runs read.

    Attributes:
        target: of the comparison.
        files: path, or name on the hub, of each part.
        data: what the suite reads.
        settings: of the evaluation of this target.
        digests: what the results stand on: a hash of each local file and model, a name where it is on the hub.
    """

    target: Target
    files: Mapping[str, str]
    data: str
    settings: EvaluateSettings
    digests: Mapping[str, Any]


def check_target(study: Study, target: Target) -> None:
    """Refuse a target whose local files are missing, malformed or overlap; what is on the hub is left to the runs.

    Raises:
        UsageError: names target and file.
    """
    where = f"targets: {target.name}"
    try:
        check_spec("model", target.model)
        if target.retrained is not None:
            check_spec("retrained", target.retrained)
        records = {name: _records(part, name) for name, part in target.parts.items()}
        forget, retain, holdout = (records.get(name) for name in ("forget", "retain", "holdout"))
        if forget is not None and retain is not None:
            check_pair(forget, retain, allow_overlap=bool(study.options.get("allow_overlap")))
        for name, others in (("forget", forget), ("retain", retain)):
            if others is not None and holdout is not None:
                check_pair(others, holdout, names=(name, "holdout"))
        if target.data is not None and not is_hub_name(target.data):
            SUITES[study.suite].read(Source(target.data, study.evaluate.rows), _split(study, target))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def place(study: Study, target: Target, out: Path) -> Placed:
    """Write the parts that are selections of rows as files of their own, and hash what the results stand on.

    Args:
        study: the comparison.
        target: one of its targets, checked.
        out: folder of the comparison.

    Raises:
        UsageError: a part cannot be read, or was written of other rows before.
        RunError: it cannot be written.
    """
    folder = out / "data" / target.name
    files = {}
    for name, part in target.parts.items():
        own = part.rows is None and part.split == "train" and target.data is not None
        files[name] = part.source if own else str(_write(part, name, folder))
    data = target.data if target.data is not None else str(folder)
    settings = dataclasses.replace(study.evaluate, split=_split(study, target))
    digests: dict[str, Any] = {name: _digest(file) for name, file in files.items()}
    digests["model"] = weights_digest(target.model)
    digests["retrained"] = None if target.retrained is None else weights_digest(target.retrained)
    digests["data"] = data if is_hub_name(data) else _plan_digest(study, data, settings)
    return Placed(target, files, data, settings, digests)


def _split(study: Study, target: Target) -> str | None:
    return target.split if study.suite == "tofu" else None


def _records(part: Part, name: str) -> list[Record] | None:
    """The rows of a part; None where they are on the hub."""
    if is_hub_name(part.source):
        return None
    return _selected(read_records(part.source, name=name, split=part.split, allow_hub=False), part, name)


def _selected(rows: list[Any], part: Part, name: str) -> list[Any]:
    if part.rows is None:
        return rows
    start, end = (int(number) if number else None for number in part.rows.split(":"))
    chosen = rows[start:end]
    if not chosen:
        raise UsageError(
            f"{name}: rows: found {part.rows} of {len(rows)} rows, accepted is a selection that leaves one"
        )
    return chosen


def _write(part: Part, name: str, folder: Path) -> Path:
    rows = _selected(read_rows(part.source, name=name, split=part.split), part, name)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path = folder / f"{name}.jsonl"
    try:
        if path.is_file():
            if path.read_text(encoding="utf-8") != text:
                raise UsageError(f"out: {path} holds other rows, accepted is a new folder, or the same rows")
            return path
        folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.part")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise RunError(f"out: cannot write {path}: {error.strerror}") from None
    return path


def _plan_digest(study: Study, data: str, settings: EvaluateSettings) -> str:
    plan = SUITES[study.suite].read(Source(data, settings.rows), settings.split)
    return hashlib.sha256(json.dumps(plan.hashes(), sort_keys=True).encode()).hexdigest()


def _digest(file: str) -> str:
    """SHA-256 of a file or of a folder's files; the name of what is on the hub."""
    path = Path(file).expanduser()
    if not path.exists():
        return file
    return _hash([path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()))


def weights_digest(spec: str) -> str:
    """SHA-256 of a local model's weights and configuration; the name of what is no local model.

    Args:
        spec: as `expunge unlearn` takes a model.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        return _hash(sorted(one for one in path.iterdir() if one.suffix in _WEIGHTS or one.name in _CONFIGS))
    return _digest(spec)


def _hash(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            total.update(f"{file.name}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}\0".encode())
    return total.hexdigest()
