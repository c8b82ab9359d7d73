"""Checks of option values, with the message a user sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from expunge.errors import UsageError


def whole(option: str, value: object, least: int) -> None:
    """Refuse what is no whole number from `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{option}: found {value!r}, accepted is a whole number from {least}")


def flag(option: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise UsageError(f"{option}: found {value!r}, accepted is true or false")


def text(option: str, value: object) -> None:
    """Refuse what is no text, or an empty one."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{option}: found {value!r}, accepted is a text")


def one_of(option: str, value: object, accepted: Sequence[str]) -> None:
    """Refuse what is not among the accepted names."""
    if value not in accepted:
        raise UsageError(f"{option}: found {value!r}, accepted is one of {', '.join(accepted)}")


def number(option: str, value: object, fits: Any, accepted: str) -> None:
    """Refuse what is no finite number, or does not fit."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not fits(value):
        raise UsageError(f"{option}: found {value!r}, accepted is {accepted}")
