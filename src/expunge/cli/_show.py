"""What a person sees: a progress line with the number that matters, and the tables at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from expunge.train import Answer, Summary, UnlearnResult
from expunge.train import Progress as State

_STAGES = {
    "load": "loading",
    "calibrate": "measuring the holdout",
    "before": "scoring before",
    "reference": "keeping the reference",
    "teach": "teaching",
    "train": "forgetting",
    "save": "saving and verifying",
    "after": "scoring after",
}


def console() -> Console:
    """Standard output; colours only on a terminal, plain text of 80 columns elsewhere."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 80)


class ProgressLine:
    """One line that follows the stages of a run; on standard error, so that output can be piped.

    Without a terminal a line is written when a stage begins, and every ten seconds of training.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=None, numbers="")
        self._stage, self._spoken, self._began = "", 0.0, 0.0
        self._first: float | None = None

    @contextmanager
    def showing(self) -> Iterator[ProgressLine]:
        """Show the line inside the block."""
        with self._bar:
            yield self

    def __call__(self, state: State) -> None:
        """Take in what the run is doing."""
        for text in state.lines:
            self._console.print(text, markup=False, soft_wrap=True)
        if state.lines:
            return
        name, now = _STAGES.get(state.stage, state.stage), time.monotonic()
        if state.stage != self._stage:
            self._stage, self._spoken, self._began, self._first = state.stage, 0.0, now, state.violation
            self._bar.reset(self._task, total=state.total, numbers="", description=name)
        numbers, done, total = "", float(state.done), None if state.total is None else float(state.total)
        if state.stage == "train" and state.violation is not None and state.tolerance is not None:
            numbers, done, total = self._training(state, state.violation, state.tolerance, now)
        elif state.stage == "teach" and state.loss is not None:
            numbers = f"{state.done}/{state.total}  loss {state.loss:.3f}"
        elif state.total:
            numbers = f"{state.done}/{state.total}"
            if state.bytes is not None:
                numbers += f"  {state.bytes / 1e6:.0f} MB"
        self._bar.update(self._task, completed=done, total=total, numbers=numbers)
        if not self._live and (self._spoken == 0.0 or (state.stage in ("teach", "train") and now - self._spoken > 10)):
            self._console.print(f"{name} {numbers}".rstrip(), soft_wrap=True)
            self._spoken = now

    def _training(self, state: State, violation: float, tolerance: float, now: float) -> tuple[str, float, float]:
        """What is said of an update; the bar is the way from the first violation to the tolerance, which ends it."""
        numbers = f"step {state.step}  violation {violation:.3f} → {tolerance:.3f}"
        way = max((self._first or 1.0) - tolerance, 1e-6)
        done = min(max((self._first or 1.0) - violation, 0.0), way)
        if 0 < done < way:
            numbers += f"  about {(now - self._began) * (way - done) / done:.0f} s left"
        if state.phase == "rest":
            numbers += "  (the last examples)"
        return numbers, done, way


def result_table(result: UnlearnResult) -> Table:
    """Before and after, for the examples to forget and those to keep."""
    table = Table(title=None, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for column in ("probability", "exact match", "violation", "ROUGE-L"):
        table.add_column(column, justify="right")
    pairs: tuple[tuple[str, Summary | None, Summary | None], ...] = (
        ("forget", result.forget_before, result.forget_after),
        ("retain", result.retain_before, result.retain_after),
    )
    if (earlier := result.earlier) is not None:
        pairs += (("earlier", earlier.before, earlier.after),)
    for name, before, after in pairs:
        if before is not None and after is not None:
            table.add_row(f"{name} ({before.examples}) before", *_numbers(before))
            table.add_row(f"{name} ({after.examples}) after", *_numbers(after), style="bold")
    return table


def _numbers(summary: Summary) -> list[str]:
    values = (summary.probability, summary.exact, summary.violation, summary.rouge_l)
    return ["not measured" if value is None else f"{value:.3f}" for value in values]


def verdict(result: UnlearnResult) -> str:
    """One sentence on how the run ended."""
    total = result.forget_before.examples
    if result.forgotten:
        stop = "a fixed number of passes" if result.stopped_at is None else f"stopped at step {result.stopped_at}"
        return (
            f"Forgotten: {total} of {total} examples, in {result.steps} steps and {result.unlearn_seconds:.0f} s "
            f"({stop}, tolerance {result.tolerance:.3f} from the {result.tolerance_source})."
        )
    return (
        f"Not finished: {len(result.left)} of {total} examples are left above the tolerance "
        f"{result.tolerance:.3f} after {result.steps} steps and {result.unlearn_seconds:.0f} s; {result.reason}."
    )


def show_result(out: Console, result: UnlearnResult) -> None:
    """Print the verdict, the table, what is left and where the model is."""
    out.print(verdict(result))
    out.print()
    out.print(result_table(result))
    out.print()
    if result.left:
        shown = ", ".join(result.left[:20]) + (f" and {len(result.left) - 20} more" if len(result.left) > 20 else "")
        out.print(f"left above the tolerance (ids): {shown}", markup=False)
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"model: {result.model}", markup=False, soft_wrap=True)


def show_answers(out: Console, title: str, answers: Sequence[Answer]) -> None:
    """Print questions with the answers before and after."""
    out.print(title, style="bold")
    for answer in answers:
        out.print(f"  Q       {answer.question}", markup=False)
        out.print(f"  before  {answer.before}", markup=False)
        out.print(f"  after   {answer.after}", markup=False)
        out.print()
