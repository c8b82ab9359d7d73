"""Saving: what is read back is what was in memory, the model in memory stays as it was, and failures leave nothing."""

import copy
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.lm._tokenizer import tiny, tiny_tokenizer, tokenizer_for

from expunge.errors import RunError, UsageError
from expunge.lm import _save as save_module
from expunge.lm import add_lora, fingerprint, load_model, merged_in_place, probe_logits, save_model

PROBE = torch.arange(3, 19).reshape(2, 8)
MODELS = ["llama", "llama_tied", "gpt2", "qwen2"]


def trained(model, std=0.1):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * std)
    return model


def save(model, out, tokenizer=None, **options):
    tokenizer = tokenizer or tokenizer_for(model.config.model_type)
    return save_model(model, tokenizer, out, **({"card": "# A card\n", "probe_ids": PROBE} | options))


def nothing_left(folder):
    return list(Path(folder).iterdir()) == []


@pytest.mark.parametrize("name", MODELS)
def test_merged_folder_equals_memory_in_float32(tmp_path, name):
    model = trained(add_lora(tiny(name), dropout=0.3)).train()
    base, before = tiny(name), fingerprint(model)
    adapted = probe_logits(model, PROBE)
    report = save(model, tmp_path / "out")
    loaded = load_model(str(tmp_path / "out"))
    found = probe_logits(loaded.model, PROBE)
    torch.testing.assert_close(found, adapted, rtol=0, atol=1e-5)
    change = (found - probe_logits(base, PROBE)).abs().max().item()
    assert change > 0.1
    assert report.change_from_base == pytest.approx(change)
    assert report.max_logit_error <= 1e-5
    assert report.merge_logit_change <= 1e-5
    assert report.update_below_precision < 0.05
    assert report.fingerprint == loaded.fingerprint
    assert report.warnings == loaded.notes == ()
    assert fingerprint(model) == before
    assert model.training
    assert loaded.model.config.tie_word_embeddings == base.config.tie_word_embeddings


@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_are_summed_in_float32_then_cast(tmp_path, name):
    model = trained(add_lora(tiny(name, dtype=torch.bfloat16), rank=4, alpha=8))
    expected = copy.deepcopy(model).float().merge_and_unload()
    report = save(model, tmp_path / "out")
    found = load_model(str(tmp_path / "out")).model
    assert found.dtype == torch.bfloat16
    for key, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], weight.bfloat16()), key
    assert report.max_logit_error == 0.0
    assert report.merge_logit_change > 0


