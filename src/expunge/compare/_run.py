"""`compare`: every cell of a comparison, one at a time or several side by side, then its results."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from expunge.compare._cell import RUN, Interrupted, Job, check_record, define, fail, read_record, run_job, stages
from expunge.compare._parts import Placed, check_target, place
from expunge.compare._result import Comparison, collect
from expunge.compare._stress import run_stress
from expunge.compare._study import Cell, Study
from expunge.errors import UsageError
from expunge.report._study import write_study
from expunge.suites import evaluate
from expunge.train import InterruptedRun

CELLS, REFERENCES = "cells", "references"


@dataclass(frozen=True)
class Step:
    """What a comparison is doing.

    Attributes:
        name: of the cell, or of the reference model.
        number: of the cell, from 1; 0: a reference model.
        total: all cells.
        stage: load, train, score, …; done, failed, or kept (complete before).
        error: why it failed.
    """

    name: str
    number: int
    total: int
    stage: str
    error: str | None = None


Watch = Callable[[Step], None]


def check(study: Study) -> None:
    """Refuse what can be known to be wrong before any model is loaded.

    Raises:
        UsageError: a model or file is missing or malformed, or rows overlap.
    """
    for target in study.targets:
        check_target(study, target)


def compare(
    study: Study,
    out: str | Path,
    *,
    workers: int = 1,
    keep_models: bool = False,
    progress: Watch | None = None,
    interrupted: Interrupted | None = None,
) -> Comparison:
    """Unlearn, evaluate and compare.

    Complete cells in the folder are kept, and a run that was cut off goes on from its last checkpoint. A cell that
    failed is recorded with its error and tried again the next time.

    Args:
        study: what is compared.
        out: folder of the comparison; may hold what an earlier call left.
        workers: cells that run at the same time, each in a process of its own; 1: one after another in this process.
        keep_models: keep saved models when they are measured.
        progress: called with what is being done.
        interrupted: asked often; True ends the comparison where it can go on.

    Returns:
        The results, which are also in the folder's `comparison.json`, `comparison.md` and `comparison.html`.

    Raises:
        UsageError: something is wrong; no run was started.
        RunError: the target or the retrained model could not be evaluated, or the folder cannot be written.
        InterruptedRun: it was asked to end.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise UsageError(f"workers: found {workers!r}, accepted is a whole number from 1")
    check(study)
    folder = Path(out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"out: {folder} is a file, accepted is a folder")
    watch, asked = progress or (lambda _: None), interrupted or (lambda: False)
    placed = {target.name: place(study, target, folder) for target in study.targets}
    cells = study.cells()
    jobs = [_job(study, cell, placed[cell.target.name], folder, keep_models) for cell in cells]
    complete = [check_record(job.folder, job.definition) for job in jobs]
    for target in placed.values():
        _references(study, target, folder, watch)
    numbered = [(number, job) for number, job in enumerate(jobs, start=1)]
    for number, job in numbered:
        if complete[number - 1]:
            watch(Step(job.name, number, len(jobs), "kept"))
    waiting = [pair for pair in numbered if not complete[pair[0] - 1]]
    run = _in_turn if workers == 1 else _side_by_side
    run(waiting, workers, _Told(watch, len(jobs)), asked)
    references = {name: folder / REFERENCES / name for name in placed}
    found = collect(study, list(zip(cells, [job.folder for job in jobs], strict=True)), references, workers)
    found.write(folder)
    write_study(folder)
    return found


def _job(study: Study, cell: Cell, placed: Placed, out: Path, keep_model: bool) -> Job:
    folder, there = out / CELLS / cell.name, _places(placed, out)
    config = study.config(cell, placed.files, folder / RUN)
    stressed = None if study.stress is None else dataclasses.replace(study.stress, evaluate=placed.settings)
    return Job(
        name=cell.name,
        folder=folder,
        config=config,
        suite=study.suite,
        data=placed.data,
        settings=placed.settings,
        retrained=there.get("retrained"),
        original=there["target"],
        stress=stressed,
        stressed_retrained=there.get("retrained stress") if stressed else None,
        stressed_original=there["target stress"] if stressed else None,
        definition=define(config, study.suite, placed.settings, placed.digests, stressed),
        keep_model=keep_model,
    )


def _places(placed: Placed, out: Path) -> dict[str, str]:
    """Results of the retrained model, where there is one, and of the target."""
    folder = out / REFERENCES / placed.target.name
    roles = ["target"] if placed.target.retrained is None else ["retrained", "target"]
    return {
        **{role: str(folder / role) for role in roles},
        **{f"{role} stress": str(folder / f"{role}-stress") for role in roles},
    }


