"""`expunge stress`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from expunge.cli._measuring import StageLine, add_inputs, add_measuring, add_number, measuring
from expunge.cli._options import reader
from expunge.cli._show import console
from expunge.errors import UsageError
from expunge.stress import TESTS, StressResult, StressSettings, stress

STRESS = """try to bring back what a model has forgotten

tests: int8, int4 quantise its linear layers (bitsandbytes; `pip install
'expunge[quantization]'`); relearn teaches a copy a few of the rows again;
paraphrase asks in other words; prefix gives the beginning of each answer;
samples draws several answers and takes the best. The model's folder is never
changed.

examples:
  expunge stress run/model --suite mine --data ./my-data --out stress
  expunge stress run/model --suite tofu --data ./tofu --original ./target \\
      --out stress
  expunge stress run/model --suite tofu --data ./tofu --out stress \\
      --rows forget=0:40 retain=0:40 --tests int4,prefix

the same command goes on where it was cut off. --out holds ids and numbers, no
texts."""

_OPTIONS: tuple[str, ...] = ("tests", "prefix", "samples", "temperature", "top_p")
_OPTIONS += ("relearn_rows", "relearn_steps", "relearn_batch", "relearn_lr", "relearn_full")
# Columns of the table: heading and width; with the names, 80 characters.
_COLUMNS = {"before": ("before", 6), "after": ("after", 6), "change": ("change", 6), "interval": ("interval", 14)}
_MORE = {"recovered": ("back", 5), "retrained": ("retrained", 9)}


def add_stress(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge stress`."""
    usual = StressSettings()
    add_inputs(parser, folder="its stress run")
    parser.add_argument("--out", required=True, metavar="DIR", help="results folder; finished tests in it are kept")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    group = parser.add_argument_group("tests")
    group.add_argument(
        "--tests", type=_names, default=TESTS, metavar="NAME,NAME", help=f"which of {', '.join(TESTS)} [all]"
    )
    add_number(group, "--relearn-rows", usual.relearn_rows, "rows to forget that are taught again")
    add_number(group, "--relearn-steps", usual.relearn_steps, "updates on them")
    add_number(group, "--relearn-batch", usual.relearn_batch, "rows in an update")
    group.add_argument(
        "--relearn-lr",
        type=reader(float),
        metavar="X",
        help="step size, falling to 0 [0.0002; with --relearn-full 0.00002]",
    )
    group.add_argument("--relearn-full", action="store_true", help="train all weights instead of a LoRA adapter")
    group.add_argument(
        "--prefix", type=_shares, default=usual.prefix, metavar="N,N", help="per cent of the answer given [0,25,50]"
    )
    add_number(group, "--samples", usual.samples, "answers drawn for each question")
    add_number(group, "--temperature", usual.temperature, "of the draws")
    add_number(group, "--top-p", usual.top_p, "draw from the likeliest tokens that have this probability together")
    add_measuring(parser)


def run_stress(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    options: dict[str, Any] = {name: getattr(arguments, name) for name in _OPTIONS}
    settings = StressSettings(evaluate=measuring(arguments), **options)
    try:
        with StageLine() as line:
            found = stress(
                arguments.model,
                arguments.suite,
                arguments.data,
                retrained=arguments.retrained,
                original=arguments.original,
                out=arguments.out,
                settings=settings,
                progress=line,
            )
    except KeyboardInterrupt:
        sys.stderr.write(f"expunge: interrupted; finished tests are in {arguments.out}, the same command goes on\n")
        return 130
    if arguments.json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return 0
    show_stress(console(), found)
    console().print(f"results: {arguments.out}", markup=False, soft_wrap=True)
    return 0


def show_stress(out: Console, found: StressResult) -> None:
    """Print what came back, what was not measured and why, and what was done."""
    more = [name for name in _MORE if any(row[name] is not None for row in found.rows)]
    out.print(_table([], more, found.suite))
    measured = [row for row in found.rows if row["after"] is not None]
    for name in dict.fromkeys(_heading(row) for row in measured):
        out.print(name, style="bold", markup=False)
        out.print(_table([row for row in measured if _heading(row) == name], more))
    texts = ["interval: 95 % of the change, by bootstrap"]
    texts += ["back: share of what was forgotten that came back"] if "recovered" in more else []
    texts += ["retrained: that model under the same test"] if "retrained" in more else []
    out.print("; ".join(texts) + "\n", style="dim", markup=False)
    missing: dict[str, list[str]] = {}
    for row in found.rows:
        if row["after"] is None:
            missing.setdefault(row["reason"], []).append(row["test"])
    for reason, tests in missing.items():
        out.print(f"not measured: {', '.join(dict.fromkeys(tests))}: {reason}", markup=False)
    for test, details in found.details.items():
        out.print(_details(test, details), markup=False)
    for note in found.notes:
        out.print(note if note.startswith("warning") else f"note: {note}", markup=False)
    spent: dict[str, float] = {}
    for label, value in found.seconds.items():
        whose = next((one for one in ("retrained", "original") if label.startswith(one)), label)
        spent[whose] = spent.get(whose, 0.0) + value
    if spent:
        out.print(", ".join(f"{name} {value:.1f} s" for name, value in spent.items()), markup=False)


def _heading(row: dict[str, Any]) -> str:
    return f"{row['test']} {row['setting']}".strip()


def _table(rows: list[dict[str, Any]], more: list[str], suite: str = "") -> Table:
    """Rows of one test, or, without any, the heading of all."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=not rows)
    table.add_column(suite, width=28, overflow="fold")
    columns = _COLUMNS | {name: _MORE[name] for name in more}
    for heading, width in columns.values():
        table.add_column(heading, justify="right", width=width, no_wrap=True)
    for row in rows:
        table.add_row(f" {row['metric']}", *(_text(name, row[name]) for name in columns))
    return table


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "interval":
        return "…".join(f"{end:+.3f}" for end in value)
    return f"{value:.0%}" if name == "recovered" else f"{value:+.3f}" if name == "change" else f"{value:.3f}"


def _details(test: str, details: dict[str, Any]) -> str:
    if "quantised" in details:
        what = details["quantised"]
        where = f"{what['layers']} linear layers of the decoder, {what['weights']:,} weights, by {what['library']}"
        return (
            f"{test}: {where}: {what['format']}; products in {what['compute']}; error {what['error']:.2%} of the "
            "weights. Embeddings, head and norms stay as they are."
        )
    trained = "all weights" if details["trained"] == "full" else "a LoRA adapter"
    loss = details.get("loss")
    change = "" if loss is None else f", loss {loss[0]:.2f} → {loss[1]:.2f} nats a token"
    return f"{test}: {len(details['rows'])} rows, {details['steps']} steps on {trained}, lr {details['lr']:g}{change}."


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _shares(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(share) for share in text.split(","))
    except ValueError:
        raise UsageError(f"prefix: found {text!r}, accepted are whole numbers from 0 to 99, such as 0,25,50") from None
