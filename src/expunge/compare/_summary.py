"""From the results of cells to means, distances and ratios; pure functions of plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Values = Mapping[str, float | None]


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds.

    Attributes:
        mean: over the seeds that have it; None: none has.
        sd: sample standard deviation (n − 1 in the divisor); None for fewer than two.
        n: seeds that have it.
    """

    mean: float | None
    sd: float | None
    n: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and standard deviation of what was measured.

    Example:
        >>> spread([1.0, 3.0, None])
        Spread(mean=2.0, sd=1.4142135623730951, n=2)
    """
    found = [value for value in values if value is not None]
    if not found:
        return Spread(None, None, 0)
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


@dataclass(frozen=True)
class Distance:
    """How far a model is from the retrained one.

    Attributes:
        value: root mean square of the differences, in [0, 1]; None: not all were measured.
        differences: by metric, the model's value less the retrained model's.
        reason: why there is no value.
    """

    value: float | None
    differences: dict[str, float]
    reason: str | None = None


def distance(ours: Values, theirs: Values | None, metrics: Sequence[str]) -> Distance:
    """Distance of a model to the retrained one.

    d = √(1/M · Σ_m (a_m − r_m)²), over the M metrics that the retrained model has a value for.

    Args:
        ours: a, the model's metrics by name.
        theirs: r, the retrained model's; None without one.
        metrics: shares in [0, 1] that count.

    Returns:
        The distance; without a value where a metric that counts is missing, never a smaller sum.

    Example:
        >>> distance({"a": 0.75, "b": 1.0}, {"a": 0.25, "b": 0.5}, ["a", "b", "c"]).value
        0.5
    """
    if theirs is None:
        return Distance(None, {}, "no retrained model")
    counted = [name for name in metrics if theirs.get(name) is not None]
    if not counted:
        return Distance(None, {}, "the retrained model has none of the metrics")
    missing = [name for name in counted if ours.get(name) is None]
    differences = {name: ours[name] - theirs[name] for name in counted if name not in missing}  # type: ignore[operator]
    if missing:
        return Distance(None, differences, f"without {', '.join(missing)}")
    return Distance(math.sqrt(math.fsum(one * one for one in differences.values()) / len(counted)), differences)


def group(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One summary for each target, method and optimizer, over its seeds, in the order of the rows.

    Args:
        rows: cells, as `comparison.json` has them.

    Returns:
        Summaries; failed and missing cells are counted and left out of the means.
    """
    groups: dict[tuple[str, str, str | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["method"], row["optimizer"]), []).append(row)
    found = [_summary(key, members) for key, members in groups.items()]
    for target in {row["target"] for row in found}:
        _ratios([row for row in found if row["target"] == target])
    return found


def _summary(key: tuple[str, str, str | None], members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    done = [row for row in members if row["state"] == "complete"]
    names = list(dict.fromkeys(name for row in done for name in row["metrics"]))
    target, method, optimizer = key
    return {
        "target": target,
        "method": method,
        "optimizer": optimizer,
        "name": method if optimizer is None else f"{method}, {optimizer}",
        "baseline": members[0]["baseline"],
        "seeds": [row["seed"] for row in done],
        "failed": sum(row["state"] == "failed" for row in members),
        "seconds": spread([row["seconds"] for row in done]).to_dict(),
        "distance": spread([row["distance"] for row in done]).to_dict(),
        "metrics": {name: spread([row["metrics"].get(name) for row in done]).to_dict() for name in names},
        "flags": list(dict.fromkeys(flag for row in done for flag in row["flags"])),
        "best_baseline": False,
        "ratio": None,
    }


def _ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Time as a multiple of the best baseline's: of the one nearest to the retrained model."""
    ranked = [row for row in rows if row["baseline"] and row["distance"]["mean"] is not None and row["seconds"]["mean"]]
    if not ranked:
        return
    best = min(ranked, key=lambda row: row["distance"]["mean"])
    best["best_baseline"] = True
    for row in rows:
        if row["seconds"]["mean"] is not None:
            row["ratio"] = row["seconds"]["mean"] / best["seconds"]["mean"]
