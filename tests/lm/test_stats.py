"""Token statistics against a plain computation on all logits, written independently, in float64 where it decides."""

import peft
import pytest
import torch
from tests.lm._plain import NAMES, plain, random_case
from tests.lm._tiny import ARCHITECTURES, VOCABULARY, tiny_model
from torch import Tensor

from expunge.errors import UsageError
from expunge.lm import (
    Head,
    Margin,
    Reference,
    competitor_ids,
    labelled_positions,
    split_model,
    token_stats,
    token_stats_from_logits,
)
from expunge.lm._scan import Plan

ALL = {"logprob": True, "entropy": True, "moments": True, "hit": True, "rank": True}
TIGHT = {"rtol": 1e-5, "atol": 1e-5}  # atol: differences of logits of order 10


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 9), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    labels[1, 7:] = -100
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids, mask, labels


def weighted(stats: dict[str, Tensor]) -> Tensor:
    """One scalar in which every token and every differentiable statistic has its own weight."""
    total = torch.zeros((), dtype=stats["logprob"].dtype)
    for i, name in enumerate(("logprob", "margin", "kl", "entropy")):
        total = total + (stats[name] * torch.linspace(0.5, 1.5 + i, len(stats[name]), dtype=total.dtype)).sum()
    return total


def gradients(loss: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def as_dict(stats) -> dict[str, Tensor]:
    return {name: getattr(stats, name) for name in NAMES if getattr(stats, name) is not None}


def compare_with_plain(model, reference_model, chunk):
    """Values and parameter gradients of our statistics and of the plain ones on model(...).logits."""
    ids, mask, labels = batch()
    row, position, targets = labelled_positions(labels)
    with torch.no_grad():
        reference_logits = reference_model(input_ids=ids, attention_mask=mask).logits[row, position]
        reference_split = split_model(reference_model)
        reference = Reference(reference_split.body(ids, mask)[row, position], reference_split.head)
    logits = model(input_ids=ids, attention_mask=mask).logits[row, position]
    expected = plain(logits, targets, 4, 1.5, reference_logits)
    expected_grads = gradients(weighted(expected), model)
    split = split_model(model)
    hidden = split.body(ids, mask)[row, position]
    found = as_dict(token_stats(hidden, split.head, targets, margin=Margin(4, 1.5), kl=reference, chunk=chunk, **ALL))
    found_grads = gradients(weighted(found), model)
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name].detach(), msg=lambda m, n=name: f"{n}: {m}", **TIGHT)
    assert found_grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        scale = grad.abs().max().item()  # sums over tokens and layers: relative to the largest entry
        torch.testing.assert_close(
            found_grads[name], grad, rtol=1e-4, atol=2e-5 * scale + 1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full_finetuning_equals_plain_logits(name):
    compare_with_plain(tiny_model(name), tiny_model(name, seed=1), chunk=4)


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "cohere"])
@pytest.mark.parametrize("chunk", [1, None])
def test_lora_equals_plain_logits(name, chunk):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny_model(name), config).eval()
    compare_with_plain(model, tiny_model(name, seed=1), chunk=chunk)


HEADS = [{}, {"softcap": 2.0, "scale": 0.7}]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "want",
    [
        {"logprob": True},
        {"entropy": True, "moments": True},
        {"margin": Margin(1, 0.5)},
        {"margin": Margin(7, 2.0), "logprob": True, "kl": "reference", "hit": True},
        {"margin": Margin(beta=3.0, competitors=torch.tensor([[1, 2, -1], [3, -1, -1], [0, 5, 6], [7, 8, -1]]))},
        {"kl": "reference"},
    ],
    ids=["logprob", "entropy", "margin1", "all", "competitors", "kl"],
)
def test_gradcheck(want, full, bias, head):
    hidden, weight, b, targets = random_case(n=4, v=12, d=3)
    h0, w0, _, _ = random_case(1, n=4, v=12, d=3)
    want = dict(want) | ({"kl": Reference(h0, Head(w0, **head))} if "kl" in want else {})

    def values(h, w, c):
        stats = token_stats(h, Head(w, c if bias else None, **head), targets, chunk=3, **want)
        return tuple(v for v in as_dict(stats).values() if v.requires_grad)

    arguments = (hidden.requires_grad_(), weight.requires_grad_(full), b.requires_grad_(full and bias))
    assert values(*arguments)[0].dtype == torch.float64
    assert torch.autograd.gradcheck(values, arguments)


