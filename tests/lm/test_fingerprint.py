"""The fingerprint: any weight changes it, nothing else does."""

import pytest
import torch
from tests.lm._tokenizer import tiny
from transformers import AutoModelForCausalLM

from expunge.lm import add_lora, fingerprint

MODELS = ["llama", "llama_tied", "gpt2"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_survives_save_and_load(tmp_path, name, dtype):
    model = tiny(name, dtype=dtype)
    model.save_pretrained(tmp_path)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)) == fingerprint(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_with_one_weight_and_back(dtype):
    model = tiny("llama", dtype=dtype)
    before = fingerprint(model)
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        kept = weight[3, 5].clone()
        weight[3, 5] = torch.nextafter(kept, torch.tensor(9.0, dtype=dtype)) if dtype == torch.float32 else kept * 1.01
        assert fingerprint(model) != before
        weight[3, 5] = kept
    assert fingerprint(model) == before


def test_depends_on_type_name_and_shape():
    def of(**tensors):
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_parameter(name, torch.nn.Parameter(tensor))
        return fingerprint(module)

    zeros = torch.zeros(2, 3)
    results = {
        of(a=zeros),
        of(b=zeros),
        of(a=zeros.reshape(3, 2)),
        of(a=zeros.bfloat16()),
        of(a=zeros.half()),
        of(a=zeros, b=torch.zeros(0)),
        of(a=torch.tensor(0.0)),
    }
    assert len(results) == 7
    assert of(a=zeros, b=zeros + 1) == of(b=zeros + 1, a=zeros)


def test_tied_weights_count_once_and_training_state_does_not_matter():
    model = tiny("llama_tied")
    before = fingerprint(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.train().requires_grad_(False)
    assert fingerprint(model) == before


def test_merged_equals_plain_and_wrapped_does_not():
    plain = fingerprint(tiny("llama"))
    wrapped = add_lora(tiny("llama"))
    assert fingerprint(wrapped) != plain
    assert fingerprint(wrapped.merge_and_unload()) == plain
