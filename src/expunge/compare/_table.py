"""A comparison as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "–"


def markdown(values: Mapping[str, Any]) -> str:
    """Tables of a comparison, one for each target, with what a reader needs to judge them.

    Args:
        values: as in `comparison.json`.
    """
    lines = [f"# {values['name']}", ""]
    targets = list(values["references"])
    for target in targets:
        lines += [f"## {target}", ""] if len(targets) > 1 else []
        lines += [*_table(values, target), ""]
        stressed = _stress(values, target)
        lines += [*stressed, ""] if stressed else []
    lines += _notes(values)
    return "\n".join(lines) + "\n"


def _table(values: Mapping[str, Any], target: str) -> list[str]:
    models = values["references"][target]
    rows = [row for row in values["summary"] if row["target"] == target]
    measured = [model["metrics"] for model in models.values()] + [row["metrics"] for row in rows]
    # A metric that no model has a value for has no column.
    names = [name for name in values["table"] if any(_mean(one.get(name)) is not None for one in measured)]
    header = ["method", "seconds", "× best baseline", "distance", *(name.replace("_", " ") for name in names)]
    lines = [_line(header), _line(["---", *["---:"] * (len(header) - 1)])]
    for role, name in (("target", "before unlearning"), ("retrained", "★ retrained")):
        if role in models:
            one = models[role]
            cells = [number(one["metrics"].get(metric)) for metric in names]
            lines.append(_line([name, MISSING, MISSING, number(one["distance"]), *cells]))
    for row in rows:
        lines.append(_line([_name(row), *_numbers(row), *(_spread(row["metrics"].get(metric)) for metric in names)]))
    return lines


def _stress(values: Mapping[str, Any], target: str) -> list[str]:
    """What comes out of the texts to forget under each stress test, with the change it makes."""
    rows = [row for row in values["summary"] if row["target"] == target and row["stress"]]
    models = {role: one["stress"] for role, one in values["references"][target].items() if one["stress"]}
    tests = dict.fromkeys((one["test"], one["setting"]) for row in rows for one in row["stress"])
    if not tests:
        return []
    header = ["under stress", *(f"{test}{f' ({setting})' if setting else ''}" for test, setting in tests)]
    lines = [_line(header), _line(["---", *["---:"] * len(tests)])]
    for role, name in (("target", "before unlearning"), ("retrained", "★ retrained")):
        if role in models:
            found = {(one["test"], one["setting"]): number(one["after"]) for one in models[role]}
            lines.append(_line([name, *(found.get(test, MISSING) for test in tests)]))
    for row in rows:
        found = {(one["test"], one["setting"]): _changed(one) for one in row["stress"]}
        lines.append(_line([row["name"], *(found.get(test, MISSING) for test in tests)]))
    names = dict.fromkeys(one["metric"].replace("_", " ") for row in rows for one in row["stress"])
    return [*lines, "", f"Under stress: {', '.join(names)}, and in brackets the change by the test."]


def _changed(one: Mapping[str, Any]) -> str:
    change = one["change"]["mean"]
    return _spread(one["after"]) + ("" if change is None else f" ({change:+.3f})")


def _name(row: Mapping[str, Any]) -> str:
    """With a mark where something is to be known."""
    marks = (" †" if row["best_baseline"] else "") + (" ‡" if row["flags"] else "")
    failed = f" ({row['failed']} failed)" if row["failed"] else ""
    return f"{row['name']}{marks}{failed}"


def _numbers(row: Mapping[str, Any]) -> list[str]:
    ratio = MISSING if row["ratio"] is None else f"{row['ratio']:.2f}"
    return [_spread(row["seconds"], digits=1), ratio, _spread(row["distance"])]


def _notes(values: Mapping[str, Any]) -> list[str]:
    seeds = sorted({row["seed"] for row in values["cells"]})
    several = "mean ± standard deviation over seeds" if len(seeds) > 1 else "seed"
    lines = [f"Suite {values['suite']}; {several} {', '.join(map(str, seeds))}."]
    if values["rows"]:
        lines.append("Rows evaluated: " + ", ".join(f"{name} {rows}" for name, rows in values["rows"].items()) + ".")
    lines.append(
        "Distance to the retrained model: root mean square of the differences in " + ", ".join(values["distance"]) + "."
    )
    lines.append(f"Seconds: {values['counted']}.")
    if values["machine"]:
        one = values["machine"]
        several = f", {values['workers']} runs side by side" if values["workers"] > 1 else ""
        lines.append(f"On {one['device']} with {one['threads']} threads, {one['dtype']}{several}.")
    if any(row["best_baseline"] for row in values["summary"]):
        lines.append("† best baseline: of the methods other than masc, the one nearest to the retrained model.")
    flags = {flag: row["name"] for row in values["summary"] for flag in row["flags"]}
    lines += [f"‡ {name}: {flag}." for flag, name in flags.items()]
    lines += [
        f"{row['name']} was cut off and resumed: what was done again after a checkpoint is counted once."
        for row in values["cells"]
        if row["resumed"]
    ]
    lines += [f"Failed: {row['name']}: {row['error']}" for row in values["cells"] if row["state"] == "failed"]
    return [line for text in lines for line in (text, "")][:-1]


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where it was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}"


def _spread(one: Mapping[str, Any] | None, digits: int = 3) -> str:
    if one is None or one["mean"] is None:
        return MISSING
    return number(one["mean"], digits) + ("" if one["sd"] is None else f" ± {one['sd']:.{digits}f}")


def _mean(one: Any) -> float | None:
    return one["mean"] if isinstance(one, Mapping) else one


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
