"""MUSE: the few-shot prompt and its answers, and what becomes of a metric over sequences of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_STOPS = ("\n\n", "\nQuestion", "Question:")


def few_shot_prompt(examples: Sequence[tuple[str, str]], question: str) -> str:
    r"""MUSE's KnowMem prompt: solved examples, then the question, all in plain text.

    Args:
        examples: pairs of question and answer.
        question: to be answered.

    Example:
        >>> few_shot_prompt([("A?", "B")], "C?")
        'Question: A?\nAnswer: B\n\nQuestion: C?\nAnswer: '

    References:
        Shi et al., MUSE, 2024, https://arxiv.org/abs/2407.06460, and its code (knowmem).
    """
    shots = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in examples)
    return f"{shots}Question: {question}\nAnswer: "


def few_shot_answer(text: str) -> str:
    r"""The answer in a continuation of `few_shot_prompt`: up to an empty line or the next question.

    Example:
        >>> few_shot_answer("1472\n\nQuestion: And")
        '1472'
    """
    for stop in _STOPS:
        text = text.split(stop)[0]
    return text.strip()


@dataclass(frozen=True)
class Trend:
    """A metric over requests.

    Attributes:
        values: one a request, in order; None where not measured.
        relative: each over the value before the first request; None where not measured or that is 0.
        drop: value before the first request minus the last; None where either is missing.
        slope: change per unit of the position (requests, or forget-set size), least squares; None with fewer than two.
    """

    values: tuple[float | None, ...]
    relative: tuple[float | None, ...]
    drop: float | None
    slope: float | None


def sustainability(values: Sequence[float | None], *, before: float | None = None) -> Trend:
    """A utility after the first, second, … of successive unlearning requests.

    Args:
        values: one after each request.
        before: the value before the first; None takes the first of `values`.

    Example:
        >>> sustainability([0.5, 0.4, 0.3], before=0.5).slope
        -0.1

    References:
        Shi et al., MUSE, 2024, section 3 (C6).
    """
    return scalability(range(1, len(values) + 1), values, before=before)


def scalability(sizes: Sequence[float], values: Sequence[float | None], *, before: float | None = None) -> Trend:
    """A utility after one request each of growing size.

    Args:
        sizes: of the forget set, in any unit.
        values: one for each size.
        before: the value without unlearning; None takes the first of `values`.

    References:
        Shi et al., MUSE, 2024, section 3 (C5).
    """
    if len(sizes) != len(values):
        raise ValueError(f"sizes: found {len(sizes)} for {len(values)} values, accepted is one for each")
    start = before if before is not None else next(iter(values), None)
    relative = tuple(None if value is None or not start else value / start for value in values)
    last = values[-1] if len(values) else None
    drop = None if start is None or last is None else start - last
    pairs = [(size, value) for size, value in zip(sizes, values, strict=True) if value is not None]
    slope = None
    if len({size for size, _ in pairs}) > 1:
        x, y = np.array(pairs, dtype=np.float64).T
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        slope = round(slope, 12)
    return Trend(tuple(values), relative, drop, slope)
