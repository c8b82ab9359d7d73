"""Six updates are three, an end, and three more: bit for bit, for every optimizer, storage and method."""

import copy
import errno
import json
import os
import random
import re
import resource

import numpy as np
import pytest
import torch
from tests.lm._tokenizer import tiny, tiny_tokenizer
from tests.train._runs import config_from_options, examples, write

from expunge.errors import RunError, UsageError
from expunge.lm import load_model
from expunge.train import InterruptedRun, RunFolder, finished, request_of, resume, unlearn
from expunge.train import _checkpoints as checkpoints_module
from expunge.train import _run as run_module
from expunge.train._checkpoints import Checkpoints

MASC = {"method": "masc", "rho": 0.01, "probe": 1, "every": 4, "lora_dropout": 0.1}
SHARED = {"optimizer": "adamw", "update": "alternate"}
SCHEMES = {"shared": SHARED, "decoupled": {"optimizer": "dualoptim"}, "base_delta": {"optimizer": "dualoptim+"}}
STORAGES = ("32bit", "bf16", "8bit", "4bit")
DTYPES = {"32bit": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8, "4bit": torch.uint8}
METHODS = {
    "rmu": {"method": "rmu", "method_options": {"layer": "1"}},
    "npo+kl": {"method": "npo+kl"},
    "task-vector": {"method": "task-vector"},
    "dual ascent": {"method": "graddiff", "weighting": "primal-dual", "retain_limit": 1.0, "dual_step": 0.5},
    "masc, masked": MASC | {"cut": [0.2, 0.6], "min_prefix": 1, "min_suffix": 1},
    "masc, accumulated": MASC | {"micro_batch": 1},
    "npo+kl, accumulated": {"method": "npo+kl", "micro_batch": 1},
    "masc, gated": MASC | {"gate": True, "taper": 0.5, "focus": True},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """An untrained model whose matrices and adapters are just large enough for 8-bit and 4-bit states."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    tiny("llama", hidden_size=64, intermediate_size=64, max_position_embeddings=128).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    parts = {"forget": range(5), "retain": range(5, 12)}
    return {name: str(write(folder / f"{name}.jsonl", examples(numbers))) for name, numbers in parts.items()}


def make(model, files, out, **changes):
    usual = {"batch": 2, "retain_batch": 2, "epochs": 9, "lr": 1e-2, "lora_dropout": 0.0, "rank": 64, "threads": 1}
    usual |= {"sample": 0, "retain_sample": 0, "tolerance": 0.0, "seed": 1, "device": "cpu", "checkpoint_every": 2}
    return config_from_options({"model": model, "out": str(out), **files, **usual, **changes})


def at(step):
    """Asks a run to end after that many updates of this process."""
    calls = iter([*[False] * (step - 1), True])
    return lambda: next(calls)


def state_of(out):
    state, notes = RunFolder(out).checkpoints.read()
    assert notes == []
    return state


def log_of(out):
    """The lines of a log, without what the machine had free when its process began."""
    lines = (out / "log.jsonl").read_bytes().splitlines()
    assert json.loads(lines[0])["event"] == "plan"
    return lines[1:]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differences(one, other, where="state"):
    """Places at which two states differ, in type, dtype or bits."""
    if type(one) is not type(other):
        return [where]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return [] if same and bits(one) == bits(other) else [where]
    if isinstance(one, dict):
        keys = [where] if one.keys() != other.keys() else []
        return keys + [
            place for key in one if key in other for place in differences(one[key], other[key], f"{where}.{key}")
        ]
    if isinstance(one, list | tuple):
        pairs = enumerate(zip(one, other, strict=False))
        lengths = [where] if len(one) != len(other) else []
        return lengths + [place for number, pair in pairs for place in differences(*pair, f"{where}[{number}]")]
    return [] if one == other else [where]


@pytest.fixture
def quick(monkeypatch, wide):
    """Loads the model once: every run gets a copy."""
    loaded = load_model(wide)
    monkeypatch.setattr(run_module, "load", lambda config: copy.deepcopy(loaded))


def check_three_and_three(tmp_path, model, files, **changes):
    """Both ways to six updates leave the same checkpoint and the same log; returns the checkpoint's state."""
    with pytest.raises(InterruptedRun, match="interrupted at step 6"):
        unlearn(make(model, files, tmp_path / "whole", **changes), interrupted=at(6))
    with pytest.raises(InterruptedRun, match="interrupted at step 3"):
        unlearn(make(model, files, tmp_path / "parts", **changes), interrupted=at(3))
    three = state_of(tmp_path / "parts")
    torch.manual_seed(12345)
    random.seed(12345)
    np.random.seed(12345)
    with pytest.raises(InterruptedRun, match="interrupted at step 6"):
        resume(tmp_path / "parts", interrupted=at(3))
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert differences(whole["run"], parts["run"]) == []
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    # the three updates after it did change the weights and the optimizer
    changed = differences(three["run"], parts["run"])
    assert {"state.masters.masters", "state.optimizer.state"} <= {
        re.sub(r"(\[|\.\d).*", "", place) for place in changed
    }
    return parts["run"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_six_updates_are_three_and_three(tmp_path, wide, files, scheme, storage, lora):
    changes = MASC | SCHEMES[scheme] | {"optimizer_storage": storage, "lora": lora}
    state = check_three_and_three(tmp_path, wide, files, **changes)
    kept = [tensor for each in state["optimizer"]["state"].values() for tensor in each.values() if tensor.dim() > 0]
    assert DTYPES[storage] in {tensor.dtype for tensor in kept}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_six_updates_are_three_and_three_with_every_kind_of_loss(tmp_path, wide, files, method, lora):
    state = check_three_and_three(tmp_path, wide, files, lora=lora, **METHODS[method])
    if method == "dual ascent":
        assert state["weights"]["retain"] != 1.0


def test_a_step_of_bfloat16_weights_is_resumed_from_their_masters(tmp_path, knowing_bf16, files):
    state = check_three_and_three(tmp_path, knowing_bf16, files, lora=False, **MASC | {"lr": 1e-4})
    masters = state["masters"]["masters"]
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)


# -- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_the_last_two_are_kept(tmp_path, wide, files):
    with pytest.raises(InterruptedRun):
        unlearn(make(wide, files, tmp_path / "run", **MASC), interrupted=at(7))
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir())
    assert names == ["state-000006.pt", "state-000007.pt"]
    assert state_of(tmp_path / "run")["run"]["loop"]["step"] == 7


