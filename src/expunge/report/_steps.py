"""The course of a run, from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expunge.report._numbers import number, rounded, thin

_POINTS, _LISTED = 600, 60
# What a step's event says besides the series a chart of its own shows, or that is no series.
_MAIN = ("violation", "forget_loss", "retain_loss")
_NO_SERIES = ("event", "phase", "step", "updated", "closed", *_MAIN)
_NAMES = {
    "anchor_loss": "Anchor loss",
    "total_loss": "Total loss",
    "gradient_norm": "Gradient norm",
    "cosine": "Cosine of forget and retain gradients",
    "base_norm": "Norm of the shared base",
    "delta_norm": "Norm of the deltas",
}


def course(log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Series of a log, for charts and their tables.

    Returns:
        "step": updates; "violation", "forget_loss", "retain_loss": as long, None where not logged; "looks": probes and
        confirmations; "measures": means over all forget examples; "more": further series, as
        {"title", "series": {name: values}}; "kept" and "updates": how many updates are shown, and how many there were.
    """
    events = [event for event in log if event.get("event") == "step" and number(event.get("step")) is not None]
    keep = thin(len(events), _POINTS)
    shown = [events[index] for index in keep]
    found: dict[str, Any] = {"step": [event["step"] for event in shown]}
    found |= {name: rounded([number(event.get(name)) for event in shown], 6) for name in _MAIN}
    found["looks"] = [_look(event) for event in log if event.get("event") == "look"]
    found["measures"] = [
        {"step": event.get("step"), "mean": number(event.get("mean")), "above": event.get("above")}
        for event in log
        if event.get("event") == "measure"
    ]
    found["more"] = _more(shown)
    return found | {"kept": len(shown), "updates": len(events)}


def _look(event: Mapping[str, Any]) -> dict[str, Any]:
    numbers = event.get("numbers") or {}
    found = {name: number(numbers.get(name)) for name in ("step", "mean", "standard_error", "examples")}
    # The event's own stage is what is asked for next.
    return found | {"stage": str(numbers.get("stage", "probe")), "stop": bool(event.get("stop"))}


def _more(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every other number that steps have, one chart for each; a mapping of numbers is one chart of several lines."""
    names = dict.fromkeys(name for event in events for name in event if name not in _NO_SERIES)
    charts = []
    for name in names:
        values = [event.get(name) for event in events]
        keys = dict.fromkeys(key for value in values if isinstance(value, Mapping) for key in value)
        if keys:
            series = {
                str(key): rounded(
                    [number(value.get(key)) if isinstance(value, Mapping) else None for value in values], 6
                )
                for key in keys
            }
        else:
            series = {name.replace("_", " "): rounded([number(value) for value in values], 6)}
        series = {key: line for key, line in series.items() if any(value not in (None, 0.0) for value in line)}
        if series:
            charts.append({"title": _NAMES.get(name, name.replace("_", " ").capitalize()), "series": series})
    return charts


def listed(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table beside the charts: evenly spaced updates, with the looks and measurements that fall on them."""
    rows = []
    measured = {one["step"]: one["mean"] for one in found["measures"]}
    looks: dict[Any, list[dict[str, Any]]] = {}
    for look in found["looks"]:
        looks.setdefault(look["step"], []).append(look)
    for index in thin(len(found["step"]), _LISTED):
        step = found["step"][index]
        row = {name: found[name][index] for name in _MAIN} | {"step": step, "all": measured.get(step)}
        rows.append(row | {"looks": looks.get(step, [])})
    return rows