def test_tied_model_has_one_copy(tmp_path):
    report = save(trained(add_lora(tiny("llama_tied"))), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert not any("lora" in name or "base_layer" in name for name in names)
    model = load_model(str(report.path)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_folder_is_complete(tmp_path):
    model = trained(add_lora(tiny("llama")))
    model.generation_config.max_new_tokens = 17
    report = save(model, tmp_path / "deep" / "out", extra_files={"run.json": "{}", "raw.bin": b"\0\1"})
    out = report.path
    names = {file.name for file in out.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"} <= names
    assert (out / "README.md").read_text() == "# A card\n"
    assert (out / "run.json").read_text() == "{}"
    assert (out / "raw.bin").read_bytes() == b"\0\1"
    assert report.bytes == sum(file.stat().st_size for file in out.iterdir())
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
    assert list((tmp_path / "deep").iterdir()) == [out]
    loaded = load_model(str(out))
    assert loaded.model.generation_config.max_new_tokens == 17
    assert loaded.tokenizer.pad_token is None
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template
    assert len(loaded.tokenizer) == 60
    assert loaded.model.get_input_embeddings().weight.shape[0] == 96


def test_update_below_precision_by_hand():
    """w = 1.0, ΔW = 1e-4: 1.0001 in float32; bfloat16 has 1.0 and 1.0078, so the update is lost."""
    for dtype, value, share in ((torch.float32, 1.0001, 0.0), (torch.bfloat16, 1.0, 1.0)):
        model = add_lora(tiny("llama", dtype=dtype), rank=1, alpha=1, targets=["q_proj"], layers=[0])
        layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
        with torch.no_grad():
            layer.get_base_layer().weight.fill_(1.0)
            layer.lora_A["default"].weight.fill_(1.0)
            layer.lora_B["default"].weight.fill_(1e-4)
        with merged_in_place(model) as stats:
            assert layer.get_base_layer().weight[0, 0].item() == pytest.approx(value, abs=1e-7)
        assert layer.get_base_layer().weight[0, 0].item() == 1.0
        assert stats.lost_share == share


def test_update_mostly_below_precision_warns(tmp_path):
    model = trained(add_lora(tiny("llama", dtype=torch.bfloat16)), std=0.01)
    report = save(model, tmp_path / "out")
    assert 0.5 < report.update_below_precision < 1
    assert report.change_from_base > 0
    assert "below bfloat16 precision" in report.warnings[0]


def test_update_wholly_below_precision_is_an_error(tmp_path):
    model = add_lora(tiny("llama", dtype=torch.bfloat16), rank=1, alpha=1, targets=["q_proj"])
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.fill_(1e-5)
            elif "q_proj" in name:
                param.fill_(1.0)
    with pytest.raises(RunError, match="whole update is below the precision of bfloat16"):
        save(model, tmp_path / "out")
    assert nothing_left(tmp_path)


def test_untrained_adapters_save_the_base(tmp_path):
    report = save(add_lora(tiny("llama")), tmp_path / "out")
    assert report.change_from_base == 0.0
    assert report.update_below_precision is None
    assert report.fingerprint == fingerprint(tiny("llama"))


def test_full_model_is_compared_with_the_logits_given(tmp_path):
    model = tiny("llama_tied")
    base = probe_logits(model, PROBE)
    with pytest.raises(RunError, match="equal the base"):
        save(model, tmp_path / "same", base_logits=base)
    assert nothing_left(tmp_path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(0.1)
    assert save(model, tmp_path / "out", base_logits=base).change_from_base > 0
    assert save(model, tmp_path / "unknown").change_from_base is None


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_only_loads_to_the_same_model(tmp_path, name, dtype):
    tiny(name, dtype=dtype).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = load_model(str(tmp_path / "base"))
    model = trained(add_lora(base.model))
    before = fingerprint(model)
    report = save(model, tmp_path / "adapter", adapter_only=True)
    assert fingerprint(model) == before == report.fingerprint
    assert report.merge_logit_change is None
    assert report.update_below_precision is None
    assert report.change_from_base > 0.1
    assert report.warnings == ()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert (tmp_path / "adapter" / "README.md").read_text() == "# A card\n"
    with merged_in_place(model):
        merged = probe_logits(model, PROBE)
    assert torch.equal(probe_logits(load_model(str(tmp_path / "adapter")).model, PROBE), merged)


def test_adapter_on_a_merged_adapter_names_that_folder(tmp_path):
    folder = tmp_path / "base"
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    for place in (tmp_path / "first", tmp_path / "second"):
        model = trained(add_lora(load_model(str(folder)).model))
        save(model, place, adapter_only=True)
        folder = place
    with merged_in_place(model):
        merged = probe_logits(model, PROBE)
    assert torch.equal(probe_logits(load_model(str(folder)).model, PROBE), merged)


def test_adapter_of_a_nameless_base_says_so(tmp_path):
    report = save(trained(add_lora(tiny("llama"))), tmp_path / "out", adapter_only=True)
    assert "names no base model" in report.warnings[0]


def test_taken_output_is_refused(tmp_path):
    model = tiny("llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name, found in (("full", "not empty"), ("file", "a file")):
        with pytest.raises(UsageError, match=found):
            save(model, tmp_path / name)
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    assert save(model, tmp_path / "empty").path == tmp_path / "empty"


@pytest.mark.parametrize("name", ["README.md", "../up.txt", "a/b.txt"])
def test_extra_files_stay_inside(tmp_path, name):
    with pytest.raises(UsageError, match="extra file"):
        save(tiny("llama"), tmp_path / "out", extra_files={name: ""})


def test_adapter_only_needs_adapters(tmp_path):
    with pytest.raises(UsageError, match="no adapters"):
        save(tiny("llama"), tmp_path / "out", adapter_only=True)


def test_merged_adapter_is_refused(tmp_path):
    model = trained(add_lora(tiny("llama")))
    model.merge_adapter()
    with pytest.raises(UsageError, match="merged already"):
        save(model, tmp_path / "out")


def test_full_disk_is_seen_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RunError, match=r"bytes are needed, 1 are free"):
        save(tiny("llama"), tmp_path / "out")
    assert nothing_left(tmp_path)


def test_full_disk_while_writing_leaves_nothing(tmp_path):
    """A real limit on the size of a file, in a process of its own: the system refuses the write itself."""
    script = """
import resource, sys
from pathlib import Path
from expunge.errors import RunError
from tests.lm.test_save import add_lora, fingerprint, save, tiny, trained
model = trained(add_lora(tiny("llama", vocab_size=96), rank=16))
before = fingerprint(model)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
for adapter_only in (False, True):
    try:
        save(model, Path(sys.argv[1]), adapter_only=adapter_only)
    except RunError as error:
        assert error.__cause__ is None and error.__suppress_context__
        assert fingerprint(model) == before
        print(error)
"""
    root = Path(__file__).parents[2]
    out = tmp_path / "out"
    path = os.pathsep.join([str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script, str(out)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"cannot write {out} (")
        assert "bytes are needed)" in line
    assert nothing_left(tmp_path)


def _damage(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["model.norm.weight"][:1].add_(1e-3), "weights read back differ"),
        (lambda tensors: tensors.pop("model.norm.weight"), "weights read back differ"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}), "cannot be read back"),
    ],
)
def test_damage_on_the_way_to_disk_is_found(tmp_path, monkeypatch, change, message):
    reload = save_module._reload

    def damaged(body, folder, dtype):
        _damage(folder, change)
        return reload(body, folder, dtype)

    monkeypatch.setattr(save_module, "_reload", damaged)
    with pytest.raises(RunError, match=message) as error:
        save(trained(add_lora(tiny("llama"))), tmp_path / "out")
    assert str(tmp_path / "out") in str(error.value)
    assert nothing_left(tmp_path)


def test_tokenizer_that_reads_back_as_another_is_found(tmp_path):
    """transformers reads any tokenizer in a Qwen2 folder as a Qwen2Tokenizer, which cannot split on spaces."""
    with pytest.raises(RunError, match="the tokenizer read back has other vocabulary"):
        save(tiny("qwen2"), tmp_path / "out", tokenizer=tiny_tokenizer())
    assert nothing_left(tmp_path)


def test_interruption_leaves_nothing_and_restores_the_weights(tmp_path, monkeypatch):
    model = trained(add_lora(tiny("llama")))
    before = fingerprint(model)

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model.get_base_model()), "save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(model, tmp_path / "out")
    assert nothing_left(tmp_path)
    assert fingerprint(model) == before


def test_quiet(tmp_path, capfd):
    save(trained(add_lora(tiny("gpt2"))), tmp_path / "out")
    assert capfd.readouterr() == ("", "")
