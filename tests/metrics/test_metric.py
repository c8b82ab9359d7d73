import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expunge.metrics import SHARE_UP, Bootstrap, Metric, combine, mean_metric, null_metric

BOOT = Bootstrap(seed=3, resamples=400)


def mean(values, **options):
    return mean_metric("m", values, SHARE_UP, unit=options.pop("unit", "rows"), bootstrap=BOOT, **options)


def test_a_mean_keeps_rows_nulls_and_reason():
    found = mean([0.25, None, math.nan, 0.75], reason="empty reference")
    assert (found.value, found.n, found.nulls, found.reason) == (0.5, 2, 2, "empty reference")
    assert found.per_row == (0.25, None, None, 0.75)
    assert found.interval[0] == 0.25
    assert found.interval[1] == 0.75


def test_nothing_measured_is_none_with_a_reason_never_zero():
    assert mean([None, None], reason="why").value is None
    assert mean([None], reason="why").reason == "why"
    assert mean([]).reason == "no rows"
    assert mean([]).interval is None
    assert null_metric("m", SHARE_UP, "why").to_dict()["value"] is None


def test_one_row_has_no_interval():
    assert mean([0.5]).interval is None


def test_the_interval_is_that_of_scipy():
    from scipy.stats import bootstrap

    values = np.random.default_rng(0).random(60)
    ours = mean_metric("m", values, SHARE_UP, unit="u", bootstrap=Bootstrap(resamples=5000)).interval
    theirs = bootstrap((values,), np.mean, method="percentile", n_resamples=5000, random_state=1).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_the_seed_the_level_and_the_resamples_reach_the_interval():
    values = np.random.default_rng(0).random(30)

    def interval(**options):
        return mean_metric("m", values, SHARE_UP, unit="u", bootstrap=Bootstrap(**options)).interval

    assert interval() == interval()
    assert interval(seed=1) != interval()
    assert interval(resamples=50) != interval()
    narrow, wide = interval(level=0.5), interval()
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_metrics_of_one_unit_share_their_draws():
    values = np.random.default_rng(0).random(30)
    left, right = mean(values), mean(1.0 - values)
    total = combine("t", [left, right], lambda parts: parts.sum(0), SHARE_UP, bootstrap=BOOT)
    assert total.interval == pytest.approx((1.0, 1.0))  # with draws of their own it would be wide
    other = combine("t", [left, mean(1.0 - values, unit="others")], lambda p: p.sum(0), SHARE_UP, bootstrap=BOOT)
    assert other.interval[1] - other.interval[0] > 0.05


def test_an_aggregate_misses_what_a_part_misses():
    found = combine("t", [mean([0.5, 0.6]), null_metric("gone", SHARE_UP, "no data")], np.sum, SHARE_UP, bootstrap=BOOT)
    assert found.value is None
    assert "gone" in found.reason
    assert "no data" in found.reason


def test_a_metric_is_json_and_frozen():
    found = mean([0.5, None])
    assert json.loads(json.dumps(found.to_dict(rows=True)))["per_row"] == [0.5, None]
    assert "per_row" not in found.to_dict()
    with pytest.raises(AttributeError):
        found.value = 1.0
    assert found == Metric(**{**vars(found), "replicates": None})


@pytest.mark.parametrize("options", [{"resamples": 1}, {"level": 1.0}])
def test_bootstrap_refuses(options):
    with pytest.raises(ValueError, match="accepted is"):
        Bootstrap(**options)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=20))
def test_the_interval_holds_values_the_rows_can_give(values):
    found = mean(values)
    measured = [value for value in values if value is not None]
    if found.interval:
        assert min(measured) - 1e-9 <= found.interval[0] <= found.interval[1] <= max(measured) + 1e-9


def test_draws_come_in_blocks_of_bounded_size():
    boot = Bootstrap(resamples=7)
    blocks = list(boot.blocks("u", 1 << 21))  # two rows a block
    assert [block.shape for block in blocks] == [(2, 1 << 21)] * 3 + [(1, 1 << 21)]
    rows = list(boot.draws("u", 5))
    assert len(rows) == 7
    assert not any(row.flags.writeable for row in rows)
    assert (np.array(rows) == np.array(list(boot.draws("u", 5)))).all()
