import dataclasses
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from expunge.errors import UsageError
from expunge.scoring import ScoreTable


def table(**changes):
    """Record 4 in windows of 4 and 2 tokens, record 7 in one of 3, record 9 without a token."""
    nan = math.nan
    base = ScoreTable(
        id=("x", "x", "y", "z"),
        record=np.array([4, 4, 7, 9]),
        tokens=np.array([4, 2, 3, 0]),
        logprob_sum=np.array([-4.0, -5.0, -3.0, nan]),
        logprob_mean=np.array([-1.0, -2.5, -1.0, nan]),
        exact=np.array([0.75, 1.0, 1 / 3, nan]),
        violation=np.array([0.5, 1.0, 0.0, nan]),
        certificate=np.array([-2.0, -1.0, -1.5, nan]),
        certificate_coarse=np.array([-1.0, 0.0, -1.0, nan]),
        suffix_exact=np.array([0.75, 1.0, 0.0, nan]),
    )
    return dataclasses.replace(base, **changes)


def test_mean_leaves_out_what_was_not_measured():
    assert table().mean("violation") == pytest.approx(0.5)
    assert table(certificate=None).mean("certificate") is None
    assert table().mean("tokens") == 2.25
    with pytest.raises(UsageError, match="'violations', accepted is one of id, record"):
        table().mean("violations")
    with pytest.raises(UsageError, match="numbers"):
        table().mean("id")


def test_rows_are_json_and_missing_is_null():
    rows = table().to_rows()
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows[0]["id"] == "x"
    assert rows[3]["tokens"] == 0
    assert rows[3]["exact"] is None


@pytest.mark.parametrize("certificate", [None, np.array([-2.0, -1.0, -1.5, math.nan])])
def test_parquet_round_trip(tmp_path, certificate):
    path = tmp_path / "scores.parquet"
    table(certificate=certificate).to_parquet(path)
    loaded = ScoreTable.from_parquet(path)
    assert loaded.to_rows() == table(certificate=certificate).to_rows()
    assert (loaded.certificate is None) == (certificate is None)
    assert loaded.tokens.dtype == np.int64
    assert pq.read_table(path)["exact"].null_count == 1
    assert [file.name for file in tmp_path.iterdir()] == ["scores.parquet"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "scores.parquet"
    table().to_parquet(path)
    before = path.read_bytes()

    def full(_, where):
        where.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="disk full"):
        table().to_parquet(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["scores.parquet"]


def test_unreadable_files_are_usage_errors(tmp_path):
    (tmp_path / "text").write_text("no table")
    with pytest.raises(UsageError, match="Parquet"):
        ScoreTable.from_parquet(tmp_path / "text")
    with pytest.raises(UsageError, match="Parquet"):
        ScoreTable.from_parquet(tmp_path / "missing")
    pq.write_table(pq.read_table(written(tmp_path)).drop(["exact"]), tmp_path / "other")
    with pytest.raises(UsageError, match="exact"):
        ScoreTable.from_parquet(tmp_path / "other")


def written(folder):
    table().to_parquet(folder / "full")
    return folder / "full"


def test_by_record_joins_windows():
    joined = table().by_record()
    assert joined.id == ("x", "y", "z")
    assert joined.record.tolist() == [4, 7, 9]
    assert joined.tokens.tolist() == [6, 3, 0]
    row = joined.to_rows()[0]
    # 3 + 2 hits of 6; 2 + 2 violations of 6; the last window is exact, and 3 of the first run on into it
    assert row["logprob_sum"] == -9.0
    assert row["logprob_mean"] == -1.5
    assert row["exact"] == pytest.approx(5 / 6)
    assert row["violation"] == pytest.approx(4 / 6)
    assert row["certificate"] == -3.0
    assert row["certificate_coarse"] == -1.0
    assert row["suffix_exact"] == pytest.approx(5 / 6)
    assert joined.to_rows()[2]["exact"] is None
    assert joined.by_record().to_rows() == joined.to_rows()


def test_a_miss_in_the_last_window_ends_the_suffix():
    joined = table(suffix_exact=np.array([1.0, 0.5, 0.0, math.nan])).by_record()
    assert joined.suffix_exact[0] == pytest.approx(1 / 6)


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match="exact: found 1 values, accepted is 4"):
        table(exact=np.array([1.0]))


def test_columns_of_later_versions_are_optional_in_old_files(tmp_path):
    path = tmp_path / "scores.parquet"
    table(min_k=np.array([-1.0, -2.0, -3.0, math.nan]), zlib=np.array([9.0, 9.0, 9.0, 9.0])).to_parquet(path)
    assert ScoreTable.from_parquet(path).values("min_k") == [-1.0, -2.0, -3.0, None]
    assert ScoreTable.from_parquet(path).min_k_plus is None
    old = pq.read_table(path).drop_columns(["min_k", "min_k_plus", "zlib"])
    pq.write_table(old, path)
    assert ScoreTable.from_parquet(path).zlib is None


def test_min_k_of_joined_windows_is_not_measured():
    joined = table(min_k=np.array([-1.0, -2.0, -3.0, -4.0])).by_record()
    several = [len(set(np.flatnonzero(table().record == record))) > 1 for record in joined.record]
    assert [math.isnan(value) for value in joined.min_k] == several


def test_take():
    assert table().take([2, 0]).id == (table().id[2], table().id[0])
    assert table().take([2]).logprob_sum[0] == table().logprob_sum[2]
