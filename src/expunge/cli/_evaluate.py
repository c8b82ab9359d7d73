"""`expunge evaluate`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from expunge.cli._show import console
from expunge.errors import UsageError
from expunge.metrics import Metric
from expunge.suites import SUITES, EvaluateSettings, Evaluation, MeasureSettings, evaluate

EVALUATE = """measure what a model still knows of what was to be forgotten, and what it has kept

examples:
  expunge evaluate run/model --suite mine --data ./my-data --out results
  expunge evaluate run/model --suite tofu --data ./tofu --retrained ./retrained --out results
  expunge evaluate run/model --suite tofu --data locuslab/TOFU --split forget05
  expunge evaluate run/model --suite muse --data ./muse_news --rows forget=0:50 holdout=0:50

the folder of `mine` holds forget, retain and, optionally, holdout (never trained on)
and paraphrase, each .jsonl, .json, .parquet, .csv or .txt. --out keeps all tables, with the
texts in them: keep it where the data may be kept."""

_STAGES = {"load": "loading", "score": "scoring", "generate": "generating answers", "tasks": "running lm-eval"}
_ARROWS = {"higher": "↑", "lower": "↓", "reference": "≈"}
_SHOWN_EXAMPLES = 5


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge evaluate`."""
    measure = MeasureSettings()
    parser.add_argument(
        "model", metavar="MODEL", help="smollm2-135m, a model or adapter folder, a .gguf file, a hub id"
    )
    parser.add_argument("--suite", required=True, metavar="NAME", help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder in the suite's layout, or a hub name")
    parser.add_argument(
        "--retrained",
        metavar="MODEL",
        help="model that never saw the rows to forget, or the --out folder of its evaluation",
    )
    parser.add_argument(
        "--original", metavar="MODEL", help="model before unlearning, or the --out folder of its evaluation"
    )
    parser.add_argument("--out", metavar="DIR", help="results folder; matching tables in it are used again [none]")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--show-text", action="store_true", help=f"show {_SHOWN_EXAMPLES} answers of each table; never shown otherwise"
    )
    group = parser.add_argument_group("data options")
    group.add_argument(
        "--rows", nargs="+", metavar="PART=START:END", default=[], help="rows to take, such as forget=0:100"
    )
    group.add_argument("--split", metavar="NAME", help="what TOFU forgets [the folder's only one; hub: forget10]")
    group.add_argument("--template", default=measure.template, metavar="TEXT", help="chat, plain, or a text [chat]")
    group.add_argument("--system", metavar="TEXT", help="system turn [none]")
    group = parser.add_argument_group("measuring options")
    _number(group, "--max-length", measure.max_length, "longest row, tokens")
    _number(group, "--max-new-tokens", measure.max_new_tokens, "longest answer, tokens")
    _number(group, "--batch", measure.batch_size, "rows in a forward pass; answers in batches of four times as many")
    _number(group, "--k", measure.k, "competitors in the margin of the violation rate")
    group.add_argument("--rho", type=float, default=measure.rho, metavar="X", help="its token probability [0.7]")
    group.add_argument("--dtype", default="auto", metavar="NAME", help="auto, float32, bfloat16, float16 [auto]")
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:N, mps [the accelerator if there is one]")
    _number(group, "--threads", None, "CPU threads [PyTorch's choice]")
    _number(group, "--seed", 0, "of the bootstrap")
    _number(group, "--resamples", 1000, "of the bootstrap")
    group = parser.add_argument_group("general ability (needs `pip install 'expunge[lm-eval]'`)")
    group.add_argument("--tasks", nargs="+", metavar="NAME", default=[], help="lm-eval tasks to run")
    group.add_argument("--task-files", metavar="DIR", help="folder with task files of your own")


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    settings = EvaluateSettings(
        measure=MeasureSettings(
            template=arguments.template.replace("\\n", "\n"),
            system=arguments.system,
            max_length=arguments.max_length,
            max_new_tokens=arguments.max_new_tokens,
            batch_size=arguments.batch,
            rho=arguments.rho,
            k=arguments.k,
        ),
        rows=_rows(arguments.rows),
        split=arguments.split,
        dtype=arguments.dtype,
        device=arguments.device,
        seed=arguments.seed,
        resamples=arguments.resamples,
        tasks=tuple(arguments.tasks),
        task_files=arguments.task_files,
    )
    _set_threads(arguments.threads)
    with _Line() as line:
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


class _Line:
    """One line on standard error: a bar on a terminal, elsewhere a line as each stage begins."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=1)
        self._stage = ""

    def __enter__(self) -> _Line:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take in what the evaluation is doing."""
        name = _STAGES.get(stage, stage)
        if stage != self._stage or done < self._bar.tasks[0].completed:
            self._stage = stage
            self._bar.reset(self._task, total=total, description=name)
            if not self._console.is_terminal:
                self._console.print(name if stage == "load" else f"{name} ({total})", soft_wrap=True)
        self._bar.update(self._task, completed=done, total=total)


def _number(group: Any, flag: str, default: int | None, text: str) -> None:
    shown = text if default is None else f"{text} [{default}]"
    group.add_argument(flag, type=_whole, default=default, metavar="N", help=shown)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, accepted is a whole number") from None


def _rows(words: list[str]) -> dict[str, str]:
    """`forget=0:100` → {"forget": "0:100"}."""
    pairs = [word.partition("=") for word in words]
    wrong = [word for word, pair in zip(words, pairs, strict=True) if not pair[0] or not pair[1]]
    if wrong:
        raise UsageError(f"rows: found {wrong[0]!r}, accepted is PART=START:END, such as forget=0:100")
    return {part: text for part, _, text in pairs}


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise UsageError(f"threads: found {threads}, accepted is a whole number from 1")
    import torch

    torch.set_num_threads(threads)
