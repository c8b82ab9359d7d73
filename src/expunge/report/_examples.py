"""The table of examples to forget, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expunge.report._numbers import bound, cut, histogram, number, rounded, share
from expunge.report._read import RunData, probabilities
from expunge.stopping import left_over

# The page stays under its size with these; all values are in the run folder.
MAX_ROWS, _TOKEN_BYTES, _TEXT_BYTES = 300, 180_000, 120_000
VERDICTS = {"forgotten": "forgotten", "chance": "within chance", "left": "left", "unknown": "not measured"}


def examples(run: RunData, alpha: float | None) -> dict[str, Any]:
    """Rows of the table, those that matter most if not all fit.

    Args:
        run: saved results.
        alpha: tolerance; None: unknown.

    Returns:
        "rows": dictionaries in the order of the file; "total"; "tokens": margins by row for the token views;
        "counts": how many rows have each verdict.
    """
    rows = _rows(run, alpha)
    counts = {name: sum(row["verdict"] == name for row in rows) for name in VERDICTS}
    chosen = sorted(sorted(range(len(rows)), key=lambda index: _importance(rows[index]))[:MAX_ROWS])
    shown = [rows[index] for index in chosen]
    tokens = _tokens(run, shown)
    for row in shown:
        row["has_tokens"] = str(row["index"]) in tokens
    return {"rows": shown, "total": len(rows), "tokens": tokens, "counts": counts}


def margins(run: RunData, tau: float | None) -> dict[str, Any] | None:
    """Distributions of all tokens' margins before and after; None where they were not measured."""
    flat = {when: [value for row in _lists(run, when) for value in row or () if value is not None] for when in _WHEN}
    found = histogram(flat["before"], flat["after"])
    if found is None or tau is None:
        return None
    above = {when: sum(value > tau for value in values) / len(values) for when, values in flat.items()}
    return found | {"tau": tau, "count": {when: len(values) for when, values in flat.items()}, "above": above}


_WHEN = ("before", "after")


def _lists(run: RunData, when: str) -> list[Any]:
    return list(run.tokens.get(when, {}).get("margin", ()))


def _importance(row: Mapping[str, Any]) -> tuple[int, float]:
    """What is left comes first, then what is closest to being left."""
    return (0 if row["verdict"] == "left" else 1, -(row["after"] if row["after"] is not None else -1.0))


def _rows(run: RunData, alpha: float | None) -> list[dict[str, Any]]:
    when = "after" if run.column("forget-after", "id") else "before"
    table = f"forget-{when}"
    ids, records = run.column(table, "id"), run.column(table, "record")
    tokens, certificates = run.column(table, "tokens"), run.column("forget-after", "certificate")
    before = {name: _aligned(run, ids, records, name) for name in ("violation", "logprob_mean")}
    after = run.column("forget-after", "violation") or [None] * len(ids)
    chances = probabilities(run.column("forget-after", "logprob_mean")) or [None] * len(ids)
    left = None if run.result is None else {str(name) for name in run.result.get("left") or ()}
    seen: dict[str, int] = {}
    rows = []
    for index, name in enumerate(ids):
        part = seen[name] = seen.get(name, 0) + 1
        row = {
            "index": index,
            "id": cut(name, 80) + (f" (part {part})" if part > 1 else ""),
            "tokens": tokens[index],
            "before": before["violation"][index],
            "after": number(after[index]),
            "p_before": probabilities([before["logprob_mean"][index]])[0],
            "p_after": chances[index],
            "certificate": certificates[index] if certificates else None,
            "hash": _hash(run, records[index]),
        }
        verdict = _verdict(name, row["after"], row["tokens"], left, alpha)
        row |= {"verdict": verdict, "verdict_text": VERDICTS[verdict], "bound": bound(row["certificate"])}
        row |= {f"{key}_text": share(row[key]) for key in ("before", "after", "p_before", "p_after")}
        row["text"] = run.texts[index] if run.texts is not None and index < len(run.texts) else None
        rows.append(row)
    return rows


def _aligned(run: RunData, ids: Sequence[str], records: Sequence[Any], name: str) -> list[float | None]:
    """A column of before, in the rows' order; None everywhere if its rows are others."""
    same = run.column("forget-before", "id") == list(ids) and run.column("forget-before", "record") == list(records)
    return run.column("forget-before", name) if same else [None] * len(ids)


def _hash(run: RunData, record: Any) -> str | None:
    if run.hashes is None or not isinstance(record, int) or not 0 <= record < len(run.hashes):
        return None
    return run.hashes[record]


def _verdict(name: str, after: float | None, tokens: int, left: set[str] | None, alpha: float | None) -> str:
    """What the run says of an example; in a run that has not ended, what its numbers say."""
    if after is None or alpha is None or not tokens:
        return "unknown"
    is_left = bool(left_over([after], [tokens], alpha)) if left is None else name in left
    if is_left:
        return "left"
    return "chance" if after > alpha else "forgotten"


def _tokens(run: RunData, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Margins by row, as many rows as fit, those that matter most first."""
    lists = {when: _lists(run, when) for when in _WHEN}
    ids = run.column("forget-after", "id") or run.column("forget-before", "id")
    # Tables of other rows would show the tokens of another example.
    lists = {when: values if run.tokens.get(when, {}).get("id") == ids else [] for when, values in lists.items()}
    found: dict[str, Any] = {}
    room, text_room = _TOKEN_BYTES, _TEXT_BYTES
    for row in sorted(rows, key=_importance):
        index = row["index"]
        one: dict[str, Any] = {when: rounded(values[index], 2) for when, values in lists.items() if values}
        size = sum(7 * len(values) for values in one.values())
        words = row["text"].tokens if row["text"] is not None else ()
        text_size = sum(len(word.encode("utf-8", "replace")) + 3 for word in words)
        if not one or size > room:
            continue
        room -= size
        if words and text_size <= text_room and all(len(values) == len(words) for values in one.values()):
            text_room -= text_size
            one["words"] = list(words)
        found[str(index)] = one
    return found
