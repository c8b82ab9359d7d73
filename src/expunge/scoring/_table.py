"""The table of per-row scores."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from expunge.errors import UsageError
from expunge.metrics import mean_or_none
from expunge.scoring._files import write_parquet

_TEXT, _COUNTS = ("id",), ("record", "tokens")
_TYPES = {"id": pa.string(), "record": pa.int64(), "tokens": pa.int64()}
# Columns that not every pass measures; tables written before they existed are read without them.
_OPTIONAL = ("certificate", "certificate_coarse", "min_k", "min_k_plus", "zlib")
_ADDED = ("min_k", "min_k_plus", "zlib")


@dataclass(frozen=True)
class ScoreTable:
    """Scores of rows, one entry a row in every column; NaN stands for "not measured" (rows without a labelled token).

    Attributes:
        id: names of the rows.
        record: index of the record each row came from; windows of a long text share it.
        tokens: labelled tokens T that were predicted.
        logprob_sum: Σ_t log p_t, in nats; for texts to forget lower is better, as in all columns below.
        logprob_mean: Σ_t log p_t / T, in nats.
        exact: share of labelled tokens that are the model's first choice, in [0, 1].
        violation: share of labelled tokens with margin above τ_ρ, in [0, 1].
        certificate: Σ_t log σ(m_t) ≥ logprob_sum, in nats; None where β ≠ 1, since then it is no bound.
        certificate_coarse: (1 − V)·T·log ρ ≥ logprob_sum, in nats; None where it is no bound (β < 1, or β > 1 with
            ρ < 1/2).
        suffix_exact: share of the answer, from its end, predicted without an error (extraction strength), in [0, 1].
        min_k: mean of the lowest 40 % of log p_t, in nats; None where not measured. Other shares: from the tokens.
        min_k_plus: the same of the normalised values of min-k++; None where not measured.
        zlib: bytes of the labelled text compressed by zlib; None where not measured.
    """

    id: tuple[str, ...]
    record: np.ndarray
    tokens: np.ndarray
    logprob_sum: np.ndarray
    logprob_mean: np.ndarray
    exact: np.ndarray
    violation: np.ndarray
    certificate: np.ndarray | None
    certificate_coarse: np.ndarray | None
    suffix_exact: np.ndarray
    min_k: np.ndarray | None = None
    min_k_plus: np.ndarray | None = None
    zlib: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Check that all columns have one length."""
        for name in self.columns():
            column = getattr(self, name)
            if column is not None and len(column) != len(self.id):
                raise ValueError(f"{name}: found {len(column)} values, accepted is {len(self.id)}")

    def __len__(self) -> int:
        return len(self.id)

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(field.name for field in dataclasses.fields(ScoreTable))

    def values(self, column: str) -> list[Any]:
        """Return a column as a list; None for what was not measured.

        Args:
            column: a name of `columns()`.

        Raises:
            UsageError: the name is unknown.
        """
        if column not in self.columns():
            raise UsageError(f"column: found {column!r}, accepted is one of {', '.join(self.columns())}")
        data = getattr(self, column)
        if data is None:
            return [None] * len(self)
        if column in _TEXT:
            return list(data)
        return [None if math.isnan(value) else value for value in data.tolist()]

    def mean(self, column: str) -> float | None:
        """Average a column of numbers over the rows where it was measured; None where it never was.

        Args:
            column: a name of `columns()` other than "id".
        """
        if column in _TEXT:
            raise UsageError(f"column: found {column!r}, accepted is a column of numbers")
        return mean_or_none(self.values(column))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one dictionary a row, JSON values only."""
        table = {name: self.values(name) for name in self.columns()}
        return [{name: table[name][index] for name in table} for index in range(len(self))]

    def to_parquet(self, path: str | Path) -> None:
        """Write the table as Parquet, whole or not at all; what was not measured is null.

        Args:
            path: the file; its folder exists.
        """
        columns = {name: pa.array(self.values(name), _TYPES.get(name, pa.float64())) for name in self.columns()}
        write_parquet(path, columns)

    @classmethod
    def from_parquet(cls, path: str | Path) -> "ScoreTable":
        """Read a table written by `to_parquet`.

        Args:
            path: the file.

        Raises:
            UsageError: the file is missing, is no Parquet file or has other columns.
        """
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise UsageError(f"{path}: found no readable Parquet file, accepted is a score table") from error
        there = [name for name in cls.columns() if name in table.column_names]
        missing = [name for name in cls.columns() if name not in (*there, *_ADDED)]
        if missing:
            raise UsageError(f"{path}: found no column {', '.join(missing)}, accepted is a score table")
        return cls(**{name: _column(name, table[name].to_pylist()) for name in there})

    def take(self, rows: Sequence[int]) -> "ScoreTable":
        """The named rows, in that order."""
        places = list(rows)
        found = {name: getattr(self, name) for name in self.columns()}
        found = {name: None if column is None else column[places] for name, column in found.items() if name != "id"}
        return ScoreTable(id=tuple(self.id[place] for place in places), **found)

    def by_record(self) -> "ScoreTable":
        """Join the windows of each record: sums are added, shares weighted by tokens, suffixes run on across windows.

        Returns:
            One row a record, in the order of first appearance, with the id of the record's first row. Rows without a
            labelled token add nothing. min_k, min_k_plus and zlib cannot be joined: they are not measured for a record
            of several windows (join the token table instead).
        """
        places: dict[int, list[int]] = {}
        for index, record in enumerate(self.record.tolist()):
            places.setdefault(record, []).append(index)
        groups = list(places.values())
        tokens = np.array([self.tokens[group].sum() for group in groups], dtype=np.int64)
        divisor = np.where(tokens > 0, tokens, 1)

        def added(column: np.ndarray) -> np.ndarray:
            sums = np.array([np.nansum(column[group]) for group in groups], dtype=np.float64)
            return np.where(tokens > 0, sums, np.nan)

        logprob_sum = added(self.logprob_sum)
        return ScoreTable(
            id=tuple(self.id[group[0]] for group in groups),
            record=np.array(list(places), dtype=np.int64),
            tokens=tokens,
            logprob_sum=logprob_sum,
            logprob_mean=logprob_sum / divisor,
            exact=added(self.exact * self.tokens) / divisor,
            violation=added(self.violation * self.tokens) / divisor,
            certificate=None if self.certificate is None else added(self.certificate),
            certificate_coarse=None if self.certificate_coarse is None else added(self.certificate_coarse),
            suffix_exact=np.array([self._suffix(group) for group in groups], dtype=np.float64),
            **{name: self._of_single(getattr(self, name), groups) for name in _ADDED},
        )

    @staticmethod
    def _of_single(column: np.ndarray | None, groups: list[list[int]]) -> np.ndarray | None:
        """A column of the records that are one window."""
        if column is None:
            return None
        return np.array([column[group[0]] if len(group) == 1 else math.nan for group in groups], dtype=np.float64)

    def _suffix(self, group: list[int]) -> float:
        """Share of the joined windows that is predicted without an error, from the end."""
        windows = [index for index in group if self.tokens[index] > 0]
        exact = 0
        for index in reversed(windows):
            length = round(float(self.suffix_exact[index] * self.tokens[index]))
            exact += length
            if length < self.tokens[index]:
                break
        return exact / int(self.tokens[windows].sum()) if windows else math.nan


def _column(name: str, values: list[Any]) -> Any:
    """Turn a list with None into the column it came from."""
    if name in _TEXT:
        return tuple(values)
    if name in _COUNTS:
        return np.array(values, dtype=np.int64)
    if name in _OPTIONAL and values and all(value is None for value in values):
        return None
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
