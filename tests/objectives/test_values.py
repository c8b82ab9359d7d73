"""Values worked by hand, limits, and what happens at the edges of float32."""

import math

import pytest
import torch

from expunge.lm import Head, token_stats
from expunge.objectives import (
    SumCount,
    ap,
    ce,
    ce_u,
    dpo,
    ga,
    ga_sum,
    idk,
    kl,
    me,
    me_uniform,
    npo,
    npo_norm,
    rmu,
    rmu_direction,
    rmu_retain,
    row_counts,
    row_sums,
    satimp,
    simnpo,
    tnpo,
    undial,
    wga,
)

ONE = torch.tensor([0])


def value(result) -> float:
    return result.mean().item()


def at(*numbers: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=grad)


def test_npo_of_the_pitfalls():
    logprob = at(-3.0, grad=True)
    loss = npo(logprob, at(-2.0), ONE, 1, beta=0.1).mean()
    assert loss.item() == pytest.approx(12.8879, abs=5e-5)
    loss.backward()
    # 2·σ(β·(log π − log π₀)) = 2·σ(−.1)
    assert logprob.grad.item() == pytest.approx(0.9500, abs=5e-5)


def test_npo_sums_over_the_tokens_of_a_row():
    rows = torch.tensor([0, 0, 0])
    assert value(npo(at(-1.0, -1.5, -0.5), at(-0.5, -1.0, -0.5), rows, 1)) == pytest.approx(12.8879, abs=5e-5)


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_policy_equals_reference(beta):
    rows, same = torch.tensor([0, 0, 1]), at(-1.0, -4.0, -0.3)
    expected = pytest.approx(2 / beta * math.log(2), rel=1e-12)
    assert value(npo(same, same, rows, 2, beta=beta)) == expected
    assert value(npo_norm(same, same, rows, 2, beta=beta)) == expected
    assert value(tnpo(same, same, rows, 2, beta=beta)) == expected
    assert value(dpo(same, same, same, same, rows, rows, 2, beta=beta)) == expected
    assert value(ap(same, same, rows, rows, 2, beta=beta)) == pytest.approx(math.log(2) / beta, rel=1e-12)


def test_policy_equals_reference_of_the_pitfalls():
    assert value(npo(at(-5.0), at(-5.0), ONE, 1)) == pytest.approx(13.8629, abs=5e-5)


def test_npo_tends_to_gradient_ascent_for_small_beta():
    rows = torch.tensor([0, 0, 1])
    logprob, reference = at(-1.0, -2.0, -0.5, grad=True), at(-0.2, -0.1, -0.4)
    (a,) = torch.autograd.grad(npo(logprob, reference, rows, 2, beta=1e-6).mean(), logprob)
    (b,) = torch.autograd.grad(ga_sum(logprob, rows, 2).mean(), logprob)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


def test_simnpo_of_the_pitfalls():
    rows = torch.zeros(4, dtype=torch.int64)
    found = value(simnpo(at(-0.1, -0.4, -1.0, -0.5), rows, 1, beta=2.5, gamma=0.5))
    assert found == pytest.approx(0.30950, abs=5e-6)
    # the other convention: δ = γ/β subtracted from the mean loss before it is scaled
    delta = 0.5 / 2.5
    assert found == pytest.approx(2 / 2.5 * math.log1p(math.exp(-2.5 * (0.5 - delta))), rel=1e-9)


def test_npo_norm_is_npo_of_row_means():
    rows = torch.tensor([0, 0, 0, 0, 1])
    found = npo_norm(at(-3.0, -3.0, -3.0, -3.0, -2.0), at(-2.0, -2.0, -2.0, -2.0, -2.0), rows, 2)
    assert found.total.item() == pytest.approx(12.8879 + 13.8629, abs=1e-4)


def test_likelihoods():
    logprob, rows = at(-1.0, -3.0, -2.0), torch.tensor([0, 0, 1])
    assert value(ga(logprob, rows, 2)) == -2.0
    assert value(ce(logprob, rows, 2)) == 2.0
    assert value(ga_sum(logprob, rows, 2)) == -3.0
    assert value(idk(logprob, rows, ONE, 2)) == 2.0


def test_graddiff_of_equal_losses_is_zero():
    logprob, rows = at(-1.0, -3.0), torch.tensor([0, 1])
    assert value(ga(logprob, rows, 2)) + value(ce(logprob, rows, 2)) == 0.0


def test_one_update_divides_by_its_labelled_tokens():
    first, second = ce(at(-2.0, -2.0, -2.0, -2.0), torch.zeros(4).long(), 1), ce(at(-8.0), ONE, 1)
    assert SumCount(first.total + second.total, first.terms + second.terms).mean().item() == pytest.approx(3.2)


