import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expunge.metrics import (
    Summary,
    certificate,
    certificate_coarse,
    extraction_strength,
    mean_or_none,
    probability,
    summarise,
)


def test_summary_counts_what_is_missing():
    assert summarise([1.0, 3.0]) == Summary(2.0, 2, 0, None)
    assert summarise([1.0, None, math.nan], reason="empty reference") == Summary(1.0, 1, 2, "empty reference")
    assert summarise([None]) == Summary(None, 0, 1, "not measured")
    assert summarise([]) == Summary(None, 0, 0, "no examples")
    assert summarise(np.array([0.0, 1.0])) == Summary(0.5, 2, 0, None)


def test_nothing_measured_has_no_mean():
    assert mean_or_none([None]) is None
    assert mean_or_none([]) is None
    assert mean_or_none([0.0]) == 0.0


def test_probability():
    assert probability(math.log(0.25)) == pytest.approx(0.25)
    assert probability(0.0) == 1.0


def test_certificate_by_hand():
    # sigma(log 3) = .75, sigma(-log 3) = .25
    assert certificate([math.log(3), -math.log(3)]) == pytest.approx(math.log(0.75 * 0.25))
    assert certificate([]) is None
    assert certificate([-1000.0]) == -1000.0
    assert certificate([1000.0]) == 0.0


def test_coarse_certificate_by_hand():
    assert certificate_coarse(0.25, 4, 0.7) == pytest.approx(3 * math.log(0.7))
    assert certificate_coarse(1.0, 4, 0.7) == 0.0
    assert certificate_coarse(0.0, 0, 0.7) is None


@pytest.mark.parametrize("arguments", [(1.5, 1, 0.7), (math.nan, 1, 0.7), (0.5, 1, 1.0)])
def test_coarse_certificate_refuses(arguments):
    with pytest.raises(ValueError, match="accepted is"):
        certificate_coarse(*arguments)


@given(
    st.lists(st.lists(st.floats(-8, 8), min_size=5, max_size=5), min_size=1, max_size=8),
    st.floats(0.05, 0.95),
    st.integers(1, 4),
    st.sampled_from([1.0, 2.0, 5.0]),
)
def test_proposition_1_log_probability_is_below_both_bounds(logits, rho, k, beta):
    logits = np.array(logits)
    logprob = float((logits[:, 0] - np.logaddexp.reduce(logits, axis=1)).sum())
    competitors = np.sort(logits[:, 1:], axis=1)[:, -k:]

    def margins(b):
        return b * logits[:, 0] - np.logaddexp.reduce(b * competitors, axis=1)

    assert logprob <= certificate(margins(1.0)) + 1e-9
    tau = math.log(rho / (1 - rho))
    violation = float((margins(1.0) > tau).mean())
    assert certificate(margins(1.0)) <= certificate_coarse(violation, len(logits), rho) + 1e-9
    if rho >= 0.5:
        # the coarse bound also holds for the sharper margin
        violation = float((margins(beta) > tau).mean())
        assert logprob <= certificate_coarse(violation, len(logits), rho) + 1e-9


@pytest.mark.parametrize(
    ("hits", "share"), [([0, 1, 1, 1], 0.75), ([1, 1], 1.0), ([1, 0], 0.0), ([True, False, True], 1 / 3), ([], None)]
)
def test_extraction_strength(hits, share):
    assert extraction_strength(hits) == share
    assert extraction_strength(np.array(hits)) == share
