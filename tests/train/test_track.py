"""The numbers of a run in a tracker: read back with TensorBoard's own reader."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.train import _runs

from expunge.errors import UsageError
from expunge.train import _track, resume, unlearn
from expunge.train._track import numbers, told


def read(folder):
    """Metric → [(step, value)] over all files of a run."""
    found = {}
    for file in sorted(folder.rglob("events.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((one.step, one.value) for one in events.Scalars(name))
    return found


def events(run, name):
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def test_tensorboard_has_the_numbers_of_the_log(tmp_path, knowing, data):
    result = unlearn(_runs.config(knowing, data, tmp_path / "run", track="tensorboard"))
    found = read(tmp_path / "run" / "tensorboard")
    steps = events(tmp_path / "run", "step")
    for name in ("forget_loss", "retain_loss", "violation", "gradient_norm"):
        expected = [(step["step"], pytest.approx(step[name], rel=1e-6)) for step in steps if step[name] is not None]
        assert found[f"step/{name}"] == expected, name
    measured = [(one["step"], pytest.approx(one["mean"], rel=1e-6)) for one in events(tmp_path / "run", "measure")]
    assert found["measure/mean"] == measured
    looks = [one for one in events(tmp_path / "run", "look") if one["numbers"]]
    assert found["look/mean"] == [
        (one["numbers"]["step"], pytest.approx(one["numbers"]["mean"], rel=1e-6)) for one in looks
    ]
    after = result.forget_after.violation
    assert found["result/forget_after/violation"] == [(result.steps, pytest.approx(after, rel=1e-6))]
    # Settings, but no text, id or place.
    everything = b"".join(file.read_bytes() for file in (tmp_path / "run" / "tensorboard").rglob("*") if file.is_file())
    assert b"recipe.lr" in everything
    for row in _runs.examples(_runs.FORGET):
        assert row["completion"].encode() not in everything
        assert row["id"].encode() not in everything
    assert str(tmp_path).encode() not in everything


def test_a_resumed_run_goes_on_there(tmp_path, knowing, data):
    asked = iter([False, True])
    config = _runs.config(knowing, data, tmp_path / "run", track="tensorboard")
    with pytest.raises(Exception, match="interrupted"):
        unlearn(config, interrupted=lambda: next(asked))
    result = resume(tmp_path / "run")
    steps = [step for step, _ in read(tmp_path / "run" / "tensorboard")["step/forget_loss"]]
    assert sorted(set(steps)) == list(range(1, result.steps + 1))


def test_a_tracker_that_fails_costs_nothing(tmp_path, knowing, data, monkeypatch):
    from torch.utils import tensorboard

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", full)
    result = unlearn(_runs.config(knowing, data, tmp_path / "run", track="tensorboard"))
    assert result.forgotten
    assert [note for note in result.notes if "tensorboard failed (OSError)" in note]
    assert len(events(tmp_path / "run", "step")) == result.steps


def test_what_is_not_there_is_refused_before_work(tmp_path, knowing, data, monkeypatch):
    with pytest.raises(UsageError, match="track: found 'tensorbord', accepted is one of tensorboard, wandb"):
        _runs.config(knowing, data, tmp_path / "run", track="tensorbord")
    monkeypatch.setattr(_track.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="track: found wandb, which is not installed; `pip install wandb`"):
        unlearn(_runs.config(knowing, data, tmp_path / "run", track="wandb"))
    assert not (tmp_path / "run").exists()


def test_numbers_only():
    values = {"step": 3, "mean": math.nan, "stop": True, "ids": ["secret"], "reason": "secret", "above": 2}
    assert numbers("measure", values | {"none": None, "numbers": {"mean": 0.5}}) == {
        "measure/above": 2,
        "measure/mean": 0.5,
    }
    config = {"model": "/home/me/model", "forget": "/home/me/f", "system": "secret", "masc": {"rho": 0.7, "k": 10}}
    assert told(config | {"betas": (0.8, 0.9), "lora": True, "holdout": None}) == {
        "model": "model",
        "masc.rho": 0.7,
        "masc.k": 10,
        "betas": "(0.8, 0.9)",
        "lora": True,
    }