def hurt(path, how):
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[len(content) // 2] ^= 1
    elif how == "the end":
        del content[len(content) * 2 // 3 :]
    elif how == "all":
        content = bytearray()
    elif how == "another file":
        content = bytearray(b"junk " * 100)
    path.write_bytes(content)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["a bit", "the end", "all", "another file"])
def test_a_damaged_newest_gives_way_to_the_one_before(tmp_path, wide, files, how):
    changes = {"method": "graddiff", "lora": True, "epochs": 3}
    whole = unlearn(make(wide, files, tmp_path / "whole", **changes))
    out = tmp_path / "run"
    with pytest.raises(InterruptedRun):
        unlearn(make(wide, files, out, **changes), interrupted=at(5))
    hurt(out / "checkpoint" / "state-000005.pt", how)
    state, notes = RunFolder(out).checkpoints.read()
    assert state["run"]["loop"]["step"] == 4
    assert len(notes) == 1
    result = resume(out)
    assert [note for note in result.notes if "state-000005.pt is damaged" in note] == notes
    assert result.fingerprint == whole.fingerprint
    assert log_of(out) == log_of(tmp_path / "whole")


@pytest.mark.usefixtures("quick")
def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path, wide, files):
    out = tmp_path / "run"
    with pytest.raises(InterruptedRun):
        unlearn(make(wide, files, out, **MASC), interrupted=at(3))
    for path in (out / "checkpoint").iterdir():
        hurt(path, "a bit")
    with pytest.raises(UsageError, match=r"found 2 checkpoints, each damaged; removing them lets `expunge resume"):
        resume(out)


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_checkpoint_is_run(tmp_path):
    (tmp_path / "c").mkdir()
    torch.save({"run": Attack(tmp_path / "done")}, tmp_path / "c" / "state-000001.pt")
    with pytest.raises(UsageError, match="damaged"):
        Checkpoints(tmp_path / "c").read()
    assert not (tmp_path / "done").exists()


