"""Numbers as a person reads them, and as a chart needs them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

MISSING = "not measured"
_BINS = 48


def share(value: float | None, digits: int = 3) -> str:
    """A share or probability; what was not measured says so."""
    return MISSING if value is None else signed(f"{value:.{digits}f}")


def signed(text: str) -> str:
    """A real minus sign."""
    return text.replace("-", "\N{MINUS SIGN}")


def percent(value: float | None) -> str:
    """A share as per cent."""
    return MISSING if value is None else signed(f"{100 * value:.1f}") + "\N{NO-BREAK SPACE}%"


def seconds(value: float | None) -> str:
    """A duration."""
    if value is None:
        return MISSING
    if value < 99.5:
        return f"{value:.1f}\N{NO-BREAK SPACE}s" if value < 9.95 else f"{value:.0f}\N{NO-BREAK SPACE}s"
    if value < 5970:
        return f"{value / 60:.1f}\N{NO-BREAK SPACE}min"
    return f"{value / 3600:.1f}\N{NO-BREAK SPACE}h"


def bound(nats: float | None) -> str | Markup:
    """An upper bound on a probability, given as its logarithm: ≤ 9.1 × 10⁻⁹. Rounded up, so that it stays a bound."""
    if nats is None:
        return MISSING
    power = nats / math.log(10)
    if power >= -3:
        return f"≤\N{NO-BREAK SPACE}{_up(math.exp(min(nats, 0.0)), 3):.3f}"
    exponent = math.floor(power)
    factor = _up(10 ** (power - exponent), 1)
    if factor >= 10:
        factor, exponent = 1.0, exponent + 1
    return Markup("≤&nbsp;{}&nbsp;×&nbsp;10<sup>{}</sup>").format(f"{factor:.1f}", signed(str(exponent)))


def _up(value: float, digits: int) -> float:
    """Round up, but not for an error of the last bits."""
    return math.ceil(value * 10**digits - 1e-6) / 10**digits


def cut(text: object, limit: int = 120) -> str:
    """A text of at most `limit` characters."""
    whole = str(text)
    return whole if len(whole) <= limit else whole[: limit - 1] + "…"


def embed(value: Any) -> Markup:
    """JSON that can stand inside a script element: no character of it means anything to HTML."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text.encode("utf-8", "replace").decode("utf-8"))


def histogram(before: Sequence[float], after: Sequence[float]) -> dict[str, Any] | None:
    """Counts of two samples in common bins; None where one is empty.

    Returns:
        "edges" (one more than the bins), "before" and "after" (counts).
    """
    if not len(before) or not len(after):
        return None
    both = np.concatenate([before, after])
    low, high = math.floor(float(both.min())), math.ceil(float(both.max()))
    edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    counts = {name: np.histogram(values, edges)[0].tolist() for name, values in (("before", before), ("after", after))}
    return {"edges": [round(float(edge), 4) for edge in edges], **counts}


def thin(count: int, limit: int) -> list[int]:
    """Which of `count` points to keep so that at most about `limit` are left: evenly spaced, first and last kept."""
    if count <= limit:
        return list(range(count))
    return sorted({round(index * (count - 1) / (limit - 1)) for index in range(limit)})


def rounded(values: Sequence[float | None], digits: int = 4) -> list[float | None]:
    """Numbers short enough to embed."""
    return [None if value is None else round(value, digits) for value in values]


def number(value: Any) -> float | None:
    """A finite number, or None for everything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None
