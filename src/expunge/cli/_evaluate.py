"""`expunge evaluate`."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from expunge.cli._measuring import StageLine, add_inputs, add_measuring, measuring
from expunge.cli._show import console
from expunge.metrics import Metric
from expunge.suites import Evaluation, evaluate

EVALUATE = """measure what a model still knows of what was to be forgotten, and what it kept

examples:
  expunge evaluate run/model --suite mine --data ./my-data --out results
  expunge evaluate run/model --suite tofu --data ./tofu \\
      --retrained ./retrained --out results
  expunge evaluate run/model --suite tofu --data locuslab/TOFU --split forget05
  expunge evaluate run/model --suite muse --data ./muse_news \\
      --rows forget=0:50 holdout=0:50

the folder of `mine` holds forget, retain and, optionally, holdout (never
trained on) and paraphrase, each .jsonl, .json, .parquet, .csv or .txt. --out
keeps all tables, with the texts in them: keep it where the data may be kept."""

_ARROWS = {"higher": "↑", "lower": "↓", "reference": "≈"}
_SHOWN_EXAMPLES = 5


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge evaluate`."""
    add_inputs(parser, folder="its evaluation")
    parser.add_argument("--out", metavar="DIR", help="results folder; matching tables in it are used again [none]")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--show-text", action="store_true", help=f"show {_SHOWN_EXAMPLES} answers of each table; never shown otherwise"
    )
    add_measuring(parser)
    group = parser.add_argument_group("general ability (needs `pip install 'expunge[lm-eval]'`)")
    group.add_argument("--tasks", nargs="+", metavar="NAME", default=[], help="lm-eval tasks to run")
    group.add_argument("--task-files", metavar="DIR", help="folder with task files of your own")


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    settings = measuring(arguments, tasks=tuple(arguments.tasks), task_files=arguments.task_files)
    with StageLine() as line:
        found = evaluate(
            arguments.model,
            arguments.suite,
            arguments.data,
            retrained=arguments.retrained,
            original=arguments.original,
            out=arguments.out,
            settings=settings,
            progress=line,
        )
    if arguments.json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return 0
    show_evaluation(console(), found, texts=arguments.show_text)
    if arguments.out:
        console().print(f"results: {arguments.out}", markup=False, soft_wrap=True)
    return 0


def show_evaluation(out: Console, found: Evaluation, *, texts: bool = False) -> None:
    """Print the metrics, what is missing and why, and flags; examples only when asked for."""
    out.print(metric_table(found))
    out.print("↑ higher is better, ↓ lower, ≈ as the retrained model; interval: 95 %, by bootstrap\n", style="dim")
    missing: dict[str, list[str]] = {}
    for metric in found.metrics:
        if metric.value is None:
            missing.setdefault(metric.reason or "not measured", []).append(metric.name)
    for reason, names in missing.items():
        out.print(f"not measured: {', '.join(names)}: {reason}", markup=False)
    notes: dict[str, list[str]] = {}
    for metric in found.metrics:
        if metric.note:
            notes.setdefault(metric.note, []).append(metric.name)
    for note, names in notes.items():
        out.print(f"note: {', '.join(names)}: {note}", markup=False)
    for text in (*found.notes, *found.flags):
        out.print(text if text.startswith(("warning", "over-forgetting")) else f"note: {text}", markup=False)
    if texts:
        _show_texts(out, found)
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in found.seconds.items())
    out.print(f"{spent}", markup=False)


def metric_table(found: Evaluation) -> Table:
    """What was measured, with the retrained model's values where there are any."""
    with_reference = any(metric.reference is not None for metric in found.metrics)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(found.suite, overflow="fold")
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("interval", justify="right")
    if with_reference:
        table.add_column("retrained", justify="right")
    table.add_column("rows", justify="right")
    for metric in found.metrics:
        if metric.value is None:
            continue
        cells = [metric.name, _ARROWS[metric.scale.better], _text(metric, metric.value)]
        cells.append(
            ""
            if metric.interval is None
            else f"{_text(metric, metric.interval[0])}…{_text(metric, metric.interval[1])}"
        )
        if with_reference:
            cells.append("" if metric.reference is None else _text(metric, metric.reference))
        cells.append(f"{metric.n}" + (f" ({metric.nulls} missing)" if metric.nulls else "") if metric.n else "")
        table.add_row(*cells)
    return table


def _text(metric: Metric, value: float) -> str:
    if metric.scale.unit == "p":
        return f"{value:.3g}" if value >= 1e-4 or value == 0 else f"{value:.0e}"
    return f"{value:.1f}" if metric.scale.unit in ("%", "nats", "log10 p") else f"{value:.3f}"


def _show_texts(out: Console, found: Evaluation) -> None:
    for name, answers in found.measured.answers.items():
        out.print(name, style="bold", markup=False)
        for index in range(min(_SHOWN_EXAMPLES, len(answers))):
            out.print(f"  asked      {answers.prompt[index]}", markup=False)
            out.print(f"  reference  {answers.reference[index]}", markup=False)
            out.print(f"  answer     {answers.prediction[index]}\n", markup=False)