def _references(study: Study, placed: Placed, out: Path, watch: Watch) -> None:
    """Score the retrained model and the target, once; tables of the same weights and rows are used again."""
    target, there = placed.target, _places(placed, out)
    specs = {"retrained": target.retrained, "target": target.model}
    for role, spec in specs.items():
        if spec is None:
            continue
        name = f"{target.name}, {role}"

        def tell(stage: str, name: str = name) -> None:
            watch(Step(name, 0, 0, stage))

        retrained = there.get("retrained") if role == "target" else None
        options: dict[str, Any] = {"settings": placed.settings, "progress": stages(tell)}
        evaluate(spec, study.suite, placed.data, retrained=retrained, out=there[role], **options)
        if study.stress is not None:
            options["settings"] = dataclasses.replace(study.stress, evaluate=placed.settings)
            run_stress(spec, study.suite, placed.data, out=Path(there[f"{role} stress"]), **options)
        tell("done")


@dataclass(frozen=True)
class _Told:
    """Tells how a cell stands."""

    watch: Watch
    total: int

    def stage(self, number: int, job: Job, stage: str) -> None:
        self.watch(Step(job.name, number, self.total, stage))

    def ended(self, number: int, job: Job) -> None:
        record = read_record(job.folder) or {}
        failed = record.get("state") == "failed"
        self.watch(Step(job.name, number, self.total, "failed" if failed else "done", record.get("error")))


def _in_turn(waiting: Sequence[tuple[int, Job]], _workers: int, told: _Told, asked: Interrupted) -> None:
    for number, job in waiting:
        try:
            run_job(job, lambda stage, number=number, job=job: told.stage(number, job, stage), asked)  # type: ignore[misc]
        except InterruptedRun:
            raise _interrupted(job.name) from None
        told.ended(number, job)


def _interrupted(name: str) -> InterruptedRun:
    return InterruptedRun(f"interrupted in {name}; the same command goes on from there")


def _side_by_side(waiting: Sequence[tuple[int, Job]], workers: int, told: _Told, asked: Interrupted) -> None:
    """A process for each cell: what one of them leaves in memory, or dies of, is its own."""
    context: Any = multiprocessing.get_context("spawn")
    stop, threads = context.Event(), max(1, torch.get_num_threads() // workers)
    left = list(waiting)
    running: dict[Any, tuple[Any, int, Job]] = {}
    names: list[str] = []
    while left or running:
        if asked():
            stop.set()
            left = []
        while left and len(running) < workers:
            number, job = left.pop(0)
            process = context.Process(target=_work, args=(job, stop, threads, os.getpid()), daemon=True)
            process.start()
            told.stage(number, job, "start")
            running[process.sentinel] = (process, number, job)
        for sentinel in wait(list(running), timeout=0.5):
            process, number, job = running.pop(sentinel)
            if _ended(process, job):
                told.ended(number, job)
            else:
                names.append(job.name)
    if stop.is_set():
        raise _interrupted(names[0] if names else "a pause between cells")


def _ended(process: BaseProcess, job: Job) -> bool:
    """Whether a process's cell is complete or failed; a process that died is a failure of its cell."""
    process.join()
    if process.exitcode not in (0, InterruptedRun.exit_code):
        fail(job, f"the process of the cell ended with {_reason(process.exitcode)}")
    return process.exitcode != InterruptedRun.exit_code


def _reason(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _work(job: Job, stop: Any, threads: int, parent: int) -> None:
    """What a worker process does: one cell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    torch.set_num_threads(threads)
    try:
        run_job(job, lambda _: None, lambda: stop.is_set() or os.getppid() != parent)
    except InterruptedRun:
        raise SystemExit(InterruptedRun.exit_code) from None


def dry_run(study: Study) -> dict[str, Any]:
    """What a comparison would do: its cells with all their settings; nothing is loaded or written.

    Args:
        study: what is compared.

    Returns:
        JSON values.

    Raises:
        UsageError: as `compare`, before its first run.
    """
    check(study)
    runs: list[dict[str, Any]] = []
    for cell in study.cells():
        files = {name: part.source for name, part in cell.target.parts.items()}
        config = study.config(cell, files, Path(CELLS) / cell.name / RUN).resolved()
        formula = config.spec.formula if config.method != "masc" else "masc"
        budget = f"{config.recipe.epochs} passes" if config.budget and config.recipe else "the rule"
        runs.append({"name": cell.name, "method": formula, "budget": budget, "config": config.to_dict()})
    return {"suite": study.suite, "axes": list(study.axes), "cells": runs}
