"""Whole runs: result and files, resumption as if it had not stopped, and failures that leave nothing behind."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.train._runs import config, examples, options, weights, write

from expunge.data import encode_records, read_records
from expunge.errors import UsageError
from expunge.lm import load_model
from expunge.scoring import score
from expunge.train import InterruptedRun, resume, unlearn
from expunge.train import _run as module

KINDS = {
    "lora": {},
    "dropout": {"lora_dropout": 0.2},
    "upper": {"upper": 0.5, "lora_dropout": 0.1},
    "full": {"lora": False, "lr": 3e-3},
}


def run(model, data, out, **changes):
    return unlearn(config(model, data, out, **changes))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_end_to_end(tmp_path, knowing, data, kind):
    result = run(knowing, data, tmp_path / "run", **KINDS[kind])
    folder = tmp_path / "run"
    assert result.exit_code == 0
    assert result.forgotten
    assert result.stopped_at is not None
    assert result.tolerance_source == "holdout"
    assert result.left == []
    assert result.forget_before.violation > 0.9
    assert result.forget_after.violation <= result.tolerance + 1e-9
    assert result.retain_after.exact > 0.5
    assert result.forget_before.examples == 4
    assert result.retain_before.generated == 2
    assert {path.name for path in folder.iterdir()} == {"run.json", "log.jsonl", "result.json", "scores", "model"}
    assert {path.name for path in (folder / "scores").iterdir()} == {
        "before.json",
        *(f"{name}-{when}.parquet" for name in ("forget", "retain") for when in ("before", "after")),
        *(f"forget-{when}-tokens.parquet" for when in ("before", "after")),
    }
    assert (folder / "model" / "README.md").is_file()
    again = load_model(str(folder / "model"))
    assert again.fingerprint == result.fingerprint
    corpus = encode_records(read_records(data["forget"]), again.tokenizer)
    table = score(again.model, corpus, pad_id=again.pad_id)
    assert table.mean("violation") == pytest.approx(result.forget_after.violation, abs=1e-6)
    assert table.mean("exact") == pytest.approx(result.forget_after.exact, abs=1e-6)
    saved = json.loads((folder / "result.json").read_text())
    assert saved["forget_after"]["probability"] == pytest.approx(result.forget_after.probability)
    # no text to forget anywhere but in the model's own files
    answers = [row["completion"] for row in examples(range(4))]
    for file in folder.rglob("*"):
        if file.is_file() and (folder / "model") not in file.parents:
            content = file.read_bytes().decode("utf-8", errors="ignore")
            assert not any(answer in content for answer in answers), file
            if file.suffix != ".parquet":
                assert not re.search(r"\bw\d+\b", content), file
    assert not any(answer in (folder / "model" / "README.md").read_text() for answer in answers)
    for events in [[json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]]:
        assert [event["event"] for event in events[:3]] == ["plan", "start", "measure"]


def test_show_text_writes_answers(tmp_path, knowing, data):
    result = run(knowing, data, tmp_path / "run", show_text=True)
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    references = {answer["reference"] for answer in saved["answers"]["forget"]}
    assert references <= {row["completion"] for row in examples(range(4))}
    assert len(references) == 2
    assert all(answer.before and answer.after is not None for answer in result.answers["forget"])


def interrupt_at(step):
    calls = []
    return lambda: calls.append(1) or len(calls) >= step


def same(one, other):
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in mine)


def comparable(result):
    values = result.to_dict(texts=False)
    return {key: value for key, value in values.items() if key not in ("out", "model", "seconds")}


@pytest.mark.parametrize("kind", [*KINDS, "bf16"])
def test_resumed_equals_never_stopped(tmp_path, knowing, knowing_bf16, data, kind):
    model, changes = (knowing_bf16, {}) if kind == "bf16" else (knowing, KINDS[kind])
    changes = {"micro_batch": 2, "tolerance": 0.1, **changes}
    whole = run(model, data, tmp_path / "whole", **changes)
    with pytest.raises(InterruptedRun, match="step 3") as caught:
        unlearn(config(model, data, tmp_path / "parts", **changes), interrupted=interrupt_at(3))
    assert caught.value.exit_code == 130
    torch.manual_seed(12345)
    with pytest.raises(InterruptedRun):
        resume(tmp_path / "parts", interrupted=interrupt_at(1))
    parts = resume(tmp_path / "parts")
    assert same(tmp_path / "whole", tmp_path / "parts")
    assert comparable(parts) == comparable(whole)
    assert whole.steps > 4
    # the first line is the plan: what the machine had free when the process began
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines()[1:] for name in ("whole", "parts")]
    assert logs[0] == logs[1]


def test_resume_refuses_changed_data_model_and_packages(tmp_path, knowing, data):
    model, forget = tmp_path / "m", tmp_path / "forget.jsonl"
    shutil.copytree(knowing, model)
    shutil.copy(data["forget"], forget)
    mine, out = data | {"forget": str(forget)}, tmp_path / "run"
    with pytest.raises(InterruptedRun):
        unlearn(config(str(model), mine, out), interrupted=interrupt_at(2))
    rows = examples(range(4))
    rows[0]["completion"] += " w5"
    write(forget, rows)
    with pytest.raises(UsageError, match="forget data"):
        resume(out)
    shutil.copy(data["forget"], forget)
    loaded = load_model(str(model))
    kept = (model / "model.safetensors").read_bytes()
    with torch.no_grad():
        next(loaded.model.parameters())[0, 0] += 1
    loaded.model.save_pretrained(model)
    with pytest.raises(UsageError, match="weights of"):
        resume(out)
    (model / "model.safetensors").write_bytes(kept)
    saved = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(saved | {"versions": saved["versions"] | {"torch": "1.0"}}))
    with pytest.raises(UsageError, match=r"accepted is 1\.0"):
        resume(out)
    (out / "run.json").write_text(json.dumps(saved))
    assert resume(out).forgotten
    with pytest.raises(UsageError, match="complete"):
        resume(out)


@pytest.mark.parametrize("content", [None, "{}", "[1]", "no json", '{"config": {}}'])
def test_resume_of_something_else(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=r"run\.json"):
        resume(tmp_path)


@pytest.mark.parametrize("full_of", ["files", "itself"])
def test_a_taken_folder_is_refused_before_the_model_is_loaded(tmp_path, data, monkeypatch, full_of):
    monkeypatch.setattr(module, "load", lambda _: pytest.fail("the model was loaded"))
    out = tmp_path / "run"
    if full_of == "files":
        out.mkdir()
        (out / "note.txt").write_text("mine")
    else:
        out.write_text("mine")
    with pytest.raises(UsageError, match=r"^out: "):
        run("absent", data, out)


def test_an_error_after_the_loading_leaves_no_folder(tmp_path, knowing, data):
    for changes in ({"targets": ("q_proj", "nope")}, {"k": 96}):
        with pytest.raises(UsageError, match=r"nope|k: found 96"):
            run(knowing, data, tmp_path / "run", **changes)
        assert list(tmp_path.iterdir()) == []


# Imports once, then forks a run for each line it reads: a process takes longer to import torch than to run.
SCRIPT = """
import json, os, resource, sys, time
from expunge.train import _run, config_from_options, unlearn
from expunge.errors import ExpungeError