def test_from_logits_equals_from_hidden():
    hidden, weight, bias, targets = random_case()
    h0, w0, _, _ = random_case(1)
    head = Head(weight, bias, softcap=3.0)
    a = token_stats(hidden, head, targets, margin=Margin(3), kl=Reference(h0, Head(w0)), **ALL)
    logits, reference = head.logits(hidden), Head(w0).logits(h0)
    b = token_stats_from_logits(logits, targets, margin=Margin(3), kl=reference, **ALL)
    for name, value in plain(logits, targets, 3, 1.0, reference).items():
        torch.testing.assert_close(getattr(a, name), value)
        torch.testing.assert_close(getattr(b, name), value)


def test_what_was_not_asked_for_is_none():
    hidden, weight, _, targets = random_case()
    assert all(value is None for value in vars(token_stats(hidden, Head(weight), targets)).values())
    assert set(as_dict(token_stats(hidden, Head(weight), targets, hit=True))) == {"hit"}


def test_bf16_logits_are_summed_in_float32():
    head = Head(torch.zeros(128_000, 2, dtype=torch.bfloat16))
    hidden = torch.ones(1, 2, dtype=torch.bfloat16)
    stats = token_stats(hidden, head, torch.tensor([3]), logprob=True, entropy=True)
    assert stats.logprob.dtype == torch.float32
    assert stats.logprob.item() == pytest.approx(-11.75979, abs=5e-6)
    assert stats.entropy.item() == pytest.approx(11.75979, abs=5e-5)


@pytest.mark.parametrize("full", [False, True])
def test_bf16_is_no_worse_than_naive_bf16(full):
    hidden, weight, _, targets = random_case(n=30, v=600, d=32, dtype=torch.bfloat16)
    h0, w0, _, _ = random_case(1, n=30, v=600, d=32, dtype=torch.bfloat16)

    def run(function, dtype):
        h = hidden.to(dtype).requires_grad_()
        w = weight.to(dtype).requires_grad_(full)
        stats = function(h, w, w0.to(dtype), h0.to(dtype))
        total = sum((s.double() * torch.linspace(0.5, 1.5, 30).double()).sum() for s in stats)
        total.backward()
        return [*(s.double() for s in stats), *(x.grad.double() for x in ((h, w) if full else (h,)))]

    def ours(h, w, w0, h0):
        s = token_stats(h, Head(w), targets, logprob=True, margin=Margin(5), kl=Reference(h0, Head(w0)), chunk=11)
        return s.logprob, s.margin, s.kl

    def naive(h, w, w0, h0):
        z, z0 = h @ w.T, h0 @ w0.T
        up = torch.promote_types(z.dtype, torch.float32)
        s = plain(z.to(up), targets, 5, 1.0, z0.to(up))
        return s["logprob"], s["margin"], s["kl"]

    truth = run(naive, torch.float64)
    for ours_value, naive_value, true in zip(run(ours, torch.bfloat16), run(naive, torch.bfloat16), truth, strict=True):
        budget = 2e-3 * true.abs().max()
        assert (ours_value - true).abs().max() <= (naive_value - true).abs().max() + budget


def test_hit_takes_the_first_of_equal_logits():
    head = Head(torch.tensor([[1.0], [2.0], [2.0], [0.0]]).bfloat16())
    hidden = torch.ones(3, 1).bfloat16()
    for want in ({"hit": True}, {"hit": True, "margin": Margin(1)}, {"hit": True, "logprob": True}):
        stats = token_stats(hidden, head, torch.tensor([1, 2, 0]), rank=True, **want)
        assert stats.hit.tolist() == [1.0, 0.0, 0.0]
        assert stats.rank.tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("full", [False, True])
def test_no_tokens(full):
    _, weight, bias, targets = random_case(dtype=torch.float32)
    weight.requires_grad_(full)
    hidden = torch.ones(2, 6, requires_grad=True)
    reference = Reference(torch.ones(0, 6), Head(weight.detach()))
    stats = token_stats(hidden[:0], Head(weight, bias), targets[:0], margin=Margin(3), kl=reference, **ALL)
    assert all(value.shape == (0,) for value in as_dict(stats).values())
    (stats.logprob.sum() + stats.margin.sum() + stats.kl.sum() + stats.entropy.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros(2, 6))
    stats = token_stats(hidden[:0], Head(weight), targets[:0], margin=Margin(competitors=torch.zeros(0, 2).long()))
    stats.margin.sum().backward()
    assert competitor_ids(hidden[:0], Head(weight), targets[:0], k=2, delta=0.5).shape == (0, 2)
    assert labelled_positions(torch.full((2, 3), -100))[0].shape == (0,)


