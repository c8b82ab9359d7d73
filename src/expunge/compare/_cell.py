"""One cell: unlearn, evaluate; each stage is kept, and what was cut off goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expunge.compare._stress import define_stress, run_stress
from expunge.errors import ExpungeError, RunError, UsageError
from expunge.suites import EvaluateSettings, evaluate
from expunge.train import InterruptedRun, Progress, RunConfig, resume, unlearn

if TYPE_CHECKING:
    from expunge.stress import StressSettings

RECORD, RUN, EVALUATION, STRESS = "cell.json", "run", "evaluation", "stress"
# Asked between stages and, while a run trains, after every update.
Interrupted = Callable[[], bool]
Watch = Callable[[str], None]
# What is measured of a saved model, by part of the definition.
_MEASURED = {"evaluate": EVALUATION, "stress": STRESS}
# Decide how fast a run is, or where it lies, but not what it is of.
_NOT_DEFINING = ("out", "model", "forget", "retain", "holdout", "threads", "device", "micro_batch", "checkpoint_every")


@dataclass(frozen=True)
class Job:
    """What a process needs to run a cell.

    Attributes:
        name: of the cell.
        folder: of the cell.
        config: of its run, in the folder's `run`.
        suite: it is evaluated by.
        data: the suite's.
        settings: of the evaluation.
        retrained: results folder of the retrained model's evaluation; None without one.
        original: results folder of the target's evaluation.
        stress: how the model is stressed; None: not at all.
        stressed_retrained: results folder of the retrained model's stress tests; None without one.
        stressed_original: of the target's; None where nothing is stressed.
        definition: what the results stand on, as JSON values.
        keep_model: keep the saved model when all is measured.
    """

    name: str
    folder: Path
    config: RunConfig
    suite: str
    data: str
    settings: EvaluateSettings
    retrained: str | None
    original: str
    stress: StressSettings | None
    stressed_retrained: str | None
    stressed_original: str | None
    definition: Mapping[str, Any]
    keep_model: bool = False


def define(
    config: RunConfig,
    suite: str,
    settings: EvaluateSettings,
    digests: Mapping[str, Any],
    stressed: StressSettings | None = None,
) -> dict[str, Any]:
    """What a cell's results stand on; two cells with one definition have the same results.

    Args:
        config: of the run.
        suite: of the evaluation.
        settings: of the evaluation.
        digests: of model and files.
        stressed: settings of the stress tests; None: none.
    """
    run = {name: value for name, value in config.resolved().to_dict().items() if name not in _NOT_DEFINING}
    run |= {name: digests.get(name) for name in ("model", "forget", "retain")}
    run |= {"holdout": None if config.holdout is None else digests.get("holdout")}
    measured = {name: value for name, value in dataclasses.asdict(settings).items() if name != "device"}
    measured |= {"suite": suite, "data": digests["data"], "retrained": digests["retrained"]}
    parts = {"run": run, "evaluate": measured}
    if stressed is not None:
        parts["stress"] = define_stress(stressed)
    return json.loads(json.dumps(parts))


def read_record(folder: Path) -> dict[str, Any] | None:
    """`cell.json` of a cell's folder; None where there is none.

    Raises:
        UsageError: it cannot be read.
    """
    file = folder / RECORD
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError):
        raise UsageError(f"out: {file} cannot be read, accepted is a file that expunge wrote") from None


def check_record(folder: Path, definition: Mapping[str, Any]) -> bool:
    """Whether a cell is complete.

    A saved model that was kept can be measured again, and in another way; a run is what it is.

    Raises:
        UsageError: the folder holds results of another definition; names the first setting that differs.
    """
    record = read_record(folder)
    if record is None:
        return False
    kept = (folder / RUN / "model").is_dir() or not (folder / RUN / "result.json").is_file()
    same = True
    for part, values in definition.items():
        there = record["definition"].get(part, {})
        differing = [name for name in sorted({*values, *there}) if values.get(name) != there.get(name)]
        same = same and not differing
        if differing and (part == "run" or not kept):
            what = _difference(differing[0], there.get(differing[0]), values.get(differing[0]))
            raise UsageError(f"out: {folder} holds results of {what}; accepted is a new folder, or the same")
    return same and record["state"] == "complete"


def _difference(name: str, there: Any, now: Any) -> str:
    if isinstance(there, dict) and isinstance(now, dict):
        inner = next(key for key in sorted({*there, *now}) if there.get(key) != now.get(key))
        return _difference(inner, there.get(inner), now.get(inner))
    digests = all(isinstance(value, str) and len(value) == 64 for value in (there, now))
    return f"another {name} (the files changed)" if digests else f"{name} {there!r} where the file has {now!r}"


def run_job(job: Job, watch: Watch, interrupted: Interrupted) -> dict[str, Any]:
    """Run what is left of a cell.

    Args:
        job: the cell.
        watch: called with what is being done.
        interrupted: True ends the cell where it can go on.

    Returns:
        Its record: "state" is "complete", or "failed" with a line in "error".

    Raises:
        InterruptedRun: it was asked to end.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with _alone(job.folder):
        record = read_record(job.folder) or {"name": job.name, "resumed": False, "definition": {}}
        for part, folder in _MEASURED.items():
            if record["definition"].get(part) != job.definition.get(part):
                shutil.rmtree(job.folder / folder, ignore_errors=True)
        record |= {"definition": dict(job.definition), "state": "running", "stage": "unlearn", "error": None}
        _write(job.folder, record)
        try:
            _unlearn(job, record, watch, interrupted)
            _next(job, record, "evaluate", interrupted)
            _evaluate(job, watch)
            if job.stress is not None:
                _next(job, record, "stress", interrupted)
                _stress(job, job.stress, watch)
            record |= {"state": "complete", "stage": None}
        except InterruptedRun:
            raise
        except Exception as error:  # a cell that fails must not end the others, whatever it raises
            record |= {"state": "failed", "error": one_line(error)}
        if record["state"] == "complete" and not job.keep_model:
            shutil.rmtree(job.folder / RUN / "model", ignore_errors=True)
        _write(job.folder, record)
        return record


