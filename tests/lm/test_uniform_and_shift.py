"""The mean log-probability over the vocabulary, and the reference whose target logit is lowered (UNDIAL)."""

import math

import pytest
import torch
from tests.lm._plain import random_case
from tests.lm._tiny import ARCHITECTURES, VOCABULARY, tiny_model

from expunge.errors import UsageError
from expunge.lm import Head, Margin, Reference, labelled_positions, split_model, token_stats, token_stats_from_logits

HEADS = [{}, {"softcap": 2.0, "scale": 0.7}]


def plain_uniform(logits):
    return torch.stack([torch.stack([torch.softmax(z, 0)[v].log() for v in range(len(z))]).mean() for z in logits])


def plain_shifted(logits, reference, targets, shift):
    values = []
    for z, z0, y in zip(logits, reference, targets.tolist(), strict=True):
        lowered = z0.clone()
        lowered[y] = lowered[y] - shift
        q, p = torch.softmax(lowered, 0), torch.softmax(z, 0)
        values.append((q * (q / p).log()).sum())
    return torch.stack(values)


def setup(head=None, bias=False, n=5, v=40, d=6):
    hidden, weight, b, targets = random_case(n=n, v=v, d=d)
    h0, w0, b0, _ = random_case(1, n=n, v=v, d=d)
    head = head or {}
    return hidden, Head(weight, b if bias else None, **head), targets, Reference(h0, Head(w0, b0, **head))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_values_equal_the_definition(head, bias, chunk):
    hidden, h, targets, reference = setup(head, bias)
    shifted = Reference(reference.hidden, reference.head, target_shift=1.5)
    stats = token_stats(hidden, h, targets, uniform=True, kl=shifted, chunk=chunk)
    logits, logits0 = h.logits(hidden), reference.head.logits(reference.hidden)
    torch.testing.assert_close(stats.uniform, plain_uniform(logits))
    torch.testing.assert_close(stats.kl, plain_shifted(logits, logits0, targets, 1.5))
    from_logits = token_stats_from_logits(logits, targets, uniform=True, kl=logits0, target_shift=1.5)
    torch.testing.assert_close(from_logits.uniform, stats.uniform)
    torch.testing.assert_close(from_logits.kl, stats.kl)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("want", ["uniform", "shifted", "both"])
def test_gradcheck(want, full, bias, head):
    hidden, weight, b, targets = random_case(n=4, v=12, d=3)
    h0, w0, _, _ = random_case(1, n=4, v=12, d=3)
    options = {"uniform": want != "shifted"}
    if want != "uniform":
        options["kl"] = Reference(h0, Head(w0, **head), target_shift=2.0)

    def values(h, w, c):
        stats = token_stats(h, Head(w, c if bias else None, **head), targets, chunk=3, **options)
        return tuple(value for value in (stats.uniform, stats.kl) if value is not None)

    arguments = (hidden.requires_grad_(), weight.requires_grad_(full), b.requires_grad_(full and bias))
    assert torch.autograd.gradcheck(values, arguments)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "cohere", "gpt2"])
def test_parameter_gradients_equal_those_of_plain_logits(name):
    assert name in ARCHITECTURES
    model, other = tiny_model(name), tiny_model(name, seed=1)
    ids = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :3] = -100
    row, position, targets = labelled_positions(labels)
    weights = torch.linspace(0.5, 1.5, len(targets))
    with torch.no_grad():
        logits0 = other(input_ids=ids).logits[row, position]
        split0 = split_model(other)
        reference = Reference(split0.body(ids)[row, position], split0.head, target_shift=3.0)

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    logits = model(input_ids=ids).logits[row, position]
    expected = gradients(((plain_uniform(logits) + plain_shifted(logits, logits0, targets, 3.0)) * weights).sum())
    split = split_model(model)
    stats = token_stats(split.body(ids)[row, position], split.head, targets, uniform=True, kl=reference, chunk=4)
    found = gradients(((stats.uniform + stats.kl) * weights).sum())
    assert found.keys() == expected.keys()
    for n, grad in expected.items():
        scale = grad.abs().max().item()  # sums over tokens and layers: relative to the largest entry
        torch.testing.assert_close(found[n], grad, rtol=1e-4, atol=2e-5 * scale + 1e-6, msg=lambda m, n=n: f"{n}: {m}")


def test_all_statistics_in_one_pass_are_those_of_their_own():
    hidden, h, targets, reference = setup()
    shifted = Reference(reference.hidden, reference.head, target_shift=0.5)
    plain = {"logprob": True, "entropy": True, "moments": True, "hit": True, "rank": True, "margin": Margin(3)}
    alone = token_stats(hidden, h, targets, **plain)
    together = token_stats(hidden, h, targets, uniform=True, kl=shifted, **plain)
    for name, value in vars(alone).items():
        if value is not None:
            assert torch.equal(getattr(together, name), value)
    assert torch.equal(together.uniform, token_stats(hidden, h, targets, uniform=True).uniform)
    assert alone.uniform is None


def test_the_shift_reaches_the_result_and_zero_is_the_plain_kl():
    hidden, h, targets, reference = setup()
    values = [
        token_stats(hidden, h, targets, kl=Reference(reference.hidden, reference.head, target_shift=shift)).kl
        for shift in (0.0, 1.0, 10.0)
    ]
    assert torch.equal(values[0], token_stats(hidden, h, targets, kl=reference).kl)
    assert len({value.sum().item() for value in values}) == 3


