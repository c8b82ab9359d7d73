"""What a ledger says of a request, taken from the folder of a finished run."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expunge._files import shown_model
from expunge.errors import UsageError

# Options that name places: an entry is handed over, and a folder's name is nobody's business.
_PLACES = ("model", "forget", "retain", "holdout", "out")
_RESULTS = ("forgotten", "reason", "tolerance", "tolerance_source", "steps", "stopped_at", "seconds", "max_logit_error")
_MEANS = ("forget_before", "forget_after", "retain_before", "retain_after")


@dataclass(frozen=True)
class Entry:
    """A request, before it is signed.

    Attributes:
        request: its name, as the person or the ticket has it.
        versions: of the packages that did it.
        config: resolved, without folders.
        data: how many rows of each file; no plain hash of them, which could be guessed.
        model_before: name and fingerprint.
        model_after: name and fingerprint.
        results: of the run, without ids.
        certificate: upper bounds on what the saved model still gives the examples; None where not measured.
        files: SHA-256 of the run's own files.
        rows: texts of each row by part ("text", "answer"); the ledger keeps keyed hashes of them only.
    """

    request: str
    versions: Mapping[str, Any]
    config: Mapping[str, Any]
    data: Mapping[str, Any]
    model_before: Mapping[str, Any]
    model_after: Mapping[str, Any]
    results: Mapping[str, Any]
    certificate: Mapping[str, Any] | None
    files: Mapping[str, str]
    rows: Sequence[Mapping[str, str]] = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse a request without a usable name."""
        if not self.request.strip() or len(self.request) > 200 or not self.request.isprintable():
            raise UsageError(
                f"request: found {self.request[:40]!r}, accepted is a name of 1 to 200 printable characters"
            )

    def fields(self) -> dict[str, Any]:
        """JSON values, without the texts."""
        names = ("versions", "config", "data", "model_before", "model_after", "results", "files")
        found = {name: dict(getattr(self, name)) for name in names}
        return {"request": self.request, "certificate": self.certificate, **found}


def entry_from_run(folder: str | Path, request: str, *, forget: str | Path | None = None) -> Entry:
    """Read the entry of a finished run.

    Args:
        folder: of the run.
        request: name of the request.
        forget: file that was forgotten; None: where the run's configuration says. The texts are read to hash them.

    Raises:
        UsageError: the run is not finished, or the file is not there or has another number of rows.
    """
    place = Path(folder).expanduser()
    run, result = _json(place / "run.json"), _json(place / "result.json")
    try:
        return _entry(place, run, result, request, forget)
    except (KeyError, TypeError) as error:
        raise UsageError(f"{place}: found a run without {error}, accepted is the folder of a finished run") from None


def _entry(place: Path, run: dict[str, Any], result: dict[str, Any], request: str, forget: str | Path | None) -> Entry:
    config = run["config"]
    source = str(forget or config["forget"])
    rows = _texts(source, config.get("columns") or {})
    expected = run["data"]["forget"]["records"]
    if len(rows) != expected:
        raise UsageError(f"forget: {source} has {len(rows)} rows, accepted are the {expected} of the run")
    counts = {name: _counts(run["data"].get(name)) for name in ("forget", "retain", "holdout", "earlier")}
    return Entry(
        request=request,
        versions=run["versions"],
        config=_without_places(config) | {"resolved_masc": run.get("resolved_masc")},
        data={name: value for name, value in counts.items() if value},
        model_before={"name": shown_model(config["model"]), "fingerprint": run["weights"]},
        model_after={"name": Path(result["model"]).name, "fingerprint": result["fingerprint"]},
        results={name: result.get(name) for name in (*_RESULTS, *_MEANS)} | {"left": len(result["left"])},
        certificate=_certificate(place / "scores" / "forget-after.parquet"),
        files={name: _sha256(place / name) for name in ("result.json", "log.jsonl") if (place / name).is_file()},
        rows=rows,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}), accepted is the folder of a finished run"
        ) from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: found no JSON object, accepted is the folder of a finished run")
    return values


def _texts(source: str, columns: Mapping[str, str]) -> list[dict[str, str]]:
    # NOTE: imported here since the room of the data loads torch, which reading a ledger does not need.
    from expunge.data import read_records

    found = []
    for record in read_records(source, columns=dict(columns)):
        if record.messages is None:
            found.append({"text": record.answer})
        else:
            turns = [message.content for message in record.messages if message.role != "system"]
            found.append({"text": "\n".join(turns), "answer": record.answer})
    return found


def _counts(part: Mapping[str, Any] | None) -> dict[str, int] | None:
    if part is None:
        return None
    return {"records": part["records"], "rows": part["rows"], "dropped": len(part.get("dropped", ()))}


def _without_places(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in (*_PLACES, "earlier", "columns")}
    places = {name: config[name] for name in _PLACES if isinstance(config.get(name), str)}
    return kept | {name: shown_model(value) if name == "model" else Path(value).name for name, value in places.items()}


def _certificate(path: Path) -> dict[str, Any] | None:
    """What the score table of the saved model says, without the ids."""
    if not path.is_file():
        return None
    import pyarrow.parquet as pq

    wanted = ("tokens", "violation", "certificate", "logprob_sum")
    table = pq.read_table(path)
    columns = {name: table[name].to_pylist() if name in table.column_names else [] for name in wanted}
    bounds = [value for value in columns["certificate"] if value is not None]
    violations = [value for value in columns["violation"] if value is not None]
    return {
        "meaning": "nats; log-probability of an example's answer is at most its certificate, the sum of log sigma(m_t)",
        "examples": table.num_rows,
        "tokens": sum(columns["tokens"]),
        "certified": len(bounds),
        "highest": max(bounds, default=None),
        "median": statistics.median(bounds) if bounds else None,
        "violation_mean": statistics.fmean(violations) if violations else None,
        "violation_highest": max(violations, default=None),
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
