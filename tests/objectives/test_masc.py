import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expunge.errors import UsageError
from expunge.objectives import SumCount, apply_suffix, kl_sum, masc_hinge, mean_kl, suffix_start, threshold


def reference_hinge(margins, rows, n_rows, rho, eta, gate):
    """The formula, row by row, in plain Python."""
    tau = math.log(rho / (1 - rho))
    losses = []
    for row in range(n_rows):
        own = [m for m, r in zip(margins, rows, strict=True) if r == row]
        if not own:
            continue
        share = sum(m > tau for m in own) / len(own)
        closed = gate is not None and share <= gate
        losses.append(0.0 if closed else sum(max(0.0, m - (tau - eta)) / eta for m in own) / len(own))
    return sum(losses) / len(losses) if losses else 0.0


def test_threshold_is_the_logit_of_rho():
    assert threshold(0.5) == 0.0
    assert threshold(0.7) == pytest.approx(math.log(7 / 3), rel=1e-12)
    assert threshold(0.2) == pytest.approx(-math.log(4), rel=1e-12)


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_threshold_refuses_values_outside_the_open_interval(rho):
    with pytest.raises(UsageError, match="rho"):
        threshold(rho)


def test_hinge_worked_by_hand():
    # rho .5: tau 0, eta .5: hinge (m + .5)/.5. Row 0: 1 -> 3, -.25 -> .5, mean 1.75. Row 1: 0 -> 1. Mean of rows 1.375.
    margins = torch.tensor([1.0, -0.25, 0.0], requires_grad=True)
    result = masc_hinge(margins, torch.tensor([0, 0, 1]), 2, rho=0.5, eta=0.5)
    assert result.loss.item() == pytest.approx(1.375)
    assert result.per_row.tolist() == pytest.approx([1.75, 1.0])
    assert result.violation.tolist() == [0.5, 0.0]
    assert (result.count, result.excluded, result.closed) == (2, 0, 0)
    result.loss.backward()
    # d/dm = 1/(rows · tokens of the row · eta)
    assert margins.grad.tolist() == pytest.approx([0.5, 0.5, 1.0])


def test_rows_without_tokens_are_excluded_and_counted():
    # as "length-normalised loss over rows with (0 tokens), (4 tokens, sum 8) -> 2.0, dropped = 1"
    margins = torch.full((4,), 1.0)
    result = masc_hinge(margins, torch.ones(4, dtype=torch.int64), 2, rho=0.5, eta=1.0)
    assert result.loss.item() == pytest.approx(2.0)
    assert (result.count, result.excluded) == (1, 1)
    assert math.isnan(result.violation[0].item())
    assert result.violation[1].item() == 1.0


def test_nothing_labelled_gives_a_zero_attached_to_the_graph():
    margins = torch.empty(0, requires_grad=True)
    result = masc_hinge(margins, torch.empty(0, dtype=torch.int64), 3)
    assert result.loss.item() == 0.0
    assert result.excluded == 3
    result.loss.backward()
    assert margins.grad.shape == (0,)


def test_gate_closes_rows_within_the_tolerance():
    margins = torch.tensor([1.0, -0.25, 1.0, 1.0], requires_grad=True)
    rows = torch.tensor([0, 0, 1, 1])
    result = masc_hinge(margins, rows, 2, rho=0.5, eta=0.5, gate=0.5)
    assert result.per_row.tolist() == pytest.approx([0.0, 3.0])
    assert result.loss.item() == pytest.approx(1.5)
    assert (result.count, result.closed) == (2, 1)
    result.loss.backward()
    assert margins.grad.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.5])


def test_all_rows_closed_still_runs_backward():
    margins = torch.tensor([-9.0, -9.0], requires_grad=True)
    result = masc_hinge(margins, torch.tensor([0, 1]), 2, gate=0.0)
    assert result.loss.item() == 0.0
    assert result.closed == 2
    result.loss.backward()
    assert margins.grad.tolist() == [0.0, 0.0]


def test_a_margin_exactly_at_tau_is_no_violation_and_costs_one():
    result = masc_hinge(torch.tensor([0.0]), torch.tensor([0]), 1, rho=0.5, eta=0.25)
    assert result.violation.tolist() == [0.0]
    assert result.loss.item() == 1.0


