"""Several runs side by side: what each forgot, what it cost, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expunge.errors import UsageError
from expunge.report._numbers import MISSING, cut, number, percent, seconds, share
from expunge.report._read import Point, RunData
from expunge.report._render import page
from expunge.report._steps import course
from expunge.report._view import kept, spent, summary, tolerance, verdict

_GROUPS = ("recipe", "masc")


def render_comparison(runs: Sequence[RunData], *, retrained: Point | None = None) -> str:
    """One HTML page that compares runs; a pure function, like `render_report`.

    Args:
        runs: two or more.
        retrained: where the model stands that never saw what was forgotten; None: not known.

    Raises:
        UsageError: fewer than two runs.
    """
    if len(runs) < 2:
        raise UsageError(f"runs: found {len(runs)}, accepted are two or more to compare")
    names = _names(runs)
    rows = [_row(run, name) for run, name in zip(runs, names, strict=True)]
    points = [
        {
            "name": row["name"],
            "forget": row["forget_value"],
            "retain": row["retain_value"],
            "seconds": row["seconds_value"],
        }
        for row in rows
    ]
    data = {
        "kind": "comparison",
        "points": points,
        "retrained": None if retrained is None else {"forget": retrained.forget, "retain": retrained.retain},
        "original": _original(runs),
        "courses": [_line(run, name) for run, name in zip(runs, names, strict=True)],
    }
    return page(
        "comparison.html",
        title=f"{len(runs)} runs",
        data=data,
        rows=rows,
        retrained=retrained,
        original=data["original"],
        differences=_differences(runs),
        names_of_runs=names,
        sentence=_sentence(rows),
    )


def _names(runs: Sequence[RunData]) -> list[str]:
    """Unlike names."""
    found: list[str] = []
    for run in runs:
        name, number_ = cut(run.name, 60), 2
        while name in found:
            name, number_ = f"{cut(run.name, 54)} ({number_})", number_ + 1
        found.append(name)
    return found


def _row(run: RunData, name: str) -> dict[str, Any]:
    total, left = summary(run, "forget_before").get("examples"), (run.result or {}).get("left")
    means = {
        f"{part}_{key}": number(summary(run, f"{part}_after").get(key))
        for part in ("forget", "retain")
        for key in ("probability", "violation", "rouge_l")
    }
    state = verdict(run)
    return {
        "name": name,
        "state": state["state"],
        "title": state["title"],
        "forgotten": MISSING if total is None or left is None else f"{total - len(left)} of {total}",
        "violation": share(means["forget_violation"]),
        "alpha": share(tolerance(run)),
        "forget": share(means["forget_probability"]),
        "retain": share(means["retain_probability"]),
        "rouge": f"{share(means['forget_rouge_l'])} / {share(means['retain_rouge_l'])}",
        "kept": percent(kept(run)),
        "seconds": seconds(spent(run)),
        "steps": (run.result or {}).get("steps"),
        "forget_value": means["forget_probability"],
        "retain_value": means["retain_probability"],
        "seconds_value": spent(run),
        "good": bool((run.result or {}).get("forgotten")),
    }


def _sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the comparison comes to."""
    good = [row for row in rows if row["good"]]
    if not good:
        return f"None of {len(rows)} runs forgot every example."
    text = f"{len(good)} of {len(rows)} runs forgot every example"
    timed = [row for row in good if row["seconds_value"] is not None]
    if timed:
        fastest = min(timed, key=lambda row: row["seconds_value"])
        text += f"; the fastest is {fastest['name']} with {fastest['seconds']}"
    measured = [row for row in good if row["retain_value"] is not None]
    if measured:
        best = max(measured, key=lambda row: row["retain_value"])
        text += f"; {best['name']} keeps most, with a retain probability of {best['retain']}"
    return text + "."


def _original(runs: Sequence[RunData]) -> dict[str, float | None] | None:
    """Where the model stood before, if all runs started from the same weights."""
    if len({run.run.get("weights") for run in runs}) != 1:
        return None
    for run in runs:
        found = {part: number(summary(run, f"{part}_before").get("probability")) for part in ("forget", "retain")}
        if None not in found.values():
            return found
    return None


def _line(run: RunData, name: str) -> dict[str, Any]:
    found = course(run.log)
    measured = [[one["step"], one["mean"]] for one in found["measures"]]
    looked = [[one["step"], one["mean"]] for one in found["looks"] if one["stage"] != "probe"]
    every = measured or looked or list(map(list, zip(found["step"], found["violation"], strict=True)))
    return {"name": name, "points": every, "alpha": tolerance(run)}


def _differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs."""
    flat = [_flat(run) for run in runs]
    names = dict.fromkeys(name for values in flat for name in values)
    found = [(name, [values.get(name, "none") for values in flat]) for name in names]
    return [(name, values) for name, values in found if len(set(values)) > 1]


def _flat(run: RunData) -> dict[str, str]:
    config = dict(run.run.get("config", {}))
    found: dict[str, Any] = {}
    for group in _GROUPS:
        found |= dict(config.pop(group, None) or {})
    found |= dict(run.run.get("resolved_masc") or {})
    found |= {
        name: value for name, value in config.items() if name not in ("out", "forget", "retain", "holdout", "earlier")
    }
    found |= {"model": str(config.get("model", "")).rstrip("/").rsplit("/", 1)[-1]}
    return {name: "none" if value is None else cut(value, 80) for name, value in found.items()}