def test_checkpoints_of_a_way_that_was_left_are_removed(tmp_path):
    """After a damaged one the run goes on from the one before: what is newer by its number is older by its state."""
    checkpoints = Checkpoints(tmp_path)
    for step in (2, 4):
        checkpoints.write(step, {"step": step})
    hurt(tmp_path / "state-000004.pt", "all")
    checkpoints.write(3, {"step": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state-000002.pt", "state-000003.pt"]
    assert checkpoints.read() == ({"step": 3}, [])


@pytest.mark.usefixtures("quick")
def test_a_full_disk_while_checkpointing_keeps_the_one_before(tmp_path, wide, files, monkeypatch):
    changes = {"method": "graddiff", "lora": True, "epochs": 3}
    whole = unlearn(make(wide, files, tmp_path / "whole", **changes))
    out, save = tmp_path / "run", torch.save

    def full(state, path):
        save(state, path)
        if state["run"]["loop"]["step"] == 4:
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_module.torch, "save", full)
        with pytest.raises(RunError, match=r"^checkpoint: cannot write .*state-000004\.pt: No space left") as caught:
            unlearn(make(wide, files, out, **changes))
    assert "\n" not in str(caught.value)
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["state-000002.pt"]
    assert resume(out).fingerprint == whole.fingerprint


def test_a_real_limit_of_the_disk_is_one_line(tmp_path):
    """The writer of torch fails otherwise than Python's: with a `RuntimeError` in the middle of the file."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(1, {"weight": torch.ones(10)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(RunError, match=r"^checkpoint: cannot write .*; .* holds the checkpoint before it$"):
            checkpoints.write(2, {"weight": torch.ones(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["state-000001.pt"]
    assert torch.equal(checkpoints.read()[0]["weight"], torch.ones(10))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "c").write_text("mine")
    with pytest.raises(RunError, match=r"^checkpoint: cannot write .*state-000001\.pt: File exists$"):
        Checkpoints(tmp_path / "c").write(1, {})


# -- two processes, and what a killed one leaves -----------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_worked_on_is_refused(tmp_path, wide, files):
    out = tmp_path / "run"
    with pytest.raises(InterruptedRun):
        unlearn(make(wide, files, out, **MASC), interrupted=at(1))
    with RunFolder(out).held(), pytest.raises(UsageError, match="another process works on this run"):
        resume(out)
    with pytest.raises(InterruptedRun):
        resume(out, interrupted=at(1))


@pytest.mark.usefixtures("quick")
def test_what_a_killed_process_left_half_written_is_removed(tmp_path, wide, files):
    out = tmp_path / "run"
    changes = {"method": "graddiff", "lora": True, "epochs": 1}
    with pytest.raises(InterruptedRun):
        unlearn(make(wide, files, out, **changes), interrupted=at(1))
    for name in (".result.json.part", "scores/.before.json.part", "checkpoint/.state-000009.pt.part"):
        (out / name).write_bytes(b"half")
    (out / ".model.0123").mkdir()
    (out / ".model.0123" / "model.safetensors").write_bytes(b"half")
    resume(out)
    names = {path.relative_to(out).parts[0] for path in out.rglob("*")}
    assert names == {"run.json", "log.jsonl", "result.json", "scores", "model"}
    assert not [path for path in out.rglob(".*")]


@pytest.mark.usefixtures("quick")
def test_what_was_asked_for_is_known_to_who_resumes(tmp_path, wide, files):
    asked = {"name": "ticket-17", "ledger": "somewhere"}
    changes = {"method": "graddiff", "lora": True, "epochs": 1}
    with pytest.raises(InterruptedRun):
        unlearn(make(wide, files, tmp_path / "run", **changes), interrupted=at(1), request=asked)
    assert request_of(tmp_path / "run") == asked
    assert finished(tmp_path / "run") is None
    result = resume(tmp_path / "run")
    assert finished(tmp_path / "run").to_dict(texts=False) == result.to_dict(texts=False)
    with pytest.raises(UsageError, match="this run is complete"):
        resume(tmp_path / "run")
