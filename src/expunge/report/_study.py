"""A comparison of methods: what each forgets, keeps and takes, over targets and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expunge.errors import UsageError
from expunge.report._numbers import MISSING, cut, number, seconds, share, signed
from expunge.report._read import read_json
from expunge.report._render import page
from expunge.report._write import _write

STUDY = "comparison.json"


def read_study_results(folder: str | Path) -> dict[str, Any]:
    """Read what `expunge compare` wrote.

    Args:
        folder: of the comparison.

    Raises:
        UsageError: there is no `comparison.json` of its kind in it.
    """
    place = Path(folder).expanduser()
    values = read_json(place / STUDY)
    if values is None or not {"references", "cells", "summary", "axes", "table"} <= set(values):
        raise UsageError(f"{place}: found no {STUDY} of a comparison, accepted is the folder of `expunge compare`")
    return values


def render_study(values: Mapping[str, Any]) -> str:
    """One HTML page of a comparison; a pure function, like `render_report`.

    Args:
        values: as `read_study_results` gives them.
    """
    targets = [_target(values, name, models) for name, models in values["references"].items()]
    data = {"kind": "study", "trades": [target["plot"] for target in targets], "results": dict(values)}
    return page(
        "study.html",
        title=cut(values["name"], 60),
        data=data,
        targets=targets,
        axes=[_words(name) for name in values["axes"]],
        sentence=_sentence(values),
        notes=_notes(values),
        failed=[row for row in values["cells"] if row["state"] == "failed"],
    )


def _target(values: Mapping[str, Any], name: str, models: Mapping[str, Any]) -> dict[str, Any]:
    """The table and the plot of a target."""
    rows = [row for row in values["summary"] if row["target"] == name]
    measured = [{key: {"mean": one} for key, one in model["metrics"].items()} for model in models.values()]
    measured += [row["metrics"] for row in rows]
    columns = [key for key in values["table"] if any(_mean(one, key) is not None for one in measured)]
    forget, utility = values["axes"]
    points = [
        {
            "name": cut(row["name"], 40),
            "forget": _mean(row["metrics"], forget),
            "retain": _mean(row["metrics"], utility),
            "seconds": number(row["seconds"]["mean"]),
        }
        for row in rows
    ]
    places = {
        role: {"forget": number(model["metrics"].get(forget)), "retain": number(model["metrics"].get(utility))}
        for role, model in models.items()
    }
    before = places.get("target", {})
    return {
        "name": cut(name, 60),
        "columns": [_words(key) for key in columns],
        "references": [_reference(role, models[role], columns) for role in ("target", "retrained") if role in models],
        "rows": [_row(row, columns) for row in rows],
        "plot": {
            "axes": {"forget": _words(forget), "utility": _words(utility)},
            "points": points,
            "retrained": places.get("retrained"),
            "original": before if None not in before.values() else None,
        },
        "with_retrained": "retrained" in models,
    }


def _reference(role: str, model: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    name = {"target": "◇ before", "retrained": "★ retrained"}[role]
    cells = [_metric(number(model["metrics"].get(key))) for key in columns]
    return {"name": name, "distance": _metric(number(model["distance"])), "cells": cells}


def _row(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    ratio = number(row["ratio"])
    return {
        "name": cut(row["name"], 60),
        "best": row["best_baseline"],
        "failed": row["failed"],
        "seconds": seconds(number(row["seconds"]["mean"])),
        "ratio": MISSING if ratio is None else f"{ratio:.2f}",
        "distance": _spread(row["distance"]),
        "cells": [_spread(row["metrics"].get(key)) for key in columns],
        "flags": row["flags"],
    }


def _spread(one: Mapping[str, Any] | None) -> str:
    """Mean ± standard deviation over seeds."""
    if one is None or number(one["mean"]) is None:
        return MISSING
    sd = number(one["sd"])
    return _metric(number(one["mean"])) + ("" if sd is None else f" ± {share(sd)}")


def _metric(value: float | None) -> str:
    """A share as one; percentages and logarithms with one digit."""
    return share(value) if value is None or abs(value) <= 1 else signed(f"{value:.1f}")


def _mean(metrics: Mapping[str, Any], name: str) -> float | None:
    return number((metrics.get(name) or {}).get("mean"))


def _words(name: str) -> str:
    return cut(name, 60).replace("_", " ")


def _sentence(values: Mapping[str, Any]) -> str:
    """What the comparison comes to."""
    ranked = [row for row in values["summary"] if number(row["distance"]["mean"]) is not None]
    if not ranked:
        return "No distance to a retrained model: there is none, or it was not measured."
    best = min(ranked, key=lambda row: row["distance"]["mean"])
    text = (
        f"Nearest to the retrained model is {cut(best['name'], 60)}, at a distance of "
        f"{share(best['distance']['mean'])}, in {seconds(number(best['seconds']['mean']))}"
    )
    baseline = next((row for row in ranked if row["best_baseline"] and row["target"] == best["target"]), None)
    if baseline is not None and baseline is not best:
        text += (
            f"; the best other method, {cut(baseline['name'], 60)}, has {share(baseline['distance']['mean'])} "
            f"after {seconds(number(baseline['seconds']['mean']))}"
        )
    return text + "."


def _notes(values: Mapping[str, Any]) -> list[str]:
    """What a reader needs to judge the numbers."""
    names = ", ".join(map(_words, values["distance"]))
    found = [
        f"Suite {values['suite']}. Distance to the retrained model: root mean square of the differences in {names}.",
        f"Time: {values['counted']}.",
    ]
    machine = values.get("machine")
    if machine:
        aside = f", {values['workers']} runs side by side" if values["workers"] > 1 else ""
        found.append(f"Measured on {machine['device']}, {machine['threads']} threads, {machine['dtype']}{aside}.")
    if values.get("rows"):
        found.append("Rows: " + ", ".join(f"{name} {rows}" for name, rows in values["rows"].items()) + ".")
    return found


def write_study(folder: str | Path) -> Path:
    """Write `comparison.html` of a comparison's folder, whole or not at all.

    Raises:
        UsageError: as `read_study_results`.
        RunError: the page cannot be written.
    """
    return _write(Path(folder).expanduser() / "comparison.html", render_study(read_study_results(folder)))