def run(job):
    def save(*args, **kwargs):
        if job["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
        return plain(*args, **kwargs)
    plain, _run.save_model = _run.save_model, save
    def watch(state):
        if state.stage == "train":
            print("step", flush=True)
            time.sleep(job["sleep"])
    try:
        unlearn(config_from_options(job["options"]), progress=watch)
    except ExpungeError as error:
        print(f"error {error.exit_code} {error}", flush=True)
    os._exit(0)

for line in sys.stdin:
    child = os.fork()
    if not child:
        run(json.loads(line))
    print(child, flush=True)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def runs():
    """Starts a run in a process of its own and gives the process's number and a reader of its lines."""
    server = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )

    def start(model, data, out, *, limit=None, sleep=0.0, **changes):
        job = {"options": options(model, data, out, **changes), "limit": limit, "sleep": sleep}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline()), lambda: server.stdout.readline().strip()

    yield start
    server.stdin.close()
    server.wait(30)


def test_killed_at_random_moments_then_resumed(tmp_path, knowing, data, runs):
    changes = {"checkpoint_every": 1, "lora_dropout": 0.1, "tolerance": 0.1, "sample": 0}
    whole = run(knowing, data, tmp_path / "whole", **changes)
    chance = random.Random(0)
    for attempt in range(3):
        out = tmp_path / f"parts{attempt}"
        process, line = runs(knowing, data, out, sleep=0.02, **changes)
        for _ in range(chance.randrange(1, whole.steps)):
            assert line() == "step"
        time.sleep(chance.random() * 0.04)
        os.kill(process, signal.SIGKILL)
        while (last := line()) == "step":
            pass
        assert last == f"ended {int(signal.SIGKILL)}"
        result = resume(out)
        assert same(tmp_path / "whole", out)
        assert comparable(result) == comparable(whole)


def test_a_full_disk_while_saving_leaves_no_model(tmp_path, knowing, data, runs):
    out = tmp_path / "run"
    _, line = runs(knowing, data, out, limit=20_000)
    while (last := line()) == "step":
        pass
    assert last.startswith("error 1 cannot write")
    assert line() == "ended 0"  # one line
    assert not (out / "model").exists()
    assert {path.name for path in out.iterdir()} == {"run.json", "log.jsonl", "scores", "checkpoint"}
    assert resume(out).forgotten


def test_a_resumed_run_with_texts_has_the_answers_before(tmp_path, knowing, data):
    with pytest.raises(InterruptedRun):
        unlearn(config(knowing, data, tmp_path / "run", show_text=True), interrupted=interrupt_at(1))
    result = resume(tmp_path / "run")
    assert all(answer.before for answer in result.answers["forget"])


def test_paths_may_be_path_objects(tmp_path, knowing, data):
    paths = {name: Path(path) for name, path in data.items()}
    from expunge.train import RunConfig

    assert RunConfig(model=Path(knowing), out=tmp_path / "x", **paths).forget == data["forget"]


def test_a_model_with_few_positions(tmp_path, knowing, data):
    """Rows longer than the model are refused; a prompt that fills it still gets an answer."""
    model = tmp_path / "m"
    shutil.copytree(knowing, model)
    file = model / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"max_position_embeddings": 8}))
    with pytest.raises(UsageError, match=r"^max_length: forget has a row of 1[0-9] tokens"):
        run(str(model), data, tmp_path / "run")
    file.write_text(json.dumps(values | {"max_position_embeddings": 20}))
    assert run(str(model), data, tmp_path / "run").forget_before.generated == 2
