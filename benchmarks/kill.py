"""Kill runs at random moments, and look at what is left: nothing, a run that can be resumed, or a complete one.

    python benchmarks/kill.py MODEL --forget FILE --retain FILE --kills 50 -- --lora --epochs 5

One run is left alone. Then, `--kills` times, the same run is started in a process of its own and gets SIGKILL at a
moment drawn evenly over the time the first one took. What is in its folder is named, `expunge resume` ends the run (or
`expunge unlearn` starts it again where there is nothing), killed again with probability one half, and the end is
compared with the first run: the same weights byte for byte, the same updates in the log, one entry in a ledger that
verifies, a report, and no file that was being written. Options after `--` go to `expunge unlearn`.

The processes are forked from one that has imported everything, so that the time goes into runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from expunge.cli import main
from expunge.cli._main import COMMANDS, make_parser


class Process:
    """The command line in a process of its own, silent."""

    def __init__(self, words: Sequence[str]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                silence = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(silence, stream)
                code = main(list(words))
            finally:
                os._exit(code)

    def kill_after(self, seconds: float) -> int | None:
        """Wait, then kill; the exit code where it ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return None

    def wait(self) -> int:
        """The exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def state_of(folder: Path) -> str:
    """What is in the folder of a killed run."""
    if not folder.exists():
        return "absent"
    if not (folder / "run.json").is_file():
        return f"BROKEN: {sorted(file.name for file in folder.iterdir())}"
    json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if not (folder / "result.json").is_file():
        return "resumable"
    return "complete" if (folder / "report.html").is_file() else "complete but for report or ledger"


def end_of(place: Path) -> dict[str, object]:
    """All that has to be the same in the end."""
    run = place / "run"
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    files = [*(run / "model").glob("*.safetensors"), *(run / "scores").glob("*.parquet")]
    ledger = [json.loads(line)["fields"] for line in (place / "ledger" / "ledger.jsonl").read_text().splitlines()]
    return {
        "files": {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)},
        "log": [line for line in lines if line["event"] != "plan"],  # a plan has what was free
        "entries": [fields["request"] for fields in ledger[1:]],
        "ledger": main(["ledger", "verify", str(place / "ledger"), "--model", str(run / "model"), "--json"]),
        "half-written": sorted(str(file.relative_to(place)) for file in place.rglob(".*") if ".lock" not in file.name),
        "report": (run / "report.html").is_file(),
        "checkpoints": sorted(file.name for file in run.glob("checkpoint/*")),
    }


def quietly(place: Path) -> dict[str, object]:
    """`end_of` without its output."""
    with open(os.devnull, "w", encoding="utf-8") as silence:
        stdout, sys.stdout = sys.stdout, silence
        try:
            return end_of(place)
        finally:
            sys.stdout = stdout


def finish(place: Path, words: Sequence[str], seconds: float, draw: random.Random) -> list[str]:
    """Bring a killed run to its end; the states it was found in."""
    found = []
    while True:
        state = state_of(place / "run")
        found.append(state)
        if state == "complete":
            return found
        process = Process(["resume", str(place / "run")] if state != "absent" else words)
        if draw.random() < 0.5 and len(found) < 4:
            process.kill_after(draw.uniform(0, seconds))
        elif (code := process.wait()) not in (0, 3):
            raise SystemExit(f"kill: a run that was {state} ended with exit code {code}")


def run() -> None:
    """Parse, run once, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--forget", required=True)
    parser.add_argument("--retain", required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    arguments, options = parser.parse_args(given[:cut]), given[cut + 1 :]
    for command in COMMANDS:  # imports what the processes need
        make_parser(command)
    draw = random.Random(arguments.seed)
    words = ["unlearn", arguments.model, "--forget", arguments.forget, "--retain", arguments.retain, "--request", "r"]
    words += ["--checkpoint-every", "1", "--threads", "1", *options]
    states: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:

        def at(name: str) -> tuple[Path, list[str]]:
            place = Path(folder) / name
            place.mkdir()
            return place, [*words, "--out", str(place / "run"), "--ledger", str(place / "ledger")]

        place, first = at("first")
        started = time.monotonic()
        if (code := Process(first).wait()) not in (0, 3):
            raise SystemExit(f"kill: the run that was left alone ended with exit code {code}")
        seconds = time.monotonic() - started
        expected = quietly(place)
        print(f"left alone: {seconds:.1f} s, {len([e for e in expected['log'] if e['event'] == 'step'])} updates")
        different = 0
        for number in range(arguments.kills):
            place, again = at(f"kill-{number}")
            moment = draw.uniform(0, 1.05 * seconds)
            Process(again).kill_after(moment)
            found = finish(place, again, seconds, draw)
            states.update(found[:1])
            ended = quietly(place)
            wrong = [name for name in expected if ended[name] != expected[name]]
            different += bool(wrong)
            print(
                f"killed after {moment:5.2f} s: {', then '.join(found)}; {'DIFFERENT: ' if wrong else 'the same end'}",
                end="",
            )
            print(", ".join(wrong), flush=True)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"{arguments.kills} kills: {counted}; {different} ended otherwise than the run that was left alone")
    if different or any(state.startswith("BROKEN") for state in states):
        raise SystemExit(1)


if __name__ == "__main__":
    run()
