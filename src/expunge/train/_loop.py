"""The loop: update until the rule says that the examples are forgotten, then go on with those that are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from expunge.data import EpochSampler
from expunge.lm import MasterWeights, RowRunner
from expunge.objectives import MascSettings, suffix_start, threshold
from expunge.stopping import Decision, Observation, StoppingRule, left_over
from expunge.train._log import RunLog
from expunge.train._measure import measure
from expunge.train._objective import Example, MascObjective, Objective
from expunge.train._random import random_states, set_random_states
from expunge.train._recipe import Recipe
from expunge.train._schedule import step_scale
from expunge.train._state import LoopState, StepError, StepReport
from expunge.train._update import Updater


class UnlearningLoop:
    """An objective, and MASC's online stopping rule or a fixed number of passes.

    One call of `advance` does one update and the looks that are due; all that decides what comes next is in `state`,
    the rule and the samplers, so a loop restored from `state_dict` goes on as if it had never stopped.

    Args:
        runner: rows `[0, n_forget)` are to be forgotten, rows from `n_forget` on are to be kept.
        n_forget: forget rows.
        n_retain: retain rows.
        ids: names of the forget rows, for decisions and the log.
        masc: settings of the measurement and the rule, and of the method where it is MASC; `tolerance` is filled in.
        recipe: how the weights are changed.
        masters: the trainable weights.
        optimizer: over `masters.masters`.
        seed: of sampling, masks and probes.
        log: gets every update, probe and decision.
        held_out: forget rows that are probed and not trained on; empty: probes are drawn from those trained on.
        micro_batch: most rows in one forward pass with gradient.
        objective: of the method; None: MASC.
        budget: train for `recipe.epochs` passes and measure then, whatever the violation; False: the rule decides.
        skip_first: labelled tokens at the start of each answer that are left out of the forget loss.
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
        objective: Objective | None = None,
        budget: bool = False,
        skip_first: int = 0,
    ) -> None:
        assert masc.tolerance is not None
        self.runner, self.masc, self.recipe, self.log = runner, masc, recipe, log
        self.slack = int(masters.rounds)
        self.masters, self.optimizer = masters, optimizer
        self.ids, self.n_forget, self.seed = list(ids), n_forget, seed
        self.objective = objective or MascObjective(runner, masc, gate=recipe.gate, slack=self.slack)
        self.budget, self.skip_first = budget, skip_first
        self.alpha, self.tau = masc.tolerance, threshold(masc.rho)
        self.trained = [index for index in range(n_forget) if index not in set(held_out)]
        pool = list(held_out) or self.trained
        self.rule = StoppingRule(self.alpha, min(masc.probe, len(pool)), min(masc.confirm, len(pool)), masc.every)
        self.probe_pool = EpochSampler(pool, seed=seed + 1)
        uses_retain = self.objective.uses_retain
        self.retain = EpochSampler(range(n_forget, n_forget + n_retain), seed=seed + 2) if uses_retain else None
        self.masks, self.state = torch.Generator().manual_seed(seed + 3), LoopState()
        self.updater = Updater(self.objective, recipe, masters, optimizer, runner, micro_batch)

    # -- looking -----------------------------------------------------------------------------------------------------

    def measure(self, rows: Sequence[int], starts: Sequence[int] | None = None) -> list[float]:
        """Violation of rows under the present model: share of tokens with margin above τ_ρ.

        Between updates the model is in evaluation mode.

        Raises:
            RunError: a margin is not a number.
        """
        return measure(self.runner, self.masc, rows, starts, step=self.state.step)

    def measure_all(self) -> list[int]:
        """Measure every forget example, and note and return those above the tolerance by more than chance explains."""
        state = self.state
        state.violations = self.measure(range(self.n_forget))
        state.measured_at = state.step
        tokens = [self.runner.tokens(index) for index in range(self.n_forget)]
        # Saving rounds merged weights: where they are of low precision, one token more has to be within, so that an
        # example that is within in training is so in the saved model.
        shares = [min(1.0, share + self.slack / count) for share, count in zip(state.violations, tokens, strict=True)]
        state.rest = left_over(shares, tokens, self.alpha)
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
        if not isinstance(self.objective, MascObjective):
            return [self.skip_first if self.runner.tokens(row) > self.skip_first else 0 for row in rows]
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
        trainable = [row for row in rest if row in set(self.trained)]
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
        elif not trainable:
            state.phase, state.reason = "done", f"{len(rest)} held-out examples are left above the tolerance"
        else:
            if state.phase == "main":
                state.phase, state.passes = "rest", 0
            self._fill(trainable)

    def _end_of_pass(self) -> None:
        state, recipe = self.state, self.recipe
        state.passes += 1
        if self.budget:
            if state.passes < recipe.epochs:
                self._fill(self.trained)
                return
            self.measure_all()
            state.phase = "done"
            state.reason = f"{recipe.epochs} passes are done: mean violation {self.mean_violation:.3f}"
            return
        if state.phase == "rest":
            self._settle()
            return
        items = self.trained
        if recipe.focus:
            self.measure_all()
            assert state.violations is not None
            within = self.mean_violation is not None and self.mean_violation <= self.alpha
            # None above the tolerance, but the mean is: held-out examples are, so training goes on with all.
            items = [row for row in self.trained if state.violations[row] > self.alpha] or items
            if within:
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
        rest = self.measure_all()
        assert self.mean_violation is not None
        assert self.state.violations is not None
        if self.budget or rest or self.mean_violation > self.alpha:
            self._fill(self.trained)
            return
        self._decide("full", range(self.n_forget), self.state.violations)
        self.state.phase, self.state.stopped_at = "done", 0
        self.state.reason = "nothing to do: every example is within the tolerance before the first update"

    def advance(self) -> StepReport | None:
        """Do one update and the looks due after it; None once the run is done.

        Raises:
            StepError: a loss or gradient is not finite; weights, samplers and random states are those before it.
            RunError: a measurement or the log failed after the update.
        """
        state = self.state
        if state.phase == "done":
            return None
        before, recent = self._positions(), state.recent
        try:
            report = self._update(state.queue[: self.recipe.batch])
        except StepError as error:
            error.partial = self.updater.applied
            self._go_to(before)
            state.recent = recent
            raise
        state.queue = state.queue[self.recipe.batch :]
        state.step += 1
        self.log.write("step", phase=state.phase, **asdict(report))
        if state.phase == "main" and not self.budget:
            decision = self.look()
            if decision is not None and decision.stop:
                state.queue = []
                self._settle()
                return report
        if not state.queue:
            self._end_of_pass()
        return report

    def _update(self, forget: Sequence[int]) -> StepReport:
        examples = [Example(row, True, start) for row, start in zip(forget, self._starts(forget), strict=True)]
        state = self.state
        return self.updater.update(examples, self._draw, step=state.step + 1, scale=self._scale, phase=state.phase)

    def _scale(self, violation: float | None) -> float:
        """Factor of the step size, which follows the violation of the rows that are trained on."""
        if violation is not None:
            # Half of what these rows show, half of what was known: single batches stray by their size.
            self.state.recent = 0.5 * self.state.recent + 0.5 * violation
        return step_scale(self.recipe, self.state, self.alpha)

    def _draw(self) -> list[Example]:
        return [Example(row, False) for row in self.retain.next(self.recipe.retain_batch)] if self.retain else []

    def run(self, after_step: Callable[[StepReport], None]) -> None:
        """Advance until done; `after_step` sees every update and may raise to interrupt."""
        while (report := self.advance()) is not None:
            after_step(report)

    # -- state -------------------------------------------------------------------------------------------------------

    def _positions(self) -> dict[str, Any]:
        """What an update moves on besides the weights."""
        return {
            "retain": None if self.retain is None else self.retain.state_dict(),
            "masks": self.masks.get_state(),
            "random": random_states(),
        }

    def _go_to(self, positions: dict[str, Any]) -> None:
        if self.retain is not None:
            self.retain.load_state_dict(positions["retain"])
        self.masks.set_state(positions["masks"])
        set_random_states(positions["random"])
        self.masters.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on: plain values, and tensors that are not copied.

        Save it, or copy it, before the next update.
        """
        return {
            "loop": asdict(self.state),
            "rule": self.rule.state_dict(),
            "probe_pool": self.probe_pool.state_dict(),
            "positions": self._positions(),
            "weights": self.objective.weights.state_dict(),
            "masters": self.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.state = LoopState(**state["loop"])
        self.rule.load_state_dict(state["rule"])
        self.probe_pool.load_state_dict(state["probe_pool"])
        self._go_to(state["positions"])
        self.objective.weights.load_state_dict(state["weights"])
        self.masters.load_state_dict(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])
