import math

import numpy as np
import pytest
from scipy.stats import hmean, ks_2samp

from expunge.metrics import (
    SHARE_UP,
    UTILITY_PARTS,
    Bootstrap,
    forget_quality,
    harmonic_mean,
    log_truth_ratio,
    mean_metric,
    model_utility,
    option_probability,
    truth_score,
)

BOOT = Bootstrap(resamples=100)


def test_truth_ratio_by_both_means():
    assert math.exp(log_truth_ratio(-1.5, [-1.0, -3.0])) == pytest.approx(0.6065, abs=5e-5)
    assert math.exp(log_truth_ratio(-1.5, [-1.0, -3.0], mean="arithmetic")) == pytest.approx(0.9359, abs=5e-5)
    assert log_truth_ratio(-1.0, []) is None
    assert log_truth_ratio(math.nan, [-1.0]) is None
    with pytest.raises(ValueError, match="'median'"):
        log_truth_ratio(-1.0, [-1.0], mean="median")


@pytest.mark.parametrize(
    ("aggregate", "expected"), [("closer_to_one", 0.6667), ("true_better", 0.1667), ("paraphrase_share", 0.5)]
)
def test_truth_ratio_aggregates(aggregate, expected):
    rows = [truth_score(math.log(ratio), aggregate) for ratio in (0.5, 2.0, 1.0)]
    assert np.mean(rows) == pytest.approx(expected, abs=5e-5)
    assert truth_score(None, aggregate) is None


def test_truth_scores_do_not_overflow():
    for aggregate in ("closer_to_one", "true_better", "paraphrase_share"):
        assert truth_score(2000.0, aggregate) == 0.0
    assert truth_score(-2000.0, "closer_to_one") == 0.0
    assert truth_score(-2000.0, "paraphrase_share") == 1.0
    with pytest.raises(ValueError, match="'best'"):
        truth_score(0.0, "best")


def test_option_probability():
    assert option_probability(-1.0, [-2.0, -3.0]) == pytest.approx(0.6652, abs=5e-5)
    assert option_probability(-1.0, []) is None
    assert option_probability(-1000.0, [-1000.0]) == pytest.approx(0.5)


def test_harmonic_mean():
    assert harmonic_mean([0.5, 1.0, 0.25]) == pytest.approx(0.4286, abs=5e-5)
    assert harmonic_mean([0.5, 0.0]) == 0.0
    assert harmonic_mean([0.5, None]) is None
    assert harmonic_mean([]) is None
    with pytest.raises(ValueError, match="accepted are numbers from 0"):
        harmonic_mean([-0.5])


def test_model_utility_is_scipys_harmonic_mean_of_nine():
    rng = np.random.default_rng(0)
    parts = [
        mean_metric(name, rng.random(20), SHARE_UP, unit=name.rpartition("_")[0], bootstrap=BOOT)
        for name in UTILITY_PARTS
    ]
    found = model_utility(parts[::-1], bootstrap=BOOT)
    assert len(UTILITY_PARTS) == 9
    assert found.value == pytest.approx(hmean([part.value for part in parts]))
    assert found.interval[0] < found.value < found.interval[1]
    zero = mean_metric(UTILITY_PARTS[0], [0.0, 0.0], SHARE_UP, unit="u", bootstrap=BOOT)
    assert model_utility([zero, *parts[1:]], bootstrap=BOOT).value == 0.0
    null = mean_metric(UTILITY_PARTS[0], [None], SHARE_UP, unit="u", bootstrap=BOOT)
    assert model_utility([null, *parts[1:]], bootstrap=BOOT).value is None
    with pytest.raises(ValueError, match="retain_probability"):
        model_utility(parts[:8], bootstrap=BOOT)


def test_forget_quality_is_the_ks_test():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=100), rng.normal(0.5, size=80)
    found = forget_quality([*ours, None], list(theirs), bootstrap=BOOT)
    expected = ks_2samp(ours, theirs)
    assert found.p.value == pytest.approx(expected.pvalue)
    assert found.log10_p.value == pytest.approx(math.log10(expected.pvalue))
    assert found.statistic.value == pytest.approx(expected.statistic)
    assert (found.p.n, found.p.nulls) == (80, 1)
    assert found.statistic.interval[0] <= found.statistic.interval[1]


def test_ratios_and_their_logarithms_have_one_forget_quality():
    rng = np.random.default_rng(1)
    ours, theirs = rng.random(50), rng.random(50)
    log = forget_quality(np.log(ours), np.log(theirs), bootstrap=BOOT)
    assert log.p.value == forget_quality(ours, theirs, bootstrap=BOOT).p.value


def test_forget_quality_without_a_retrained_model_is_null():
    found = forget_quality([0.1, 0.2], None, bootstrap=BOOT)
    assert [one.value for one in (found.p, found.log10_p, found.statistic)] == [None] * 3
    assert "no retrained model" in found.p.reason
    assert forget_quality([None], [0.1], bootstrap=BOOT).p.reason == "no row was measured"


def test_a_model_compared_with_itself():
    found = forget_quality([0.1, 0.2], [0.1, 0.2], bootstrap=BOOT, identical=True)
    assert (found.p.value, found.log10_p.value, found.statistic.value) == (1.0, 0.0, 0.0)
    assert "same fingerprint" in found.p.note


def test_log10_p_does_not_run_out_of_digits():
    found = forget_quality(list(range(2000)), list(range(5000, 7000)), bootstrap=Bootstrap(resamples=2))
    assert found.p.value == 0.0 or found.p.value < 1e-300
    assert -2000 < found.log10_p.value < -300
