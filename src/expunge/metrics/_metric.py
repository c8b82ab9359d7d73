"""What a metric is: a value with its scale, its uncertainty, its rows, and the reason where there is none."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from expunge.metrics._scores import NOT_MEASURED

Better = Literal["higher", "lower", "reference"]
Row = float | None
# Numbers in a block of draws: 16 MB.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Scale:
    """How to read a value.

    Attributes:
        unit: "share", "%", "nats", "p", "log10 p", …
        low: smallest possible value; None: unbounded.
        high: largest possible value; None: unbounded.
        better: which direction is better; "reference": the closer to the retrained model the better.
    """

    unit: str
    low: float | None
    high: float | None
    better: Better


SHARE_UP = Scale("share", 0.0, 1.0, "higher")
SHARE_DOWN = Scale("share", 0.0, 1.0, "lower")
SHARE_AS_RETRAINED = Scale("share", 0.0, 1.0, "reference")
NATS_DOWN = Scale("nats", None, 0.0, "lower")


@dataclass(frozen=True)
class Metric:
    """One aggregate.

    Attributes:
        name: exact name, such as "forget_rouge_l".
        value: the aggregate; None where it was not measured, and then `reason` says why.
        scale: unit, range and direction.
        interval: bootstrap confidence interval; None where there is none (one row, or nothing measured).
        n: rows that were measured.
        nulls: rows left out because they were not.
        reason: why the value, or some rows, are missing.
        note: what a reader should know about the value, such as a reference that makes it meaningless.
        per_row: values per row, None for a row that was not measured; None for an aggregate of aggregates.
        reference: the retrained model's value of the same metric.
        replicates: (R,) bootstrap replicates of `value`, from which intervals of further aggregates are made.
    """

    name: str
    value: float | None
    scale: Scale
    interval: tuple[float, float] | None = None
    n: int = 0
    nulls: int = 0
    reason: str | None = None
    note: str | None = None
    per_row: tuple[Row, ...] | None = None
    reference: float | None = None
    replicates: np.ndarray | None = field(default=None, repr=False, compare=False)

    def to_dict(self, *, rows: bool = False) -> dict[str, Any]:
        """Return JSON values only.

        Args:
            rows: with the values per row.
        """
        found: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.scale.unit}
        found |= {"range": [self.scale.low, self.scale.high], "better": self.scale.better}
        found |= {"interval": None if self.interval is None else list(self.interval)}
        found |= {"n": self.n, "nulls": self.nulls, "reason": self.reason, "note": self.note}
        found |= {"reference": self.reference}
        if rows:
            found["per_row"] = None if self.per_row is None else list(self.per_row)
        return found


@dataclass(frozen=True)
class Bootstrap:
    """Seeded resampling of rows, with replacement; intervals are percentiles of the replicates.

    Rows of one unit (such as the questions of a split) are resampled together: every metric of the unit sees the same
    draws, so that an aggregate of several metrics keeps their dependence.

    Attributes:
        seed: of the draws.
        resamples: R, replicates for each metric, 2 or more.
        level: confidence level, in (0, 1).

    Raises:
        ValueError: a value is out of range.

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13 (percentile intervals).
    """

    seed: int = 0
    resamples: int = 1000
    level: float = 0.95

    def __post_init__(self) -> None:
        if self.resamples < 2:
            raise ValueError(f"resamples: found {self.resamples!r}, accepted is a whole number from 2")
        if not 0.0 < self.level < 1.0:
            raise ValueError(f"level: found {self.level!r}, accepted is a number between 0 and 1, both excluded")

    def blocks(self, unit: str, size: int) -> Iterator[np.ndarray]:
        """Row numbers of the replicates in blocks of (r, size), R rows in all, read only.

        They are the same for the same unit, size and seed. Blocks keep memory bounded for a million rows.
        """
        rows = max(1, _BLOCK // max(size, 1))
        for number, start in enumerate(range(0, self.resamples, rows)):
            yield _block(self.seed, unit, number, min(rows, self.resamples - start), size)

    def draws(self, unit: str, size: int) -> Iterator[np.ndarray]:
        """Row numbers of each replicate, R times (size,); see `blocks`."""
        for block in self.blocks(unit, size):
            yield from block

    def interval(self, replicates: np.ndarray | None) -> tuple[float, float] | None:
        """Percentile interval; None where fewer than two replicates are finite."""
        if replicates is None:
            return None
        finite = replicates[np.isfinite(replicates)]
        if finite.size < 2:
            return None
        tail = 50.0 * (1.0 - self.level)
        low, high = np.percentile(finite, [tail, 100.0 - tail])
        return float(low), float(high)


@lru_cache(maxsize=8)
def _block(seed: int, unit: str, number: int, rows: int, size: int) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}:{unit}:{size}:{number}".encode()).digest()
    found = np.random.default_rng(list(digest)).integers(size, size=(rows, size), dtype=np.int32)
    found.setflags(write=False)
    return found


def as_rows(values: Iterable[float | None] | np.ndarray) -> tuple[Row, ...]:
    """Turn what is not finite into None."""
    return tuple(None if value is None or not math.isfinite(value) else float(value) for value in values)


def null_metric(name: str, scale: Scale, reason: str, *, nulls: int = 0) -> Metric:
    """A metric that was not measured, with the reason."""
    return Metric(name, None, scale, nulls=nulls, reason=reason)


def mean_metric(
    name: str,
    values: Iterable[float | None] | np.ndarray,
    scale: Scale,
    *,
    unit: str,
    bootstrap: Bootstrap,
    reason: str = NOT_MEASURED,
) -> Metric:
    """The mean of what was measured, with its interval and rows.

    Args:
        name: of the metric.
        values: one a row; None and what is not finite stand for "not measured".
        scale: of the metric.
        unit: what the rows are; metrics of the same rows have the same unit.
        bootstrap: draws the replicates.
        reason: why rows may be missing, reported when some are.

    Example:
        >>> found = mean_metric("x", [0.0, 1.0, None], SHARE_UP, unit="u", bootstrap=Bootstrap(), reason="empty")
        >>> found.value, found.n, found.nulls, found.reason
        (0.5, 2, 1, 'empty')
    """
    rows = as_rows(values)
    if not rows:
        return null_metric(name, scale, "no rows")
    measured = [value for value in rows if value is not None]
    nulls = len(rows) - len(measured)
    if not measured:
        return Metric(name, None, scale, nulls=nulls, reason=reason, per_row=rows)
    replicates = None
    if len(measured) > 1:
        column = np.array([math.nan if value is None else value for value in rows])
        blocks = bootstrap.blocks(unit, len(rows))
        replicates = np.concatenate([_means(column[block]) for block in blocks])
    return Metric(
        name,
        math.fsum(measured) / len(measured),
        scale,
        interval=bootstrap.interval(replicates),
        n=len(measured),
        nulls=nulls,
        reason=reason if nulls else None,
        per_row=rows,
        replicates=replicates,
    )


def _means(values: np.ndarray) -> np.ndarray:
    """Means along rows of what is finite; NaN where nothing is."""
    seen = np.isfinite(values)
    counts = seen.sum(1)
    return np.where(counts > 0, np.where(seen, values, 0.0).sum(1) / np.maximum(counts, 1), math.nan)


def combine(
    name: str,
    parts: Sequence[Metric],
    function: Callable[[np.ndarray], np.ndarray],
    scale: Scale,
    *,
    bootstrap: Bootstrap,
) -> Metric:
    """An aggregate of aggregates; missing where a part is.

    Args:
        name: of the aggregate.
        parts: k metrics.
        function: maps (k, m) to (m,): column by column, the aggregate of the parts' values. NaN: undefined.
        scale: of the aggregate.
        bootstrap: gives the interval; the parts' replicates are combined draw by draw.
    """
    missing = [part for part in parts if part.value is None]
    if missing or not parts:
        names = ", ".join(part.name for part in missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        why = missing[0].reason or NOT_MEASURED if missing else ""
        return null_metric(name, scale, f"without {names}: {why}" if missing else "no parts")
    value = float(function(np.array([[part.value] for part in parts], dtype=np.float64))[0])
    if not math.isfinite(value):
        return null_metric(name, scale, "undefined for these values")
    found = [part.replicates for part in parts]
    sizes = {len(one) for one in found if one is not None}
    replicates = None
    if len(sizes) == 1:
        size = sizes.pop()
        # A part without replicates (a single row) is taken as certain.
        columns = [np.full(size, part.value) if part.replicates is None else part.replicates for part in parts]
        replicates = function(np.array(columns, dtype=np.float64))
    return Metric(
        name,
        value,
        scale,
        interval=bootstrap.interval(replicates),
        n=min(part.n for part in parts),
        nulls=sum(part.nulls for part in parts),
        reason=next((part.reason for part in parts if part.reason), None),
        replicates=replicates,
    )
