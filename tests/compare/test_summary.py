"""Distances, means and ratios, worked by hand."""

import math

import pytest

from expunge.compare import Spread, distance, spread
from expunge.compare._summary import group


def test_spread_counts_only_what_was_measured():
    assert spread([None, None]) == Spread(None, None, 0)
    assert spread([2.0, None]) == Spread(2.0, None, 1)
    found = spread([1.0, 2.0, 6.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.sd == pytest.approx(math.sqrt(7.0))


def test_distance_is_over_what_the_retrained_model_has():
    theirs = {"a": 0.2, "b": 0.9, "c": None}
    found = distance({"a": 0.5, "b": 0.5, "c": 1.0}, theirs, ["a", "b", "c", "d"])
    assert found.value == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 2))
    assert found.differences == {"a": pytest.approx(0.3), "b": pytest.approx(-0.4)}
    assert distance(theirs, theirs, ["a", "b"]).value == 0.0


def test_what_is_missing_makes_no_distance_smaller():
    found = distance({"a": 0.2, "b": None}, {"a": 0.2, "b": 0.9}, ["a", "b"])
    assert (found.value, found.reason) == (None, "without b")
    assert distance({"a": 1.0}, None, ["a"]).reason == "no retrained model"
    assert distance({"a": 1.0}, {"a": None}, ["a"]).value is None


def _row(method, seed, seconds, away, *, state="complete", target="t", value=0.5):
    row = {"target": target, "method": method, "optimizer": None, "seed": seed, "state": state, "flags": []}
    row |= {"baseline": method != "masc", "seconds": seconds, "distance": away, "metrics": {"m": value}}
    return row


def test_the_best_baseline_is_the_nearest_and_sets_the_ratio():
    rows = [_row("masc", 0, 10.0, 0.1), _row("npo", 0, 40.0, 0.3), _row("ga", 0, 1.0, 0.9)]
    rows += [_row("masc", 1, 30.0, 0.3), _row("npo", 1, 60.0, 0.1), _row("ga", 1, 1.0, 0.7)]
    masc, npo, ga = group(rows)
    assert [row["best_baseline"] for row in (masc, npo, ga)] == [False, True, False]
    assert [row["ratio"] for row in (masc, npo, ga)] == [0.4, 1.0, 0.02]
    assert masc["seconds"] == {"mean": 20.0, "sd": pytest.approx(14.1421356), "n": 2}
    assert masc["seeds"] == [0, 1]


def test_failed_cells_are_counted_and_left_out():
    rows = [_row("npo", 0, 40.0, 0.3), _row("npo", 1, None, None, state="failed", value=None)]
    (npo,) = group(rows)
    assert (npo["failed"], npo["seeds"], npo["seconds"]["n"]) == (1, [0], 1)
    assert npo["metrics"]["m"] == {"mean": 0.5, "sd": None, "n": 1}


def test_targets_have_baselines_of_their_own():
    rows = [_row("masc", 0, 10.0, 0.1), _row("npo", 0, 20.0, 0.3)]
    rows += [_row("masc", 0, 10.0, 0.1, target="u"), _row("npo", 0, 40.0, 0.3, target="u")]
    assert [row["ratio"] for row in group(rows)] == [0.5, 1.0, 0.25, 1.0]


def test_without_a_distance_there_is_no_best_baseline():
    (masc, npo) = group([_row("masc", 0, 10.0, None), _row("npo", 0, 20.0, None)])
    assert (masc["ratio"], npo["ratio"], npo["best_baseline"]) == (None, None, False)