def test_masked_positions_change_nothing():
    model = tiny_model("llama")
    split = split_model(model)
    ids, mask, labels = batch()
    other_ids, other_labels = ids.clone(), labels.clone()
    other_ids[mask == 0] = 5
    other_labels[:, 0] = 17  # nothing predicts the first token
    results = []
    for i, target in ((ids, labels), (other_ids, other_labels)):
        row, position, targets = labelled_positions(target)
        stats = token_stats(
            split.body(i, mask)[row, position], split.head, targets, margin=Margin(3), logprob=True, entropy=True
        )
        grads = gradients((stats.margin + stats.logprob + stats.entropy).sum(), model)
        results.append((as_dict(stats), grads))
    for a, b in zip(*results, strict=True):
        assert a.keys() == b.keys()
        embedding = "model.embed_tokens.weight"
        assert all(torch.equal(a[name], b[name]) for name in a if name != embedding)
        if embedding in a:
            torch.testing.assert_close(a[embedding], b[embedding])


def test_hidden_states_elsewhere_change_nothing():
    hidden, weight, _, targets = random_case()
    keep = torch.tensor([0, 3])
    subset = token_stats(hidden[keep], Head(weight), targets[keep], margin=Margin(3), **ALL)
    whole = token_stats(hidden, Head(weight), targets, margin=Margin(3), **ALL)
    for name, value in as_dict(subset).items():
        torch.testing.assert_close(getattr(whole, name)[keep], value)


def test_labelled_positions():
    labels = torch.tensor([[-100, -100, 7, 2], [9, -100, 8, -100]])
    row, position, target = labelled_positions(labels)
    assert (row.tolist(), position.tolist(), target.tolist()) == ([0, 0, 1], [1, 2, 1], [7, 2, 8])


def test_inputs_stay_as_they_are():
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, bias, targets = random_case(dtype=dtype)
        copies = [x.clone() for x in (hidden, weight, bias, targets)]
        token_stats(hidden, Head(weight, bias), targets, margin=Margin(3), kl=Reference(hidden, Head(weight)), **ALL)
        assert all(torch.equal(a, b) for a, b in zip(copies, (hidden, weight, bias, targets), strict=True))


def test_no_grad_gives_detached_values():
    hidden, weight, _, targets = random_case()
    with torch.no_grad():
        stats = token_stats(hidden.requires_grad_(), Head(weight), targets, logprob=True, margin=Margin(2))
    assert not stats.logprob.requires_grad
    assert not stats.margin.requires_grad
    reference = token_stats(hidden, Head(weight), targets, logprob=True, hit=True)
    assert reference.logprob.requires_grad
    assert not reference.hit.requires_grad


@pytest.mark.parametrize("vocabulary", [100, 49_152, 152_000])
def test_chunks_are_bounded(vocabulary):
    head = Head(torch.empty(vocabulary, 1, device="meta"))
    rows = Plan(head, torch.empty(0), logprob=True).rows(5000, torch.float32)
    assert 1 <= rows <= 5000
    assert rows * vocabulary * 4 <= 64 * 2**20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin": Margin(40)}, "k must be below the vocabulary size 40, found 40"),
        ({"targets": torch.tensor([0, 1, 2, 3, -100])}, r"targets must be in \[0, 40\), found -100"),
        ({"targets": torch.tensor([0, 1])}, r"targets must have shape \(5,\), found \(2,\)"),
        ({"hidden": torch.zeros(5, 7)}, r"hidden must have shape \(N, 6\), found \(5, 7\)"),
        ({"chunk": 0}, "chunk must be at least 1, found 0"),
        ({"kl": Reference(torch.zeros(4, 6), Head(torch.zeros(40, 6)))}, "the reference has 4 tokens and 40 logits"),
    ],
)
def test_wrong_inputs(change, message):
    hidden, weight, _, targets = random_case()
    arguments = {"hidden": hidden, "head": Head(weight), "targets": targets} | change
    with pytest.raises(UsageError, match=message):
        token_stats(**arguments)
