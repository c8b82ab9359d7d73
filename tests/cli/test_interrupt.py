"""Signals inside a run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from expunge.cli._interrupt import interruptible
from expunge.train import InterruptedRun, Progress


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_noted(tmp_path, number, code):
    former = signal.getsignal(number)

    def run():
        with interruptible(tmp_path) as interruption:
            assert not interruption.asked()
            os.kill(os.getpid(), number)
            assert interruption.asked()
            raise InterruptedRun("ended")

    with pytest.raises(InterruptedRun) as ended:
        run()
    assert ended.value.exit_code == code
    assert signal.getsignal(number) is former


def test_a_stage_without_updates_is_left_at_once(tmp_path):
    told = []

    def run(*stages):
        with interruptible(tmp_path) as interruption:
            watch = interruption.watching(told.append)
            watch(Progress("load"))
            os.kill(os.getpid(), signal.SIGINT)
            for stage in stages:
                watch(Progress(stage))

    with pytest.raises(InterruptedRun, match="nothing was written yet"):
        run("train", "save", "after")  # an update ends first
    assert [state.stage for state in told] == ["load", "train"]
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InterruptedRun, match="expunge resume"):
        run("save")


def test_a_second_signal_ends_the_process(tmp_path):
    code = f"""
import sys, time
from expunge.cli._interrupt import interruptible
with interruptible({str(tmp_path)!r}):
    print("ready", flush=True)
    try:
        while True:
            time.sleep(0.01)
    finally:
        print("cleaned up", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert out == ""
    assert "ended at once; nothing was written yet" in err
