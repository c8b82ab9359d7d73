"""`expunge card`: the section of a saved model's README on what was removed from it."""

from __future__ import annotations

import argparse
import json
import sys

from expunge.cli._request import line_of, request_from
from expunge.cli._show import console
from expunge.errors import UsageError
from expunge.train import finished, request_of, write_card

CARD = """write what was done into the model's README

Every run writes this section when it ends; this command writes it again, with
the entry of a request that was signed later. The rest of the README stays.

examples:
  expunge card run
  expunge card run --ledger deletions --request ticket-17"""


def add_card(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge card`."""
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--ledger", metavar="PATH", help="ledger with the run's request [that of the run]")
    parser.add_argument("--request", metavar="ID", help="name of that request [that of the run]")
    parser.add_argument("--json", action="store_true", help="print the file's name and the entry as JSON")


def run_card(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    result = finished(arguments.run)
    if result is None:
        raise UsageError(f"{arguments.run}: found a run that has not ended, accepted is the folder of a finished run")
    request = request_from(arguments.request, arguments.ledger) or request_of(arguments.run)
    entry = None if request is None else line_of(result, request)
    if request is not None and entry is None:
        raise UsageError(
            f"ledger: {request['ledger']} has no entry of this run under {request['name']}, accepted is one that has "
            "(`expunge ledger add`)"
        )
    file = write_card(arguments.run, entry=entry)
    if arguments.json:
        values = {"card": str(file), "entry": None if entry is None else entry["hash"]}
        sys.stdout.write(json.dumps(values, ensure_ascii=False) + "\n")
    else:
        console().print(f"card: {file}", markup=False, soft_wrap=True)
    return 0