@given(
    st.lists(st.tuples(st.floats(-20, 20, width=32), st.integers(0, 4)), max_size=30),
    st.floats(0.05, 0.95),
    st.floats(0.05, 2.0),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_hinge_equals_the_plain_formula(pairs, rho, eta, gate):
    margins = [m for m, _ in pairs]
    rows = [r for _, r in pairs]
    result = masc_hinge(
        torch.tensor(margins, dtype=torch.float64),
        torch.tensor(rows, dtype=torch.int64),
        5,
        rho=rho,
        eta=eta,
        gate=gate,
    )
    assert result.loss.item() == pytest.approx(reference_hinge(margins, rows, 5, rho, eta, gate), rel=1e-9, abs=1e-12)
    if gate is None:
        seen = ~result.violation.isnan()
        assert (result.per_row[seen] >= result.violation[seen] - 1e-12).all()


def test_gradcheck():
    margins = torch.tensor([1.3, -0.2, 0.7, -3.0], dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([0, 0, 2, 2])
    assert torch.autograd.gradcheck(lambda m: masc_hinge(m, rows, 4, rho=0.6, eta=0.8).loss, (margins,))


def test_half_precision_is_computed_in_float32():
    margins = torch.full((1000,), 1.0, dtype=torch.bfloat16, requires_grad=True)
    result = masc_hinge(margins, torch.zeros(1000, dtype=torch.int64), 1, rho=0.5, eta=0.3)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(1.3 / 0.3, rel=1e-5)


def test_options_reach_the_result():
    margins, rows = torch.tensor([0.6, 1.0]), torch.tensor([0, 0])
    losses = {masc_hinge(margins, rows, 1, rho=rho, eta=eta).loss.item() for rho in (0.5, 0.7) for eta in (0.25, 0.5)}
    assert len(losses) == 4


def test_micro_batches_join_to_the_whole_batch():
    torch.manual_seed(0)
    margins, rows = torch.randn(12, dtype=torch.float64), torch.arange(4).repeat_interleave(3)
    whole = masc_hinge(margins, rows, 4)
    parts = [masc_hinge(margins[rows == r], rows[rows == r] - r, 1) for r in range(4)]
    joined = sum(part.total for part in parts) / sum(part.count for part in parts)
    assert joined.item() == pytest.approx(whole.loss.item(), rel=1e-12)


@pytest.mark.parametrize("options", [{"eta": 0.0}, {"eta": -1.0}, {"eta": math.inf}, {"rho": 1.0}, {"gate": 1.5}])
def test_bad_options_are_usage_errors_naming_the_option(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        masc_hinge(torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1, **options)


@pytest.mark.parametrize(
    ("margins", "rows"),
    [
        (torch.zeros(2), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64)),
        (torch.zeros(1), torch.ones(1, dtype=torch.int64)),
        (torch.zeros(1), -torch.ones(1, dtype=torch.int64)),
        (torch.zeros(1), torch.zeros(1)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(margins, rows):
    with pytest.raises(ValueError, match="accepted is"):
        masc_hinge(margins, rows, 1)


def test_mean_kl_over_labelled_tokens_only():
    assert mean_kl(torch.tensor([0.2, 0.4])).item() == pytest.approx(0.3)


def test_mean_kl_of_nothing_is_attached():
    kl = torch.empty(0, requires_grad=True)
    mean_kl(kl).backward()
    assert mean_kl(kl).item() == 0.0


def test_one_update_divides_by_all_its_tokens():
    # sums 8 (4 tokens) and 8 (1 token) -> 3.2, not 5
    first, second = kl_sum(torch.full((4,), 2.0)), kl_sum(torch.tensor([8.0]))
    assert SumCount(first.total + second.total, first.terms + second.terms).mean().item() == pytest.approx(3.2)
    total, terms = first
    assert (total.item(), terms) == (8.0, 4)


def test_kl_must_be_one_dimensional():
    with pytest.raises(ValueError, match="kl"):
        kl_sum(torch.zeros(2, 2))


def draw(n, seed=0, **options):
    settings = {"cut": (0.2, 0.6), "min_prefix": 32, "min_suffix": 32} | options
    return suffix_start(n, generator=torch.Generator().manual_seed(seed), **settings)


def test_suffix_of_a_fixed_share():
    assert draw(1000, cut=(0.6, 0.6), min_suffix=128) == 600
    assert draw(200, cut=(0.6, 0.6), min_suffix=128) == 72  # 120 moved left: 128 stay
    assert draw(100, cut=(0.2, 0.2)) == 32  # 20 moved right: 32 are left out
    assert draw(159, cut=(0.6, 0.6), min_suffix=128) == 0  # too short for 32 + 128
    assert draw(160, cut=(0.6, 0.6), min_suffix=128) == 32


def test_no_cut_is_the_whole_answer():
    assert draw(500, cut=None) == 0


@given(st.integers(0, 400), st.integers(0, 50), st.integers(0, 50), st.integers(0, 5))
def test_suffix_keeps_its_promises(n, prefix, suffix, seed):
    start = draw(n, seed, min_prefix=prefix, min_suffix=suffix)
    assert start == draw(n, seed, min_prefix=prefix, min_suffix=suffix)
    if n < prefix + suffix:
        assert start == 0
    else:
        assert start >= prefix
        assert n - start >= suffix


def test_suffix_draws_cover_the_range_and_do_not_depend_on_row_lengths():
    generator = torch.Generator().manual_seed(1)
    options = {"cut": (0.2, 0.6), "min_prefix": 0, "min_suffix": 0, "generator": generator}
    starts = [suffix_start(1000, **options) for _ in range(500)]
    assert 200 <= min(starts) < 220
    assert 580 < max(starts) <= 600
    generator.manual_seed(1)
    suffix_start(3, **(options | {"min_prefix": 32}))
    assert suffix_start(1000, **options) == starts[1]


@pytest.mark.parametrize("cut", [(0.6, 0.2), (-0.1, 0.5), (0.5, 1.1)])
def test_suffix_refuses_bad_cuts(cut):
    with pytest.raises(UsageError, match="cut"):
        draw(100, cut=cut)


def test_apply_suffix_hides_the_first_labels():
    labels = (-100, -100, 5, 6, -100, 7, 8)
    assert apply_suffix(labels, 0) == labels
    assert apply_suffix(labels, 3) == (-100, -100, -100, -100, -100, -100, 8)
    assert apply_suffix(list(labels), 1) == (-100, -100, -100, 6, -100, 7, 8)


@pytest.mark.parametrize("start", [-1, 2, 3])
def test_apply_suffix_never_leaves_a_row_without_labels(start):
    with pytest.raises(ValueError, match="start"):
        apply_suffix((-100, 5, 6), start)


def test_apply_suffix_of_an_unlabelled_row():
    assert apply_suffix((-100, -100), 0) == (-100, -100)


def test_numerator_and_denominator_use_one_mask():
    # 30 tokens, 5 excluded, kept sum 50 -> 2.0
    kl, kept = torch.cat([torch.full((25,), 2.0), torch.full((5,), 99.0)]), torch.arange(30) < 25
    assert mean_kl(kl[kept]).item() == pytest.approx(2.0)


def test_gate_of_one_number_per_row():
    """Both rows have violation 1/2; only the first one's gate closes."""
    margins = torch.tensor([3.0, -3.0, 3.0, -3.0], requires_grad=True)
    rows = torch.tensor([0, 0, 1, 1])
    result = masc_hinge(margins, rows, 2, rho=0.5, eta=1.0, gate=torch.tensor([0.5, 0.4]))
    assert result.closed == 1
    assert result.per_row.tolist() == [0.0, 2.0]
    result.loss.backward()
    assert margins.grad.tolist() == [0.0, 0.0, 0.25, 0.0]
    with pytest.raises(ValueError, match="gate"):
        masc_hinge(margins, rows, 2, gate=torch.tensor([0.5]))


def test_spared_tokens_cost_nothing_and_count():
    margins = torch.tensor([2.0, 3.0, -5.0, 1.0], dtype=torch.float64, requires_grad=True)
    rows, spared = torch.tensor([0, 0, 0, 1]), torch.tensor([True, False, False, True])
    found = masc_hinge(margins, rows, 2, rho=0.5, eta=1.0, spared=spared)
    # Row 0: (0 + 4 + 0) / 3 tokens; row 1: its only token is spared.
    assert found.per_row.tolist() == pytest.approx([4 / 3, 0.0])
    assert found.loss.item() == pytest.approx(2 / 3)
    assert found.violation.tolist() == pytest.approx([2 / 3, 1.0])
    found.loss.backward()
    assert margins.grad.tolist() == pytest.approx([0.0, 1 / 6, 0.0, 0.0])
    with pytest.raises(ValueError, match="spared: found"):
        masc_hinge(margins, rows, 2, spared=spared[:2])
