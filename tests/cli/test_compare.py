"""`expunge compare`: whole comparisons on a tiny model, cut off and resumed, failing, side by side."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.compare._studies import GRADDIFF, MASC, QUICK, make_place, refused, results, run, words, write_study
from tests.train._runs import examples


@pytest.fixture
def place(tmp_path, knowing):
    return make_place(tmp_path, knowing)


def _target(**changes):
    files = {"forget": "${data}/forget.jsonl", "retain": "${data}/retain.jsonl"}
    return {"tiny": {"model": "${models}/knowing", **files, **changes}}


def test_two_methods_and_two_seeds(place, capsys):
    file = write_study(place / "s.yaml", seeds=[0, 1])
    code, output, errors = run(capsys, *words(place, file))
    assert code == 0
    assert max(map(len, output.splitlines()[:-3])) <= 80
    assert "[4/4] tiny/graddiff/seed-1: done" in errors
    found = results(place)
    assert [row["state"] for row in found["cells"]] == ["complete"] * 4
    assert [(row["name"], row["seeds"]) for row in found["summary"]] == [("masc", [0, 1]), ("graddiff", [0, 1])]
    masc, graddiff = found["summary"]
    assert (masc["best_baseline"], graddiff["best_baseline"], graddiff["ratio"]) == (False, True, 1.0)
    cell = found["cells"][0]
    assert cell["seconds"] == pytest.approx(sum(cell["stages"][name] for name in ("calibrate", "train")))
    assert cell["tolerance_source"] == "holdout"
    assert found["cells"][1]["tolerance_source"] == "preset"
    target, retrained = (found["references"]["tiny"][role] for role in ("target", "retrained"))
    # The retrained model is the target itself here: a distance is a change.
    assert (target["distance"], retrained["distance"]) == (0.0, 0.0)
    assert 0.2 < cell["distance"] < 1.0
    assert cell["differences"]["forget_probability"] == pytest.approx(
        cell["metrics"]["forget_probability"] - target["metrics"]["forget_probability"]
    )
    table = (place / "out" / "comparison.md").read_text()
    assert "| graddiff †" in table
    assert "± " in table
    assert 'data-chart="trade:0"' in (place / "out" / "comparison.html").read_text()
    assert not list((place / "out").rglob("model.safetensors"))
    for row in examples(range(14)):
        for text in (row["prompt"], row["completion"]):
            assert text not in output + errors + table
            assert text not in json.dumps(found)

    # The same command again does nothing but say so.
    times = {path: path.stat().st_mtime_ns for path in (place / "out" / "cells").rglob("*") if path.is_file()}
    code, again, errors = run(capsys, *words(place, file))
    assert (code, again) == (0, output)
    assert errors.count("complete before") == 4
    assert times == {path: path.stat().st_mtime_ns for path in times}

    # A method more is run beside what is there; another setting of one that is there is refused.
    file = write_study(place / "s.yaml", methods=[GRADDIFF | {"lr": 2e-2}, MASC], seeds=[0])
    assert "cells/tiny/graddiff/seed-0 holds results of lr 0.01 where the file has 0.02" in refused(
        capsys, *words(place, file)
    )
    file = write_study(place / "s.yaml", evaluate={"max_new_tokens": 4, "device": "cpu"})
    assert "max_new_tokens 8 where the file has 4" in refused(capsys, *words(place, file))
    (place / "data" / "forget.jsonl").write_text((place / "data" / "holdout.jsonl").read_text())
    (place / "data" / "holdout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples(range(20, 24))))
    file = write_study(place / "s.yaml")
    assert "forget.jsonl holds other rows" in refused(capsys, *words(place, file))


def test_a_cell_that_fails_is_recorded_and_the_rest_go_on(place, capsys):
    wrong = {"name": "wrong", "method": "graddiff", "lora": True, "targets": ["nowhere"]}
    file = write_study(place / "s.yaml", methods=[wrong, GRADDIFF])
    code, output, errors = run(capsys, *words(place, file))
    assert code == 1
    first, second = results(place)["cells"]
    assert f"[1/2] tiny/wrong/seed-0: failed: {first['error']}" in errors
    assert f"failed: tiny/wrong/seed-0: {first['error']}" in output
    assert (first["state"], second["state"]) == ("failed", "complete")
    assert "nowhere" in first["error"]
    assert "Failed: tiny/wrong/seed-0" in (place / "out" / "comparison.md").read_text()
    assert "nowhere" in (place / "out" / "comparison.html").read_text()


@pytest.mark.slow
def test_side_by_side(place, capsys):
    wrong = {"name": "wrong", "method": "graddiff", "lora": True, "targets": ["nowhere"]}
    file = write_study(place / "s.yaml", methods=[GRADDIFF, wrong])
    assert run(capsys, *words(place, file, out="one"))[0] == 1
    code, _, errors = run(capsys, *words(place, file, "--workers", "2", out="two"))
    assert code == 1
    assert errors.count("started in a process of its own") == 2
    one, two = results(place, "one"), results(place, "two")
    assert (one["workers"], two["workers"]) == (1, 2)
    assert [row["error"] for row in one["cells"]] == [row["error"] for row in two["cells"]]
    assert one["cells"][0]["metrics"] == two["cells"][0]["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_cut_off_and_resumed(place, capsys, kill):
    """A run that is killed, or asked to end, goes on from its checkpoint; what it made is as if it had not stopped."""
    slow = [{"name": "graddiff", "epochs": 30, "checkpoint_every": 2, "lr": 1e-4}]
    file = write_study(place / "s.yaml", methods=slow)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "expunge", *words(place, file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    cell = place / "out" / "cells" / "tiny" / "graddiff" / "seed-0"
    while process.poll() is None and not list(cell.glob("run/checkpoint/*.pt")):
        time.sleep(0.01)
    process.send_signal(kill)
    errors = process.stderr.read()
    code = process.wait(60)
    assert code != 0
    assert (cell / "run" / "run.json").is_file()
    assert not (cell / "run" / "result.json").exists()
    if kill == signal.SIGTERM:
        assert code == 130
        assert "the same command goes on from there" in errors.splitlines()[-1]
    assert run(capsys, *words(place, file))[0] == 0
    assert run(capsys, *words(place, file, out="whole"))[0] == 0
    again, whole = results(place)["cells"][0], results(place, "whole")["cells"][0]
    assert (again["resumed"], whole["resumed"]) == (True, False)
    assert again["steps"] == whole["steps"] == 60
    assert again["metrics"] == whole["metrics"]


def test_a_worker_that_dies_is_a_failed_cell(place, capsys, monkeypatch):
    from expunge.compare import _run

    def die(*_arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(_run, "_work", die)
    monkeypatch.setattr(
        _run.multiprocessing, "get_context", lambda _name, found=_run.multiprocessing.get_context: found("fork")
    )
    file = write_study(place / "s.yaml", methods=[GRADDIFF])
    assert run(capsys, *words(place, file, "--workers", "2"))[0] == 1
    assert results(place)["cells"][0]["error"] == "the process of the cell ended with signal SIGKILL"


def test_dry_run_writes_nothing(place, capsys):
    file = write_study(place / "s.yaml", seeds=[0, 1])
    code, output, errors = run(capsys, *words(place, file, "--dry-run", out=None))
    assert (code, errors) == (0, "")
    assert [line.split()[0] for line in output.splitlines()[1:5]] == [
        f"tiny/{method}/seed-{seed}" for seed in (0, 1) for method in ("masc", "graddiff")
    ]
    code, output, _ = run(capsys, *words(place, file, "--dry-run", "--json", out=None))
    cells = json.loads(output)["cells"]
    assert [cell["budget"] for cell in cells[:2]] == ["the rule", "1 passes"]
    assert cells[0]["config"]["masc"]["rho"] == 0.7
    assert {path.name for path in place.iterdir()} == {"data", "models", "s.yaml"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"methods": [GRADDIFF | {"epoch": 1}]}, ["methods: graddiff", "'epoch'", "closest is 'epochs'"]),
        ({"methods": [{"name": "graddif"}]}, ["methods: graddif", "closest is 'graddiff'"]),
        ({"options": QUICK | {"lr": 0}}, ["tiny/masc: lr: found 0"]),
        ({"targets": _target(model="./nowhere")}, ["targets: tiny", "./nowhere"]),
        ({"targets": _target(forget="${data}/none.jsonl")}, ["targets: tiny: forget", "no such file"]),
        ({"targets": _target(forget="${data}/retain.jsonl")}, ["targets: tiny: 6 of 6 forget rows"]),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_before_anything_runs(place, capsys, changes, named):
    file = write_study(place / "s.yaml", **changes)
    sets = [word for word in words(place, file) if not word.startswith("models=") or "${models}" in file.read_text()]
    error = refused(capsys, *sets)
    for part in named:
        assert part in error
    assert not (place / "out").exists()


def test_placeholders_and_options(place, capsys, tmp_path):
    file = write_study(place / "s.yaml")
    assert "${models} has no value" in refused(capsys, "compare", str(file), "--set", "data=x", "--out", "o")
    assert "set: found 'data'" in refused(capsys, "compare", str(file), "--set", "data", "--out", "o")
    assert "closest is 'data'" in refused(capsys, *words(place, file, "--set", "date=x"))
    assert "out: found none" in refused(capsys, *words(place, file, out=None))
    assert "workers: found 0" in refused(capsys, *words(place, file, "--workers", "0"))
    assert "file: cannot read" in refused(capsys, "compare", str(tmp_path / "no.yaml"), "--out", "o")


def test_a_part_can_be_a_selection_of_rows(place, capsys):
    target = {"model": "${models}/knowing", "forget": {"file": "${data}/forget.jsonl", "rows": "0:2"}}
    target |= {"retain": "${data}/retain.jsonl", "holdout": "${data}/holdout.jsonl"}
    file = write_study(place / "s.yaml", targets={"tiny": target}, methods=[GRADDIFF])
    assert run(capsys, *words(place, file))[0] == 0
    written = (place / "out" / "data" / "tiny" / "forget.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in written] == ["row-0", "row-1"]
    cell = results(place)["cells"][0]
    assert (cell["distance"], cell["distance_reason"]) == (None, "no retrained model")
    assert results(place)["summary"][0]["ratio"] is None
    shutil.rmtree(place / "out")
    target["forget"]["rows"] = "7:"
    write_study(file, targets={"tiny": target})
    assert re.search("forget: rows: found 7: of 4 rows", refused(capsys, *words(place, file)))
    assert not Path(place / "out").exists()
