"""Results on disk: tables under the key of what they were measured with, and the evaluation beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expunge.errors import RunError, UsageError
from expunge.scoring import AnswerTable, ScoreTable, TokenTable
from expunge.suites._encode import MeasureSettings
from expunge.suites._measure import Measured
from expunge.suites._plan import Plan

MEASUREMENT, EVALUATION, ROWS, SCORES, RETRAINED, ORIGINAL = (
    "measurement.json",
    "evaluation.json",
    "rows.json",
    "scores",
    "retrained",
    "original",
)
# Raised when what tables hold changes, so that older ones are not taken for new.
_FORMAT = 1
_PACKAGES = ("expunge", "torch", "transformers", "tokenizers", "numpy", "scipy", "rapidfuzz")


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What tables were measured with; two stamps with one key have the same tables.

    Attributes:
        key: hash of all below but versions and device.
        fingerprint: of the weights.
        tokens: hash of the rows as token ids, which covers tokenizer and template.
        data: hash of each table's texts.
        settings: of the measurement.
        dtype: of the weights.
        device: where it ran.
        versions: of the packages.
    """

    key: str
    fingerprint: str
    tokens: str
    data: dict[str, str]
    settings: dict[str, Any]
    dtype: str
    device: str
    versions: dict[str, str]


def make_stamp(
    plan: Plan, settings: MeasureSettings, *, fingerprint: str, tokens: list[Any], dtype: str, device: str
) -> Stamp:
    """Stamp of a measurement."""
    hashed = hash_of(tokens)
    values = [_FORMAT, fingerprint, hashed, plan.hashes(), dataclasses.asdict(settings), dtype]
    return Stamp(
        hash_of(values),
        fingerprint,
        hashed,
        plan.hashes(),
        dataclasses.asdict(settings),
        dtype,
        device,
        {name: importlib.metadata.version(name) for name in _PACKAGES},
    )


def hash_of(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def read_stamp(folder: Path) -> Stamp | None:
    """The stamp of a folder's tables; None where it has none.

    Raises:
        UsageError: it cannot be read.
    """
    file = folder / MEASUREMENT
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return Stamp(**{field.name: values[field.name] for field in dataclasses.fields(Stamp)})
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(f"{file}: found no stamp of a measurement, accepted is one written by expunge") from None


def write_measured(folder: Path, measured: Measured, stamp: Stamp) -> None:
    """Write all tables, the stamp last: a folder with a stamp is complete.

    Raises:
        RunError: it cannot be written.
    """
    with writing(folder):
        (folder / SCORES).mkdir(parents=True, exist_ok=True)
        (folder / MEASUREMENT).unlink(missing_ok=True)
        for old in (folder / SCORES).glob("*.parquet"):
            old.unlink()
        for name, table in measured.scores.items():
            table.to_parquet(folder / SCORES / f"{name}.parquet")
        for name, tokens in measured.tokens.items():
            tokens.to_parquet(folder / SCORES / f"{name}.tokens.parquet")
        for name, answers in measured.answers.items():
            answers.to_parquet(folder / SCORES / f"{name}.parquet")
        write_json(folder / MEASUREMENT, dataclasses.asdict(stamp) | {"notes": list(measured.notes)})


def read_measured(folder: Path, plan: Plan) -> Measured:
    """Read the tables of a plan.

    Raises:
        UsageError: a table is missing or damaged.
    """
    scores = {table.name: ScoreTable.from_parquet(folder / SCORES / f"{table.name}.parquet") for table in plan.texts}
    tokens = {
        table.name: TokenTable.from_parquet(folder / SCORES / f"{table.name}.tokens.parquet")
        for table in plan.texts
        if table.level == "tokens"
    }
    answers = {
        table.name: AnswerTable.from_parquet(folder / SCORES / f"{table.name}.parquet") for table in plan.questions
    }
    stamp = read_stamp(folder)
    assert stamp is not None
    notes = json.loads((folder / MEASUREMENT).read_text(encoding="utf-8")).get("notes", [])
    return Measured(plan, scores, tokens, answers, stamp.fingerprint, tuple(notes))


def check_comparable(folder: str, theirs: Stamp, plan: Plan, settings: MeasureSettings, option: str) -> None:
    """Refuse stored tables of other rows or settings.

    Raises:
        UsageError: names what differs.
    """
    hashes = plan.hashes()
    differing = sorted(name for name, value in hashes.items() if theirs.data.get(name) != value)
    if differing:
        raise UsageError(
            f"{option}: the tables in {folder} are of other rows ({differing[0]}), accepted are the same rows: "
            "evaluate that model with the same --data and --rows"
        )
    ours = dataclasses.asdict(settings)
    # The batch size changes results by rounding only.
    other = [name for name, value in ours.items() if name != "batch_size" and theirs.settings.get(name) != value]
    if other:
        raise UsageError(
            f"{option}: the tables in {folder} were made with {other[0]} {theirs.settings.get(other[0])!r}, "
            f"accepted is {ours[other[0]]!r}"
        )


def write_json(path: Path, values: Any, *, indent: int | None = 2) -> None:
    """Write JSON whole or not at all; what is not finite becomes null."""
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.write_text(json.dumps(_plain(values), indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a failure to write into an error of one line."""
    try:
        yield
    except OSError as error:
        raise RunError(f"out: cannot write to {folder}: {error.strerror or error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
