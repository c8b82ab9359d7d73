"""One run from a configuration to a verified model and its numbers, and its resumption."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from expunge.errors import RunError, UsageError
from expunge.lm import (
    LoadedModel,
    SaveReport,
    adapter_disabled,
    layer_index,
    load_model,
    probe_logits,
    save_model,
)
from expunge.objectives import MascSettings
from expunge.scoring import ScoreTable
from expunge.stopping import left_over
from expunge.train._arithmetic import base_weights, subtract_tuning
from expunge.train._card import new_card, write_card
from expunge.train._config import RunConfig
from expunge.train._evaluate import Evaluation
from expunge.train._folder import LOG, MODEL, RESULT, SCORES, RunFolder
from expunge.train._log import RunLog
from expunge.train._loop import UnlearningLoop
from expunge.train._plan import check_plan, plan_run
from expunge.train._prepare import (
    check_lengths,
    held_out,
    load,
    make_objective,
    make_runner,
    make_trainable,
)
from expunge.train._progress import Progress, Watch
from expunge.train._record import check_same, describe_run
from expunge.train._result import Earlier, Summary, UnlearnResult
from expunge.train._state import StepError, StepReport
from expunge.train._track import Tracker, check_tracker, result_numbers


class InterruptedRun(RunError):
    """The run was asked to end; its folder can be resumed, or nothing was written yet."""

    exit_code = 130


def unlearn(
    config: RunConfig,
    *,
    progress: Watch | None = None,
    interrupted: Callable[[], bool] | None = None,
    request: Mapping[str, str] | None = None,
) -> UnlearnResult:
    """Make a model forget the examples of a file.

    Args:
        config: the run; `RunConfig(model=..., forget=..., retain=..., out=...)` is enough.
        progress: called often with what the run is doing; an error that it raises ends the run, which can be resumed.
        interrupted: asked after every update; True ends the run with a checkpoint.
        request: kept in `run.json` for whoever ends the run: where its result is to be signed.

    Returns:
        The result, which is also in the run folder.

    Raises:
        UsageError: the input or an option is wrong; nothing was written.
        RunError: it failed while working; what is in the folder can be resumed.

    Example:
        result = unlearn(RunConfig(model="smollm2-135m", forget="forget.jsonl", retain="retain.jsonl", out="run"))
    """
    with _flushed():
        return _Run(config.resolved(), progress, interrupted).start(request)


def resume(
    out: str | Path, *, progress: Watch | None = None, interrupted: Callable[[], bool] | None = None
) -> UnlearnResult:
    """Continue an interrupted run where its last checkpoint was taken, as if it had not stopped.

    Args:
        out: the run folder.
        progress: as for `unlearn`.
        interrupted: as for `unlearn`.

    Raises:
        UsageError: there is nothing to resume, or model, data or packages are not those of the run.
    """
    folder = RunFolder(out)
    saved = folder.read_run()
    if folder.read_json(RESULT) is not None:
        raise UsageError(f"{folder.path}: this run is complete; its model is in {folder.path / MODEL}")
    config = RunConfig.from_dict(saved["config"])
    # The number of threads decides in which order a CPU sums.
    config = dataclasses.replace(config, out=str(out), threads=config.threads or saved["threads"])
    with _flushed():
        return _Run(config, progress, interrupted).go_on(folder, saved)


def finished(out: str | Path) -> UnlearnResult | None:
    """The result of a complete run, without the answers; None for a run that can be resumed.

    Args:
        out: the run folder.

    Raises:
        UsageError: this is no run folder.
    """
    folder = RunFolder(out)
    folder.read_run()
    values = folder.read_json(RESULT)
    if values is None:
        return None
    # The folder may have been moved since.
    places = {"out": str(folder.path), "model": str(folder.path / MODEL)}
    return UnlearnResult.from_dict(values | places)


def request_of(out: str | Path) -> dict[str, str] | None:
    """What `unlearn` was given as `request`; None where that was nothing.

    Args:
        out: the run folder.

    Raises:
        UsageError: this is no run folder.
    """
    return RunFolder(out).read_run().get("request")


def loaded_run(config: RunConfig) -> _Run:
    """A run up to its first number: files read, model loaded and made trainable, nothing written."""
    run = _Run(config.resolved(), None, None)
    run.folder.check_free()
    run._load()
    return run


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """Subnormal numbers count as zero inside the block.

    Probabilities of a confident model are full of them, and a CPU takes up to twice as long over them. Torch has no
    question for the former setting: a product that is zero only where it is on tells.
    """
    former = float(torch.tensor(1e-39) * 1.0) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(former)


class _Run:
    """The stages of a run, in the order in which they happen."""

    def __init__(self, config: RunConfig, progress: Watch | None, interrupted: Callable[[], bool] | None) -> None:
        assert config.masc is not None
        assert config.recipe is not None
        self.config, self.masc, self.recipe = config, config.masc, config.recipe
        self.watch: Watch = progress or (lambda _: None)
        self.interrupted = interrupted or (lambda: False)
        self.folder = RunFolder(config.out)
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []

    # -- the two ways in ---------------------------------------------------------------------------------------------

    def start(self, request: Mapping[str, str] | None) -> UnlearnResult:
        self.folder.check_free()
        check_tracker(self.config.track)
        self._load()
        source = self._calibrate()
        self.run_info = describe_run(self.config, self.masc, source, self.loaded, self.data)
        self.run_info["request"] = None if request is None else dict(request)
        self.folder.create(self.run_info)
        with self.folder.held():
            return self._go(None)

    def go_on(self, folder: RunFolder, saved: dict[str, Any]) -> UnlearnResult:
        self.folder, self.run_info = folder, saved
        self.masc = MascSettings(**saved["resolved_masc"])
        check_tracker(self.config.track)
        with folder.held():
            self._load()
            check_same(saved, self.loaded, self.data, self.config.model)
            state, self.notes = folder.checkpoints.read()
            return self._go(state)

    def _go(self, state: dict[str, Any] | None) -> UnlearnResult:
        """From the beginning, or from where a checkpoint was taken."""
        with self._tracking() as tracker:
            return self._run(state, tracker)

    def _run(self, state: dict[str, Any] | None, tracker: Tracker | None) -> UnlearnResult:
        log = RunLog(self.folder.path / LOG, keep=state["log"] if state else 0, listener=tracker)
        if state is None:
            log.write("plan", **self.plan.to_dict())
            log.write("start", tolerance=self.masc.tolerance, tolerance_source=self.run_info["tolerance_source"])
        self.evaluation = Evaluation(self.config, self.masc, self.data, self.folder, self.watch)
        before = self._before()
        self._make_loop(log)
        self._keep_references()
        if state is None:
            with self._stage("train"):
                self.loop.start()
        else:
            self.loop.load_state_dict(state["run"])
            self.seconds.update(state["seconds"])
        result = self._finish(before, [] if tracker is None else tracker.notes)
        if tracker is not None:
            tracker("result", result_numbers(result))
        return result

    @contextlib.contextmanager
    def _tracking(self) -> Iterator[Tracker | None]:
        name = self.config.track
        tracker = None if name is None else Tracker(name, self.folder.path, self.config.to_dict())
        try:
            yield tracker
        finally:
            if tracker is not None:
                tracker.finish()

    # -- stages ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        self.watch(Progress("load"))
        torch.set_num_threads(self.config.threads or torch.get_num_threads())
        self._plan()
        with self._stage("load"):
            self.loaded: LoadedModel = load(self.config)
            self.fingerprint = self.loaded.fingerprint
        check_lengths(self.loaded.model, self.data)
        # Full fine-tuning leaves no base to compare with; an adapter can be switched off.
        self.base_logits = None if self.recipe.lora else probe_logits(self.loaded.model, self._probe_ids())
        # NOTE: made before the folder is: a target that matches nothing must leave no folder.
        self.trainable = make_trainable(self.loaded.model, self.recipe, self.config.seed)
        self.base_weights = base_weights(self.trainable) if self.config.spec.kind == "weights" else {}
        self._check_layers()
        self._make_runner()
        if self.trainable.split.head is None and self.references.get("states"):
            if not self.recipe.lora:
                raise UsageError("full: this model's head is not recognised; accepted with it is --lora")
            if self.masc.teacher_delta is not None:
                raise UsageError("teacher_delta: this model's head is not recognised; accepted with it is none")

    def _plan(self) -> None:
        """Read and encode the data and count what the run takes; of the model only the small files are read yet."""
        config = self.config
        self.plan, shape, self.data = plan_run(config)
        if config.plan_check:
            check_plan(self.plan, config, shape, self.data)
        self.watch(Progress("plan", lines=tuple(self.plan.lines())))

    def _as_loaded(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block the model is the one that was loaded; holds until the first update also without this."""
        model = self.trainable.model
        return adapter_disabled(model) if isinstance(model, PeftModel) else contextlib.nullcontext()

    def _calibrate(self) -> str:
        """Set α, from the holdout where there is one and no number was given."""
        if self.config.tolerance is not None:
            return "option"
        if self.data.holdout is None:
            return "preset"
        evaluation = Evaluation(self.config, self.masc, self.data, self.folder, self.watch)
        with self._stage("calibrate"), self._as_loaded():
            tables = evaluation.score(self.loaded, self.data.holdout, "calibrate")
        found = tables.mean("violation")
        assert found is not None
        self.masc = dataclasses.replace(self.masc, tolerance=found)
        return "holdout"

    def _before(self) -> dict[str, Summary | None]:
        saved = self.folder.read_json("scores/before.json")
        # Answers are kept in memory only; where they are to be shown, a resumed run asks for them again.
        if saved is not None and not self.config.show_text:
            return {name: None if value is None else Summary(**value) for name, value in saved.items()}
        with self._stage("evaluate"), self._as_loaded():
            found = self.evaluation.evaluate(self.loaded, "before")
        self.folder.write_json(
            "scores/before.json",
            {name: None if value is None else dataclasses.asdict(value) for name, value in found.items()},
        )
        return found

    def _probe_ids(self) -> torch.Tensor:
        """Tokens on which the saved model is compared: the longest forget row, where the weights changed most."""
        longest = max(self.data.forget.corpus.rows, key=lambda row: len(row.input_ids))
        return torch.tensor([longest.input_ids[:64]])

    def _make_runner(self) -> None:
        config = self.config
        self.runner = make_runner(self.trainable, self.data, pad_id=self.loaded.pad_id, seed=config.seed)
        n_forget = len(self.data.forget.corpus.rows)
        n_retain = 0 if self.data.retain is None else len(self.data.retain.corpus.rows)
        objective = make_objective(config, self.masc, self.runner, self.data, 0)
        forget, retain = list(range(n_forget)), list(range(n_forget, n_forget + n_retain))
        self.references = objective.references(forget, retain)
        if self.masc.teacher_delta is not None:  # the measurement asks for the competitors, whatever the method
            self.references["states"] = sorted({*self.references.get("states", ()), *forget})
        self.references = {kind: rows for kind, rows in self.references.items() if rows}

    def _check_layers(self) -> None:
        """A layer that a term asks for is there, and something that is trained lies in it or below it."""
        for options in (self.config.spec.forget_options, self.config.spec.retain_options):
            if "layer" in options:
                layer = layer_index(self.trainable.model, int(options["layer"] or 0))
                if layer < self.trainable.first_layer:
                    raise UsageError(
                        f"layer: found {layer}, accepted is one from {self.trainable.first_layer}, the first that is "
                        f"trained (upper {self.recipe.upper:g})"
                    )

    def _make_loop(self, log: RunLog) -> None:
        config, forget = self.config, self.data.forget.corpus.rows
        masters = self.trainable.masters
        objective = make_objective(config, self.masc, self.runner, self.data, int(masters.rounds))
        self.loop = UnlearningLoop(
            self.runner,
            n_forget=len(forget),
            n_retain=0 if self.data.retain is None else len(self.data.retain.corpus.rows),
            ids=self.data.forget.row_ids,
            masc=self.masc,
            recipe=self.recipe,
            masters=masters,
            optimizer=self.trainable.optimizer,
            seed=config.seed,
            log=log,
            held_out=held_out(config, len(forget)),
            micro_batch=config.micro_batch,
            objective=objective,
            budget=config.budget,
            skip_first=config.spec.recipe.skip_first,
        )

    def _keep_references(self) -> None:
        """Full fine-tuning: what the reference model says of the rows is computed before the first update."""
        if self.recipe.lora:
            return
        total, done = sum(len(rows) for rows in self.references.values()), 0

        def count(_: int) -> None:
            nonlocal done
            done += 1
            self.watch(Progress("reference", done, total, bytes=size))

        size = self.runner.reference_bytes(self.references)
        with self._stage("reference"):
            self.runner.keep_reference(self.references, count)

    def _finish(self, before: dict[str, Summary | None], said: list[str]) -> UnlearnResult:
        started, spent = time.monotonic(), self.seconds.get("train", 0.0)

        def note() -> None:
            self.seconds["train"] = spent + time.monotonic() - started

        def after_step(report: StepReport) -> None:
            note()
            self._show()
            ended = self.interrupted()
            if ended or report.step % self.config.checkpoint_every == 0:
                self._checkpoint()
            if ended:
                raise InterruptedRun(
                    f"interrupted at step {report.step}; `expunge resume {self.folder.path}` continues from there"
                )

        if self.recipe.alternates and not self.folder.checkpoints:
            self._checkpoint()
        try:
            self.loop.run(after_step)
        except StepError as error:
            if error.partial:  # a forget step was taken and its retain steps failed: the last checkpoint stays
                raise RunError(f"{error}; {self.folder.path} holds the last checkpoint before it") from None
            self._checkpoint()
            raise RunError(f"{error}; {self.folder.path} holds the state before that step") from None
        note()
        self._checkpoint()
        if self.config.spec.kind == "weights":
            self._subtract()
            note()
        saved = self._save()
        self.notes += said
        return self._conclude(before, saved)

    def _subtract(self) -> None:
        """Task arithmetic: take what tuning on the forget examples changed off the weights."""
        scale = float(self.config.spec.forget_options["scale"] or 0.0)
        subtract_tuning(self.trainable, self.base_weights, scale)
        self.loop.measure_all()
        self.loop.state.reason += f"; their task vector was subtracted, scale {scale:g}"

    def _save(self) -> SaveReport:
        self.watch(Progress("save"))
        target = self.folder.path / MODEL
        if target.exists():  # a resumed run that was cut off between saving and its result
            shutil.rmtree(target)
        with self._stage("save"):
            return save_model(
                self.trainable.model,
                self.loaded.tokenizer,
                target,
                card=new_card(self.config.model),
                adapter_only=self.config.adapter_only,
                probe_ids=self._probe_ids(),
                base_logits=self.base_logits,
            )

    def _conclude(self, before: dict[str, Summary | None], saved: SaveReport) -> UnlearnResult:
        state, alpha = self.loop.state, self.masc.tolerance
        assert alpha is not None
        del self.loop.optimizer, self.loop.masters, self.loop.runner, self.runner, self.trainable, self.loaded
        self.loaded = load_model(
            str(self.folder.path / MODEL),
            dtype=self.config.dtype,
            device=self.config.device,
            trust_remote_code=self.config.trust_remote_code,
        )
        with self._stage("evaluate"):
            after = self.evaluation.evaluate(self.loaded, "after")
        left = [self.loop.ids[index] for index in state.rest]
        if self.masc.teacher_delta is None:
            table = self.evaluation.forget_table
            assert table is not None
            above = left_over(table.values("violation"), table.values("tokens"), alpha)
            left = [self.loop.ids[index] for index in above]
        reason = state.reason
        if state.stopped_at is not None and state.rest and not left:  # training asks for a token more than the result
            reason = f"stopped at step {state.stopped_at}: every example is forgotten"
        if left and not state.rest:
            reason = f"{len(left)} examples are above the tolerance in the saved model, though not in training"
        earlier = self._earlier(before, after)
        assert before["forget"] is not None
        assert after["forget"] is not None
        result = UnlearnResult(
            out=str(self.folder.path),
            model=str(self.folder.path / MODEL),
            forgotten=(state.stopped_at is not None or self.config.budget) and not left,
            reason=reason,
            tolerance=alpha,
            tolerance_source=self.run_info["tolerance_source"],
            steps=state.step,
            stopped_at=state.stopped_at,
            seconds={name: round(value, 3) for name, value in self.seconds.items()},
            left=left,
            forget_before=before["forget"],
            forget_after=after["forget"],
            retain_before=before["retain"],
            retain_after=after["retain"],
            max_logit_error=saved.max_logit_error,
            fingerprint=saved.fingerprint,
            earlier=earlier,
            notes=(*self.loaded.notes, *self.notes, *saved.warnings, *self._advice(), *_known_again(earlier)),
            answers=self.evaluation.answers,
        )
        write_card(self.folder.path, result=result.to_dict(texts=False))
        self.folder.write_json(RESULT, result.to_dict(texts=self.config.show_text))
        self.folder.checkpoints.drop()
        return result

    def _earlier(self, before: dict[str, Summary | None], after: dict[str, Summary | None]) -> Earlier | None:
        """What became of what was forgotten before."""
        then, now, table = before.get("earlier"), after["earlier"], self.evaluation.earlier_table
        if then is None or now is None or table is None:
            return None
        alpha = self.masc.tolerance
        assert alpha is not None
        was = ScoreTable.from_parquet(self.folder.path / SCORES / "earlier-before.parquet")
        known, above = (set(left_over(one.values("violation"), one.values("tokens"), alpha)) for one in (was, table))
        return Earlier(then, now, [table.values("id")[row] for row in sorted(above - known)])

    def _advice(self) -> tuple[str, ...]:
        """What would have made the numbers surer."""
        preset = self.run_info["tolerance_source"] == "preset"
        if not preset or self.config.preset != "default" or self.config.method != "masc":
            return ()
        return (
            f"the tolerance {self.masc.tolerance:g} is the preset's; `--holdout FILE` with comparable texts the model "
            "never saw would measure it",
        )

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        state = self.loop.state
        self.watch(
            Progress(
                "train",
                done=len(state.items) - len(state.queue),
                total=len(state.items),
                violation=self.loop.mean_violation,
                tolerance=self.masc.tolerance,
                step=state.step,
                phase=state.phase,
            )
        )

    def _checkpoint(self) -> None:
        # The log first: it may be longer than the checkpoint says, never shorter.
        log = self.loop.log.save()
        self.folder.checkpoints.write(
            self.loop.state.step, {"run": self.loop.state_dict(), "log": log, "seconds": dict(self.seconds)}
        )

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def _known_again(earlier: Earlier | None) -> tuple[str, ...]:
    if earlier is None or not earlier.back:
        return ()
    shown = ", ".join(earlier.back[:20]) + (f" and {len(earlier.back) - 20} more" if len(earlier.back) > 20 else "")
    return (
        f"{len(earlier.back)} of {earlier.after.examples} examples of earlier requests are known again (ids): {shown}; "
        "a run with their files as --forget removes them",
    )
