import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expunge.metrics import (
    Bootstrap,
    auc,
    auc_metric,
    gradient_norm_score,
    min_k,
    normalised_logprob,
    privacy_metric,
    privacy_score,
    privleak,
    privleak_metric,
    reference_score,
    zlib_score,
)

BOOT = Bootstrap(resamples=100)
SCORES = st.lists(st.integers(-5, 5), min_size=1, max_size=12)


def metric(members, others, name="mia_min_k"):
    return auc_metric(name, members, others, units=("forget", "holdout"), bootstrap=BOOT)


def test_min_k():
    assert min_k([-0.1, -4.0, -0.2, -2.0, -0.3], 0.4) == pytest.approx(-3.0)
    assert min_k([-1.0, -2.0], 0.1) == -2.0
    assert min_k(np.arange(100.0), 0.29) == pytest.approx(14.0)  # 29 tokens, though 0.29 * 100 < 29 in floats
    assert min_k([]) is None
    with pytest.raises(ValueError, match="share: found 0"):
        min_k([-1.0], 0)


def test_min_k_plus_plus():
    p = np.array([0.5, 0.25, 0.25])
    mean = (p * np.log(p)).sum()
    variance = (p * (np.log(p) - mean) ** 2).sum()
    assert normalised_logprob([math.log(0.25)], [mean], [variance])[0] == pytest.approx(-1.0)
    # a uniform distribution has no spread: nothing is unusual, and nothing is divided by zero
    assert normalised_logprob([math.log(0.5)], [math.log(0.5)], [0.0])[0] == 0.0


def test_attack_scores_are_higher_for_members():
    assert zlib_score(-0.5, 100) > zlib_score(-1.0, 100)
    assert zlib_score(-1.0, 0) is None
    assert zlib_score(None, 10) is None
    assert reference_score(-1.0, -3.0) == 2.0
    assert reference_score(-1.0, None) is None
    assert gradient_norm_score(0.1) > gradient_norm_score(2.0)
    assert gradient_norm_score(None) is None


def test_auc():
    assert auc([2, 3], [0, 1]) == 1.0
    assert auc([1, 1], [1, 1, 1]) == 0.5
    assert auc([], [1]) is None
    assert auc([1], []) is None


@given(SCORES, SCORES)
def test_auc_counts_pairs(members, others):
    pairs = [(a > b) + 0.5 * (a == b) for a in members for b in others]
    assert auc(members, others) == pytest.approx(np.mean(pairs))
    assert auc(members, others) == pytest.approx(1 - auc(others, members))


def test_auc_metric_has_interval_rows_and_reasons():
    found = metric([2.0, 3.0, None, 0.5], [0.0, 1.0])
    assert found.value == pytest.approx(5 / 6)
    assert (found.n, found.nulls) == (5, 1)
    assert found.interval[0] < 1.0
    assert len(found.per_row) == 6
    assert metric([], [1.0]).value is None
    assert metric([1.0], []).reason == "no rows that were never seen"


@pytest.mark.parametrize(("a", "r", "expected"), [(0.98, 0.5, -96.0), (0.0, 0.5, 100.0), (0.5, 0.5, 0.0)])
def test_privleak(a, r, expected):
    assert privleak(a, r) == pytest.approx(expected)


def test_privleak_without_meaning():
    assert privleak(0.5, 1.0) is None
    assert privleak(None, 0.5) is None
    ours = metric([1.0, 2.0, 0.0], [1.0, 0.5])
    assert privleak_metric("privleak", ours, None, bootstrap=BOOT).reason == "no retrained model to compare with"
    separating = metric([2.0, 3.0, 2.5, 0.0], [0.5, 1.0, 0.2])
    assert "AUC 0.75" in privleak_metric("privleak", ours, separating, bootstrap=BOOT).note
    assert privleak_metric("privleak", ours, metric([1.0, 0.0], [1.0, 0.0]), bootstrap=BOOT).note is None


def test_privleak_metric_is_the_function_of_both_aucs():
    ours, theirs = metric([2.0, 3.0, 0.0], [1.0, 0.5]), metric([1.0, 0.0, 2.0], [1.0, 0.5])
    found = privleak_metric("privleak", ours, theirs, bootstrap=BOOT)
    assert found.value == pytest.approx(privleak(ours.value, theirs.value))
    assert found.interval[0] <= found.interval[1]


def test_privacy_score():
    assert privacy_score(0.6, 0.5, 0.9) == pytest.approx(0.75)
    assert privacy_score(0.6, 0.5, 0.5) is None
    assert privacy_score(0.1, 0.5, 0.6) == 0.0
    parts = metric([2.0, 0.0], [1.0]), metric([1.0, 0.0], [1.0]), metric([2.0, 3.0], [1.0])
    found = privacy_metric("privacy_score", parts, bootstrap=BOOT)
    assert found.value == pytest.approx(privacy_score(*(part.value for part in parts)))
