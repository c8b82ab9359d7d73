"""Loading: every kind of source, the pad id, nothing resized, and one line for everything that is wrong."""

import json
import shutil
import warnings

import huggingface_hub.constants
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.lm._tokenizer import TEMPLATE, tiny, tiny_tokenizer, tokenizer_for
from transformers.utils import logging as hf_logging

from expunge.errors import RunError, UsageError
from expunge.lm import add_lora, fingerprint, load_model, pick_device

IDS = torch.arange(3, 19).reshape(2, 8)


def folder(path, name="llama", *, dtype=torch.float32, tokenizer=None, **settings):
    tiny(name, dtype=dtype, **settings).save_pretrained(path)
    (tokenizer or tokenizer_for(name)).save_pretrained(path)
    return path


def adapter(path, base_name, name="llama", *, dtype=torch.float32, **settings):
    """A PEFT adapter with random values made by PEFT alone; returns the wrapped model."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **settings)
    wrapped = get_peft_model(tiny(name, dtype=dtype), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(0)
    for key, param in wrapped.named_parameters():
        if "lora_" in key:
            param.data = (torch.randn(param.shape, generator=generator) * 0.1).to(dtype)
    wrapped.save_pretrained(str(path), save_embedding_layers=False)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base_name}))
    return wrapped


def message(spec, **options):
    with pytest.raises(UsageError) as error:
        load_model(str(spec), **options)
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "qwen2"])
def test_folder(tmp_path, name):
    loaded = load_model(str(folder(tmp_path / "m", name)))
    assert fingerprint(tiny(name)) == loaded.fingerprint
    assert not loaded.model.training
    assert loaded.source == str(tmp_path / "m")
    assert loaded.notes == ()
    assert loaded.tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_dtype(tmp_path, stored, asked):
    model = load_model(str(folder(tmp_path / "m", dtype=stored)), dtype=asked).model
    expected = stored if asked == "auto" else getattr(torch, asked)
    assert {param.dtype for param in model.parameters()} == {expected}


def test_fingerprint_is_taken_once(tmp_path):
    loaded = load_model(str(folder(tmp_path / "m")))
    before = loaded.fingerprint
    loaded.model.model.norm.weight.data.add_(1)
    assert loaded.fingerprint == before != fingerprint(loaded.model)


def test_fingerprint_after_adapters_is_refused(tmp_path):
    loaded = load_model(str(folder(tmp_path / "m")))
    add_lora(loaded.model)
    with pytest.raises(RunError, match="before adapters are attached"):
        _ = loaded.fingerprint


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pad": True}, 59),
        ({}, 2),
        ({"eos": False}, 0),
        ({"eos": False, "unk": False}, 0),
        ({"pad": True, "words": 120}, 2),  # its pad id 119 is outside the model's 96 rows
    ],
)
def test_pad_id_and_nothing_resized(tmp_path, options, expected):
    tokenizer = tiny_tokenizer(**options)
    loaded = load_model(str(folder(tmp_path / "m", tokenizer=tokenizer)))
    assert loaded.pad_id == expected
    assert loaded.tokenizer.pad_token == tokenizer.pad_token
    assert len(loaded.tokenizer) == options.get("words", 60)
    assert loaded.model.get_input_embeddings().weight.shape[0] == loaded.model.config.vocab_size == 96
    assert bool(loaded.notes) == (len(tokenizer) > 96)


def test_quiet_and_settings_restored(tmp_path, capfd):
    path = folder(tmp_path / "m")
    capfd.readouterr()
    before = (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled())
    load_model(str(path))
    assert capfd.readouterr() == ("", "")
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(str(path))
    assert not caught


@pytest.mark.parametrize("place", ["absolute", "inside", "beside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_is_merged_in_float32_and_cast(tmp_path, dtype, place):
    path = tmp_path / "adapter"
    base = {"absolute": tmp_path / "b", "inside": path / "base", "beside": tmp_path / "base"}[place]
    wrapped = adapter(path, {"absolute": str(base), "inside": "base", "beside": "../base"}[place], dtype=dtype)
    folder(base, dtype=dtype)
    loaded = load_model(str(path))
    expected = wrapped.float().merge_and_unload()
    assert {param.dtype for param in loaded.model.parameters()} == {dtype}
    assert set(loaded.model.state_dict()) == set(expected.state_dict())
    for key, weight in expected.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], weight.to(dtype)), key
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert all(param.requires_grad for param in loaded.model.parameters())
    assert loaded.fingerprint != fingerprint(tiny("llama", dtype=dtype))


def test_adapter_in_float32_is_not_rounded_to_the_base(tmp_path):
    wrapped = adapter(tmp_path / "a", str(folder(tmp_path / "b", dtype=torch.bfloat16)), dtype=torch.bfloat16)
    loaded = load_model(str(tmp_path / "a"), dtype="float32")
    assert loaded.fingerprint == fingerprint(wrapped.float().merge_and_unload())


def test_adapter_on_a_tied_model_keeps_it_tied(tmp_path):
    adapter(tmp_path / "a", str(folder(tmp_path / "b", "llama_tied")), "llama_tied")
    model = load_model(str(tmp_path / "a"), dtype="bfloat16").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_adapter_on_an_adapter(tmp_path):
    adapter(tmp_path / "a", str(folder(tmp_path / "b")))
    adapter(tmp_path / "c", "../a")
    prints = {load_model(str(tmp_path / name)).fingerprint for name in "abc"}
    assert len(prints) == 3


def test_adapter_cycle_ends(tmp_path):
    adapter(tmp_path / "a", "../a")
    assert "adapters on top of each other" in message(tmp_path / "a")


def test_adapter_faults(tmp_path):
    base = folder(tmp_path / "b", hidden_size=64)
    adapter(tmp_path / "a", str(base))
    assert "cannot merge the adapter" in message(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    assert "adapter_model.safetensors" in message(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    assert "names no base" in message(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    assert "cannot read adapter_config.json" in message(tmp_path / "a")


def test_missing_base_is_named(tmp_path):
    adapter(tmp_path / "a", "/not/there")
    assert "'/not/there': no such file or folder" in message(tmp_path / "a")


def test_pickled_weights_are_refused(tmp_path):
    path = folder(tmp_path / "m")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    text = message(path)
    assert "only pickled weights (.bin)" in text
    assert "safetensors" in text


def test_missing_weights_are_not_made_up(tmp_path):
    path = folder(tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert "1 weights are missing" in message(path)
    assert "model.norm.weight" in message(path)


def test_unused_weights_are_noted(tmp_path):
    path = folder(tmp_path / "m")
    tensors = load_file(path / "model.safetensors") | {"extra.weight": torch.ones(2)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert "extra.weight" in load_model(str(path)).notes[0]


@pytest.mark.parametrize("dtype", ["int8", "fp32", ""])
def test_unknown_dtype(dtype):
    assert "bfloat16" in message("anything", dtype=dtype)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "", "cuda:99"])
def test_unknown_device(device):
    assert f"device: found '{device}'" in message("anything", device=device)


def test_default_device(monkeypatch):
    assert pick_device("cpu").type == "cpu"
    assert pick_device(None).type in ("cpu", "cuda", "mps")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert pick_device(None).type == "cpu"


def test_folder_faults(tmp_path):
    assert "without config.json" in message(tmp_path)
    assert "'smollm2-135m'" in message(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "name the file itself" in message(tmp_path)
    assert "cannot be read as GGUF" in message(tmp_path / "x.gguf")
    (tmp_path / "x.txt").write_text("")
    assert "not .gguf" in message(tmp_path / "x.txt")
    path = folder(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"broken")
    assert "cannot be loaded" in message(path)
    (path / "config.json").write_text("{")
    assert "cannot be loaded" in message(path)


def test_not_a_causal_model(tmp_path):
    config = transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, vocab_size=96)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert "found type 't5', accepted are causal language models" in message(tmp_path)


def test_quantised_folder(tmp_path):
    path = folder(tmp_path / "m")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    assert "quantised" in message(path)


@pytest.mark.parametrize("spec", ["./nowhere", "/no/where", "~/nowhere-at-all", "a/b/c", "", "two words"])
def test_missing_path(spec):
    assert f"'{spec}': no such file or folder" in message(spec)


def test_hub_out_of_reach(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for spec in ("gpt2-of-nobody", "nobody/nothing"):
        text = message(spec)
        assert f"'{spec}'" in text
        assert "the hub cannot be reached" in text
        assert "accepted are" in text


def test_hub_id_is_read_from_the_local_cache(tmp_path, monkeypatch):
    """A hub id whose files are there goes the way of a folder, and keeps its name for adapters saved later."""
    path = folder(tmp_path / "snapshot")
    seen = {}

    def download(spec, **options):
        seen.update(options, spec=spec)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = load_model("someone/something")
    assert loaded.model.config.name_or_path == "someone/something"
    assert not any("bin" in pattern or "py" in pattern for pattern in seen["allow_patterns"])
    shutil.rmtree(path)
