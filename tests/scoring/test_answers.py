import dataclasses
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from expunge.errors import UsageError
from expunge.scoring import AnswerTable


def table(**changes):
    numbers = {"rouge_l": [1.0, math.nan], "rouge_l_f1": [0.5, math.nan], "prob": [0.25, 0.5], "entropy": [1.0, 0.0]}
    columns = {name: np.array(values) for name, values in numbers.items()}
    texts = {"prompt": ("Who?", "東?"), "prediction": ("A.", ""), "reference": ("A", "")}
    return AnswerTable(id=("a", "b"), **texts, **columns, finished=np.array([True, False]), **changes)


def test_the_file_has_the_named_fields_and_comes_back(tmp_path):
    path = tmp_path / "answers.parquet"
    table().to_parquet(path)
    names = pq.read_table(path).column_names
    assert names[:4] == ["id", "prompt", "prediction", "reference"]
    assert {"rouge_l", "prob"} <= set(names)
    again = AnswerTable.from_parquet(path)
    for name in AnswerTable.columns():
        assert again.values(name) == table().values(name)
    assert again.values("rouge_l") == [1.0, None]
    assert list(tmp_path.iterdir()) == [path]


def test_probabilities_are_added():
    assert table().with_probability(np.array([0.1, 0.2])).values("prob") == [0.1, 0.2]


def test_bad_tables(tmp_path):
    with pytest.raises(ValueError, match="prompt: found 1 values, accepted is 2"):
        dataclasses.replace(table(), prompt=("x",))
    with pytest.raises(UsageError, match="'rouge'"):
        table().values("rouge")
    (tmp_path / "bad").write_text("no")
    with pytest.raises(UsageError, match="no table of answers"):
        AnswerTable.from_parquet(tmp_path / "bad")
