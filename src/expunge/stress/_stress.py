"""`stress`: a model, a suite and data in; what comes back under each test out."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expunge.errors import UsageError
from expunge.lm import load_model, pick_device
from expunge.stress._bench import Bench
from expunge.stress._quantise import NotMeasuredError
from expunge.stress._rows import Found, Models, make_rows
from expunge.stress._scores import WATCHED, reduced
from expunge.stress._settings import StressSettings
from expunge.stress._store import RESULT, StoredTests, check_folder, read_outcome, stored_tests, write_outcome
from expunge.stress._tests import PLAIN, Job, Outcome, jobs_of, tables_of
from expunge.suites import (
    SUITES,
    Plan,
    Source,
    Stamp,
    Watch,
    check_spec,
    encode_plan,
    make_stamp,
    write_json,
    writing,
)

RETRAINED, ORIGINAL = "retrained", "original"


@dataclass(frozen=True)
class StressResult:
    """What a stress run found.

    Attributes:
        suite: its name.
        fingerprint: of the stressed model.
        rows: one for each test, setting and metric, with
            test, setting, metric: names; `metric` as in the suite's evaluation, or of the rest of an answer;
            before, after, change: means over the `n` rows that both measured, and their difference;
            interval: 95 % interval of the change;
            retrained: the retrained model's value under the same test;
            original: the original model's value without the test;
            recovered: change / (original − before), the share of what was forgotten that came back;
            better: "higher", or "reference": the closer to the retrained model the better;
            reason, recovered_reason: why a value is null.
        details: by test, what was done: what was quantised, which rows were taught again.
        notes: what a user should know.
        seconds: by model and test.
        stamp: model, data and settings.
        settings: of the run.
        references: fingerprints of the retrained and the original model; None without one.
    """

    suite: str
    fingerprint: str
    rows: list[dict[str, Any]]
    details: dict[str, dict[str, Any]]
    notes: tuple[str, ...]
    seconds: dict[str, float]
    stamp: Stamp
    settings: StressSettings
    references: dict[str, str | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values only, without texts and values per row."""
        found = dataclasses.asdict(self)
        found["seconds"] = {name: round(value, 3) for name, value in self.seconds.items()}
        return found | {"notes": list(self.notes)}


