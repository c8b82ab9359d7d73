"""LoRA: targets are checked, the reference is the base, checkpointing changes nothing, ΔW is exact."""

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from tests.lm._tiny import ARCHITECTURES
from tests.lm._tokenizer import tiny

from expunge.errors import UsageError
from expunge.lm import adapter_disabled, add_lora, default_targets, lora_report
from expunge.lm._lora import weight_update

IDS = torch.arange(3, 19).reshape(2, 8)
EXPECTED = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense"),
    "gpt2": ("c_attn", "attn.c_proj"),
    "gpt_neox": ("query_key_value", "attention.dense"),
}


def trained(model, seed=0, std=0.1):
    """Give the adapters random values, as if trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * std)
    return model


def adapted_names(model):
    return {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_defaults_adapt_attention_in_every_block_and_change_nothing_yet(name):
    model = tiny(name)
    before = model(input_ids=IDS).logits
    targets = default_targets(model)
    assert targets == EXPECTED.get(name, targets)
    wrapped = add_lora(model, rank=4)
    report = lora_report(wrapped)
    assert report.modules == 2 * len(targets)
    assert report.trainable > 0
    assert not any("mlp" in adapted or "lm_head" in adapted for adapted in adapted_names(wrapped))
    assert torch.equal(wrapped(input_ids=IDS).logits, before)


def test_unknown_family_gets_all_linear_layers():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.query = layer.self_attn.q_proj
        del layer.self_attn.q_proj
    assert set(default_targets(model)) == {"query", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_report_counts_by_hand():
    model = tiny("llama_tied")
    base = sum(param.numel() for param in model.parameters())
    report = lora_report(add_lora(model, rank=3, alpha=6, dropout=0.1, targets=["v_proj", "q_proj"]))
    trainable = 2 * (3 * (32 + 32) + 3 * (32 + 16))  # q: 32 → 32, v: 32 → 16, in two blocks
    assert report.trainable == trainable
    assert report.total == base + trainable
    assert (report.rank, report.alpha, report.dropout) == (3, 6, 0.1)
    assert report.targets == ("q_proj", "v_proj")
    assert report.layers is None


def test_pattern_without_match_is_named_with_what_there_is():
    with pytest.raises(UsageError) as error:
        add_lora(tiny("llama"), targets=["q_proj", "nope"])
    message = str(error.value)
    assert "'nope'" in message
    assert "'q_proj'" not in message
    assert "gate_proj" in message
    assert "\n" not in message


@pytest.mark.parametrize("targets", [["mlp"], ["proj"], [], ["norm"]])
def test_only_linear_layers_match(targets):
    with pytest.raises(UsageError, match="no linear layer"):
        add_lora(tiny("llama"), targets=targets)


@pytest.mark.parametrize(
    ("name", "target"), [("llama_tied", "lm_head"), ("llama_tied", "embed_tokens"), ("gpt2", "wte")]
)
def test_tied_head_and_embedding_are_refused(name, target):
    model = tiny(name)
    before = model.get_input_embeddings().weight.clone()
    with pytest.raises(UsageError, match=f"'{target}' is not adapted .it is tied"):
        add_lora(model, targets=[target, "c_attn" if name == "gpt2" else "q_proj"])
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert not any(isinstance(module, BaseTunerLayer) for module in model.modules())


def test_untied_head_is_refused_too():
    with pytest.raises(UsageError, match="stay frozen"):
        add_lora(tiny("llama"), targets=["lm_head"])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_all_linear_leaves_the_head(name):
    wrapped = add_lora(tiny(name), targets="all-linear")
    assert lora_report(wrapped).modules == 2 * (7 if name == "llama" else 4)
    assert not any("lm_head" in adapted for adapted in adapted_names(wrapped))


def test_layers_choose_blocks():
    wrapped = add_lora(tiny("llama"), targets=["q_proj"], layers=[1])
    assert adapted_names(wrapped) == {"model.layers.1.self_attn.q_proj"}
    assert lora_report(wrapped).layers == (1,)


@pytest.mark.parametrize("layers", [[2], [-1], []])
def test_layers_out_of_range(layers):
    with pytest.raises(UsageError, match="from 0 to 1"):
        add_lora(tiny("llama"), layers=layers)


@pytest.mark.parametrize("option", [{"rank": 0}, {"alpha": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_numbers_out_of_range(option):
    with pytest.raises(UsageError, match=next(iter(option))):
        add_lora(tiny("llama"), **option)


def test_twice_is_refused():
    wrapped = add_lora(tiny("llama"))
    with pytest.raises(UsageError, match="already has adapters"):
        add_lora(wrapped)
    with pytest.raises(UsageError, match="already has adapters"):
        add_lora(wrapped.get_base_model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_have_the_type_of_the_body(dtype):
    wrapped = add_lora(tiny("llama", dtype=dtype))
    assert {param.dtype for param in wrapped.parameters()} == {dtype}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_disabled_adapter_is_the_base_without_dropout(name):
    settings = {"resid_pdrop": 0.5, "attn_pdrop": 0.5} if name == "gpt2" else {"attention_dropout": 0.5}
    model = tiny(name, **settings)
    before = model(input_ids=IDS).logits
    wrapped = trained(add_lora(model, dropout=0.5)).train()
    wrapped.base_model.model.get_input_embeddings().eval()
    flags = [module.training for module in wrapped.modules()]
    grads = [param.requires_grad for param in wrapped.parameters()]
    with adapter_disabled(wrapped), torch.no_grad():
        assert torch.equal(wrapped(input_ids=IDS).logits, before)
    assert flags == [module.training for module in wrapped.modules()]
    assert grads == [param.requires_grad for param in wrapped.parameters()]
    assert not torch.equal(wrapped.eval()(input_ids=IDS).logits, before)


def test_disabling_needs_adapters():
    with pytest.raises(UsageError, match="no adapters"), adapter_disabled(tiny("llama")):
        pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    def gradients(checkpointing):
        wrapped = trained(add_lora(tiny("llama"), dropout=0.0)).train()
        if checkpointing:
            wrapped.enable_input_require_grads()
            wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        wrapped(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return [param.grad for param in wrapped.parameters() if param.requires_grad]

    for plain, checkpointed in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=0, atol=1e-6)
        assert plain.norm() > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_update_is_scaled_b_a(name, dtype):
    wrapped = trained(add_lora(tiny(name, dtype=dtype), rank=4, alpha=10))
    layer = next(module for module in wrapped.modules() if isinstance(module, BaseTunerLayer))
    a, b = (getattr(layer, part)["default"].weight.float() for part in ("lora_A", "lora_B"))
    expected = 10 / 4 * b @ a
    before = layer.get_base_layer().weight.clone()
    update = weight_update(layer)
    assert update.dtype == torch.float32
    torch.testing.assert_close(update, expected.T if name == "gpt2" else expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.get_base_layer().weight, before)
    assert not layer.merged
