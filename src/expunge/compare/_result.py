"""What a comparison found, as JSON and as a table."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.compare._cell import EVALUATION, RUN, STRESS, read_record
from expunge.compare._scales import distance_metrics, table_metrics
from expunge.compare._stress import shown_rows, stress_rows, stress_summary
from expunge.compare._study import Cell, Study
from expunge.compare._summary import distance, group
from expunge.compare._table import markdown
from expunge.errors import RunError

JSON, TABLE = "comparison.json", "comparison.md"
COUNTED = (
    "seconds of calibrating on the holdout, computing references, and training with its probes and its measurements "
    "of all examples (two at least, with every method); not of loading, saving and evaluating"
)
_STAGES = ("calibrate", "reference", "train")


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        values: as in `comparison.json`: "references", "cells" and "summary", and how they were measured.
    """

    values: Mapping[str, Any]

    @property
    def failed(self) -> list[str]:
        """Names of the cells that failed."""
        return [row["name"] for row in self.values["cells"] if row["state"] == "failed"]

    @property
    def exit_code(self) -> int:
        """0: every cell is complete; 1: one failed."""
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return dict(self.values)

    def to_markdown(self) -> str:
        """A table for each target, and what its columns are."""
        return markdown(self.values)

    def write(self, folder: Path) -> None:
        """Write `comparison.json` and `comparison.md`, whole or not at all.

        Raises:
            RunError: they cannot be written.
        """
        texts = {JSON: json.dumps(self.values, indent=2, ensure_ascii=False) + "\n", TABLE: self.to_markdown()}
        for name, text in texts.items():
            aside = folder / f".{name}.part"
            try:
                aside.write_text(text, encoding="utf-8")
                os.replace(aside, folder / name)
            except OSError as error:
                raise RunError(f"out: cannot write to {folder}: {error.strerror}") from None


def collect(
    study: Study, cells: Sequence[tuple[Cell, Path]], references: Mapping[str, Path], workers: int
) -> Comparison:
    """Read what the cells and reference models left.

    Args:
        study: the comparison.
        cells: with their folders.
        references: by target, the folder that holds the evaluations `target` and `retrained`.
        workers: that the cells were run with.
    """
    models = {name: _references(study.suite, folder) for name, folder in references.items()}
    rows = [_row(study, cell, folder, models[cell.target.name]) for cell, folder in cells]
    return Comparison(
        {
            "name": study.name,
            "suite": study.suite,
            "expunge": importlib.metadata.version("expunge"),
            "axes": list(study.axes),
            "table": list(table_metrics(study.suite)),
            "distance": list(distance_metrics(study.suite)),
            "counted": COUNTED,
            "workers": workers,
            "machine": next((row["machine"] for row in rows if row["machine"]), None),
            "rows": dict(study.evaluate.rows),
            "file": study.source,
            "references": models,
            "cells": rows,
            "summary": [_with_stress(summary, rows, study.suite) for summary in group(rows)],
        }
    )


def _with_stress(summary: dict[str, Any], rows: Sequence[Mapping[str, Any]], suite: str) -> dict[str, Any]:
    """A summary with the means of its stress tests."""
    key = ("target", "method", "optimizer")
    members = [row for row in rows if all(row[name] == summary[name] for name in key)]
    return summary | {"stress": stress_summary(members, suite)}


def _references(suite: str, folder: Path) -> dict[str, Any]:
    """Metrics of the target and of the retrained model, and the target's distance to it."""
    found = {role: _metrics(folder / role) for role in ("target", "retrained")}
    theirs = found["retrained"]
    models: dict[str, Any] = {}
    for role, metrics in found.items():
        if metrics is not None:
            metrics["stress"] = _stress(folder / f"{role}-stress", suite)
            away = distance(metrics["metrics"], theirs and theirs["metrics"], distance_metrics(suite))
            models[role] = metrics | {"distance": away.value if role == "target" else 0.0}
    return models


def _row(study: Study, cell: Cell, folder: Path, models: Mapping[str, Any]) -> dict[str, Any]:
    record = read_record(folder) or {"state": "not run", "error": None, "resumed": False}
    row: dict[str, Any] = {
        "name": cell.name,
        "target": cell.target.name,
        "method": cell.method.name,
        "optimizer": None if cell.optimizer is None else cell.optimizer.name,
        "seed": cell.seed,
        "baseline": ({"method": "masc"} | dict(study.options) | cell.options)["method"] != "masc",
        **{name: record[name] for name in ("state", "error", "resumed")},
        "machine": None,
        "seconds": None,
        "distance": None,
        "metrics": {},
        "flags": [],
        "stress": None,
    }
    if record["state"] != "complete":
        return row
    result, run = _read(folder / RUN / "result.json"), _read(folder / RUN / "run.json")
    row["machine"] = {name: run[name] for name in ("device", "dtype", "threads", "versions")}
    row["seconds"] = sum(result["seconds"].get(name, 0.0) for name in _STAGES)
    row["stages"] = result["seconds"]
    row |= {name: result[name] for name in ("steps", "stopped_at", "tolerance", "tolerance_source", "forgotten")}
    row["left"] = len(result["left"])
    measured = _metrics(folder / EVALUATION)
    assert measured is not None
    theirs = models.get("retrained")
    away = distance(measured["metrics"], theirs and theirs["metrics"], distance_metrics(study.suite))
    row |= measured | {"stress": _stress(folder / STRESS)}
    return row | {"distance": away.value, "differences": away.differences, "distance_reason": away.reason}


def _stress(folder: Path, suite: str | None = None) -> list[dict[str, Any]] | None:
    """Rows of stress tests; with a suite, those that are shown. None where nothing was stressed."""
    if not (folder / "stress.json").is_file():
        return None
    rows = stress_rows(_read(folder / "stress.json"))
    return rows if suite is None else [dict(row) for row in shown_rows(rows, suite)]


def _metrics(folder: Path) -> dict[str, Any] | None:
    if not (folder / "evaluation.json").is_file():
        return None
    values = _read(folder / "evaluation.json")
    metrics = values["metrics"]
    return {
        "metrics": {one["name"]: one["value"] for one in metrics},
        "intervals": {one["name"]: one["interval"] for one in metrics if one["interval"] is not None},
        "missing": {one["name"]: one["reason"] for one in metrics if one["value"] is None},
        "flags": values["flags"],
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: cannot be read: {type(error).__name__}") from None
