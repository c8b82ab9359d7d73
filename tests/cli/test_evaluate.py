"""`expunge evaluate`: every suite through the command line, and every wrong input in one line."""

import json
import shutil

import pytest
from peft import LoraConfig, get_peft_model
from tests.suites._data import write_muse, write_tofu
from tests.train._runs import FORGET, examples

from expunge.cli import main
from expunge.lm import load_model

QUICK = ("--device", "cpu", "--threads", "1", "--resamples", "50", "--batch", "4")


def run(capsys, *arguments):
    code = main(["evaluate", *map(str, arguments), *QUICK])
    output, errors = capsys.readouterr()
    return code, output, errors


def refused(capsys, *arguments):
    code, output, errors = run(capsys, *arguments)
    lines = [line for line in errors.splitlines() if not line.startswith(("loading", "scoring", "generating"))]
    assert (code, output) == (2, "")
    assert len(lines) == 1, lines
    return lines[0]


def secrets():
    return [row["completion"] for row in examples(FORGET)] + [row["prompt"] for row in examples(FORGET)]


@pytest.fixture
def places(tmp_path, data):
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, path in data.items():
        shutil.copy(path, mine / f"{name}.jsonl")
    return {"tofu": write_tofu(tmp_path / "tofu"), "muse": write_muse(tmp_path / "muse"), "mine": mine}


@pytest.mark.parametrize("suite", ["tofu", "muse", "mine"])
def test_each_suite_as_table_and_as_json(suite, places, knowing, capsys, tmp_path):
    out = tmp_path / "out"
    code, output, errors = run(capsys, knowing, "--suite", suite, "--data", places[suite], "--out", out)
    assert code == 0
    assert "scoring (" in errors
    lines = output.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[0].split()[:2] == [suite, "value"]
    assert "not measured: " in output
    for secret in secrets():
        assert secret not in output + errors
    code, output, _ = run(capsys, knowing, "--suite", suite, "--data", places[suite], "--out", out, "--json")
    assert code == 0
    found = json.loads(output)
    assert found["suite"] == suite
    assert {metric["name"] for metric in found["metrics"]} >= {"mia_loss", "privleak"}
    for secret in secrets():
        assert secret not in output


def test_text_is_shown_when_asked_for(places, knowing, capsys):
    _, output, _ = run(capsys, knowing, "--suite", "mine", "--data", places["mine"], "--show-text")
    assert any(secret in output for secret in secrets())


def test_retrained_values_stand_beside(places, knowing, capsys):
    arguments = (knowing, "--suite", "tofu", "--data", places["tofu"], "--retrained", knowing)
    code, output, _ = run(capsys, *arguments, "--rows", "forget=0:4", "holdout=4:8")
    assert code == 0
    assert "retrained" in output.splitlines()[0]
    assert "warning: the retrained model is the evaluated model itself" in output


def test_an_adapter_folder_is_merged(places, knowing, capsys, tmp_path):
    loaded = load_model(knowing, device="cpu")
    adapted = get_peft_model(loaded.model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    code, output, _ = run(capsys, tmp_path / "adapter", "--suite", "mine", "--data", places["mine"], "--json")
    assert code == 0
    own = json.loads(output)["stamp"]["fingerprint"]
    _, output, _ = run(capsys, knowing, "--suite", "mine", "--data", places["mine"], "--json")
    assert json.loads(output)["stamp"]["fingerprint"] != own


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"suite": "toffee"}, "suite: found 'toffee', accepted is one of tofu, muse, mine"),
        ({"data": "./nowhere"}, "data: found no folder ./nowhere"),
        ({"retrained": "./nowhere"}, "retrained: found no ./nowhere"),
        ({"rows": "forget"}, "rows: found 'forget', accepted is PART=START:END"),
        ({"rows": "forgot=0:1"}, "rows: found 'forgot'"),
        ({"k": "many"}, "--k: found 'many', accepted is a whole number"),
        ({"rho": "2"}, "rho: found 2.0"),
        ({"batch": "0"}, "batch_size: found 0"),
        ({"threads": "0"}, "threads: found 0"),
        ({"device": "abacus"}, "device: found 'abacus'"),
        ({"template": "none"}, "template"),
        ({"split": "forget10"}, "split: the suite mine has none"),
        ({"colour": "red"}, "--colour"),
    ],
)
def test_bad_input(changes, named, places, knowing, capsys):
    options = {"suite": "mine", "data": places["mine"]} | changes
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    code = main(["evaluate", knowing, *QUICK, *words])
    output, errors = capsys.readouterr()
    line = errors.splitlines()[-1]
    assert (code, output) == (2, "")
    assert line.startswith("expunge: ")
    assert named in line


def test_missing_options(capsys):
    assert "--suite" in refused(capsys, "model")
    assert main(["evaluate", "--help"]) == 0
    assert "--retrained" in capsys.readouterr().out


def test_without_lm_eval_tasks_are_one_line(places, knowing, capsys, monkeypatch):
    from expunge.suites import _lm_eval

    monkeypatch.setattr(_lm_eval.importlib.util, "find_spec", lambda name: None)
    line = refused(capsys, knowing, "--suite", "mine", "--data", places["mine"], "--tasks", "arc_easy")
    assert "lm-eval is not installed" in line
