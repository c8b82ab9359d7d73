"""Bytes counted on the meta device against bytes counted in a real pass."""

import gc

import pytest
import torch
from tests.lm._tiny import ARCHITECTURES, tiny_model

from expunge.lm import add_lora, split_model
from expunge.lm._footprint import Meter, head_bytes, pass_bytes, rounded_up
from expunge.lm._head import Head, assumed_split
from expunge.lm._lora import adapter_dropouts


def test_a_meter_counts_storages():
    before = torch.zeros(1000)
    with Meter() as meter:
        one = before + 1
        assert meter.now == 4000
        view = one[:10].view(2, 5)
        view += 1
        assert meter.now == 4000
        two = one.double()
        assert meter.now == meter.peak == 12000
        del two
        assert meter.now == 4000
        before.mul_(2)
        del one
        assert meter.now == 4000  # a view holds it
        del view
        assert meter.now == 0
        assert meter.peak == 12000


def measured(model, rows, length):
    """Bytes that a real forward pass holds, and the peak of both passes, beyond what was there."""
    ids = torch.ones((rows, length), dtype=torch.long)
    split = split_model(model)
    for dropout in adapter_dropouts(model):
        dropout.train()
    gc.collect()
    with Meter() as meter:
        output = split.body(ids)
        held = meter.now
        output.sum().backward()
    model.zero_grad()
    return held, meter.peak


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gpt_neox"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_pass_takes_what_was_counted(name, lora):
    layers = {"num_hidden_layers": 5, "attn_implementation": "eager"}
    model, shape = tiny_model(name, **layers), tiny_model(name, **layers).to("meta")
    if lora:
        model, shape = add_lora(model, rank=4), add_lora(shape, rank=4)
    else:
        model.requires_grad_(True), shape.requires_grad_(True)
    held, peak = measured(model, 6, 32)
    counted = pass_bytes(assumed_split(shape), 6, 32, plain=True)
    assert counted.held == pytest.approx(held, rel=0.1)
    assert counted.peak == pytest.approx(peak, rel=0.15)


def test_without_gradient_it_takes_less():
    shape = tiny_model("llama", num_hidden_layers=5).to("meta").requires_grad_(True)
    split = assumed_split(shape)
    full, look = pass_bytes(split, 6, 32), pass_bytes(split, 6, 32, grad=False)
    assert look.peak < full.peak / 3
    upper = pass_bytes(split, 6, 32, first_layer=3)
    assert upper.held < full.held / 2
    assert full.held == pytest.approx(2 * pass_bytes(split, 3, 32).held, rel=0.1)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_is_counted(name):
    model = tiny_model(name).to("meta").requires_grad_(True)
    found = pass_bytes(assumed_split(model), 2, 16)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert found.held > 0
    assert found.peak >= weights


def test_a_head_takes_a_chunk_not_all_logits():
    head = Head(torch.zeros(50_000, 8, dtype=torch.bfloat16))
    few, many = head_bytes(64, head), head_bytes(100_000, head)
    assert few >= 64 * 50_000 * 4
    assert many < 100_000 * 50_000 * 2
    trained = Head(torch.zeros(50_000, 8, dtype=torch.bfloat16, requires_grad=True))
    assert head_bytes(64, trained) - few == 50_000 * 8 * (4 + 2 * 2)


def test_rounding_up():
    assert [rounded_up(number, 16) for number in (0, 1, 16, 17)] == [0, 16, 16, 32]
