"""Real processes that get SIGKILL at random moments; `benchmarks/kill.py` does the same as often as one likes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train import _runs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize(
    "changes",
    [{}, {"full": None, "lr": 1e-3, "optimizer": "dualoptim+", "optimizer-storage": "8bit"}],
    ids=["lora", "full-dualoptim+-8bit"],
)
def test_a_killed_run_ends_as_if_it_had_not_been(knowing, data, changes):
    options = {name.replace("_", "-"): value for name, value in _runs.options("", {}, "").items()}
    options = {name: value for name, value in options.items() if name not in ("model", "out", "threads")}
    options |= {"tolerance": 0.4, **changes}
    words = [word for name, value in options.items() for word in _flag(name, value)]
    files = ["--forget", data["forget"], "--retain", data["retain"]]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), knowing, *files, "--kills", "3", "--", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 kills: " in ran.stdout
    assert "; 0 ended otherwise" in ran.stdout
    assert ran.stdout.count("the same end") == 3


def _flag(name, value):
    return [f"--{name}"] if value is None else [f"--{name}", str(value)]
