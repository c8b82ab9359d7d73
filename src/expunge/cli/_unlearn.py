"""`expunge unlearn` and `expunge resume`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from expunge.cli._interrupt import interruptible
from expunge.cli._options import add_run_options, build_config
from expunge.cli._request import add_request, line_of, request_from, sign
from expunge.cli._show import ProgressLine, console, show_result
from expunge.ledger import Ledger
from expunge.report import REPORT, write_report
from expunge.train import UnlearnResult, describe, finished, request_of, resume, unlearn, write_card

UNLEARN = """make a model forget the examples of a file

examples:
  expunge unlearn smollm2-135m --forget forget.jsonl --retain retain.jsonl \\
      --out run
  expunge unlearn ./m --forget f.csv --retain r.csv --holdout h.csv --out run
  expunge unlearn ./my-model --config run.yaml --dry-run

exit code: 0 forgotten; 3 budget spent before everything was forgotten;
2 wrong input; 1 failure; 130 interrupted, 143 terminated (resume with
`expunge resume`)"""
RESUME = """continue an interrupted run, as if it had not stopped

A run that was cut off after its last number only lacks its report and its place
in the ledger: they are made.

example:
  expunge resume run"""


def add_unlearn(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge unlearn`."""
    add_run_options(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved run and stop before the first update"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_request(parser)


def run_unlearn(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    config = build_config(arguments)
    request = request_from(arguments.request, arguments.ledger)
    if arguments.dry_run:
        sys.stdout.write(json.dumps(describe(config), indent=2, ensure_ascii=False) + "\n")
        return 0
    with interruptible(config.out) as interruption, ProgressLine().showing() as line:
        watch = interruption.watching(line)
        result = unlearn(config, progress=watch, interrupted=interruption.asked, request=request)
    return _end(result, request, as_json=arguments.json)


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge resume`."""
    parser.add_argument("out", metavar="DIR", help="folder of the interrupted run")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_request(parser)


def run_resume(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    request = request_from(arguments.request, arguments.ledger) or request_of(arguments.out)
    result = finished(arguments.out)
    if result is None or _is_told(result, request):  # a complete run is refused
        with interruptible(arguments.out) as interruption, ProgressLine().showing() as line:
            watch = interruption.watching(line)
            result = resume(arguments.out, progress=watch, interrupted=interruption.asked)
    return _end(result, request, as_json=arguments.json)


def _is_told(result: UnlearnResult, request: dict[str, str] | None) -> bool:
    """Whether the report and the line in the ledger are there."""
    signed = request is None or line_of(result, request) is not None
    return signed and (Path(result.out) / REPORT).is_file()


def _end(result: UnlearnResult, request: dict[str, str] | None, *, as_json: bool) -> int:
    tags: list[str] = []
    if request is not None:
        line = sign(result, request)
        write_card(result.out, entry=line)
        tags = [row["text"] for row in line["fields"]["rows"]["tags"]]
    report = write_report(result.out, hashes=tags) if tags else write_report(result.out)
    if as_json:
        sys.stdout.write(json.dumps(result.to_dict(texts=False), indent=2, ensure_ascii=False) + "\n")
    else:
        screen = console()
        show_result(screen, result)
        screen.print(f"report: {report}", markup=False, soft_wrap=True)
        if request is not None:
            name, path = request["name"], Ledger(request["ledger"]).path
            screen.print(f"ledger: request {name} is signed in {path}", markup=False, soft_wrap=True)
    return result.exit_code
