"""What `expunge evaluate` and `expunge stress` share: their options, and the line that shows what they do."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from expunge.cli._options import read_template, reader
from expunge.errors import UsageError
from expunge.suites import SUITES, EvaluateSettings, MeasureSettings

_STAGES = {
    "load": "loading",
    "score": "scoring",
    "generate": "generating answers",
    "relearn": "teaching again",
    "tasks": "running lm-eval",
}


def add_inputs(parser: argparse.ArgumentParser, *, folder: str) -> None:
    """Model, suite, data, and the models to compare with.

    Args:
        parser: gets the options.
        folder: what may stand in the place of a model to compare with.
    """
    parser.add_argument(
        "model", metavar="MODEL", help="smollm2-135m, a model or adapter folder, a .gguf file, a hub id"
    )
    parser.add_argument("--suite", required=True, metavar="NAME", help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder in the suite's layout, or a hub name")
    parser.add_argument(
        "--retrained", metavar="MODEL", help=f"model that never saw the rows to forget, or the --out folder of {folder}"
    )
    parser.add_argument("--original", metavar="MODEL", help=f"model before unlearning, or the --out folder of {folder}")


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Which rows, and how they are measured."""
    measure = MeasureSettings()
    group = parser.add_argument_group("data options")
    group.add_argument(
        "--rows", nargs="+", metavar="PART=START:END", default=[], help="rows to take, such as forget=0:100"
    )
    group.add_argument("--split", metavar="NAME", help="what TOFU forgets [the folder's only one; hub: forget10]")
    group.add_argument("--template", default=measure.template, metavar="TEXT", help="chat, plain, or a text [chat]")
    group.add_argument("--system", metavar="TEXT", help="system turn [none]")
    group = parser.add_argument_group("measuring options")
    add_number(group, "--max-length", measure.max_length, "longest row, tokens")
    add_number(group, "--max-new-tokens", measure.max_new_tokens, "longest answer, tokens")
    add_number(group, "--batch", measure.batch_size, "rows in a forward pass; answers in batches of four times as many")
    add_number(group, "--k", measure.k, "competitors in the margin of the violation rate")
    add_number(group, "--rho", measure.rho, "its token probability")
    group.add_argument("--dtype", default="auto", metavar="NAME", help="auto, float32, bfloat16, float16 [auto]")
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:N, mps [the accelerator if there is one]")
    group.add_argument("--threads", type=reader(int), metavar="N", help="CPU threads [PyTorch's choice]")
    add_number(group, "--seed", 0, "of the bootstrap, and of all that is drawn")
    add_number(group, "--resamples", 1000, "of the bootstrap")


def add_number(group: Any, flag: str, default: float, text: str) -> None:
    """An option with a number; its default says of which kind."""
    kind = type(default)
    metavar = "N" if kind is int else "X"
    group.add_argument(flag, type=reader(kind), default=default, metavar=metavar, help=f"{text} [{default:g}]")


def measuring(arguments: argparse.Namespace, **more: Any) -> EvaluateSettings:
    """Settings from the options; also sets the number of threads.

    Args:
        arguments: parsed.
        more: further fields.

    Raises:
        UsageError: an option is out of range.
    """
    settings = EvaluateSettings(
        measure=MeasureSettings(
            template=read_template(arguments.template),
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
        **more,
    )
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise UsageError(f"threads: found {arguments.threads}, accepted is a whole number from 1")
        torch.set_num_threads(arguments.threads)
    return settings


def _rows(words: list[str]) -> dict[str, str]:
    """`forget=0:100` → {"forget": "0:100"}."""
    pairs = [word.partition("=") for word in words]
    wrong = [word for word, pair in zip(words, pairs, strict=True) if not pair[0] or not pair[2]]
    if wrong:
        raise UsageError(f"rows: found {wrong[0]!r}, accepted is PART=START:END, such as forget=0:100")
    return {part: text for part, _, text in pairs}


class StageLine:
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

    def __enter__(self) -> StageLine:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take in what is being done; a stage is "score" or the like, with "TEST: " before it in a stress run."""
        of, colon, step = stage.rpartition(": ")
        name = f"{of}{colon}{_STAGES.get(step, step)}"
        if stage != self._stage or done < self._bar.tasks[0].completed:
            self._stage = stage
            self._bar.reset(self._task, total=total, description=name)
            if not self._console.is_terminal:
                self._console.print(name if step == "load" else f"{name} ({total})", soft_wrap=True, markup=False)
        self._bar.update(self._task, completed=done, total=total)
