"""The loop: update until the rule says that the examples are forgotten, then go on with those that are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from expunge.data import EpochSampler
from expunge.errors import RunError
from expunge.lm import Labelled, Margin, MasterWeights, RowRunner
from expunge.objectives import MascSettings, kl_sum, masc_hinge, suffix_start, threshold
from expunge.stopping import Decision, Observation, StoppingRule, left_over
from expunge.train._config import Recipe
from expunge.train._log import RunLog

# Rows in a forward pass without gradient.
_MEASURE = 16


@dataclass
class LoopState:
    """Where a run is; JSON values only.

    Attributes:
        step: updates done.
        phase: "main" until the rule stops, "rest" while training on what is left above the tolerance, "done".
        passes: finished passes over the forget examples in this phase.
        queue: examples still to come in this pass.
        items: examples of this pass.
        rest: examples above the tolerance by more than their sampling error at the last full measurement.
        violations: violation of every forget example at the last full measurement; None before the first.
        measured_at: step of that measurement.
        stopped_at: step at which the rule stopped; None: it has not.
        reason: why the run ended, or where it is.
    """

    step: int = 0
    phase: str = "main"
    passes: int = 0
    queue: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)
    violations: list[float] | None = None
    measured_at: int | None = None
    stopped_at: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class StepReport:
    """What one update did; parts are means over the whole update, None where a part was not computed."""

    step: int
    forget_loss: float | None
    retain_loss: float | None
    total_loss: float
    violation: float | None
    gradient_norm: float | None
    closed: int
    updated: bool


class UnlearningLoop:
    """MASC with its online stopping rule.

    One call of `advance` does one update and the looks that are due; all that decides what comes next is in `state`,
    the rule and the samplers, so a loop restored from `state_dict` goes on as if it had never stopped.

    Args:
        runner: rows `[0, n_forget)` are to be forgotten, rows from `n_forget` on are to be kept.
        n_forget: forget rows.
        n_retain: retain rows.
        ids: names of the forget rows, for decisions and the log.
        masc: settings of the method; `tolerance` is filled in.
        recipe: how the weights are changed.
        masters: the trainable weights.
        optimizer: over `masters.masters`.
        seed: of sampling, masks and probes.
        log: gets every update, probe and decision.
        held_out: forget rows that are probed and not trained on; empty: probes are drawn from those trained on.
        micro_batch: most rows in one forward pass with gradient.
    """

    def __init__(  # noqa: PLR0913 - the loop is where everything meets; each part has one argument
        self,
        runner: RowRunner,
        *,
        n_forget: int,
        n_retain: int,
        ids: Sequence[str],
        masc: MascSettings,
        recipe: Recipe,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        seed: int,
        log: RunLog,
        held_out: Sequence[int] = (),
        micro_batch: int | None = None,
    ) -> None:
        assert masc.tolerance is not None
        self.runner, self.masc, self.recipe, self.log = runner, masc, recipe, log
        self.masters, self.optimizer = masters, optimizer
        self.ids, self.n_forget, self.seed, self.micro_batch = list(ids), n_forget, seed, micro_batch
        self.alpha, self.tau = masc.tolerance, threshold(masc.rho)
        self.trained = [index for index in range(n_forget) if index not in set(held_out)]
        pool = list(held_out) or self.trained
        self.rule = StoppingRule(self.alpha, min(masc.probe, len(pool)), min(masc.confirm, len(pool)), masc.every)
        self.probe_pool = EpochSampler(pool, seed=seed + 1)
        uses_retain = masc.kl_weight > 0
        self.retain = EpochSampler(range(n_forget, n_forget + n_retain), seed=seed + 2) if uses_retain else None
        self.masks = torch.Generator().manual_seed(seed + 3)
        self.state = LoopState()
        self.retain_order: list[int] = []

    # -- looking -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, rows: Sequence[int], starts: Sequence[int] | None = None) -> list[float]:
        """Violation of rows under the present model, in evaluation mode: share of tokens with margin above τ_ρ."""
        model = self.runner.split.model
        training, found = model.training, [math.nan] * len(rows)
        model.eval()
        places = sorted(range(len(rows)), key=lambda place: self.runner.tokens(rows[place]))
        for first in range(0, len(places), _MEASURE):
            part = places[first : first + _MEASURE]
            cuts = None if starts is None else [starts[place] for place in part]
            chosen = [rows[place] for place in part]
            labelled = self.runner.forward(chosen, cuts)
            margins = self._margins(labelled, chosen, cuts)
            shares = masc_hinge(margins, labelled.row, len(part), rho=self.masc.rho, eta=self.masc.eta).violation
            for place, share in zip(part, shares.tolist(), strict=True):
                found[place] = share
        model.train(training)
        return found

    def _margins(self, labelled: Labelled, rows: Sequence[int], starts: Sequence[int] | None) -> Tensor:
        masc = self.masc
        sets = None
        if masc.teacher_delta is not None:
            sets = self.runner.competitors(rows, starts, k=masc.k, delta=masc.teacher_delta)
        margin = self.runner.stats(labelled, margin=Margin(k=masc.k, beta=masc.beta, competitors=sets)).margin
        assert margin is not None
        return margin

    def measure_all(self) -> list[int]:
        """Measure every forget example, and note and return those above the tolerance by more than chance explains."""
        state = self.state
        state.violations = self.measure(range(self.n_forget))
        state.measured_at = state.step
        tokens = [self.runner.tokens(index) for index in range(self.n_forget)]
        state.rest = left_over(state.violations, tokens, self.alpha)
        self.log.write(
            "measure",
            step=state.step,
            mean=self.mean_violation,
            above=len(state.rest),
            above_ids=[self.ids[index] for index in state.rest],
        )
        return state.rest

    @property
    def mean_violation(self) -> float | None:
        """Mean over all forget examples at the last full measurement."""
        found = self.state.violations
        return None if found is None else math.fsum(found) / len(found)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def look(self) -> Decision | None:
        """Take the look that is due at this step, and its confirmation; None where none is due."""
        decision = None
        while (count := self.rule.wants(self.state.step)) is not None:
            stage = "confirm" if self.rule.pending else "probe"
            rows = self.probe_pool.next(count)
            # The rule judges what training acts on: the masked suffix where there is a mask.
            violations = self.measure(rows, self._starts(rows))
            decision = self._decide(stage, rows, violations)
            if stage == "confirm" or decision.stage != "confirm":
                break
        return decision

    def _decide(self, stage: str, rows: Sequence[int], violations: Sequence[float]) -> Decision:
        names = [self.ids[row] for row in rows]
        decision = self.rule.update(Observation(self.state.step, stage, violations, names))
        self.log.write("look", ids=names, violations=list(violations), **asdict(decision))
        return decision

    def _starts(self, rows: Sequence[int]) -> list[int]:
        masc = self.masc
        return [
            suffix_start(
                self.runner.tokens(row),
                cut=masc.cut,
                min_prefix=masc.min_prefix,
                min_suffix=masc.min_suffix,
                generator=self.masks,
            )
            for row in rows
        ]

    def _settle(self) -> None:
        """After the rule's stop or a pass over the rest: measure everything, then finish or go on with what is left."""
        state = self.state
        rest = self.measure_all()
        if state.stopped_at is None:
            state.stopped_at = state.step
        if not rest:
            state.phase, state.reason = "done", f"stopped at step {state.stopped_at}: every example is forgotten"
        elif state.passes >= self.recipe.extra_epochs and state.phase == "rest":
            state.phase, state.reason = (
                "done",
                f"{len(rest)} examples are left above the tolerance; the budget is spent",
            )
        elif self.recipe.extra_epochs == 0:
            state.phase, state.reason = "done", f"{len(rest)} examples are left above the tolerance; no budget for them"
        else:
            if state.phase == "main":
                state.phase, state.passes = "rest", 0
            self._fill([row for row in rest if row in set(self.trained)] or rest)

    def _end_of_pass(self) -> None:
        state, recipe = self.state, self.recipe
        state.passes += 1
        if state.phase == "rest":
            self._settle()
            return
        items = self.trained
        if recipe.focus:
            self.measure_all()
            assert state.violations is not None
            within = self.mean_violation is not None and self.mean_violation <= self.alpha
            items = [row for row in self.trained if state.violations[row] > self.alpha]
            if within or not items:
                self._decide("full", range(self.n_forget), state.violations)
                self._settle()
                return
        if state.passes >= recipe.epochs:
            self.measure_all()
            state.phase = "done"
            state.reason = f"not stopped within {recipe.epochs} passes: mean violation {self.mean_violation:.3f}"
            return
        self._fill(items)

    def _fill(self, items: Sequence[int]) -> None:
        state = self.state
        state.items = list(items)
        state.queue = EpochSampler(state.items, seed=self.seed * 1_000_003 + state.step).next(len(state.items))

    # -- moving ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Measure everything before the first update; the model may have forgotten already."""
        self.measure_all()
        if self.state.rest:
            self._fill(self.trained)
        else:
            self.state.phase, self.state.stopped_at = "done", 0
            self.state.reason = "nothing to do: every example is within the tolerance before the first update"

    def advance(self) -> StepReport | None:
        """Do one update and the looks due after it; None once the run is done.

        Raises:
            RunError: a loss or gradient is not finite; the weights are those before the update.
        """
        state = self.state
        if state.phase == "done":
            return None
        batch, state.queue = state.queue[: self.recipe.batch], state.queue[self.recipe.batch :]
        report = self._update(batch)
        state.step += 1
        self.log.write("step", phase=state.phase, **asdict(report))
        if state.phase == "main":
            decision = self.look()
            if decision is not None and decision.stop:
                state.queue = []
                self._settle()
                return report
        if not state.queue:
            self._end_of_pass()
        return report

    def _update(self, forget: Sequence[int]) -> StepReport:
        keep = self.retain.next(self.recipe.retain_batch) if self.retain is not None else []
        rows = [(row, True, start) for row, start in zip(forget, self._starts(forget), strict=True)]
        rows += [(row, False, 0) for row in keep]
        forget_rows = sum(self.runner.tokens(row) > start for row, is_forget, start in rows if is_forget)
        retain_tokens = sum(self.runner.tokens(row) for row, is_forget, _ in rows if not is_forget)
        self.runner.split.model.train(self.recipe.lora_dropout > 0 or not self.recipe.lora)
        sums = _Sums()
        size = self.micro_batch or len(rows)
        for first in range(0, len(rows), size):
            self._backward(rows[first : first + size], forget_rows, retain_tokens, sums)
        self.runner.split.model.eval()
        norm = self._apply() if sums.backward else None
        return StepReport(
            step=self.state.step + 1,
            forget_loss=sums.forget / forget_rows if forget_rows else None,
            retain_loss=sums.retain / retain_tokens if retain_tokens else None,
            total_loss=sums.total,
            violation=sums.violation / forget_rows if forget_rows else None,
            gradient_norm=norm,
            closed=sums.closed,
            updated=norm is not None,
        )

    def _backward(
        self, rows: Sequence[tuple[int, bool, int]], forget_rows: int, retain_tokens: int, sums: _Sums
    ) -> None:
        """One forward and backward pass over a part of the update, divided by the counts of the whole update."""
        labelled = self.runner.forward([row for row, _, _ in rows], [start for _, _, start in rows])
        n_forget = sum(is_forget for _, is_forget, _ in rows)
        is_forget = labelled.row < n_forget
        loss = labelled.hidden.new_zeros((), dtype=torch.float32)
        if n_forget:
            chosen = [row for row, _, _ in rows[:n_forget]]
            part = Labelled(labelled.hidden[is_forget], labelled.row[is_forget], labelled.target[is_forget])
            margins = self._margins(part, chosen, [start for _, _, start in rows[:n_forget]])
            gate = self.alpha if self.recipe.gate else None
            hinge = masc_hinge(margins, part.row, n_forget, rho=self.masc.rho, eta=self.masc.eta, gate=gate)
            loss = loss + self.masc.weight * hinge.total / max(forget_rows, 1)
            sums.forget += hinge.total.item()
            sums.violation += hinge.violation.nansum().item()
            sums.closed += hinge.closed
            active = hinge.total.item() != 0
        else:
            active = False
        if n_forget < len(rows):
            kept = [row for row, _, _ in rows[n_forget:]]
            part = Labelled(labelled.hidden[~is_forget], labelled.row[~is_forget], labelled.target[~is_forget])
            kl = self.runner.stats(part, kl=self.runner.reference(kept)).kl
            assert kl is not None
            total = kl_sum(kl).total
            loss = loss + self.masc.kl_weight * total / max(retain_tokens, 1)
            sums.retain += total.item()
            active = True
        if not math.isfinite(loss.item()):
            self.masters.zero_grad()
            raise RunError(
                f"step {self.state.step + 1}: the loss is {loss.item()}; the weights of the step before are kept"
            )
        sums.total += loss.item()
        # Nothing in this part is above the hinge and nothing is to be kept: a backward pass would give zeros.
        if active:
            loss.backward()
            self.masters.grads_to_masters()
            sums.backward = True

    def _apply(self) -> float:
        parameters = [master for master in self.masters.masters if master.grad is not None]
        if not parameters:
            raise RunError(f"step {self.state.step + 1}: no trainable weight received a gradient")
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.max_grad_norm or math.inf).item()
        if not math.isfinite(norm):
            self.masters.zero_grad()
            raise RunError(
                f"step {self.state.step + 1}: the gradient norm is {norm}; the weights of the step before are kept"
            )
        scale = min(1.0, (self.state.step + 1) / self.recipe.warmup) if self.recipe.warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * scale
        self.optimizer.step()
        self.masters.to_model()
        self.masters.zero_grad()
        return norm

    def run(self, after_step: Callable[[StepReport], None]) -> None:
        """Advance until done; `after_step` sees every update and may raise to interrupt."""
        while (report := self.advance()) is not None:
            after_step(report)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on; tensors and JSON values."""
        return {
            "loop": asdict(self.state),
            "rule": self.rule.state_dict(),
            "probe_pool": self.probe_pool.state_dict(),
            "retain": None if self.retain is None else self.retain.state_dict(),
            "masks": self.masks.get_state(),
            "random": torch.get_rng_state(),
            "trainable": [parameter.detach().clone() for parameter in self.masters.params],
            "masters": self.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.state = LoopState(**state["loop"])
        self.rule.load_state_dict(state["rule"])
        self.probe_pool.load_state_dict(state["probe_pool"])
        if self.retain is not None:
            self.retain.load_state_dict(state["retain"])
        self.masks.set_state(state["masks"])
        torch.set_rng_state(state["random"])
        with torch.no_grad():
            for parameter, saved in zip(self.masters.params, state["trainable"], strict=True):
                parameter.copy_(saved)
        self.masters.load_state_dict(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass
class _Sums:
    """Running sums over the parts of one update."""

    forget: float = 0.0
    retain: float = 0.0
    total: float = 0.0
    violation: float = 0.0
    closed: int = 0
    backward: bool = False
