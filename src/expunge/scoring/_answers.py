"""The table of generated answers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from expunge.errors import UsageError
from expunge.scoring._files import write_parquet

_TEXT = ("id", "prompt", "prediction", "reference")
_NUMBERS = ("rouge_l", "rouge_l_f1", "prob", "entropy")


@dataclass(frozen=True)
class AnswerTable:
    """Generated answers, one entry a row in every column; NaN stands for "not measured".

    The texts are those of the data: keep files of this table where the data may be kept.

    Attributes:
        id: names of the rows.
        prompt: what was asked, without the chat template around it.
        prediction: the first answer of what the model wrote; what follows it is not scored.
        reference: the true answer.
        rouge_l: ROUGE-L recall of the prediction; not measured where the reference holds no word.
        rouge_l_f1: its F1.
        prob: exp of the mean log-probability of the reference's tokens; not measured where it was not scored.
        entropy: normalised token entropy of what the model wrote (see `expunge.metrics.token_entropy`).
        finished: whether the model ended by itself, before the length limit.
    """

    id: tuple[str, ...]
    prompt: tuple[str, ...]
    prediction: tuple[str, ...]
    reference: tuple[str, ...]
    rouge_l: np.ndarray
    rouge_l_f1: np.ndarray
    prob: np.ndarray
    entropy: np.ndarray
    finished: np.ndarray

    def __post_init__(self) -> None:
        """Check that all columns have one length."""
        for name in self.columns():
            if len(getattr(self, name)) != len(self.id):
                raise ValueError(f"{name}: found {len(getattr(self, name))} values, accepted is {len(self.id)}")

    def __len__(self) -> int:
        return len(self.id)

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(field.name for field in dataclasses.fields(AnswerTable))

    def values(self, column: str) -> list[Any]:
        """Return a column as a list; None for what was not measured.

        Raises:
            UsageError: the name is unknown.
        """
        if column not in self.columns():
            raise UsageError(f"column: found {column!r}, accepted is one of {', '.join(self.columns())}")
        data = getattr(self, column)
        if column in _TEXT:
            return list(data)
        if column in _NUMBERS:
            return [None if math.isnan(value) else value for value in data.tolist()]
        return data.tolist()

    def with_probability(self, prob: np.ndarray) -> AnswerTable:
        """The same answers with the probability of their references."""
        return dataclasses.replace(self, prob=prob)

    def to_parquet(self, path: str | Path) -> None:
        """Write the table, whole or not at all; what was not measured is null.

        Args:
            path: the file; its folder exists.
        """
        types = dict.fromkeys(_TEXT, pa.string()) | dict.fromkeys(_NUMBERS, pa.float64()) | {"finished": pa.bool_()}
        write_parquet(path, {name: pa.array(self.values(name), types[name]) for name in self.columns()})

    @classmethod
    def from_parquet(cls, path: str | Path) -> AnswerTable:
        """Read a table written by `to_parquet`.

        Raises:
            UsageError: the file is missing, is no Parquet file or has other columns.
        """
        try:
            table = pq.read_table(path)
            lists = {name: table[name].to_pylist() for name in cls.columns()}
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            raise UsageError(f"{path}: found no table of answers, accepted is one written by expunge") from error
        columns: dict[str, Any] = {name: tuple(lists[name]) for name in _TEXT}
        for name in _NUMBERS:
            columns[name] = np.array([math.nan if value is None else value for value in lists[name]], dtype=np.float64)
        return cls(**columns, finished=np.array(lists["finished"], dtype=bool))