def test_wga_and_satimp_by_hand():
    logprob = torch.tensor([0.5, 0.25], dtype=torch.float64).log().requires_grad_()
    rows = torch.tensor([0, 0])
    expected = (0.5 * math.log(0.5) + 0.25 * math.log(0.25)) / 2
    assert value(wga(logprob, rows, 1)) == pytest.approx(expected, rel=1e-12)
    (slope,) = torch.autograd.grad(wga(logprob, rows, 1, beta=2.0).mean(), logprob)
    assert slope.tolist() == pytest.approx([0.125, 0.03125])  # the weights / 2: they carry no gradient
    (slope,) = torch.autograd.grad(satimp(logprob, rows, 1, beta1=2.0, beta2=1.0).mean(), logprob)
    assert slope.tolist() == pytest.approx([0.0625, 0.0234375])
    assert value(wga(logprob, rows, 1, beta=0.0)) == pytest.approx(value(ga(logprob, rows, 1)))
    assert value(satimp(logprob, rows, 1, beta1=3.0, beta2=0.0)) == pytest.approx(
        value(wga(logprob, rows, 1, beta=3.0))
    )


def test_satimp_of_a_sure_token_is_finite():
    logprob = torch.zeros(1, requires_grad=True)
    for beta2 in (0.0, 0.5, 1.0):
        loss = satimp(logprob, ONE, 1, beta2=beta2).mean()
        (slope,) = torch.autograd.grad(loss, logprob)
        assert loss.item() == 0.0
        assert slope.item() == (1.0 if beta2 == 0 else 0.0)


def test_dpo_by_hand():
    # refusal gains 2, answer gains −1 → β·3
    found = value(dpo(at(-3.0), at(-2.0), at(-1.0, -2.0), at(-2.0, -3.0), torch.tensor([0, 0]), ONE, 1, beta=0.1))
    assert found == pytest.approx(20 * math.log1p(math.exp(-0.3)), rel=1e-12)


def test_ap_by_hand():
    found = value(ap(at(-1.0), at(-2.0, -2.0), torch.tensor([0, 0]), ONE, 1, beta=0.1))
    assert found == pytest.approx(10 * math.log1p(math.exp(-0.3)), rel=1e-12)


def test_refusals_must_fit_their_rows():
    with pytest.raises(ValueError, match="refusal_rows"):
        idk(at(-1.0, -2.0), ONE, ONE, 1)


def test_kl_of_the_pitfalls():
    assert value(kl(at(0.2, 0.4), torch.tensor([0, 0]), 1)) == pytest.approx(0.3)
    assert value(undial(at(0.2, 0.4), torch.tensor([0, 0]), 1)) == pytest.approx(0.3)


def test_maximum_entropy_at_its_ends():
    # the uniform distribution has neither KL; one token has log V in one direction, no bound in the other
    assert value(me(at(math.log(4)), 4, ONE, 1)) == pytest.approx(0.0, abs=1e-12)
    assert value(me_uniform(at(-math.log(4)), 4, ONE, 1)) == pytest.approx(0.0, abs=1e-12)
    assert value(me(at(0.0), 4, ONE, 1)) == pytest.approx(math.log(4))
    with pytest.raises(ValueError, match="vocabulary"):
        me(at(0.0), 0, ONE, 1)


