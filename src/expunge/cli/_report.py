"""`expunge report`: a page from the folders of runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from expunge.cli._show import console
from expunge.errors import UsageError
from expunge.ledger import Ledger
from expunge.report import read_point, read_run, write_comparison, write_report

REPORT = """make a page that shows what runs forgot, and what it cost

One file, to be opened in a browser; nothing is fetched from a network.

examples:
  expunge report run                    writes run/report.html
  expunge report run --show-text        with the texts that were to be forgotten
  expunge report run --ledger deletions --request ticket-17   with keyed hashes
  expunge report run-a run-b --retrained evaluation --out comparison.html"""


def add_report(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge report`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument("--out", metavar="FILE", help="page to write [RUN/report.html; comparison.html for several]")
    parser.add_argument("--show-text", action="store_true", help="show the texts to forget; never shown otherwise")
    parser.add_argument(
        "--evaluation", metavar="DIR", help="results of `expunge evaluate` for the run [RUN/evaluation]"
    )
    parser.add_argument("--stress", metavar="DIR", help="results of `expunge stress` for the run [RUN/stress]")
    parser.add_argument("--ledger", metavar="PATH", help="ledger with the run's request: shows its keyed hashes")
    parser.add_argument("--request", metavar="ID", help="name or number of that request [the newest]")
    parser.add_argument(
        "--retrained", metavar="DIR", help="evaluation of the retrained model, a star in the comparison"
    )
    parser.add_argument("--json", action="store_true", help="print the file's name and size as JSON")


def run_report(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    several = len(arguments.runs) > 1
    single = {"show-text": arguments.show_text, "ledger": arguments.ledger}
    measured = {"evaluation": arguments.evaluation, "stress": arguments.stress}
    single |= measured
    wrong = [name for name, value in single.items() if value] if several else []
    wrong += ["retrained"] if arguments.retrained and not several else []
    wrong += ["request"] if arguments.request and not arguments.ledger else []
    if wrong:
        needed = "a --ledger" if wrong[0] == "request" else "one run" if several else "several runs"
        raise UsageError(f"{wrong[0]}: goes with {needed} only")
    if several:
        runs = [
            read_run(folder, name=name) for folder, name in zip(arguments.runs, _names(arguments.runs), strict=True)
        ]
        star = None if arguments.retrained is None else read_point(arguments.retrained, "retrained")
        page = write_comparison(runs, arguments.out, retrained=star)
    else:
        hashes = None if arguments.ledger is None else _hashes(arguments.ledger, arguments.request)
        options = {"show_text": arguments.show_text, "hashes": hashes, **measured}
        page = write_report(arguments.runs[0], arguments.out, **options)
    size = page.stat().st_size
    if arguments.json:
        sys.stdout.write(json.dumps({"report": str(page), "bytes": size}) + "\n")
    else:
        console().print(f"report: {page} ({size / 1e6:.2f} MB)", markup=False, soft_wrap=True)
    return 0


def _names(folders: list[str]) -> list[str]:
    """Names of runs; with their parents' where they are alike."""
    paths = [Path(folder).expanduser().resolve() for folder in folders]
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [f"{path.parent.name}/{path.name}" for path in paths]


def _hashes(path: str, request: str | None) -> list[str]:
    """Keyed hashes of a request's rows."""
    ledger = Ledger(path)
    entries = ledger.entries()
    if not entries:
        raise UsageError(f"ledger: found no entry in {path}, accepted is a ledger with the run's request")
    entry = entries[-1] if request is None else ledger.entry(request)
    return [tags["text"] for tags in entry["fields"]["rows"]["tags"]]
