"""The split: head(body(ids)) is model(ids).logits, or the head is None and says so."""

import peft
import pytest
import torch
from tests.lm._tiny import ARCHITECTURES, VOCABULARY, tiny_model
from torch import nn

from expunge.errors import RunError, UsageError
from expunge.lm import Head, Split, split_model


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return ids, mask


def _lora(model: nn.Module, targets: list[str]) -> nn.Module:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return wrapped.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_head_of_body_is_the_models_logits(name):
    model = tiny_model(name)
    split = split_model(model)
    ids, mask = _batch()
    expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    assert split.head is not None
    assert split.head.weight is model.get_output_embeddings().weight
    found = split.head.logits(split.body(ids, mask)[mask.bool()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # atol: logits of order 10 from cancelling sums
    torch.testing.assert_close(split.logits(ids, mask)[mask.bool()], expected)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("gemma2", "softcap", 2.0), ("cohere", "scale", 0.25), ("granite", "scale", 0.25), ("llama", "softcap", None)],
)
def test_head_reads_the_config(name, field, value):
    assert getattr(split_model(tiny_model(name)).head, field) == value


def test_phi_has_a_bias_and_llama_none():
    assert split_model(tiny_model("phi")).head.bias is not None
    assert split_model(tiny_model("llama")).head.bias is None


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi", "cohere"])
def test_bf16_logits_are_float32_and_no_worse_than_the_models(name):
    model = tiny_model(name, dtype=torch.bfloat16)
    split = split_model(model)
    ids, mask = _batch()
    with torch.no_grad():
        hidden = split.body(ids, mask)
        found = split.head.logits(hidden)
        head = split.head
        bias = None if head.bias is None else head.bias.double()
        truth = Head(head.weight.double(), bias, head.softcap, head.scale).logits(hidden.double())
        naive = model(input_ids=ids, attention_mask=mask).logits
    assert found.dtype == torch.float32
    assert (found - truth).abs().max() <= (naive - truth).abs().max() + 1e-3


def test_lora_in_the_body_is_part_of_the_split():
    plain = tiny_model("llama")
    ids, mask = _batch()
    before = plain(input_ids=ids, attention_mask=mask).logits
    model = _lora(plain, ["q_proj", "v_proj"])
    split = split_model(model)
    adapted = model(input_ids=ids, attention_mask=mask).logits
    assert (adapted - before).abs().max() > 0.1
    torch.testing.assert_close(split.head.logits(split.body(ids, mask)), adapted, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(split.head.logits(split.body(ids, mask)), before, rtol=1e-5, atol=1e-5)


def test_adapted_head_is_not_split_even_while_the_adapter_is_zero():
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    split = split_model(model)
    ids, mask = _batch()
    assert split.head is None
    torch.testing.assert_close(split.logits(ids, mask), model(input_ids=ids, attention_mask=mask).logits)


def test_unknown_last_step_falls_back():
    model = tiny_model("llama")

    class Squashed(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = torch.tanh(output.logits)
            return output

    model.__class__ = Squashed
    split = split_model(model)
    ids, mask = _batch()
    assert split.head is None
    assert split.logits(ids, mask).abs().max() <= 1.0
    with pytest.raises(RunError, match="Squashed"):
        split.body(ids, mask)


def test_not_a_language_model_falls_back():
    model = nn.Linear(3, 3)
    assert split_model(model) == Split(model=model, head=None)


def test_split_leaves_the_model_and_the_random_state_alone():
    model = tiny_model("llama")
    model.train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    split_model(model)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_float64_stays_and_the_arguments_are_checked():
    head = Head(torch.ones(3, 2))
    assert head.logits(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(UsageError, match="scale must be positive, found 0"):
        Head(torch.ones(3, 2), scale=0.0)
    with pytest.raises(UsageError, match="softcap must be positive, found -1"):
        Head(torch.ones(3, 2), softcap=-1.0)