@dataclass
class _Work:
    """A stress run while it goes on."""

    plan: Plan
    settings: StressSettings
    jobs: list[Job]
    watch: Watch
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def stress(
    model: str,
    suite: str,
    data: str | Path,
    *,
    retrained: str | None = None,
    original: str | None = None,
    out: str | Path,
    settings: StressSettings | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> StressResult:
    """Try to bring back what a model has forgotten: quantised, taught some of it again, or asked in other ways.

    Neither the model's folder nor its weights are changed. Each finished test is kept in `out` with its values per row
    and not done again for the same weights, data and options; `stress.json` is written at the end.

    Args:
        model: as `expunge.lm.load_model` takes it.
        suite: "tofu", "muse" or "mine".
        data: folder in the suite's layout, or a hub name.
        retrained: a model that never saw the rows to forget, or the `out` of its stress run; it is put to the same
            tests, since what it can answer was not brought back.
        original: the model before unlearning, or the `out` of its stress run; it is measured as it is, and gives the
            share that came back.
        out: results folder.
        settings: which tests, and how; None: all, by default.
        progress: called with (stage, done, in all); a stage is "load", or "TEST: score", "TEST: generate" and
            "relearn: relearn", with "retrained " or "original " before it.

    Returns:
        What was found.

    Raises:
        UsageError: an input is wrong; paths and data are checked before weights are loaded.
        RunError: it failed while working; finished tests are kept.
    """
    settings = settings or StressSettings()
    if suite not in SUITES:
        raise UsageError(f"suite: found {suite!r}, accepted is one of {', '.join(SUITES)}")
    pick_device(settings.evaluate.device)
    folder = Path(out).expanduser()
    check_folder(folder)
    specs = {RETRAINED: retrained, ORIGINAL: original}
    watched = WATCHED[suite]
    plan = SUITES[suite].read(Source(data, settings.evaluate.rows), settings.evaluate.split)
    plan = reduced(plan, tables_of(watched, plan))
    stored = {
        name: None if spec is None else stored_tests(spec, plan, settings.evaluate.measure, name)
        for name, spec in specs.items()
    }
    for option, spec in (("model", model), *specs.items()):
        if spec is not None and stored.get(option) is None:
            check_spec(option, spec)
    jobs = jobs_of(settings)
    work = _Work(plan, settings, jobs, progress or _silent)
    found, stamp = _run(model, "", folder, jobs, work)
    others: dict[str, Found | None] = dict.fromkeys(specs)
    references: dict[str, str | None] = dict.fromkeys(specs)
    for option, spec in specs.items():
        # The original model says what there was to bring back: as it is, and asked as the model is.
        wanted = [job for job in jobs if option == RETRAINED or job.label in (PLAIN, "prefix 0 %")]
        there = stored[option]
        if there is not None:
            others[option], references[option] = _stored(there, wanted, option, work), there.fingerprint
        elif spec is not None:
            others[option], theirs = _run(spec, option, folder / option, wanted, work, known=(found, stamp))
            references[option] = theirs.fingerprint
    if references[RETRAINED] == stamp.fingerprint:
        work.notes.append("warning: the retrained model is the stressed model itself (same fingerprint)")
    result = StressResult(
        suite,
        stamp.fingerprint,
        make_rows(jobs, Models(found, others[RETRAINED], others[ORIGINAL]), watched, settings),
        {job.label: one.details for job in jobs if isinstance(one := found[job.label], Outcome) and one.details},
        tuple(dict.fromkeys(work.notes)),
        work.seconds,
        stamp,
        settings,
        references,
    )
    with writing(folder):
        write_json(folder / RESULT, result.to_dict())
    return result


def _run(
    spec: str,
    whose: str,
    folder: Path,
    jobs: Sequence[Job],
    work: _Work,
    *,
    known: tuple[Found, Stamp] | None = None,
) -> tuple[Found, Stamp]:
    """Do with one model what was not done before; `known` is of the stressed model, which it may be."""
    work.watch("load", 0, 1)
    gc.collect()
    evaluate = work.settings.evaluate
    loaded = load_model(spec, dtype=evaluate.dtype, device=evaluate.device)
    weight = next(loaded.model.parameters())
    encoded = encode_plan(loaded, work.plan, evaluate.measure)
    stamp = make_stamp(
        work.plan,
        evaluate.measure,
        fingerprint=loaded.fingerprint,
        tokens=[[row.input_ids, row.prompt_length] for row in encoded.rows],
        dtype=str(weight.dtype).removeprefix("torch."),
        device=weight.device.type,
    )
    if known is not None and known[1].key == stamp.key:
        return known
    if not whose:
        check_folder(folder, stamp.fingerprint)
        work.notes += loaded.notes
    found: dict[str, Outcome | str] = {}
    for job in jobs:
        label = f"{whose} {job.label}".strip()

        def watch(stage: str, done: int, total: int, label: str = label) -> None:
            work.watch(f"{label}: {stage}", done, total)

        outcome = read_outcome(folder, job, stamp)
        if outcome is None:
            started = time.monotonic()
            bench = Bench(loaded, work.plan, encoded, WATCHED[work.plan.suite], work.settings, watch)
            try:
                outcome = job.run(bench)
            except NotMeasuredError as error:
                found[job.label] = str(error)
                continue
            work.seconds[label] = time.monotonic() - started
            write_outcome(folder, job, stamp, outcome, work.seconds[label])
        found[job.label] = outcome
        work.notes += outcome.notes
    return found, stamp


def _stored(there: StoredTests, jobs: Sequence[Job], option: str, work: _Work) -> Found:
    """What stored results have of the tests that are wanted."""
    found = {job.label: there.find(job) for job in jobs}
    lacking = [label for label, outcome in found.items() if outcome is None]
    if lacking:
        work.notes.append(f"the {option} model's results have no {', '.join(lacking)} with the same options")
    return {label: outcome or "not in the stored results" for label, outcome in found.items()}


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass
