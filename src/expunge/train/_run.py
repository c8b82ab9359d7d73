"""One run from a configuration to a verified model and its numbers, and its resumption."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expunge.data import encode_prompt
from expunge.errors import RunError, UsageError
from expunge.lm import (
    LoadedModel,
    RowRunner,
    SaveReport,
    load_model,
    lora_report,
    probe_logits,
    save_model,
    split_model,
)
from expunge.metrics import rouge_l_recall
from expunge.objectives import MascSettings
from expunge.scoring import ScoreTable, generate, score
from expunge.stopping import left_over
from expunge.train._card import model_card
from expunge.train._config import RunConfig
from expunge.train._folder import LOG, MODEL, RESULT, RunFolder
from expunge.train._log import RunLog
from expunge.train._loop import StepReport, UnlearningLoop
from expunge.train._prepare import (
    Data,
    Part,
    Trainable,
    encode_data,
    held_out,
    load,
    make_runner,
    make_trainable,
    read_data,
)
from expunge.train._result import Answer, Summary, UnlearnResult, summarise_scores

_PACKAGES = ("expunge", "torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors")
_SCORE_BATCH = 16


@dataclass(frozen=True)
class Progress:
    """What a run is doing, for a progress line.

    Attributes:
        stage: load, calibrate, before, reference, train, save or after.
        done: finished units of this stage.
        total: all units; None: not known (training ends by itself).
        violation: the number that matters, where training is on.
        tolerance: what it falls to.
        step: updates done.
        phase: "main" or "rest", while training.
    """

    stage: str
    done: int = 0
    total: int | None = None
    violation: float | None = None
    tolerance: float | None = None
    step: int | None = None
    phase: str | None = None


class InterruptedRun(RunError):
    """The run was asked to end; its folder can be resumed."""

    exit_code = 130


Watch = Callable[[Progress], None]


def unlearn(
    config: RunConfig, *, progress: Watch | None = None, interrupted: Callable[[], bool] | None = None
) -> UnlearnResult:
    """Make a model forget the examples of a file.

    Args:
        config: the run; `RunConfig(model=..., forget=..., retain=..., out=...)` is enough.
        progress: called often with what the run is doing.
        interrupted: asked after every update; True ends the run with a checkpoint.

    Returns:
        The result, which is also in the run folder.

    Raises:
        UsageError: the input or an option is wrong; nothing was written.
        RunError: it failed while working; what is in the folder can be resumed.

    Example:
        result = unlearn(RunConfig(model="smollm2-135m", forget="forget.jsonl", retain="retain.jsonl", out="run"))
    """
    return _Run(config.resolved(), progress, interrupted).start()


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
    config = dataclasses.replace(RunConfig.from_dict(saved["config"]), out=str(out))
    return _Run(config, progress, interrupted).go_on(folder, saved)


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
        self.answers: dict[str, list[Answer]] = {}

    # -- the two ways in ---------------------------------------------------------------------------------------------

    def start(self) -> UnlearnResult:
        self.folder.check_free()
        self._load()
        source = self._calibrate()
        self.run_info = self._describe(source)
        self.folder.create(self.run_info)
        log = RunLog(self.folder.path / LOG)
        log.write("start", tolerance=self.masc.tolerance, tolerance_source=source)
        before = self._before()
        self._make_loop(log)
        self._keep_references()
        with self._stage("train"):
            self.loop.start()
        return self._finish(before)

    def go_on(self, folder: RunFolder, saved: dict[str, Any]) -> UnlearnResult:
        self.folder, self.run_info = folder, saved
        self.masc = MascSettings(**saved["resolved_masc"])
        self._load()
        self._check_same(saved)
        state = folder.read_state()
        log = RunLog(folder.path / LOG, keep=state["log"] if state else 0)
        before = self._before()
        self._make_loop(log)
        self._keep_references()
        if state is None:
            with self._stage("train"):
                self.loop.start()
        else:
            self.loop.load_state_dict(state["run"])
            self.seconds.update(state["seconds"])
        return self._finish(before)

    # -- stages ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        self.watch(Progress("load"))
        torch.set_num_threads(self.config.threads or torch.get_num_threads())
        data = read_data(self.config)
        with self._stage("load"):
            self.loaded: LoadedModel = load(self.config)
            self.fingerprint = self.loaded.fingerprint
        self.data: Data = encode_data(data, self.loaded.tokenizer, self.config)

    def _calibrate(self) -> str:
        """Set α, from the holdout where there is one and no number was given."""
        if self.config.tolerance is not None:
            return "option"
        if self.data.holdout is None:
            return "preset"
        with self._stage("calibrate"):
            tables = self._score(self.loaded, self.data.holdout, "calibrate")
        found = tables.mean("violation")
        assert found is not None
        self.masc = dataclasses.replace(self.masc, tolerance=found)
        return "holdout"

    def _before(self) -> dict[str, Summary | None]:
        saved = self.folder.read_json("scores/before.json")
        if saved is not None:
            return {name: None if value is None else Summary(**value) for name, value in saved.items()}
        found = self._evaluate(self.loaded, "before")
        self.folder.write_json(
            "scores/before.json",
            {name: None if value is None else dataclasses.asdict(value) for name, value in found.items()},
        )
        return found

    def _probe_ids(self) -> torch.Tensor:
        """Tokens on which the saved model is compared: the longest forget row, where the weights changed most."""
        longest = max(self.data.forget.corpus.rows, key=lambda row: len(row.input_ids))
        return torch.tensor([longest.input_ids[:64]])

    def _make_loop(self, log: RunLog) -> None:
        # Full fine-tuning leaves no base to compare with; an adapter can be switched off.
        self.base_logits = None if self.recipe.lora else probe_logits(self.loaded.model, self._probe_ids())
        trainable: Trainable = make_trainable(self.loaded.model, self.recipe, self.config.seed)
        self.trainable = trainable
        self.runner: RowRunner = make_runner(
            trainable, self.data, self.masc, self.recipe, pad_id=self.loaded.pad_id, seed=self.config.seed
        )
        forget = self.data.forget.corpus.rows
        self.loop = UnlearningLoop(
            self.runner,
            n_forget=len(forget),
            n_retain=0 if self.data.retain is None else len(self.data.retain.corpus.rows),
            ids=_row_ids(self.data.forget),
            masc=self.masc,
            recipe=self.recipe,
            masters=trainable.masters,
            optimizer=trainable.optimizer,
            seed=self.config.seed,
            log=log,
            held_out=held_out(self.config, len(forget)),
            micro_batch=self.config.micro_batch,
        )

    def _keep_references(self) -> None:
        """Full fine-tuning: what the reference model says of the rows is computed before the first update."""
        needs = self.masc.kl_weight > 0 or self.masc.teacher_delta is not None
        if self.recipe.lora or not needs:
            return
        if self.trainable.split.head is None:
            raise UsageError("full: this model's head is not recognised; accepted with it is --lora")
        n_forget = len(self.data.forget.corpus.rows)
        rows = list(range(n_forget)) if self.masc.teacher_delta is not None else []
        if self.masc.kl_weight > 0 and self.data.retain is not None:
            rows += range(n_forget, n_forget + len(self.data.retain.corpus.rows))
        done = 0

        def count(_: int) -> None:
            nonlocal done
            done += 1
            self.watch(Progress("reference", done, len(rows)))

        with self._stage("reference"):
            self.runner.keep_reference(rows, count)

    def _finish(self, before: dict[str, Summary | None]) -> UnlearnResult:
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

        try:
            self.loop.run(after_step)
        except InterruptedRun:
            raise
        except RunError as error:
            self._checkpoint()
            raise RunError(f"{error}; {self.folder.path} holds the state before that step") from None
        note()
        self._checkpoint()
        return self._conclude(before, self._save())

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
                card=model_card(self.config, self.masc, self.recipe, self.loop.state, self.loop.mean_violation),
                adapter_only=self.config.adapter_only,
                probe_ids=self._probe_ids(),
                base_logits=self.base_logits,
            )

    def _conclude(self, before: dict[str, Summary | None], saved: SaveReport) -> UnlearnResult:
        state, alpha = self.loop.state, self.masc.tolerance
        assert alpha is not None
        del self.loop.optimizer, self.loop.masters, self.trainable
        self.loaded = load_model(
            str(self.folder.path / MODEL), device=self.config.device, trust_remote_code=self.config.trust_remote_code
        )
        after = self._evaluate(self.loaded, "after")
        left = [self.loop.ids[index] for index in state.rest]
        if self.masc.teacher_delta is None:
            table = self.forget_table
            above = left_over(table.values("violation"), table.values("tokens"), alpha)
            left = [self.loop.ids[index] for index in above]
        assert before["forget"] is not None
        assert after["forget"] is not None
        result = UnlearnResult(
            out=str(self.folder.path),
            model=str(self.folder.path / MODEL),
            forgotten=state.stopped_at is not None and not left,
            reason=state.reason,
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
            notes=(*self.loaded.notes, *saved.warnings),
            answers=self.answers,
        )
        self.folder.write_json(RESULT, result.to_dict(texts=self.config.show_text))
        self.folder.drop_checkpoint()
        return result

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
        self.folder.write_state(
            {"run": self.loop.state_dict(), "log": self.loop.log.position, "seconds": dict(self.seconds)}
        )

    def _score(self, loaded: LoadedModel, part: Part, stage: str, rows: list[int] | None = None) -> ScoreTable:
        corpus = part.corpus
        if rows is not None:
            corpus = dataclasses.replace(corpus, rows=tuple(corpus.rows[row] for row in rows))
        return score(
            split_model(loaded.model),
            corpus,
            pad_id=loaded.pad_id,
            rho=self.masc.rho,
            k=self.masc.k,
            beta=self.masc.beta,
            batch_size=_SCORE_BATCH,
            progress=lambda done, total: self.watch(Progress(stage, done, total)),
        )

    def _evaluate(self, loaded: LoadedModel, when: str) -> dict[str, Summary | None]:
        """Score and generate; tables go to `scores/`, texts stay in memory."""
        found: dict[str, Summary | None] = {"retain": None}
        with self._stage("evaluate"):
            for part in (self.data.forget, self.data.retain):
                if part is None:
                    continue
                rows = list(range(len(part.corpus.rows)))
                if part.name == "retain":
                    rows = _sample(rows, self.config.retain_sample, self.config.seed)
                if not rows:
                    continue
                table = self._score(loaded, part, when, rows)
                if part.name == "forget":
                    self.forget_table = table
                try:
                    table.to_parquet(self.folder.path / "scores" / f"{part.name}-{when}.parquet")
                except OSError as error:
                    raise RunError(f"scores: cannot write to {self.folder.path}: {error.strerror}") from None
                found[part.name] = summarise_scores(table, self._generate(loaded, part, when))
        return found

    def _generate(self, loaded: LoadedModel, part: Part, when: str) -> list[float | None]:
        chosen = _sample(list(range(len(part.records))), self.config.sample, self.config.seed)
        records = [part.records[index] for index in chosen]
        if not records:
            return []
        options: dict[str, Any] = {
            "template": self.config.template,
            "system": self.config.system,
            "max_length": self.config.max_length,
        }
        prompts = [encode_prompt(record, loaded.tokenizer, **options) for record in records]
        outputs = generate(loaded.model, loaded.tokenizer, prompts, pad_id=loaded.pad_id)
        former = {answer.id: answer.before for answer in self.answers.get(part.name, [])}
        texts = [output.text.strip() for output in outputs]
        self.answers[part.name] = [
            Answer(
                id=record.id,
                question=record.prompt,
                reference=record.answer,
                before=text if when == "before" else former.get(record.id),
                after=text if when == "after" else None,
            )
            for record, text in zip(records, texts, strict=True)
        ]
        return [rouge_l_recall(text, record.answer) for record, text in zip(records, texts, strict=True)]

    def _describe(self, source: str) -> dict[str, Any]:
        """What `run.json` says: enough to repeat the run and to see that nothing it stands on has changed."""
        return {
            "config": self.config.to_dict(),
            "resolved_masc": dataclasses.asdict(self.masc),
            "tolerance_source": source,
            "versions": {name: _version(name) for name in _PACKAGES},
            "weights": self.fingerprint,
            "data": self.data.counts(),
            "device": str(next(self.loaded.model.parameters()).device),
            "dtype": str(next(self.loaded.model.parameters()).dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "notes": list(self.loaded.notes),
        }

    def _check_same(self, saved: dict[str, Any]) -> None:
        if saved["weights"] != self.fingerprint:
            raise UsageError(f"resume: the weights of {self.config.model} are not those the run was started with")
        now = self.data.counts()
        for name in ("forget", "retain", "holdout"):
            if (now.get(name) or {}).get("fingerprint") != (saved["data"].get(name) or {}).get("fingerprint"):
                raise UsageError(f"resume: the {name} data are not those the run was started with")

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def describe(config: RunConfig) -> dict[str, Any]:
    """What a dry run shows: the resolved configuration, the data after encoding and the trainable weights.

    Raises:
        UsageError: what `unlearn` would refuse before its first update.
    """
    run = _Run(config.resolved(), None, None)
    run.folder.check_free()
    run._load()
    trainable = make_trainable(run.loaded.model, run.recipe, config.seed)
    weights = sum(parameter.numel() for parameter in trainable.masters.params)
    total = sum(parameter.numel() for parameter in trainable.model.parameters())
    return {
        "config": run.config.to_dict(),
        "data": run.data.counts(),
        "weights": {"trainable": weights, "total": total, "fingerprint": run.fingerprint},
        "lora": dataclasses.asdict(lora_report(trainable.model)) if run.recipe.lora else None,
        "tolerance": run.masc.tolerance
        if config.tolerance is not None or config.holdout is None
        else "from the holdout",
    }


def _row_ids(part: Part) -> list[str]:
    """Ids of rows: those of the records, with the number of the window where a record has several."""
    counts: dict[int, int] = {}
    for row in part.corpus.rows:
        counts[row.record] = counts.get(row.record, 0) + 1
    seen: dict[int, int] = {}
    names = []
    for row in part.corpus.rows:
        seen[row.record] = seen.get(row.record, 0) + 1
        names.append(row.id if counts[row.record] == 1 else f"{row.id}#{seen[row.record]}")
    return names


def _sample(items: list[int], count: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(items, min(count, len(items))))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
