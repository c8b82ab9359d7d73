"""One layer's output against the hidden states the models themselves give out."""

import peft
import pytest
import torch
from tests.lm._tiny import ARCHITECTURES, VOCABULARY, tiny_model

from expunge.errors import RunError, UsageError
from expunge.lm import decoder_layers, layer_output

IDS = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def wrapped(name):
    targets = {"gpt2": ["c_attn"], "gpt_neox": ["query_key_value"]}.get(name, ["q_proj"])
    model = peft.get_peft_model(tiny_model(name), peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model.eval()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_the_input_of_the_layer_above(name, lora):
    model = wrapped(name) if lora else tiny_model(name)
    with torch.no_grad():
        states = model(input_ids=IDS, output_hidden_states=True).hidden_states
        before = hooks(model)  # transformers leaves its own behind
        with layer_output(model, 0) as found:
            assert hooks(model) == before + 1
            model(input_ids=IDS)
    assert torch.equal(found.hidden, states[1])  # states[0] are the embeddings
    assert hooks(model) == before


def test_the_last_layer_is_taken_before_the_final_norm():
    model = tiny_model("llama")
    with torch.no_grad(), layer_output(model, -1) as found:
        last = model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model.model.norm(found.hidden), last)
    assert found.layer == 1


@pytest.mark.parametrize("layer", [0, 1, -1, -2])
def test_layers_are_counted_from_both_ends(layer):
    model = tiny_model("qwen2")
    with torch.no_grad(), layer_output(model, layer) as found, layer_output(model, layer % 2) as same:
        model(input_ids=IDS)
    assert torch.equal(found.hidden, same.hidden)
    assert found.layer == layer % 2


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_are_those_of_the_hidden_states(lora):
    model = wrapped("llama") if lora else tiny_model("llama")

    def gradients(hidden):
        model.zero_grad()
        hidden.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(model(input_ids=IDS, output_hidden_states=True).hidden_states[1])
    with layer_output(model, 0) as found:
        model(input_ids=IDS)
    whole = gradients(found.hidden)
    with layer_output(model, 0, stop=True) as found:
        model(input_ids=IDS)
    stopped = gradients(found.hidden)
    assert expected
    assert whole.keys() == stopped.keys() == expected.keys()
    assert all(torch.equal(whole[n], g) and torch.equal(stopped[n], g) for n, g in expected.items())


def test_stopping_runs_no_layer_above():
    model = tiny_model("llama")
    ran = []
    handle = model.model.layers[1].register_forward_hook(lambda *_: ran.append(1))
    with layer_output(model, 0, stop=True) as found:
        model(input_ids=IDS)
        ran.append("after the forward pass")
    handle.remove()
    assert ran == []
    assert found.hidden.shape == (2, 6, 32)
    assert hooks(model) == 0
    assert model(input_ids=IDS).logits.shape == (2, 6, VOCABULARY)


def test_the_latest_forward_pass_counts():
    model = tiny_model("llama")
    with torch.no_grad(), layer_output(model, 0) as found:
        model(input_ids=IDS)
        first = found.hidden
        model(input_ids=IDS[:1])
    assert torch.equal(found.hidden, first[:1]) or torch.allclose(found.hidden, first[:1], atol=1e-6)
    assert found.hidden.shape == (1, 6, 32)


def test_non_reentrant_checkpointing_keeps_the_gradient():
    model = tiny_model("llama").train()

    def gradient():
        model.zero_grad()
        with layer_output(model, 0) as found:
            model(input_ids=IDS, use_cache=False)
        found.hidden.square().sum().backward()
        return model.model.layers[0].mlp.up_proj.weight.grad.clone()

    plain = gradient()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradient(), plain)
    assert plain.norm() > 0


def test_the_hook_is_removed_after_an_error():
    model = tiny_model("llama")
    with pytest.raises(ZeroDivisionError), layer_output(model, 0):
        _ = 1 / 0
    assert hooks(model) == 0
    with pytest.raises(IndexError), layer_output(model, 0):
        model(input_ids=torch.full((1, 3), VOCABULARY + 5))
    assert hooks(model) == 0


@pytest.mark.parametrize("layer", [2, -3, 100, 1.0, True, None])
def test_layers_that_do_not_exist_are_refused(layer):
    model = tiny_model("llama")
    with (
        pytest.raises(UsageError, match=rf"^layer: found {layer}, accepted is -2 to 1 \(the model has 2 layers\)$"),
        layer_output(model, layer),
    ):
        pass
    assert hooks(model) == 0


def test_no_forward_pass_is_an_error():
    with layer_output(tiny_model("llama"), 1) as found:
        pass
    with pytest.raises(RunError, match="layer 1: found no output"):
        _ = found.hidden


def test_models_without_a_list_of_layers_are_named():
    with pytest.raises(RunError, match=r"^Linear: found no single list of decoder layers"):
        decoder_layers(torch.nn.Linear(2, 2))


def test_the_list_is_the_models_own():
    model = tiny_model("llama")
    assert decoder_layers(model) is model.model.layers
    assert decoder_layers(wrapped("gpt2")) is not None
