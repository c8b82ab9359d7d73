import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from expunge.errors import UsageError
from expunge.scoring import Generation, end_ids, generate
from expunge.scoring._generate import _kept

VOCABULARY = 64
PAD = 0


class Letters:
    """A tokenizer that writes ids as numbers; id 1 is special."""

    eos_token_id = None

    def decode(self, tokens, skip_special_tokens=False):
        return " ".join(str(t) for t in tokens if not (skip_special_tokens and t == 1))


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    config.eos_token_id = None
    return prepared(LlamaForCausalLM(config))


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    config.eos_token_id = config.bos_token_id = None
    return prepared(GPT2LMHeadModel(config))


def mistral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=12, **sizes)
    config.eos_token_id = None
    return prepared(MistralForCausalLM(config))


def prepared(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # spread the logits, so that rounding decides nothing
    model.generation_config.eos_token_id = None
    return model.eval()


def greedy(model, prompt, steps):
    """The definition: one prompt, no cache, no padding."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def prompts(count=9):
    generator = torch.Generator().manual_seed(3)
    sizes = [3 + 5 * i % 11 for i in range(count)]
    return [torch.randint(2, VOCABULARY, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize("build", [llama, gpt2, mistral])
@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_batched_greedy_is_single_greedy(build, batch_size):
    model = build()
    found = generate(model, Letters(), prompts(), pad_id=PAD, max_new_tokens=12, batch_size=batch_size)
    assert [g.tokens for g in found] == [greedy(model, prompt, 12) for prompt in prompts()]
    assert not any(g.finished for g in found)


def test_the_pad_id_is_never_read():
    model = llama()
    first, second = (generate(model, Letters(), prompts(), pad_id=pad, max_new_tokens=6) for pad in (0, 9))
    assert first == second


def test_all_end_tokens_count_and_rows_leave_the_batch():
    model = llama()
    plain = [greedy(model, prompt, 12) for prompt in prompts()]
    ends = [plain[0][2], plain[1][5], plain[2][0]]
    model.generation_config.eos_token_id = ends
    for found, tokens in zip(generate(model, Letters(), prompts(), pad_id=PAD, max_new_tokens=12), plain, strict=True):
        stops = [i for i, token in enumerate(tokens) if token in ends]
        assert found.finished == bool(stops)
        assert found.tokens == (tokens[: stops[0]] if stops else tokens)
    assert generate(model, Letters(), [prompts()[2]], pad_id=PAD) == [Generation("", (), True)]


def test_ids_five_and_nine_end_and_nine_is_not_in_the_text():
    model = llama()
    plain = greedy(model, prompts()[0], 3)
    with torch.no_grad():  # rename the third token to 9: exchange two rows of the embedding and of the head
        for weight in (model.lm_head.weight, model.get_input_embeddings().weight):
            weight[[plain[2], 9]] = weight[[9, plain[2]]]
    prompt = [{plain[2]: 9, 9: plain[2]}.get(token, token) for token in prompts()[0]]
    model.generation_config.eos_token_id = [5, 9]
    (found,) = generate(model, Letters(), [prompt], pad_id=PAD)
    assert found.finished
    assert 9 not in found.tokens
    assert len(found.tokens) == 2
    assert found.text == " ".join(map(str, found.tokens))


def test_end_ids_join_all_sources():
    model, tokenizer = llama(), Letters()
    assert end_ids(model, tokenizer) == frozenset()
    model.generation_config.eos_token_id = [5, 9]
    model.config.eos_token_id = 5
    tokenizer.eos_token_id = 2
    assert end_ids(model, tokenizer) == {2, 5, 9}


def test_special_tokens_are_not_in_the_text():
    class Emitting(Letters):
        def decode(self, tokens, skip_special_tokens=False):
            assert skip_special_tokens
            return "text"

    assert generate(llama(), Emitting(), prompts(1), pad_id=PAD, max_new_tokens=1)[0].text == "text"


def test_generation_settings_do_not_leak_in():
    model = llama()
    expected = generate(model, Letters(), prompts(), pad_id=PAD, max_new_tokens=8)
    settings = {"do_sample": True, "temperature": 5.0, "top_p": 0.5, "repetition_penalty": 9.0, "min_new_tokens": 4}
    model.generation_config.update(**settings, no_repeat_ngram_size=1, num_beams=3)
    assert generate(model, Letters(), prompts(), pad_id=PAD, max_new_tokens=8) == expected


def test_a_lora_model_generates_with_its_adapter():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.eval()
    found = generate(model, Letters(), prompts(3), pad_id=PAD, max_new_tokens=6)
    assert [g.tokens for g in found] == [greedy(model, prompt, 6) for prompt in prompts(3)]


def test_nothing_is_printed_and_nothing_warned(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(llama(), Letters(), prompts(), pad_id=PAD, max_new_tokens=4)
    assert capfd.readouterr() == ("", "")


def test_modes_are_restored_even_after_an_error():
    model = llama().train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    generate(model, Letters(), prompts(2), pad_id=PAD, max_new_tokens=2)
    assert [module.training for module in model.modules()] == flags
    with pytest.raises(IndexError):
        generate(model, Letters(), [[VOCABULARY]], pad_id=PAD, max_new_tokens=2)
    assert [module.training for module in model.modules()] == flags
    assert torch.is_grad_enabled()


def test_dropout_is_off():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, embd_pdrop=0.5)
    model = GPT2LMHeadModel(config).train()
    first, second = (generate(model, Letters(), prompts(3), pad_id=PAD, max_new_tokens=6) for _ in range(2))
    assert first == second
    assert model.training


def test_bfloat16_runs():
    assert len(generate(llama().bfloat16(), Letters(), prompts(3), pad_id=PAD, max_new_tokens=5)[0].tokens) == 5


def test_progress_and_empty_input():
    seen = []
    generate(
        llama(), Letters(), prompts(5), pad_id=PAD, max_new_tokens=1, batch_size=2, progress=lambda *at: seen.append(at)
    )
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert generate(llama(), Letters(), [], pad_id=PAD) == []


@pytest.mark.parametrize(
    ("given_prompts", "options", "message"),
    [
        ([[]], {}, "prompt 0: found no token"),
        ([[2]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[2]], {"batch_size": 0}, "batch_size"),
        ([[2], [2] * 100], {"max_new_tokens": 29}, "prompt 1: found 100 tokens, accepted is at most 99"),
    ],
)
def test_bad_input_is_a_usage_error(given_prompts, options, message):
    with pytest.raises(UsageError, match=message):
        generate(llama(), Letters(), given_prompts, pad_id=PAD, **options)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
@settings(max_examples=50)
def test_batches_shrink_to_powers_of_two_and_keep_every_active_row(ended):
    if all(ended):
        return
    kept = _kept(list(range(len(ended))), ended)
    assert kept == sorted(set(kept))
    assert {i for i, end in enumerate(ended) if not end} <= set(kept)
    assert len(kept) == len(ended) or (len(kept) < 2 * ended.count(False) and len(kept) & (len(kept) - 1) == 0)