def _next(job: Job, record: dict[str, Any], stage: str, interrupted: Interrupted) -> None:
    if interrupted():
        raise InterruptedRun(f"{job.name}: interrupted before {stage}")
    record["stage"] = stage
    _write(job.folder, record)


def _unlearn(job: Job, record: dict[str, Any], watch: Watch, interrupted: Interrupted) -> None:
    run = job.folder / RUN
    if (run / "result.json").is_file():
        return
    if interrupted():
        raise InterruptedRun(f"{job.name}: interrupted before it began")
    stage = ""

    def show(state: Progress) -> None:
        nonlocal stage
        if interrupted() and state.stage != "train":  # there is no update to wait for
            raise InterruptedRun(f"{job.name}: interrupted")
        if state.stage != stage:
            stage = state.stage
            watch(stage)

    if (run / "run.json").is_file():
        record["resumed"] = True
        _write(job.folder, record)
        resume(run, progress=show, interrupted=interrupted)
    else:
        unlearn(job.config, progress=show, interrupted=interrupted)


def _evaluate(job: Job, watch: Watch) -> None:
    if (job.folder / EVALUATION / "evaluation.json").is_file():
        return
    evaluate(
        str(job.folder / RUN / "model"),
        job.suite,
        job.data,
        retrained=job.retrained,
        original=job.original,
        out=job.folder / EVALUATION,
        settings=job.settings,
        progress=stages(watch),
    )


def _stress(job: Job, settings: StressSettings, watch: Watch) -> None:
    if (job.folder / STRESS / "stress.json").is_file():
        return
    run_stress(
        str(job.folder / RUN / "model"),
        job.suite,
        job.data,
        out=job.folder / STRESS,
        settings=settings,
        progress=stages(watch),
        retrained=job.stressed_retrained,
        original=job.stressed_original,
    )


def stages(watch: Watch) -> Callable[[str, int, int], None]:
    """A progress function that tells a stage once, as it begins."""
    last = ""

    def show(stage: str, _done: int, _total: int) -> None:
        nonlocal last
        if stage != last:
            last = stage
            watch(stage)

    return show


def fail(job: Job, error: str) -> None:
    """Record that a cell's process ended without saying so."""
    job.folder.mkdir(parents=True, exist_ok=True)
    record = read_record(job.folder) or {"name": job.name, "resumed": False, "definition": dict(job.definition)}
    _write(job.folder, record | {"state": "failed", "error": error})


def one_line(error: BaseException) -> str:
    """An error in one line. Messages of strangers may quote data: of those only the place is told.

    Args:
        error: any.
    """
    if isinstance(error, ExpungeError):
        return " ".join(str(error).split())
    kind = type(error).__name__
    if isinstance(error, OSError | MemoryError | RuntimeError):
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"{kind}: {first[:200]}".rstrip(": ")
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return kind + "".join(f" in {Path(frame.filename).name}, line {frame.lineno}" for frame in last)


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    aside = folder / f".{RECORD}.part"
    try:
        aside.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(aside, folder / RECORD)
    except OSError as error:
        raise RunError(f"out: cannot write to {folder}: {error.strerror}") from None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time works on a cell: one whose parent was killed ends its stage first."""
    with (folder / ".lock").open("w") as handle:
        if os.name == "posix":
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
