"""The runner against the plain model: values, gradients, caches, the reference."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from tests.lm._tiny import tiny_model

from expunge.lm import MasterWeights, Reference, RowRunner, adapter_disabled, add_lora, competitor_ids, split_model
from expunge.lm import _runner as module

NAMES = ["llama", "qwen2", "gpt2", "gpt_neox"]


@dataclass
class Row:
    input_ids: tuple
    labels: tuple


def make_rows(count=10, seed=0):
    """Rows of several lengths; the last labelled token is not always the last one."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(3, 90, (8 + 2 * number,), generator=generator).tolist()
        end = len(ids) - number % 3
        labels = [-100] * 3 + ids[3:end] + [-100] * (len(ids) - end)
        rows.append(Row(tuple(ids), tuple(labels)))
    return rows


def plain(split, row, start=0):
    """(hidden states, targets) of one row alone, whole, unpadded, with the model's usual attention."""
    hidden = split.body(torch.tensor([row.input_ids]), torch.ones(1, len(row.input_ids), dtype=torch.long))[0]
    places = [t for t, label in enumerate(row.labels) if label != -100][start:]
    return hidden[[t - 1 for t in places]], torch.tensor([row.labels[t] for t in places])


def lora(name, first=0, **settings):
    model = (
        tiny_model(name, num_hidden_layers=3, **settings) if name != "gpt2" else tiny_model(name, n_layer=3, **settings)
    )
    torch.manual_seed(1)
    wrapped = add_lora(model, rank=2, dropout=0.0, targets="all-linear", layers=range(first, 3))
    return wrapped