def test_a_model_that_is_the_shifted_reference_has_no_kl():
    hidden, weight, bias, targets = random_case(n=1)
    lowered = bias.clone()
    lowered[targets] -= 4.0
    reference = Reference(hidden, Head(weight, bias), target_shift=4.0)
    hidden.requires_grad_()
    kl = token_stats(hidden, Head(weight, lowered), targets, kl=reference).kl
    assert kl.item() == pytest.approx(0.0, abs=1e-12)
    (slope,) = torch.autograd.grad(kl.sum(), hidden)
    assert slope.abs().max() < 1e-12


def test_the_gradient_is_that_of_the_soft_cross_entropy_of_the_paper():
    hidden, h, targets, reference = setup()
    logits0 = reference.head.logits(reference.hidden)
    lowered = logits0 - 3.0 * torch.nn.functional.one_hot(targets, logits0.shape[1])
    hidden.requires_grad_()
    paper = torch.nn.functional.cross_entropy(h.logits(hidden), lowered.softmax(1), reduction="sum")
    ours = token_stats(hidden, h, targets, kl=Reference(reference.hidden, reference.head, target_shift=3.0)).kl.sum()
    a, b = (torch.autograd.grad(loss, hidden)[0] for loss in (paper, ours))
    torch.testing.assert_close(a, b)
    assert paper.item() > ours.item()


def test_bf16_is_summed_in_float32():
    head = Head(torch.zeros(128_000, 2, dtype=torch.bfloat16))
    hidden = torch.ones(1, 2, dtype=torch.bfloat16)
    reference = Reference(hidden, head, target_shift=5.0)
    stats = token_stats(hidden, head, torch.tensor([3]), uniform=True, kl=reference)
    assert stats.uniform.dtype == torch.float32
    assert stats.uniform.item() == pytest.approx(-math.log(128_000), abs=5e-5)
    assert 0.0 <= stats.kl.item() < 1e-4


@pytest.mark.parametrize("full", [False, True])
def test_bf16_is_no_worse_than_naive_bf16(full):
    hidden, weight, _, targets = random_case(n=30, v=600, d=32, dtype=torch.bfloat16)
    h0, w0, _, _ = random_case(1, n=30, v=600, d=32, dtype=torch.bfloat16)
    weights = torch.linspace(0.5, 1.5, 30).double()

    def run(function, dtype):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(full)
        values = function(h, w, h0.to(dtype), w0.to(dtype))
        sum((value.double() * weights).sum() for value in values).backward()
        return [*(value.double() for value in values), *(x.grad.double() for x in ((h, w) if full else (h,)))]

    def ours(h, w, h0, w0):
        stats = token_stats(h, Head(w), targets, uniform=True, kl=Reference(h0, Head(w0), target_shift=2.0), chunk=11)
        return stats.uniform, stats.kl

    def naive(h, w, h0, w0):
        z, z0 = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (h @ w.T, h0 @ w0.T))
        return torch.log_softmax(z, 1).mean(1), plain_shifted(z, z0, targets, 2.0)

    truth = run(naive, torch.float64)
    for found, other, true in zip(run(ours, torch.bfloat16), run(naive, torch.bfloat16), truth, strict=True):
        assert (found - true).abs().max() <= (other - true).abs().max() + 2e-3 * true.abs().max()


def test_no_tokens():
    _, weight, _, targets = random_case(dtype=torch.float32)
    hidden = torch.ones(2, 6, requires_grad=True)
    reference = Reference(torch.ones(0, 6), Head(weight), target_shift=1.0)
    stats = token_stats(hidden[:0], Head(weight), targets[:0], uniform=True, kl=reference)
    assert stats.uniform.shape == stats.kl.shape == (0,)
    (stats.uniform.sum() + stats.kl.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros(2, 6))


def test_inputs_stay_as_they_are():
    hidden, weight, bias, targets = random_case()
    copies = [x.clone() for x in (hidden, weight, bias)]
    token_stats(hidden, Head(weight, bias), targets, uniform=True, kl=Reference(hidden, Head(weight), target_shift=1.0))
    logits = Head(weight, bias).logits(hidden)
    before = logits.clone()
    token_stats_from_logits(logits, targets, uniform=True, kl=logits, target_shift=1.0)
    assert torch.equal(logits, before)
    assert all(torch.equal(a, b) for a, b in zip(copies, (hidden, weight, bias), strict=True))


def test_wrong_shifts():
    hidden, h, targets, reference = setup()
    for shift in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="target_shift must be a finite number from 0"):
            Reference(reference.hidden, reference.head, target_shift=shift)
        with pytest.raises(UsageError, match="target_shift must be a finite number from 0"):
            token_stats_from_logits(h.logits(hidden), targets, target_shift=shift)
    with pytest.raises(UsageError, match="target_shift: without_target"):
        Reference(reference.hidden, reference.head, without_target=True, target_shift=1.0)
    with pytest.raises(UsageError, match="without_target"):
        token_stats(hidden, h, targets, uniform=True, kl=Reference(reference.hidden, reference.head, True))
