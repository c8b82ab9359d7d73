"""On a processor without instructions for it, a low-precision model computes in float32 and is saved as what it was."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.train import _runs

from expunge.errors import UsageError
from expunge.lm import _compute, load_model
from expunge.lm._shape import read_shape
from expunge.train import resume, unlearn

_HAS = _compute.has_instructions
CPU = torch.device("cpu")


@pytest.fixture
def old_processor(monkeypatch):
    monkeypatch.setattr(_compute, "has_instructions", lambda dtype, device: dtype == torch.float32)


@pytest.mark.parametrize(
    ("machine", "amx", "avx512", "expected"),
    [
        ("x86_64", False, False, False),
        ("x86_64", True, False, True),
        ("AMD64", False, True, True),
    ],
)
def test_what_a_processor_says(monkeypatch, machine, amx, avx512, expected):
    monkeypatch.setattr(_compute.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert _HAS(torch.bfloat16, CPU) is expected
    assert _HAS(torch.float32, CPU)
    assert not _HAS(torch.float16, CPU)
    assert _HAS(torch.float16, torch.device("cuda"))


def test_same_numbers_same_fingerprint(knowing_bf16, old_processor, monkeypatch):
    wide = load_model(knowing_bf16, device="cpu")
    assert {weight.dtype for weight in wide.model.parameters()} == {torch.float32}
    assert any("computed in float32" in note and "bfloat16" in note for note in wide.notes)
    assert read_shape(knowing_bf16, device="cpu").bytes == 2 * read_shape(knowing_bf16, device="cpu").stored
    monkeypatch.setattr(_compute, "has_instructions", lambda dtype, device: True)
    own = load_model(knowing_bf16, device="cpu")
    assert {weight.dtype for weight in own.model.parameters()} == {torch.bfloat16}
    assert own.fingerprint == wide.fingerprint
    pairs = zip(own.model.parameters(), wide.model.parameters(), strict=True)
    assert all(torch.equal(one.float(), other) for one, other in pairs)


def test_a_type_that_was_asked_for_stays(knowing_bf16, old_processor):
    loaded = load_model(knowing_bf16, dtype="bfloat16", device="cpu")
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    assert loaded.notes == ()


@pytest.mark.parametrize("changes", [{}, {"lora": False, "lr": 1e-3}, {"adapter_only": True}])
def test_a_run_is_saved_in_the_checkpoints_type(tmp_path, knowing_bf16, data, old_processor, monkeypatch, changes):
    config = _runs.config(knowing_bf16, data, tmp_path / "run", **changes)
    result = unlearn(config)
    assert result.forgotten
    assert json.loads((tmp_path / "run" / "run.json").read_text())["dtype"] == "float32"
    if "adapter_only" not in changes:
        saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
        assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
        assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert result.max_logit_error == 0.0
    # Whoever computes in bfloat16 finds the very same model.
    monkeypatch.setattr(_compute, "has_instructions", lambda dtype, device: True)
    if "adapter_only" not in changes:
        assert load_model(result.model, device="cpu").fingerprint == result.fingerprint


def test_a_run_goes_on_only_where_it_computes_alike(tmp_path, knowing_bf16, data, old_processor, monkeypatch):
    steps = 0

    def stop():
        nonlocal steps
        steps += 1
        return steps == 2

    with pytest.raises(Exception, match="interrupted"):
        unlearn(_runs.config(knowing_bf16, data, tmp_path / "run"), interrupted=stop)
    monkeypatch.setattr(_compute, "has_instructions", lambda dtype, device: True)
    with pytest.raises(UsageError, match="computes in bfloat16, accepted is one that computes in float32"):
        resume(tmp_path / "run")
    monkeypatch.setattr(_compute, "has_instructions", lambda dtype, device: dtype == torch.float32)
    assert resume(tmp_path / "run").forgotten