def move(model, seed=0, size=0.1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def runner_of(model, rows, **options):
    return RowRunner(split_model(model), rows, pad_id=0, without_adapter=partial(adapter_disabled, model), **options)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_forward_equals_the_plain_model(name, first):
    model, rows = lora(name, first), make_rows()
    move(model)
    runner = runner_of(model, rows, groups=[(0, 3, 9), (1, 2)], first_layer=first)
    if name in ("llama", "qwen2", "gpt_neox"):
        assert runner.trunk.first_layer == first
    indices, starts = [9, 0, 4, 2, 3, 1, 5, 6, 7, 8], [2, 0, 0, 5, 1, 0, 0, 3, 0, 0]
    for _ in range(2):  # the second time from the cache
        found = runner.forward(indices, starts)
        expected = [plain(runner.split, rows[index], start) for index, start in zip(indices, starts, strict=True)]
        torch.testing.assert_close(found.hidden, torch.cat([e[0] for e in expected]), rtol=1e-5, atol=1e-5)
        assert found.target.tolist() == torch.cat([e[1] for e in expected]).tolist()
        assert found.row.tolist() == [place for place, e in enumerate(expected) for _ in e[1]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache", [2 << 30, 0])
def test_gradients_equal_those_of_the_whole_forward(name, cache):
    model, rows = lora(name, 2, dtype=torch.float64), make_rows(4)
    move(model)
    runner = runner_of(model, rows, first_layer=2, cache_bytes=cache)
    indices, starts = [2, 0, 3], [1, 0, 4]

    def gradients(hidden):
        model.zero_grad()
        hidden.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    found = gradients(runner.forward(indices, starts).hidden)
    parts = [plain(runner.split, rows[i], s)[0] for i, s in zip(indices, starts, strict=True)]
    for one, other in zip(found, gradients(torch.cat(parts)), strict=True):
        scale = other.abs().max().clamp(min=1e-3)
        assert ((one - other).abs().max() / scale).item() < 1e-5
    assert (runner.cached_bytes > 0) == (cache > 0 and runner.trunk.first_layer > 0)


def test_what_is_fed_ends_before_the_last_labelled_token(monkeypatch):
    model, rows = lora("llama"), make_rows(6)
    runner = runner_of(model, rows, pad_to=1)
    fed = []
    body = type(runner.split).body

    def watch(self, ids, mask=None):
        fed.append(ids.shape)
        return body(self, ids, mask)

    monkeypatch.setattr(type(runner.split), "body", watch)
    runner.forward([5])
    last = max(t for t, label in enumerate(rows[5].labels) if label != -100)
    assert fed == [(1, last)]
    fed.clear()
    runner.forward([1, 5, 0], [runner.tokens(1), 0, runner.tokens(0)])
    assert fed == [(1, last)]


def test_nothing_active_is_empty_and_attached():
    model, rows = lora("llama"), make_rows(3)
    runner = runner_of(model, rows)
    found = runner.forward([0, 2], [runner.tokens(0), runner.tokens(2) + 1])
    assert found.hidden.shape == (0, 32)
    stats = runner.stats(found, margin=module.Margin(k=10))
    stats.margin.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_nothing_active_without_a_recognised_head():
    model, rows = lora("llama"), make_rows(3)
    split = split_model(model)
    runner = RowRunner(type(split)(model=model, head=None), rows, pad_id=0)
    stats = runner.stats(runner.forward([0], [99]), margin=module.Margin(k=10))
    assert stats.margin.shape == (0,)


@pytest.mark.parametrize("first", [0, 2])
def test_reference_is_the_model_before_the_first_update_for_lora(first):
    model, rows = lora("llama", first), make_rows(5)
    runner = runner_of(model, rows, groups=[(0, 1), (2, 3, 4)], first_layer=first)
    indices, starts = [3, 0, 2], [0, 2, 1]

    def kl():
        with torch.no_grad():
            return runner.stats(runner.forward(indices, starts), kl=runner.reference(indices, starts)).kl

    assert kl().abs().max().item() < 1e-6
    before = runner.reference(indices).hidden
    move(model)
    assert kl().max().item() > 1e-3
    assert torch.equal(runner.reference(indices).hidden, before)
    again = runner_of(model, rows, groups=[(0, 1), (2, 3, 4)], first_layer=first, cache_bytes=0)
    assert torch.equal(again.reference(indices).hidden, before)
    assert again.cached_bytes == 0


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_reference_is_the_model_before_the_first_update_for_full_training(name):
    model, rows = tiny_model(name), make_rows(4)
    runner = RowRunner(split_model(model), rows, pad_id=0, cache_bytes=0)
    runner.keep_reference({"states": [0, 2, 3]})
    found = runner.stats(runner.forward([3, 0]), kl=runner.reference([3, 0])).kl
    assert found.abs().max().item() < 1e-6
    head, before = runner.reference([3]).head.weight.clone(), runner.reference([3]).hidden
    move(model)
    assert torch.equal(runner.reference([3]).hidden, before)
    assert torch.equal(runner.reference([3]).head.weight, head)
    assert not torch.equal(runner.split.head.weight, head)
    with pytest.raises(module.RunError, match="reference of a row"):
        runner.reference([1])


@pytest.mark.parametrize("cache", [2 << 30, 0])
@pytest.mark.parametrize("full", [False, True])
def test_reference_logprobs_and_activations_are_those_of_the_model_before(full, cache):
    model, rows = (tiny_model("llama", num_hidden_layers=3) if full else lora("llama")), make_rows(5)
    runner = RowRunner(split_model(model), rows, pad_id=0, cache_bytes=cache) if full else runner_of(model, rows)
    indices, starts, layer = [3, 0, 2], [0, 2, 1], 1
    with torch.no_grad():
        pairs = [plain(runner.split, rows[i], s) for i, s in zip(indices, starts, strict=True)]
        logits = torch.cat([hidden for hidden, _ in pairs]) @ runner.split.head.weight.t()
        targets = torch.cat([target for _, target in pairs])
        expected = torch.log_softmax(logits, 1).gather(1, targets[:, None]).squeeze(1)
        states = [
            model(torch.tensor([rows[i].input_ids]), output_hidden_states=True).hidden_states[layer + 1][0]
            for i in indices
        ]
        places = [[t - 1 for t, label in enumerate(rows[i].labels) if label != -100] for i in indices]
        activations = torch.cat([h[p[s:]] for h, p, s in zip(states, places, starts, strict=True)])
    if full:
        wanted = {"logprob": indices, layer: indices}
        assert runner.reference_bytes(wanted) == sum(runner.tokens(i) for i in indices) * (4 + 4 * 32)
        runner.keep_reference(wanted)
    else:
        torch.testing.assert_close(runner.reference_logprobs(indices, starts), expected, rtol=1e-5, atol=1e-5)
    move(model)
    torch.testing.assert_close(runner.reference_logprobs(indices, starts), expected, rtol=1e-5, atol=1e-5)
    found = runner.reference_activations(indices, starts, layer=layer)
    torch.testing.assert_close(found, activations, rtol=1e-5, atol=1e-5)
    now = runner.forward(indices, starts, layer=layer)
    assert not torch.allclose(now.hidden, activations, atol=1e-3)
    assert now.target.tolist() == targets.tolist()
    now.hidden.square().sum().backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_mixed_attention_is_not_cut():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny_model(
        "qwen2", num_hidden_layers=3, layer_types=kinds, use_sliding_window=True, sliding_window=4, max_window_layers=0
    )
    wrapped = add_lora(model, rank=2, dropout=0.0, layers=[2])
    rows = make_rows(5)
    runner = runner_of(wrapped, rows, first_layer=2)
    assert runner.trunk.first_layer == 0
    expected = torch.cat([plain(runner.split, rows[index])[0] for index in (4, 1)])
    torch.testing.assert_close(runner.forward([4, 1]).hidden, expected, rtol=1e-5, atol=1e-5)


def test_teacher_competitors_are_those_of_the_model_before():
    model, rows = lora("llama"), make_rows(4)
    runner = runner_of(model, rows)
    with torch.no_grad():
        hidden, target = zip(*(plain(runner.split, rows[i], s) for i, s in ((2, 1), (0, 0))), strict=True)
    expected = competitor_ids(torch.cat(hidden), runner.split.head, torch.cat(target), k=3, delta=0.5)
    move(model, size=0.3)
    found = runner.competitors([2, 0], [1, 0], k=3, delta=0.5)
    assert found.tolist() == expected.tolist()
    assert (found == -1).any()


def test_attention_is_put_back_also_after_an_error(monkeypatch):
    model, rows = lora("llama"), make_rows(3)
    runner = runner_of(model, rows)
    config = runner.split.inner.config
    assert config._attn_implementation == "sdpa"
    seen = []
    monkeypatch.setattr(
        type(runner.split),
        "body",
        lambda *_: seen.append(config._attn_implementation) or (_ for _ in ()).throw(KeyError),
    )
    with pytest.raises(KeyError):
        runner.forward([0])
    assert (seen, config._attn_implementation) == (["eager"], "sdpa")


def test_reference_type_and_masters_fit():
    model, rows = lora("llama"), make_rows(2)
    runner = runner_of(model, rows)
    assert isinstance(runner.reference([0]), Reference)
    assert len(MasterWeights(model.parameters()).masters) == sum(p.requires_grad for p in model.parameters())


def test_copied_tokens_are_those_the_prompt_holds_too():
    rows = [Row((5, 6, 7, 6, 8, 5, 2), (-100, -100, -100, 6, 8, 5, 2)), Row((3, 4), (-100, 4)), Row((9, 9), (9, 9))]
    runner = runner_of(lora("llama"), rows)
    assert runner.copied([0, 1, 2]).tolist() == [True, False, True, False, False, True]
    assert runner.copied([0], [2]).tolist() == [True, False]
