"""One update: gradients of its parts, and the steps along them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from expunge.lm import MasterWeights, RowRunner, adapter_dropouts
from expunge.metrics import mean_or_none
from expunge.optim import ObjectiveOptimizer
from expunge.train._objective import Counts, Example, Objective
from expunge.train._recipe import Recipe
from expunge.train._state import StepError, StepReport, Sums

# Reading the optimizer's states costs a pass over them: with more weights than this only every tenth update does.
_FEW_WEIGHTS, _SELDOM = 20_000_000, 10


@dataclass(frozen=True)
class _Turn:
    """What became of one gradient: the whole update, or the forget or a retain turn of it."""

    counts: Counts
    sums: Sums
    norm: float | None
    norms: dict[str, float]
    cosine: float | None = None


class Updater:
    """Makes updates.

    Args:
        objective: gives the losses.
        recipe: says whether the parts are joined or alternate.
        masters: the trainable weights.
        optimizer: over `masters.masters`.
        runner: of the model.
        micro_batch: most rows in one forward pass; None: as many as the runner takes at once.

    Attributes:
        applied: a step of the present update has been taken.
    """

    def __init__(
        self,
        objective: Objective,
        recipe: Recipe,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        runner: RowRunner,
        micro_batch: int | None,
    ) -> None:
        self.objective, self.recipe, self.masters, self.optimizer = objective, recipe, masters, optimizer
        self.micro_batch, self.applied, self._runner = micro_batch, False, runner
        self._lr = [group["lr"] for group in optimizer.param_groups]
        self._few = sum(master.numel() for master in masters.masters) <= _FEW_WEIGHTS
        self._step, self._scale, self._phase = 0, 1.0, "main"
        self._scale_of: Callable[[float | None], float] = lambda _: 1.0
        # NOTE: everything is in evaluation mode but the adapters' dropout in an update: the model's own would move it
        # away from its reference. One list, since walking the model costs more than a probe.
        runner.split.model.eval()
        self._dropouts = adapter_dropouts(runner.split.model)

    def update(
        self,
        forget: list[Example],
        draw: Callable[[], list[Example]],
        *,
        step: int,
        scale: Callable[[float | None], float],
        phase: str,
    ) -> StepReport:
        """All rows at once, or a turn of the forget rows and then turns of retain rows.

        Args:
            forget: rows to forget.
            draw: gives the next retain rows; empty where the objective uses none.
            step: number of this update, from 1.
            scale: from the violation of the rows to forget (None: not computed) to the factor of the step size.
            phase: of the loop, for the gates.

        Raises:
            StepError: a loss or gradient is not finite, or no weight got one.
        """
        self.applied, self._step, self._scale_of, self._phase = False, step, scale, phase
        weights, recipe = self.objective.weights, self.recipe
        weight = weights.retain
        self._drop(True)
        try:
            if not recipe.alternates:
                turns = [self._joint(forget, draw())]
            else:
                turns = [self._turn(forget, "forget")]
                turns += [self._turn(kept, "retain") for kept in (draw() for _ in range(recipe.retain_every)) if kept]
        finally:
            self._drop(False)
        first = turns[0]
        retain = [turn.sums.retain / turn.counts.retain for turn in turns if turn.counts.retain]
        if retain:
            weights.update(math.fsum(retain) / len(retain))
        rows, violation = first.counts.forget_rows, first.sums.violation
        anchor, tokens = first.sums.anchor, first.counts.forget_tokens
        cosine, base, delta = self._diagnostics(first)
        return StepReport(
            step=step,
            forget_loss=first.sums.forget / first.counts.forget if first.counts.forget else None,
            retain_loss=mean_or_none(retain),
            anchor_loss=anchor / tokens if anchor is not None and tokens else None,
            total_loss=math.fsum(turn.sums.total for turn in turns),
            retain_weight=weight,
            violation=violation / rows if rows and violation is not None else None,
            gradient_norm=first.norm,
            forget_gradient_norm=first.norms.get("forget"),
            retain_gradient_norm=mean_or_none([turn.norms.get("retain") for turn in turns]),
            cosine=cosine,
            base_norm=base,
            delta_norm=delta,
            closed=first.sums.closed,
            updated=any(turn.norm is not None for turn in turns),
        )

    def _diagnostics(
        self, first: _Turn
    ) -> tuple[float | None, dict[str, float | None] | None, dict[str, float | None] | None]:
        """How the averaged gradients of the two objectives lie to each other, from the optimizer's states."""
        optimizer = self.optimizer
        if not isinstance(optimizer, ObjectiveOptimizer) or not (self._few or self._step % _SELDOM == 0):
            return first.cosine, None, None
        found = optimizer.diagnostics()
        cosine = found.cosine.get(("forget", "retain"), first.cosine)
        with_base = any(value is not None for value in found.base.values())
        return cosine, dict(found.base) if with_base else None, dict(found.delta) if with_base else None

    def _joint(self, forget: list[Example], retain: list[Example]) -> _Turn:
        """One gradient of the weighted sum, and one step along it."""
        examples = [*forget, *retain]
        counts, sums = self.objective.counts(examples), Sums()
        norms: dict[str, float] = {}
        cosine = None
        if self.recipe.gradient_norms:
            # Apart: forward and backward passes of the same rows, with the gradients joined afterwards.
            self._gradients(forget, counts, sums)
            norms["forget"], kept = self.masters.norm(), self.masters.take_grads()
            self._gradients(retain, counts, sums)
            norms["retain"] = self.masters.norm()
            cosine = self.masters.cosine(kept)
            self.masters.add_grads(kept)
        else:
            self._gradients(examples, counts, sums)
        self._rescale(counts, sums)
        return _Turn(counts, sums, self._apply(None) if sums.backward else None, norms, cosine)

    def _turn(self, examples: list[Example], objective: str) -> _Turn:
        """A gradient of one objective alone, and a step with its state."""
        counts, sums = self.objective.counts(examples), Sums()
        self._gradients(examples, counts, sums)
        if objective == "forget":
            self._rescale(counts, sums)
        norm = self._apply(objective) if sums.backward else None
        return _Turn(counts, sums, norm, {} if norm is None else {objective: norm})

    def _rescale(self, counts: Counts, sums: Sums) -> None:
        rows = counts.forget_rows
        self._scale = self._scale_of(sums.violation / rows if rows and sums.violation is not None else None)

    def _gradients(self, examples: Sequence[Example], counts: Counts, sums: Sums) -> None:
        size = self.micro_batch or self._runner.rows_at_once or max(len(examples), 1)
        if self.micro_batch is None:
            # What the runner takes apart anyway has a backward pass of its own, so that one part's activations are in
            # memory at a time; rows of similar length together, as the runner would put them.
            examples = sorted(examples, key=lambda each: (not each.forget, self._runner.length(each.row)))
        for first in range(0, len(examples), size):
            self._backward(examples[first : first + size], counts, sums)

    def _backward(self, examples: Sequence[Example], counts: Counts, sums: Sums) -> None:
        """One forward and backward pass over a part of the update, divided by the counts of the whole update."""
        part = self.objective.part(examples, counts, self._phase)
        losses = [loss for loss in (part.forget, part.retain) if loss is not None]
        sums.forget += part.forget_sum
        sums.retain += part.retain_sum
        sums.closed += part.closed
        if part.anchor_sum is not None:
            sums.anchor = (sums.anchor or 0.0) + part.anchor_sum
        if part.violation_sum is not None:
            sums.violation = (sums.violation or 0.0) + part.violation_sum
        if not losses:
            return
        loss = sum(losses[1:], losses[0])
        if not math.isfinite(loss.item()):
            raise StepError(f"step {self._step}: the loss is {loss.item()}; the weights of the step before are kept")
        sums.total += loss.item()
        loss.backward()
        self.masters.grads_to_masters()
        sums.backward = True

    def _apply(self, objective: str | None) -> float:
        """Clip and step; the objective's name goes to the optimizers that keep a state for each."""
        if all(master.grad is None for master in self.masters.masters):
            raise StepError(f"step {self._step}: no trainable weight received a gradient")
        parameters = [master for master in self.masters.masters if master.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.max_grad_norm or math.inf).item()
        if not math.isfinite(norm):
            raise StepError(f"step {self._step}: the gradient norm is {norm}; the weights of the step before are kept")
        for group, lr in zip(self.optimizer.param_groups, self._lr, strict=True):
            group["lr"] = lr * self._scale
        if isinstance(self.optimizer, ObjectiveOptimizer):
            self.optimizer.step(objective=objective)
        else:
            self.optimizer.step()
        self.applied = True
        self.masters.to_model()
        self.masters.zero_grad()
        return norm

    def _drop(self, on: bool) -> None:
        for module in self._dropouts:
            module.training = on
