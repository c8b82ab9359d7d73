"""The request a run belongs to: its name, its ledger, its line there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from expunge.errors import UsageError
from expunge.ledger import Ledger, entry_from_run
from expunge.train import UnlearnResult


def add_request(parser: argparse.ArgumentParser) -> None:
    """Options that name a request, for commands that sign."""
    parser.add_argument("--request", metavar="ID", help="sign the result and add it to the ledger under this name")
    parser.add_argument("--ledger", metavar="DIR", help="folder of the ledger [deletions]")


def request_from(name: str | None, ledger: str | None) -> dict[str, str] | None:
    """Name and ledger of the request; None where none is named.

    Raises:
        UsageError: a ledger without a name, or a ledger that was changed: it gets no entry.
    """
    if name is None:
        if ledger is not None:
            raise UsageError(f"ledger: found {ledger} without a request, accepted with it is --request ID")
        return None
    # Whoever resumes the run may do so from another folder.
    path = Path(ledger or "deletions").expanduser().absolute()
    there = Ledger(path)
    if there.path.exists() and not (found := there.verify()).ok:
        raise UsageError(f"ledger: {there.path}: {found.problems[0]}; `expunge ledger verify {path}` shows all")
    return {"name": name, "ledger": str(path)}


def line_of(result: UnlearnResult, request: dict[str, str]) -> dict[str, Any] | None:
    """The line of this very run in the ledger; None where there is none yet."""
    ledger = Ledger(request["ledger"])
    if not ledger.path.exists():
        return None
    entry = entry_from_run(result.out, request["name"])
    mine = {"request": entry.request, "files": dict(entry.files)}
    lines = (line for line in ledger.entries() if {name: line["fields"][name] for name in mine} == mine)
    return next(lines, None)


def sign(result: UnlearnResult, request: dict[str, str]) -> dict[str, Any]:
    """The line of this run, which is added where it is not there yet."""
    return line_of(result, request) or Ledger(request["ledger"]).append(entry_from_run(result.out, request["name"]))