def test_only_one_direction_pushes_a_memorised_token():
    z = torch.tensor([[20.0, 0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(z, 1)
    (text,) = torch.autograd.grad(me(-(logp.exp() * logp).sum(1), 4, ONE, 1).mean(), z, retain_graph=True)
    (code,) = torch.autograd.grad(me_uniform(logp.mean(1), 4, ONE, 1).mean(), z)
    assert text.abs().max() < 1e-6
    assert code[0, 0] == pytest.approx(0.75, abs=1e-6)


def test_rmu_by_hand():
    hidden = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    rows, u = torch.tensor([0, 1]), torch.tensor([0.6, 0.8])
    assert value(rmu(hidden, u, rows, 2, c=5.0)) == pytest.approx(6.25)  # (0 + 25/2) / 2
    assert value(rmu_retain(hidden, torch.zeros(2, 2), rows, 2)) == pytest.approx(6.25)
    assert value(rmu_retain(hidden, hidden, rows, 2)) == 0.0
    for wrong in (torch.zeros(3), torch.zeros(1, 2)):
        with pytest.raises(ValueError, match="accepted is"):
            rmu(hidden, wrong, rows, 2)
    with pytest.raises(ValueError, match="accepted is"):
        rmu_retain(hidden, torch.zeros(1, 2), rows, 2)


def test_rmu_direction():
    state = torch.random.get_rng_state()
    u = rmu_direction(512, 3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(u, rmu_direction(512, 3))
    assert not torch.equal(u, rmu_direction(512, 4))
    assert u.norm().item() == pytest.approx(1.0, abs=1e-6)
    assert bool((u >= 0).all())
    assert (u @ rmu_direction(512, 4)).item() == pytest.approx(0.75, abs=0.05)
    with pytest.raises(ValueError, match="d: found 0"):
        rmu_direction(0, 0)


def test_ce_u_by_hand():
    assert value(ce_u(torch.tensor([0.75], dtype=torch.float64).log(), ONE, 1)) == pytest.approx(math.log(4))
    # uniform over 4: q is uniform over 3, so the paper's value is log 4; ours lacks H(q) = log 3
    quarter = at(-math.log(4))
    assert value(ce_u(quarter, ONE, 1)) == pytest.approx(math.log(4 / 3))
    assert value(ce_u(quarter, ONE, 1, entropy=at(math.log(4)))) == pytest.approx(math.log(4))


@pytest.mark.parametrize("gap", [0.0, 5.0, 15.0, 20.0, 60.0, 200.0])
def test_ce_u_stays_finite_where_the_model_is_sure(gap):
    """From p = 1/V to p = 1: in float32 the slope in the logits stays near the exact one, π − q."""
    truth = torch.tensor([[gap, 0.0, -1.0, 1.0]], dtype=torch.float64)
    others = truth.clone()
    others[0, 0] = -math.inf
    exact = torch.softmax(truth, 1) - torch.softmax(others, 1)
    z = truth.float().requires_grad_()
    loss = ce_u(torch.log_softmax(z, 1)[:, 0], ONE, 1).mean()
    loss.backward()
    assert loss.isfinite()
    assert loss.item() <= -math.log(torch.finfo(torch.float32).eps) + 1e-3
    assert z.grad.isfinite().all()
    if gap <= 5.0:
        torch.testing.assert_close(z.grad.double(), exact, rtol=1e-3, atol=1e-3)
    assert z.grad.abs().max() <= 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [1.0, 8.0, 100.0])
def test_ce_u_through_the_head_stays_finite(gap, dtype):
    """As in training: the head's slope is stored in the dtype of its weights and multiplied by up to 1/ε."""
    weight = torch.zeros(6, 4)
    weight[2, 0], weight[4, 1], weight[5] = 1.0, 0.5, -0.25
    hidden = torch.tensor([[gap, 0.3, 0.0, 0.1]], dtype=torch.float64)
    exact = hidden.clone().requires_grad_()
    z = exact @ weight.double().T
    q = torch.softmax(z.detach().index_fill(1, torch.tensor([2]), -math.inf), 1)
    (-(q * torch.log_softmax(z, 1)).sum()).backward()
    ours = hidden.to(dtype).requires_grad_()
    logprob = token_stats(ours, Head(weight.to(dtype)), torch.tensor([2]), logprob=True).logprob
    ce_u(logprob, ONE, 1).mean().backward()
    assert ours.grad.isfinite().all()
    assert ours.grad.abs().max() <= 2.0
    if gap < 100.0:
        tolerance = 1e-3 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


def test_ce_u_keeps_its_digits_where_the_token_is_unlikely():
    logprob = torch.tensor([-30.0, -80.0], requires_grad=True)
    loss = ce_u(logprob, torch.tensor([0, 0]), 1)
    (slope,) = torch.autograd.grad(loss.total, logprob)
    assert loss.total.item() == pytest.approx(math.exp(-30.0), rel=1e-5, abs=0.0)
    assert slope.tolist() == pytest.approx([math.exp(-30.0), math.exp(-80.0)], rel=1e-5, abs=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ce_u_still_pushes_a_token_that_rounds_to_probability_one(dtype):
    logprob = torch.zeros(1, dtype=dtype, requires_grad=True)
    ce_u(logprob, ONE, 1).total.backward()
    assert logprob.grad.item() == pytest.approx(1 / torch.finfo(dtype).eps, rel=1e-5)


def test_rows_are_added_up_and_counted():
    rows = torch.tensor([2, 0, 2])
    assert row_counts(rows, 4).tolist() == [1, 0, 2, 0]
    assert row_sums(torch.tensor([1.0, 2.0, 4.0]), rows, 4).tolist() == [2.0, 0.0, 5.0, 0.0]
    assert row_sums(torch.ones(3, dtype=torch.bfloat16), rows, 4).dtype == torch.float32
    assert row_sums(torch.ones(3, dtype=torch.float64), rows, 4).dtype == torch.float64
    # 300 ones: bfloat16 sums would stop at 256
    assert row_sums(torch.ones(300, dtype=torch.bfloat16), torch.zeros(300).long(), 1).item() == 300.0


@pytest.mark.parametrize(
    "rows", [torch.tensor([0, 4]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]])]
)
def test_rows_out_of_range_are_refused(rows):
    with pytest.raises(ValueError, match="rows: found"):
        row_counts(rows, 4)
    with pytest.raises(ValueError, match="found"):
        row_sums(torch.zeros(3), rows, 4)
