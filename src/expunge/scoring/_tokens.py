"""The table of per-token scores: one list a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from expunge.errors import UsageError
from expunge.scoring._files import write_parquet

NUMBERS = ("logprob", "margin", "entropy", "rank", "hit", "normalised")


@dataclass(frozen=True)
class TokenTable:
    """Scores of labelled tokens, row after row; those of row i are `offsets[i]` to `offsets[i + 1]`.

    Attributes:
        id: names of the R rows.
        record: (R,) index of the record each row came from.
        offsets: (R + 1,) int64.
        logprob: (N,) log p of the token, in nats.
        margin: (N,) margin over the k strongest competitors.
        entropy: (N,) entropy of the model's distribution, in nats.
        rank: (N,) how many tokens the model finds likelier; 0: its first choice.
        hit: (N,) 1.0 where the token is the model's first choice.
        normalised: (N,) min-k++ value (see `expunge.metrics.normalised_logprob`).
    """

    id: tuple[str, ...]
    record: np.ndarray
    offsets: np.ndarray
    logprob: np.ndarray
    margin: np.ndarray
    entropy: np.ndarray
    rank: np.ndarray
    hit: np.ndarray
    normalised: np.ndarray

    def __post_init__(self) -> None:
        """Check that the columns fit."""
        if len(self.offsets) != len(self.id) + 1 or len(self.record) != len(self.id):
            raise ValueError(f"offsets: found {len(self.offsets)}, accepted is one more than the {len(self.id)} rows")
        for name in NUMBERS:
            if len(getattr(self, name)) != self.offsets[-1]:
                raise ValueError(f"{name}: found {len(getattr(self, name))} values, accepted is {self.offsets[-1]}")

    def __len__(self) -> int:
        return len(self.id)

    def rows(self, column: str) -> list[np.ndarray]:
        """One array a row.

        Args:
            column: logprob, margin, entropy, rank, hit or normalised.
        """
        if column not in NUMBERS:
            raise UsageError(f"column: found {column!r}, accepted is one of {', '.join(NUMBERS)}")
        data = getattr(self, column)
        return [data[start:end] for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    def take(self, rows: Sequence[int]) -> TokenTable:
        """The named rows, in that order."""
        columns = {name: _joined([self.rows(name)[row] for row in rows]) for name in NUMBERS}
        lengths = [int(self.offsets[row + 1] - self.offsets[row]) for row in rows]
        ids = tuple(self.id[row] for row in rows)
        return TokenTable(ids, self.record[list(rows)], _offsets(lengths), **columns)

    def by_record(self) -> TokenTable:
        """Join the windows of each record, in the order of first appearance."""
        groups: dict[int, list[int]] = {}
        for index, record in enumerate(self.record.tolist()):
            groups.setdefault(record, []).append(index)
        order = [index for group in groups.values() for index in group]
        laid = self.take(order)
        ends = np.cumsum([len(group) for group in groups.values()], dtype=np.int64)
        offsets = np.concatenate([[0], laid.offsets[ends]]).astype(np.int64)
        ids = tuple(self.id[group[0]] for group in groups.values())
        return dataclasses.replace(laid, id=ids, record=np.array(list(groups), dtype=np.int64), offsets=offsets)

    def to_parquet(self, path: str | Path) -> None:
        """Write one line a row, with a list of numbers in each column; whole or not at all.

        Args:
            path: the file; its folder exists.
        """
        columns = {"id": pa.array(self.id, pa.string()), "record": pa.array(self.record, pa.int64())}
        columns |= {name: pa.array(self.rows(name), pa.list_(pa.float64())) for name in NUMBERS}
        write_parquet(path, columns)

    @classmethod
    def from_parquet(cls, path: str | Path) -> TokenTable:
        """Read a table written by `to_parquet`.

        Raises:
            UsageError: the file is missing, is no Parquet file or has other columns.
        """
        try:
            table = pq.read_table(path)
            lists = {name: table[name].to_pylist() for name in NUMBERS}
            ids, record = tuple(table["id"].to_pylist()), np.array(table["record"].to_pylist(), dtype=np.int64)
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            raise UsageError(f"{path}: found no table of tokens, accepted is one written by expunge") from error
        arrays = {name: [np.array(row, dtype=np.float64) for row in lists[name]] for name in NUMBERS}
        lengths = [len(row) for row in lists["logprob"]]
        return cls(ids, record, _offsets(lengths), **{name: _joined(arrays[name]) for name in NUMBERS})


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts])


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)
