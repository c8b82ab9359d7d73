"""What the page says of a run: the verdict, the numbers beside it, the means and how it was done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from expunge.metrics import SHARE_UP, Bootstrap, mean_metric
from expunge.report._numbers import MISSING, cut, number, percent, seconds, share, signed
from expunge.report._read import RunData, probabilities

_WORK = ("calibrate", "reference", "train")
_MEANS = (
    ("probability", "probability", "probability"),
    ("exact", "exact match", "exact"),
    ("violation", "violation", "violation"),
    ("rouge_l", "ROUGE-L", "rouge"),
)
_SOURCES = {"holdout": "measured on the holdout", "preset": "of the preset", "option": "given as an option"}


def tolerance(run: RunData) -> float | None:
    """α."""
    value = (run.result or {}).get("tolerance")
    return number((run.run.get("resolved_masc") or {}).get("tolerance") if value is None else value)


def threshold(run: RunData) -> float | None:
    """τ_ρ = log(ρ/(1 − ρ))."""
    rho = number((run.run.get("resolved_masc") or {}).get("rho"))
    return math.log(rho / (1 - rho)) if rho is not None and 0 < rho < 1 else None


def spent(run: RunData) -> float | None:
    """Seconds from the loaded model to the end of training; None: not recorded."""
    times = (run.result or {}).get("seconds") or {}
    found = [times[name] for name in _WORK if name in times]
    return math.fsum(found) if found else None


def kept(run: RunData) -> float | None:
    """Retain probability after, as a share of before."""
    before, after = (number(summary(run, f"retain_{when}").get("probability")) for when in ("before", "after"))
    return None if before is None or after is None or before == 0 else after / before


def summary(run: RunData, name: str) -> Mapping[str, Any]:
    """Means of the result, {} where there are none."""
    return (run.result or {}).get(name) or {}


def verdict(run: RunData) -> dict[str, str]:
    """One sentence with its numbers, and whether it is good: "good", "left" or "open"."""
    alpha = tolerance(run)
    if run.result is None:
        done = max((event.get("step", 0) for event in run.log if event.get("event") == "step"), default=0)
        text = f"This run has not ended: {done} updates so far; nothing is saved or measured yet."
        return {"state": "open", "title": "Not finished", "text": text}
    result = run.result
    total, left = summary(run, "forget_before").get("examples"), len(result.get("left") or ())
    before, after = (share(number(summary(run, f"forget_{when}").get("violation"))) for when in ("before", "after"))
    took = f"in {result.get('steps')} updates and {seconds(spent(run))}"
    numbers = f"mean violation went from {before} to {after} (tolerance {share(alpha)})"
    utility = kept(run)
    cost = "what it cost was not measured" if utility is None else f"{percent(utility)} of the utility was kept"
    good = bool(result.get("forgotten"))
    what = f"All {total} examples are forgotten" if good else f"{left} of {total} examples are left"
    if not good and not left:
        what = f"Forgetting {total} examples was not confirmed"
    return {
        "state": "good" if good else "left",
        "title": "Forgotten" if good else "Not finished",
        "text": f"{what}: {numbers}, {took}; {cost}.",
        "reason": cut(str(result.get("reason", "")), 300),
    }


def cards(run: RunData) -> list[dict[str, Any]]:
    """The numbers under the verdict."""
    result = run.result or {}
    alpha, utility = tolerance(run), kept(run)
    total, left = summary(run, "forget_before").get("examples"), result.get("left")
    before, after = (number(summary(run, f"forget_{when}").get("violation")) for when in ("before", "after"))
    times = result.get("seconds") or {}
    source = _SOURCES.get(str(run.run.get("tolerance_source")), "")
    retain = [share(number(summary(run, f"retain_{when}").get("probability"))) for when in ("before", "after")]
    stop = result.get("stopped_at")
    return [
        {
            "name": "Examples forgotten",
            "term": "verdict",
            "value": MISSING if total is None or left is None else f"{total - len(left)} of {total}",
            "note": MISSING if left is None else f"{len(left) or 'none'} left above the tolerance by more than chance",
        },
        {
            "name": "Violation",
            "term": "violation",
            "value": MISSING if before is None and after is None else f"{share(before)} → {share(after)}",
            "note": f"tolerance {share(alpha)}, {source}" if source else f"tolerance {share(alpha)}",
            "bar": None if after is None else {"before": before, "after": after, "alpha": alpha},
        },
        {
            "name": "Utility kept",
            "term": "utility",
            "value": percent(utility),
            "note": f"retain probability {retain[0]} → {retain[1]}" if utility is not None else "no retain examples",
        },
        {
            "name": "Time to forget",
            "term": None,
            "value": seconds(spent(run)),
            "note": _time_note(result, times),
        },
        {
            "name": "Stop",
            "term": "probe",
            "value": MISSING if run.result is None else f"step {stop}" if stop is not None else "no stop",
            "note": cut(str(result.get("reason", "the run has not ended")), 120),
        },
    ]


def _time_note(result: Mapping[str, Any], times: Mapping[str, float]) -> str:
    updates = f"{result['steps']} updates" if "steps" in result else ""
    whole = f"{seconds(math.fsum(times.values()))} with loading and scoring" if times else ""
    return "; ".join(part for part in (updates, whole) if part) or MISSING


def means(run: RunData) -> list[dict[str, Any]]:
    """Rows of the table of means: before and after for both files, with intervals where rows are there."""
    rows = []
    for key, name, term in _MEANS:
        row: dict[str, Any] = {"name": name, "term": term}
        for part in ("forget", "retain"):
            for when in ("before", "after"):
                value = number(summary(run, f"{part}_{when}").get(key))
                row[f"{part}_{when}"] = share(value)
                row[f"{part}_{when}_bar"] = value
            row[f"{part}_interval"] = _interval(_per_row(run, f"{part}-after", key), part)
        rows.append(row)
    return rows


def _per_row(run: RunData, table: str, key: str) -> Sequence[float | None]:
    if key == "probability":
        return probabilities(run.column(table, "logprob_mean"))
    return run.column(table, key) if key in ("exact", "violation") else []


def _interval(values: Sequence[float | None], unit: str) -> str | None:
    if sum(value is not None for value in values) < 2:
        return None
    found = mean_metric("mean", values, SHARE_UP, unit=unit, bootstrap=Bootstrap(resamples=1000)).interval
    return None if found is None else f"{share(found[0])} to {share(found[1])}"


def evaluation_rows(run: RunData) -> list[dict[str, Any]]:
    """Rows of the table of a suite's metrics."""
    rows = []
    for metric in (run.evaluation or {}).get("metrics", ()):
        interval = metric.get("interval")
        value = number(metric.get("value"))
        rows.append(
            {
                "name": cut(metric.get("name", ""), 60),
                "value": _plain(value),
                "interval": None if not interval else f"{_plain(interval[0])} to {_plain(interval[1])}",
                "retrained": _plain(number(metric.get("reference"))),
                "better": str(metric.get("better", "")),
                "unit": str(metric.get("unit", "")),
                "n": metric.get("n"),
                "why": cut(metric.get("reason") or metric.get("note") or "", 160),
            }
        )
    return rows


