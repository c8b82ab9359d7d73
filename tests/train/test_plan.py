"""What a run will take, against what it takes; and what cannot fit is refused with the option that makes it fit."""

import dataclasses
import json
import re

import pytest
import torch
from tests.train import _runs

from expunge.cli import main
from expunge.errors import UsageError
from expunge.optim import state_bytes
from expunge.train import _plan, check_plan, plan_run, unlearn
from expunge.train._room import free_disk, same_disk
from expunge.train._run import _Run

VARIANTS = {
    "lora": {},
    "lora-upper": {"upper": 0.5},
    "full": {"lora": False, "lr": 1e-3},
    "full-8bit": {"lora": False, "lr": 1e-3, "optimizer": "dualoptim+", "optimizer_storage": "8bit"},
    "full-4bit": {"lora": False, "lr": 1e-3, "optimizer": "dualoptim", "optimizer_storage": "4bit"},
    "alternate-lion": {"update": "alternate", "optimizer_rule": "lion"},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("low", [False, True])
def test_parts_are_those_of_a_run(tmp_path, knowing, knowing_bf16, data, variant, low):
    config = _runs.config(knowing_bf16 if low else knowing, data, tmp_path / "run", **VARIANTS[variant]).resolved()
    plan, _, _ = plan_run(config)
    run = _Run(config, None, None)
    run._load()
    masters, model = run.trainable.masters, run.trainable.model
    assert plan.trainable == sum(param.numel() for param in masters.params)
    assert plan.parameters == sum(param.numel() for param in model.parameters())
    assert plan.parts["weights"] == sum(param.numel() * param.element_size() for param in model.parameters())
    copies = [m for m, p in zip(masters.masters, masters.params, strict=True) if m is not p]
    assert plan.parts["masters"] == sum(4 * copy.numel() for copy in copies)
    assert bool(copies) == low
    # A state for every objective, as the first update leaves it.
    objectives = ("forget", "retain") if config.recipe.alternates else (None,)
    for objective in objectives:
        for master in masters.masters:
            master.grad = torch.randn_like(master)
        assert plan.parts["gradients"] == sum(m.grad.numel() * m.grad.element_size() for m in masters.masters)
        run.trainable.optimizer.step(**({} if objective is None else {"objective": objective}))
    assert plan.parts["optimizer"] == state_bytes(run.trainable.optimizer)
    assert plan.peak == max(plan.stages.values())
    assert plan.fits_memory


@pytest.mark.parametrize("variant", ["lora", "full", "full-8bit"])
def test_the_disk_it_takes_is_enough(tmp_path, knowing, data, variant):
    config = _runs.config(knowing, data, tmp_path / "run", checkpoint_every=1, **VARIANTS[variant]).resolved()
    plan, _, _ = plan_run(config)
    most = 0

    def look(_):
        nonlocal most
        files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
        most = max(most, sum(file.stat().st_size for file in files))

    unlearn(config, progress=look)
    needed = plan.disk[str(tmp_path / "run")] - _plan._SMALL_FILES
    assert 0 < most < plan.disk[str(tmp_path / "run")]
    assert needed < 3 * most


def test_the_first_event_of_the_log_is_the_plan(tmp_path, knowing, data):
    seen = []
    unlearn(_runs.config(knowing, data, tmp_path / "run"), progress=lambda state: seen.extend(state.lines))
    event = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert event["event"] == "plan"
    assert event["peak"] == max(event["stages"].values())
    assert [line.split(":")[0] for line in seen] == ["weights", "memory", "peak", "disk"]


def refusal(monkeypatch, config, memory):
    plan, shape, data = plan_run(config)
    monkeypatch.setattr(_plan, "resident_bytes", lambda: 0)
    monkeypatch.setattr(_plan, "free_memory", lambda device: memory)
    plan = _plan.make_plan(config, shape, data)
    with pytest.raises(UsageError) as error:
        check_plan(plan, config, shape, data)
    return str(error.value)


def peak(monkeypatch, config):
    monkeypatch.setattr(_plan, "resident_bytes", lambda: 0)
    return plan_run(config)[0].peak


@pytest.mark.parametrize("share", [0.98, 0.9, 0.7, 0.5])
@pytest.mark.parametrize(
    "changes", [{"lora": False, "lr": 1e-3, "update": "alternate"}, {"batch": 4, "retain_batch": 6}]
)
def test_the_advice_is_an_option_that_fits(tmp_path, monkeypatch, wide, long_rows, share, changes):
    config = _runs.config(wide, long_rows, tmp_path / "run", **changes).resolved()
    memory = int(share * peak(monkeypatch, config))
    message = refusal(monkeypatch, config, memory)
    assert message.startswith("memory: ")
    assert "--no-plan-check" in message
    advised = re.search(r"with (--.*?) [\d.]+ MB would be", message)
    options = {"--micro-batch 1", "--optimizer-storage 8bit", "--lora"}
    if advised is None:
        assert "no option brings it below" in message
        assert share < 0.98
        return
    words = advised[1].replace(" --", "|--").split("|")
    assert set(words) <= options
    recipe = {"lora": True} if "--lora" in words else {}
    recipe |= {"optimizer_storage": "8bit"} if "--optimizer-storage 8bit" in words else {}
    micro = 1 if "--micro-batch 1" in words else config.micro_batch
    changed = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, **recipe), micro_batch=micro)
    assert peak(monkeypatch, changed) <= memory


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory):
    """Rows of a hundred words: their activations are most of what a pass takes."""
    folder = tmp_path_factory.mktemp("long")
    rows = [
        {"prompt": f"w{3 + row}", "completion": " ".join(f"w{3 + (row + i) % 50}" for i in range(100))}
        for row in range(20)
    ]
    parts = {"forget": rows[:8], "retain": rows[8:16], "holdout": rows[16:]}
    return {name: str(_runs.write(folder / f"{name}.jsonl", part)) for name, part in parts.items()}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose matrices are large enough for 8-bit states."""
    from tests.lm._tokenizer import tiny, tiny_tokenizer

    folder = tmp_path_factory.mktemp("wide") / "wide"
    tiny(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=3, max_position_embeddings=128
    ).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_what_no_option_helps_says_so(tmp_path, monkeypatch, knowing, data):
    config = _runs.config(knowing, data, tmp_path / "run").resolved()
    message = refusal(monkeypatch, config, 1000)
    assert "no option brings it below" in message
    assert "a smaller model, or more memory" in message


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch, knowing, data):
    monkeypatch.setattr(_plan, "free_disk", lambda place: 10)
    config = _runs.config(knowing, data, tmp_path / "run")
    with pytest.raises(UsageError, match=r"disk: .* are needed in .*, 0 MB are free; accepted is an --out with room"):
        unlearn(config)
    assert list(tmp_path.iterdir()) == []
    assert unlearn(dataclasses.replace(config, plan_check=False)).forgotten


def test_the_command(tmp_path, monkeypatch, knowing, data, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", knowing, "--full", "--max-length", "64", "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)
    assert assumed["length"] == 64
    assert assumed["trainable"] == assumed["parameters"]
    files = ["--forget", data["forget"], "--retain", data["retain"], "--out", "run"]
    assert main(["plan", knowing, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["weights", "memory", "peak", "disk"]
    monkeypatch.setattr(_plan, "free_memory", lambda device: -(10**12))
    assert main(["plan", knowing, *files]) == 2
    assert "expunge: memory: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_room(tmp_path):
    assert free_disk(tmp_path / "not" / "there" / "yet") == pytest.approx(free_disk(tmp_path), rel=0.01)
    assert same_disk(tmp_path / "a" / "b", tmp_path)
