"""The stress tests of a comparison: their settings from a file, and what of their results a table shows."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expunge.compare._names import check_known, mapping, typed
from expunge.compare._summary import spread
from expunge.suites import EvaluateSettings

if TYPE_CHECKING:  # only a comparison with stress tests needs what they need
    from expunge.stress import StressSettings

# Of the texts to forget, what a model says of them.
_SHOWN = {"tofu": "forget_rouge_l", "mine": "forget_rouge_l", "muse": "verbmem"}
_KEPT = ("test", "setting", "metric", "before", "after", "change", "interval", "retrained", "recovered", "reason")


def parse_stress(value: object, evaluate: EvaluateSettings) -> StressSettings:
    """Settings from a list of tests, or from a mapping with the tests and their options.

    Args:
        value: as in a file.
        evaluate: rows, lengths and hardware.

    Raises:
        UsageError: an unknown name, or a value out of range.
    """
    from expunge.stress import TESTS, StressSettings

    hints = typing.get_type_hints(StressSettings)
    accepted = [one.name for one in dataclasses.fields(StressSettings) if one.name != "evaluate"]
    found = mapping("stress", {"tests": value} if isinstance(value, list) else value, accepted)
    for name in found.get("tests", ()):
        check_known("stress: tests", name, TESTS)
    values = {name: typed(f"stress: {name}", one, hints[name]) for name, one in found.items()}
    return StressSettings(evaluate=evaluate, **values)


def run_stress(
    model: str,
    suite: str,
    data: str,
    *,
    out: Path,
    settings: StressSettings,
    progress: Callable[[str, int, int], None],
    retrained: str | None = None,
    original: str | None = None,
) -> None:
    """Put a model to the tests; those that the folder has with the same options are not done again.

    Args:
        model: its folder.
        suite: of the comparison.
        data: the suite's.
        out: results folder.
        settings: which tests, and how.
        progress: called with (stage, done, in all).
        retrained: results folder of the retrained model's tests.
        original: results folder of the target's tests.
    """
    from expunge.stress import stress

    others = {"retrained": retrained, "original": original}
    stress(model, suite, data, out=out, settings=settings, progress=progress, **others)


def define_stress(settings: StressSettings) -> dict[str, Any]:
    """What decides the results of stress tests, beside what decides those of the evaluation."""
    values = dataclasses.asdict(settings)
    del values["evaluate"]
    return values


def stress_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a comparison keeps of `stress.json`."""
    return [{name: row.get(name) for name in _KEPT} for row in result["rows"]]


def shown_rows(rows: Sequence[Mapping[str, Any]], suite: str) -> list[Mapping[str, Any]]:
    """One row for each test and setting: what comes out of the texts to forget, where a test measures that."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["test"], row["setting"])
        if key not in found or (row["metric"] == _SHOWN[suite] and found[key]["metric"] != _SHOWN[suite]):
            found[key] = row
    return list(found.values())


def stress_summary(cells: Sequence[Mapping[str, Any]], suite: str) -> list[dict[str, Any]]:
    """Means over seeds of the rows that are shown.

    Args:
        cells: the complete cells of one method, as in `comparison.json`.
        suite: of the comparison.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        for row in shown_rows(cell.get("stress") or [], suite):
            groups.setdefault((row["test"], row["setting"], row["metric"]), []).append(row)
    return [
        {
            "test": test,
            "setting": setting,
            "metric": metric,
            **{
                name: spread([row[name] for row in rows]).to_dict()
                for name in ("before", "after", "change", "recovered")
            },
        }
        for (test, setting, metric), rows in groups.items()
    ]
