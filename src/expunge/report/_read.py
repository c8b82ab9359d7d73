"""What a run folder holds, as plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expunge.errors import UsageError
from expunge.report._texts import RowText, token_texts

TABLES = ("forget-before", "forget-after", "retain-before", "retain-after")
Columns = Mapping[str, list[Any]]


@dataclass(frozen=True)
class RunData:
    """Saved results of a run.

    Attributes:
        name: shown as the run's name.
        run: `run.json`.
        result: `result.json`; None: the run is not finished.
        log: events of `log.jsonl`, in order.
        tables: score tables that are there, by name ("forget-after"), as columns.
        tokens: token tables that are there, by "before" and "after", as columns with a list a row.
        evaluation: `evaluation.json` of `expunge evaluate`; None: not evaluated.
        stress: `stress.json` of `expunge stress`; None: not tested.
        texts: of the forget rows; None: not to be shown.
        hashes: keyed hash of each forget record, as in a ledger; None: not known.
    """

    name: str
    run: Mapping[str, Any]
    result: Mapping[str, Any] | None = None
    log: Sequence[Mapping[str, Any]] = ()
    tables: Mapping[str, Columns] = field(default_factory=dict)
    tokens: Mapping[str, Columns] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None
    stress: Mapping[str, Any] | None = None
    texts: Sequence[RowText] | None = field(default=None, repr=False)
    hashes: Sequence[str] | None = None

    def column(self, table: str, name: str) -> list[Any]:
        """A column of a score table; None for each row where it was not measured, [] without the table."""
        columns = self.tables.get(table, {})
        size = len(columns.get("id", ()))
        return list(columns.get(name) or [None] * size)


@dataclass(frozen=True)
class Point:
    """Where a model stands between forgetting and keeping; None: not measured.

    Attributes:
        name: of the model.
        forget: mean probability of the answers to forget, in [0, 1].
        retain: mean probability of the answers to keep, in [0, 1].
    """

    name: str
    forget: float | None
    retain: float | None


def read_run(
    folder: str | Path,
    *,
    name: str | None = None,
    show_text: bool = False,
    evaluation: str | Path | None = None,
    stress: str | Path | None = None,
    hashes: Sequence[str] | None = None,
) -> RunData:
    """Read what is in a run folder.

    Args:
        folder: of the run; it need not be finished.
        name: of the run; None: the folder's.
        show_text: also read the texts to forget, and the tokenizer in the saved model.
        evaluation: folder `expunge evaluate` wrote for the saved model; None: the run folder's own `evaluation`.
        stress: folder `expunge stress` wrote for the saved model; None: the run folder's own `stress`.
        hashes: keyed hash of each forget record, as in a ledger.

    Raises:
        UsageError: it is no run folder, a file in it cannot be read, or results are of another model.
    """
    place = Path(folder).expanduser()
    run = read_json(place / "run.json")
    if run is None or not isinstance(run.get("config"), dict):
        raise UsageError(f"{place}: found no run.json, accepted is the folder of a run")
    scores = place / "scores"
    named = {table: scores / f"{table}.parquet" for table in TABLES}
    result = read_json(place / "result.json")
    after = None if result is None else result.get("fingerprint")
    evaluated = _measured(place, "evaluation", "evaluate", evaluation, after)
    stressed = _measured(place, "stress", "stress", stress, after)
    lists = {when: scores / f"forget-{when}-tokens.parquet" for when in ("before", "after")}
    return RunData(
        name=name or place.resolve().name,
        run=run,
        result=result,
        log=_read_log(place / "log.jsonl"),
        tables={table: read_columns(path) for table, path in named.items() if path.is_file()},
        tokens={when: read_columns(path) for when, path in lists.items() if path.is_file()},
        evaluation=evaluated,
        stress=stressed,
        texts=token_texts(run, place) if show_text else None,
        hashes=hashes,
    )


def read_point(folder: str | Path, name: str) -> Point:
    """Read where a model stands, from an evaluation's folder or a run's.

    Args:
        folder: with `scores/forget.parquet` and `scores/retain.parquet`, or with those of a run after it.
        name: of the model.

    Raises:
        UsageError: there is no score table.
    """
    scores = Path(folder).expanduser() / "scores"
    means: dict[str, float | None] = {}
    for part in ("forget", "retain"):
        files = [scores / f"{part}.parquet", scores / f"{part}-after.parquet"]
        there = next((file for file in files if file.is_file()), None)
        means[part] = None if there is None else mean(probabilities(read_columns(there).get("logprob_mean") or []))
    if means["forget"] is None and means["retain"] is None:
        raise UsageError(f"{name}: found no score table in {scores}, accepted is the folder of an evaluation or a run")
    return Point(name, means["forget"], means["retain"])


def _measured(
    place: Path, name: str, command: str, given: str | Path | None, fingerprint: str | None
) -> dict[str, Any] | None:
    """What another command found of the run's model: where it was told, or in the run's folder."""
    folder = place / name if given is None else Path(given).expanduser()
    found = read_json(folder / f"{name}.json")
    if found is None:
        if given is not None:
            raise UsageError(f"{name}: found no {name}.json in {folder}, accepted is what `expunge {command}` wrote")
        return None
    theirs = (found.get("stamp") or {}).get("fingerprint")
    if theirs is not None and fingerprint is not None and theirs != fingerprint:
        raise UsageError(f"{name}: {folder} is of another model, accepted is one of the model in {place}")
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where the file is not there.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: found no JSON object, accepted is a file that expunge wrote")
    return values


def read_columns(path: Path) -> dict[str, list[Any]]:
    """Columns of a Parquet file; what is not finite becomes None.

    Raises:
        UsageError: it cannot be read, or has no column "id".
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = {name: [_plain(value) for value in values] for name, values in pq.read_table(path).to_pydict().items()}
    except (OSError, pa.ArrowInvalid):
        found = {}
    if "id" not in found:
        raise UsageError(f"{path}: found no table of scores, accepted is one that expunge wrote")
    return found


def probabilities(logprobs: Sequence[float | None]) -> list[float | None]:
    """Mean token log-probabilities as probabilities."""
    return [None if value is None else math.exp(value) for value in logprobs]


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of what was measured; None where nothing was."""
    measured = [value for value in values if value is not None]
    return math.fsum(measured) / len(measured) if measured else None


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_log(path: Path) -> tuple[dict[str, Any], ...]:
    """Events; a last line that is still being written is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"{path}: cannot be read, accepted is the log of a run") from None
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise UsageError(f"{path}: line {number} is no JSON object, accepted is the log of a run")
        events.append(event)
    return tuple(events)
