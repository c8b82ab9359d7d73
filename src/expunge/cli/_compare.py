"""`expunge compare`."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from expunge.cli._options import reader
from expunge.cli._show import console
from expunge.compare import Comparison, Step, Study, compare, dry_run, read_study
from expunge.errors import UsageError

COMPARE = """compare methods: unlearn and evaluate with each of them, by one file

Every cell (target, method, optimizer, seed) has a folder of its own in
DIR/cells. The same command goes on where it was cut off; what is complete is
kept.

examples:
  expunge compare tofu1k.yaml --set data=./tofu target=T retrained=R --out study
  expunge compare mine.yaml --out study --workers 2
  expunge compare mine.yaml --dry-run

exit code: 0 done; 1 a cell failed, the others are in the table; 2 wrong input;
130 interrupted"""

_STAGES = {
    "load": "loading",
    "calibrate": "measuring the holdout",
    "before": "scoring before",
    "reference": "keeping the reference",
    "train": "forgetting",
    "save": "saving and verifying",
    "after": "scoring after",
    "score": "scoring",
    "generate": "generating answers",
    "tasks": "running lm-eval",
    "start": "started in a process of its own",
    "kept": "complete before",
}


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge compare`."""
    parser.add_argument("file", metavar="FILE", help="YAML file: what is compared: recipes/ has examples")
    parser.add_argument("--out", metavar="DIR", help="folder of the comparison; may hold an earlier part of it")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="values of ${NAME} in the file"
    )
    parser.add_argument("--workers", type=reader(int), default=1, metavar="N", help="cells at the same time [1]")
    parser.add_argument("--keep-models", action="store_true", help="keep the saved models when they are measured")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the cells; run nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run_compare(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    study = read_study(arguments.file, _settings(arguments.set))
    if arguments.dry_run:
        _show_cells(study, as_json=arguments.json)
        return 0
    if arguments.out is None:
        raise UsageError("out: found none, accepted is a folder for the comparison (--out DIR)")
    options = {"workers": arguments.workers, "keep_models": arguments.keep_models}
    with _interruptible() as asked:
        found = compare(study, arguments.out, progress=_Lines(), interrupted=asked, **options)
    if arguments.json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        _show(found, Path(arguments.out))
    return found.exit_code


def _settings(words: list[str]) -> dict[str, str]:
    """`data=folder` → {"data": "folder"}."""
    pairs = [word.partition("=") for word in words]
    for word, (name, sign, value) in zip(words, pairs, strict=True):
        if not name or not sign or not value:
            raise UsageError(f"set: found {word!r}, accepted is NAME=VALUE, such as data=./tofu")
    return {name: value for name, _, value in pairs}


def _show_cells(study: Study, *, as_json: bool) -> None:
    found = dry_run(study)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("cell", "ends by", "lr", "optimizer"):
        table.add_column(name, overflow="fold")
    for cell in found["cells"]:
        recipe = cell["config"]["recipe"]
        table.add_row(cell["name"], cell["budget"], f"{recipe['lr']:g}", recipe["optimizer"])
    console().print(table)
    console().print(f"{len(found['cells'])} cells, suite {found['suite']}; everything is accepted", markup=False)


def _show(found: Comparison, out: Path) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "seconds", "× best", "distance", *(axis.replace("_", " ") for axis in found.values["axes"])):
        table.add_column(name, justify="left" if not name else "right", overflow="fold")
    for target, models in found.values["references"].items():
        for role, model in models.items():
            numbers = [
                _number(model["distance"]),
                *(_number(model["metrics"].get(axis)) for axis in found.values["axes"]),
            ]
            table.add_row(f"{target}, {role}", "", "", *numbers)
    for row in found.values["summary"]:
        means = [row["seconds"]["mean"], row["ratio"], row["distance"]["mean"]]
        means += [row["metrics"].get(axis, {}).get("mean") for axis in found.values["axes"]]
        digits = (1, 2, 3, 3, 3)
        table.add_row(row["name"], *(_number(one, places) for one, places in zip(means, digits, strict=True)))
    screen = console()
    screen.print(table)
    for row in found.values["cells"]:
        if row["state"] == "failed":
            screen.print(f"failed: {row['name']}: {row['error']}", markup=False, soft_wrap=True)
    for name, file in (("table", "md"), ("plot", "html"), ("results", "json")):
        screen.print(f"{name}: {out / f'comparison.{file}'}", markup=False, soft_wrap=True)


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """The first SIGINT or SIGTERM ends the comparison where it can go on; a second one ends it at once."""
    asked = False

    def note(_number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class _Lines:
    """A line on standard error as each stage of a cell begins."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def __call__(self, step: Step) -> None:
        """Take in what the comparison is doing."""
        place = f"[{step.number}/{step.total}] " if step.number else ""
        text = f"{place}{step.name}: {_STAGES.get(step.stage, step.stage)}" + (f": {step.error}" if step.error else "")
        self._console.print(text, markup=False, soft_wrap=True)
