"""The loop: update until the rule says that the examples are forgotten, then go on with those that are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from expunge.data import EpochSampler
from expunge.lm import Labelled, MasterWeights, RowRunner, adapter_dropouts
from expunge.objectives import MascSettings, kl_sum, masc_hinge, suffix_start, threshold
from expunge.stopping import Decision, Observation, StoppingRule, left_over
from expunge.train._config import Recipe
from expunge.train._log import RunLog
from expunge.train._measure import margins_of, measure
from expunge.train._schedule import gates, step_scale
from expunge.train._state import Counts, LoopState, StepError, StepReport, Sums


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
        self.slack = int(any(one is not other for one, other in zip(masters.params, masters.masters, strict=True)))
        self.masters, self.optimizer = masters, optimizer
        self.ids, self.n_forget, self.seed, self.micro_batch = list(ids), n_forget, seed, micro_batch
        self.alpha, self.tau = masc.tolerance, threshold(masc.rho)
        self.trained = [index for index in range(n_forget) if index not in set(held_out)]
        pool = list(held_out) or self.trained
        self.rule = StoppingRule(self.alpha, min(masc.probe, len(pool)), min(masc.confirm, len(pool)), masc.every)
        self.probe_pool = EpochSampler(pool, seed=seed + 1)
        uses_retain = masc.kl_weight > 0
        self.retain = EpochSampler(range(n_forget, n_forget + n_retain), seed=seed + 2) if uses_retain else None
        self.masks, self.state = torch.Generator().manual_seed(seed + 3), LoopState()
        # NOTE: everything is in evaluation mode but the adapters' dropout in an update: the model's own would move it
        # away from its reference. One list, since walking the model costs more than a probe.
        runner.split.model.eval()
        self.dropouts = adapter_dropouts(runner.split.model)

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
        if rest or self.mean_violation > self.alpha:
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
        except StepError:
            self._go_to(before)
            state.recent = recent
            raise
        finally:
            self._drop(False)
        state.queue = state.queue[self.recipe.batch :]
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
        active = [self.runner.tokens(row) - start for row, is_forget, start in rows if is_forget]
        counts = Counts(
            forget_rows=sum(tokens > 0 for tokens in active),
            forget_tokens=sum(active),
            retain_tokens=sum(self.runner.tokens(row) for row in keep),
        )
        self._drop(True)
        sums = Sums()
        size = self.micro_batch or len(rows)
        for first in range(0, len(rows), size):
            self._backward(rows[first : first + size], counts, sums)
        if counts.forget_rows:
            # Half of what these rows show, half of what was known: single batches stray by their size.
            self.state.recent = 0.5 * self.state.recent + 0.5 * sums.violation / counts.forget_rows
        norm = self._apply() if sums.backward else None
        return StepReport(
            step=self.state.step + 1,
            forget_loss=sums.forget / counts.forget_rows if counts.forget_rows else None,
            retain_loss=sums.retain / counts.retain_tokens if counts.retain_tokens else None,
            anchor_loss=sums.anchor / counts.forget_tokens if self.masc.anchor > 0 and counts.forget_tokens else None,
            total_loss=sums.total,
            violation=sums.violation / counts.forget_rows if counts.forget_rows else None,
            gradient_norm=norm,
            closed=sums.closed,
            updated=norm is not None,
        )

    def _backward(self, rows: Sequence[tuple[int, bool, int]], counts: Counts, sums: Sums) -> None:
        """One forward and backward pass over a part of the update, divided by the counts of the whole update."""
        labelled = self.runner.forward([row for row, _, _ in rows], [start for _, _, start in rows])
        n_forget = sum(is_forget for _, is_forget, _ in rows)
        is_forget = labelled.row < n_forget
        loss = labelled.hidden.new_zeros((), dtype=torch.float32)
        if n_forget:
            chosen, starts = [row for row, _, _ in rows[:n_forget]], [start for _, _, start in rows[:n_forget]]
            part = Labelled(labelled.hidden[is_forget], labelled.row[is_forget], labelled.target[is_forget])
            margins = margins_of(self.runner, self.masc, part, chosen, starts)
            gate = None
            if self.recipe.gate:
                tokens = [self.runner.tokens(row) for row in chosen]
                gate = margins.new_tensor(gates(self.state.phase, tokens, alpha=self.alpha, slack=self.slack))
            hinge = masc_hinge(margins, part.row, n_forget, rho=self.masc.rho, eta=self.masc.eta, gate=gate)
            loss = loss + self.masc.weight * hinge.total / max(counts.forget_rows, 1)
            if self.masc.anchor > 0:
                reference = self.runner.reference(chosen, starts, without_target=True)
                anchor = self.runner.stats(part, kl=reference).kl
                assert anchor is not None
                loss = loss + self.masc.anchor * kl_sum(anchor).total / max(counts.forget_tokens, 1)
                sums.anchor += anchor.detach().sum().item()
            sums.forget += hinge.total.item()
            sums.violation += hinge.violation.nansum().item()
            sums.closed += hinge.closed
            active = hinge.total.item() != 0 or self.masc.anchor > 0
        else:
            active = False
        if n_forget < len(rows):
            kept = [row for row, _, _ in rows[n_forget:]]
            part = Labelled(labelled.hidden[~is_forget], labelled.row[~is_forget], labelled.target[~is_forget])
            kl = self.runner.stats(part, kl=self.runner.reference(kept)).kl
            assert kl is not None
            total = kl_sum(kl).total
            loss = loss + self.masc.kl_weight * total / max(counts.retain_tokens, 1)
            sums.retain += total.item()
            active = True
        if not math.isfinite(loss.item()):
            raise StepError(
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
            raise StepError(f"step {self.state.step + 1}: no trainable weight received a gradient")
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.max_grad_norm or math.inf).item()
        if not math.isfinite(norm):
            raise StepError(
                f"step {self.state.step + 1}: the gradient norm is {norm}; the weights of the step before are kept"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * step_scale(self.recipe, self.state, self.alpha)
        self.optimizer.step()
        self.masters.to_model()
        self.masters.zero_grad()
        return norm

    def run(self, after_step: Callable[[StepReport], None]) -> None:
        """Advance until done; `after_step` sees every update and may raise to interrupt."""
        while (report := self.advance()) is not None:
            after_step(report)

    def _drop(self, on: bool) -> None:
        for module in self.dropouts:
            module.training = on

    # -- state -------------------------------------------------------------------------------------------------------

    def _positions(self) -> dict[str, Any]:
        """What an update moves on besides the weights."""
        return {
            "retain": None if self.retain is None else self.retain.state_dict(),
            "masks": self.masks.get_state(),
            "random": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        }

    def _go_to(self, positions: dict[str, Any]) -> None:
        if self.retain is not None:
            self.retain.load_state_dict(positions["retain"])
        self.masks.set_state(positions["masks"])
        torch.set_rng_state(positions["random"])
        if positions["cuda"] is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state_all(positions["cuda"])
        self.masters.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on; tensors and JSON values."""
        return {
            "loop": asdict(self.state),
            "rule": self.rule.state_dict(),
            "probe_pool": self.probe_pool.state_dict(),
            "positions": self._positions(),
            "trainable": [parameter.detach().clone() for parameter in self.masters.params],
            "masters": self.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.state = LoopState(**state["loop"])
        self.rule.load_state_dict(state["rule"])
        self.probe_pool.load_state_dict(state["probe_pool"])
        self._go_to(state["positions"])
        with torch.no_grad():
            for parameter, saved in zip(self.masters.params, state["trainable"], strict=True):
                parameter.copy_(saved)
        self.masters.load_state_dict(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])