def stress_rows(run: RunData) -> list[dict[str, Any]]:
    """Rows of the table of stress tests, in their order."""
    rows = []
    for row in (run.stress or {}).get("rows", ()):
        interval, back = row.get("interval"), number(row.get("recovered"))
        rows.append(
            {
                "test": cut(row.get("test", ""), 40),
                "setting": cut(row.get("setting", ""), 60),
                "metric": cut(row.get("metric", ""), 60),
                **{name: _plain(number(row.get(name))) for name in ("before", "after", "original", "retrained")},
                "change": None if row.get("change") is None else signed(f"{row['change']:+.3f}"),
                "interval": None if not interval else f"{_plain(interval[0])} to {_plain(interval[1])}",
                "recovered": None if back is None else percent(back),
                "bar": None if back is None else min(max(back, 0.0), 1.0),
                "why": cut(row.get("reason") or "", 160),
            }
        )
    return rows


def stress_sentence(run: RunData) -> str | None:
    """The most that came back under any test, of what was to be forgotten; None where no share was measured."""
    found = [row for row in (run.stress or {}).get("rows", ()) if number(row.get("recovered")) is not None]
    if not found:
        return None
    worst = max(found, key=lambda row: row["recovered"])
    where = " ".join(part for part in (cut(worst["test"], 40), cut(worst.get("setting") or "", 60)) if part)
    share_back = percent(max(0.0, worst["recovered"]))
    return f"At most {share_back} of what was forgotten came back: {cut(worst['metric'], 60)} under {where}."


def _plain(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.2e}" if value != 0 and abs(value) < 1e-3 else share(value)


def settings(run: RunData) -> list[tuple[str, list[tuple[str, str]]]]:
    """How it was done: groups of names and values."""
    config, result = run.run.get("config", {}), run.result or {}
    masc = {**(config.get("masc") or {}), **(run.run.get("resolved_masc") or {})}
    plain = {name: value for name, value in config.items() if not isinstance(value, Mapping) and name not in _PLACES}
    data = {
        part: f"{counts.get('rows')} rows of {counts.get('records')} examples, {len(counts.get('dropped', ()))} dropped"
        for part, counts in (run.run.get("data") or {}).items()
        if isinstance(counts, Mapping) and "rows" in counts
    }
    machine = {name: run.run.get(name) for name in ("device", "dtype", "threads")}
    weights = {"before": run.run.get("weights"), "after": result.get("fingerprint")}
    weights["largest logit difference after saving"] = result.get("max_logit_error")
    groups = (
        ("Method", {"method": config.get("method"), "preset": config.get("preset"), **masc}),
        ("Training", config.get("recipe") or {}),
        ("Options", plain),
        ("Data", data),
        ("Weights (fingerprints)", weights),
        ("Time, seconds", result.get("seconds") or {}),
        ("Machine", machine),
        ("Versions", run.run.get("versions") or {}),
    )
    return [(title, [(str(name), _value(value)) for name, value in values.items()]) for title, values in groups]


# Folders of somebody's machine, and what the first group has.
_PLACES = ("model", "forget", "retain", "holdout", "earlier", "out", "method", "preset")


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return cut(", ".join(_value(one) for one in value), 200)
    return cut(f"{value:g}" if isinstance(value, float) else value, 200)


def notes(run: RunData) -> list[str]:
    """What the user should know."""
    found = [*(run.run.get("notes") or ()), *((run.result or {}).get("notes") or ())]
    found += list((run.evaluation or {}).get("flags") or ())
    earlier = (run.result or {}).get("earlier")
    if earlier:
        means = " → ".join(share(number((earlier.get(when) or {}).get("violation"))) for when in ("before", "after"))
        count, back = (earlier.get("after") or {}).get("examples"), len(earlier.get("back") or ())
        found.append(f"{count} examples of earlier requests: mean violation {means}, {back or 'none'} known again")
    return [cut(note, 400) for note in dict.fromkeys(found)]
