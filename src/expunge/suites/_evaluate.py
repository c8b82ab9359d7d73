"""`evaluate`: a model, a suite and data in; metrics with intervals, reasons and rows out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expunge.errors import UsageError
from expunge.lm import SMOLLM2, LoadedModel, load_model, pick_device
from expunge.metrics import Bootstrap, Metric
from expunge.suites import _mine, _muse, _tofu
from expunge.suites._common import Context, flags_of, with_references
from expunge.suites._encode import Encoded, MeasureSettings, encode_plan
from expunge.suites._lm_eval import check_installed, run_tasks
from expunge.suites._measure import Measured, Watch, measure
from expunge.suites._plan import Plan
from expunge.suites._source import Source
from expunge.suites._store import (
    EVALUATION,
    MEASUREMENT,
    ORIGINAL,
    RETRAINED,
    ROWS,
    Stamp,
    check_comparable,
    make_stamp,
    read_measured,
    read_stamp,
    write_json,
    write_measured,
    writing,
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Suite:
    """A benchmark: how its data is read, and its metrics.

    Attributes:
        parts: what selections of rows call the parts of its data.
        read: from a source and, where there are several, the name of a split, to what is needed of a model.
        metrics: from a model's tables, and what they are compared with.
    """

    parts: tuple[str, ...]
    read: Callable[..., Plan]
    metrics: Callable[[Measured, Context], list[Metric]]


SUITES = {
    "tofu": Suite(_tofu.PARTS, _tofu.read, _tofu.metrics),
    "muse": Suite(_muse.PARTS, _muse.read, _muse.metrics),
    "mine": Suite(_mine.PARTS, _mine.read, _mine.metrics),
}


def metric_names(suite: str) -> tuple[str, ...]:
    """Names of all metrics of a suite: what it finds in no data at all has every name.

    Args:
        suite: a key of `SUITES`.
    """
    nothing = Measured(Plan(suite, (), ()), {}, {}, {}, "")
    return tuple(metric.name for metric in SUITES[suite].metrics(nothing, Context(Bootstrap())))


@dataclass(frozen=True)
class EvaluateSettings:
    """How a model is evaluated.

    Attributes:
        measure: how texts become tokens, and what is measured of them.
        rows: for parts of the data, which rows to take, such as {"forget": "0:100"}.
        split: which rows TOFU forgets, such as "forget10"; None: the only ones in the folder.
        dtype: auto (the checkpoint's, or float32 where the processor is slow in that), float32, bfloat16 or float16.
        device: where to run; None takes the accelerator if there is one.
        seed: of the bootstrap.
        resamples: of the bootstrap, 2 or more.
        tasks: names of lm-eval tasks, run after the suite.
        task_files: folder with task files of lm-eval; None: its own tasks only.

    Raises:
        UsageError: an option is out of range.
    """

    measure: MeasureSettings = field(default_factory=MeasureSettings)
    rows: Mapping[str, str] = field(default_factory=dict)
    split: str | None = None
    dtype: str = "auto"
    device: str | None = None
    seed: int = 0
    resamples: int = 1000
    tasks: tuple[str, ...] = ()
    task_files: str | None = None

    def __post_init__(self) -> None:
        try:
            Bootstrap(seed=self.seed, resamples=self.resamples)
        except ValueError as error:
            raise UsageError(str(error)) from None


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        suite: its name.
        metrics: in the suite's order, with the retrained model's values as references.
        flags: signs of over-forgetting; empty where there are none.
        notes: what a user should know about data and models.
        seconds: loading, scoring and generating, and computing metrics.
        stamp: what the tables were measured with.
        measured: the tables.
    """

    suite: str
    metrics: tuple[Metric, ...]
    flags: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: dict[str, float]
    stamp: Stamp
    measured: Measured = field(repr=False)

    def metric(self, name: str) -> Metric:
        """A metric by name.

        Raises:
            UsageError: there is none of that name.
        """
        found = next((metric for metric in self.metrics if metric.name == name), None)
        if found is None:
            raise UsageError(f"metric: found {name!r}, accepted is one of {', '.join(m.name for m in self.metrics)}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values only, without texts and values per row."""
        return {
            "suite": self.suite,
            "metrics": [metric.to_dict() for metric in self.metrics],
            "flags": list(self.flags),
            "notes": list(self.notes),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "stamp": dataclasses.asdict(self.stamp),
        }


@dataclass
class _Work:
    """One evaluation while it runs."""

    plan: Plan
    settings: EvaluateSettings
    out: Path | None
    watch: Watch
    seconds: dict[str, float] = field(default_factory=dict)
    whose: str = ""

    @contextlib.contextmanager
    def timed(self, name: str) -> Any:
        """Add the seconds of a block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a stage, of the model compared with where one is at work."""
        name = f"{self.whose} {name}".strip()
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def evaluate(
    model: str | LoadedModel,
    suite: str,
    data: str | Path,
    *,
    retrained: str | None = None,
    original: str | None = None,
    out: str | Path | None = None,
    settings: EvaluateSettings | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a model with a suite.

    What the suite needs is named first; each distinct row is scored once and each distinct prompt continued once.

    Args:
        model: as `expunge.lm.load_model` takes it, or a loaded model.
        suite: "tofu", "muse" or "mine".
        data: folder in the suite's layout, or a hub name.
        retrained: a model that never saw the rows to forget, or the results folder of its evaluation.
        original: the model before unlearning, or the results folder of its evaluation; the privacy score needs it.
        out: results folder; tables in it that were measured with the same weights, rows and settings are used again.
            None writes nothing.
        settings: how; None: the defaults.
        progress: called with (stage, done, in all).

    Returns:
        The metrics.

    Raises:
        UsageError: an input is wrong; paths and data are checked before weights are loaded.
        RunError: it failed while working.
    """
    settings = settings or EvaluateSettings()
    if suite not in SUITES:
        raise UsageError(f"suite: found {suite!r}, accepted is one of {', '.join(SUITES)}")
    check_installed(settings.tasks)
    pick_device(settings.device)
    for option, spec in (("model", model), ("retrained", retrained), ("original", original)):
        if isinstance(spec, str):
            check_spec(option, spec)
    plan = SUITES[suite].read(Source(data, settings.rows), settings.split)
    folder = None if out is None else Path(out).expanduser()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UsageError(f"out: {folder} is a file, accepted is a folder")
    work = _Work(plan, settings, folder, progress or _silent)
    others = {}
    for option, spec in ((RETRAINED, retrained), (ORIGINAL, original)):
        others[option] = None if spec is None else _stored(spec, plan, settings, option)
    measured, stamp, tasks = _measure_model(model, work)
    for option, spec in ((RETRAINED, retrained), (ORIGINAL, original)):
        if spec is not None and others[option] is None:
            others[option] = _measure_other(spec, option, work, (measured, stamp))
    return _finish(suite, work, measured, stamp, others, tasks)


def check_spec(option: str, spec: str) -> None:
    """Refuse a model that is plainly not there, before anything is loaded.

    Args:
        option: what the message calls it; all but "model" may be the results folder of an evaluation.
        spec: as `expunge.lm.load_model` takes it.

    Raises:
        UsageError: a folder without a model, a file of another kind, or no name of the hub.
    """
    path = Path(spec).expanduser()
    if spec == SMOLLM2:
        return
    if path.is_dir():
        files = {file.name for file in path.iterdir()}
        stored = MEASUREMENT in files and option != "model"
        weights = any(name.endswith(".safetensors") for name in files)
        if not stored and not (weights and files & {"config.json", "adapter_config.json"}):
            wanted = "a model's or adapter's config and safetensors" + ("" if option == "model" else ", or results")
            raise UsageError(f"{option}: found nothing to load in the folder {spec}, accepted are {wanted}")
    elif path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UsageError(f"{option}: found the file {spec}, accepted are a folder, a .gguf file or a hub id")
    elif _HUB_ID.fullmatch(spec) is None or path.suffix in (".gguf", ".json", ".parquet"):
        raise UsageError(f"{option}: found no {spec}, accepted are a folder, a .gguf file, {SMOLLM2} or a hub id")


def _stored(spec: str, plan: Plan, settings: EvaluateSettings, option: str) -> Measured | None:
    """Tables of a results folder; None where the folder is a model."""
    path = Path(spec).expanduser()
    stamp = read_stamp(path) if path.is_dir() else None
    if stamp is None:
        return None
    check_comparable(spec, stamp, plan, settings.measure, option)
    return read_measured(path, plan)


def _measure_model(model: str | LoadedModel, work: _Work) -> tuple[Measured, Stamp, list[Metric]]:
    """Tables of the evaluated model, stored or new, and its lm-eval tasks."""
    loaded = model if isinstance(model, LoadedModel) else _load(model, work)
    stamp, encoded = _stamp(loaded, work)
    measured = None
    if work.out is not None:
        there = read_stamp(work.out)
        if there is not None and there.key != stamp.key:
            raise UsageError(
                f"out: {work.out} has results of {_difference(there, stamp)}, accepted is a new folder, or one of the "
                "same model, rows and settings"
            )
        measured = read_measured(work.out, work.plan) if there is not None else None
    if measured is None:
        measured = _measure(loaded, (stamp, encoded), work, work.out)
    tasks: list[Metric] = []
    if work.settings.tasks:
        with work.timed("tasks"):
            work.watch("tasks", 0, len(work.settings.tasks))
            options = {"include": work.settings.task_files, "batch_size": work.settings.measure.batch_size}
            tasks = run_tasks(loaded, work.settings.tasks, seed=work.settings.seed, **options)  # type: ignore[arg-type]
    return dataclasses.replace(measured, notes=(*loaded.notes, *measured.notes)), stamp, tasks


def _measure_other(spec: str, option: str, work: _Work, ours: tuple[Measured, Stamp]) -> Measured:
    """Tables of a model to compare with, kept in a folder of their own; the evaluated model's where it is the same."""
    work.whose = option
    loaded = _load(spec, work)
    stamp, encoded = _stamp(loaded, work)
    if stamp.key == ours[1].key:
        return ours[0]
    folder = None if work.out is None else work.out / option
    there = None if folder is None else read_stamp(folder)
    if folder is not None and there is not None and there.key == stamp.key:
        return read_measured(folder, work.plan)
    return _measure(loaded, (stamp, encoded), work, folder)


def _load(spec: str, work: _Work) -> LoadedModel:
    work.watch("load", 0, 1)
    gc.collect()
    with work.timed("load"):
        return load_model(spec, dtype=work.settings.dtype, device=work.settings.device)


def _stamp(loaded: LoadedModel, work: _Work) -> tuple[Stamp, Encoded]:
    weight = next(loaded.model.parameters())
    with work.timed("encode"):
        encoded = encode_plan(loaded, work.plan, work.settings.measure)
        stamp = make_stamp(
            work.plan,
            work.settings.measure,
            fingerprint=loaded.fingerprint,
            tokens=[[row.input_ids, row.prompt_length] for row in encoded.rows],
            dtype=str(weight.dtype).removeprefix("torch."),
            device=weight.device.type,
        )
    return stamp, encoded


def _measure(loaded: LoadedModel, what: tuple[Stamp, Encoded], work: _Work, folder: Path | None) -> Measured:
    stamp, encoded = what
    last = time.monotonic()

    def watch(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        work.add(stage, now - last)
        last = now
        work.watch(stage, done, total)

    measured = measure(loaded, work.plan, work.settings.measure, encoded=encoded, watch=watch)
    if folder is not None:
        write_measured(folder, measured, stamp)
    return measured


def _difference(there: Stamp, stamp: Stamp) -> str:
    if there.fingerprint != stamp.fingerprint:
        return "another model"
    return "other rows" if there.data != stamp.data else "other settings"


def _finish(
    suite: str,
    work: _Work,
    measured: Measured,
    stamp: Stamp,
    others: Mapping[str, Measured | None],
    tasks: Sequence[Metric],
) -> Evaluation:
    retrained, original = others[RETRAINED], others[ORIGINAL]
    bootstrap = Bootstrap(seed=work.settings.seed, resamples=work.settings.resamples)
    work.whose = ""
    notes = [*work.plan.notes, *measured.notes]
    identical = retrained is not None and retrained.fingerprint == measured.fingerprint
    if identical:
        notes.append("warning: the retrained model is the evaluated model itself (same fingerprint)")
    with work.timed("metrics"):
        module = SUITES[suite]
        metrics = module.metrics(measured, Context(bootstrap, retrained, original, identical))
        if retrained is not None:
            metrics = with_references(metrics, module.metrics(retrained, Context(bootstrap)))
    metrics = [*metrics, *tasks]
    found = Evaluation(
        suite,
        tuple(metrics),
        flags_of(metrics),
        tuple(dict.fromkeys(notes)),
        work.seconds,
        stamp,
        measured,
    )
    if work.out is not None:
        with writing(work.out):
            values = found.to_dict() | {"retrained": None if retrained is None else retrained.fingerprint}
            values |= {"original": None if original is None else original.fingerprint}
            values |= {"bootstrap": dataclasses.asdict(bootstrap), "rows": dict(work.settings.rows)}
            write_json(work.out / EVALUATION, values)
            rows = {metric.name: metric.per_row for metric in metrics if metric.per_row is not None}
            ids = {name: table.id for name, table in measured.scores.items()}
            ids |= {name: table.id for name, table in measured.answers.items()}
            write_json(work.out / ROWS, {"metrics": rows, "ids": ids}, indent=None)
    return found


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass
