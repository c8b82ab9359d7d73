"""`expunge unlearn` and `expunge resume`."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from expunge.cli._options import add_run_options, build_config
from expunge.cli._show import ProgressLine, console, show_result
from expunge.errors import UsageError
from expunge.ledger import Ledger, entry_from_run
from expunge.report import write_report
from expunge.train import UnlearnResult, describe, resume, unlearn

UNLEARN = """make a model forget the examples of a file

examples:
  expunge unlearn smollm2-135m --forget forget.jsonl --retain retain.jsonl --out run
  expunge unlearn ./my-model --forget f.csv --retain r.csv --holdout h.csv --out run
  expunge unlearn ./my-model --config run.yaml --dry-run

exit code: 0 forgotten; 3 budget spent before everything was forgotten; 2 wrong input;
1 failure; 130 interrupted (resume with `expunge resume`)"""
RESUME = """continue an interrupted run, as if it had not stopped

example:
  expunge resume run"""


def add_unlearn(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge unlearn`."""
    add_run_options(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved run and stop before the first update"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_request(parser)


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--request", metavar="ID", help="sign the result and add it to the ledger under this name")
    parser.add_argument("--ledger", metavar="DIR", help="folder of the ledger [deletions]")


def run_unlearn(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    config = build_config(arguments)
    ledger = _ledger(arguments)
    if arguments.dry_run:
        sys.stdout.write(json.dumps(describe(config), indent=2, ensure_ascii=False) + "\n")
        return 0
    with _interruptible() as interrupted, ProgressLine().showing() as line:
        result = unlearn(config, progress=line, interrupted=interrupted)
    return _end(result, ledger, arguments)


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge resume`."""
    parser.add_argument("out", metavar="DIR", help="folder of the interrupted run")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_request(parser)


def run_resume(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    ledger = _ledger(arguments)
    with _interruptible() as interrupted, ProgressLine().showing() as line:
        result = resume(arguments.out, progress=line, interrupted=interrupted)
    return _end(result, ledger, arguments)


def _ledger(arguments: argparse.Namespace) -> Ledger | None:
    """The ledger of a request, checked before work starts: a changed one gets no entry."""
    if arguments.request is None:
        if arguments.ledger is not None:
            raise UsageError(f"ledger: found {arguments.ledger} without a request, accepted with it is --request ID")
        return None
    path = Path(arguments.ledger or "deletions")
    ledger = Ledger(path)
    if ledger.path.exists() and not (found := ledger.verify()).ok:
        raise UsageError(f"ledger: {ledger.path}: {found.problems[0]}; `expunge ledger verify {path}` shows all")
    return ledger


def _end(result: UnlearnResult, ledger: Ledger | None, arguments: argparse.Namespace) -> int:
    tags: list[str] = []
    if ledger is not None:
        line = ledger.append(entry_from_run(result.out, arguments.request))
        tags = [row["text"] for row in line["fields"]["rows"]["tags"]]
    report = write_report(result.out, hashes=tags) if tags else write_report(result.out)
    if arguments.json:
        sys.stdout.write(json.dumps(result.to_dict(texts=False), indent=2, ensure_ascii=False) + "\n")
    else:
        screen = console()
        show_result(screen, result)
        screen.print(f"report: {report}", markup=False, soft_wrap=True)
        if ledger is not None:
            screen.print(
                f"ledger: request {arguments.request} is signed in {ledger.path}", markup=False, soft_wrap=True
            )
    return result.exit_code


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM ends the run after the present update with a checkpoint; a second Ctrl-C ends it at once."""
    asked = False

    def ask(number: int, _frame: object) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    former = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
