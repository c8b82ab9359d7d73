"""From rows to the loss of a part of an update: MASC with its gate and anchor, and every pair of terms by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from expunge.errors import UsageError
from expunge.lm import Labelled, Margin, RowRunner
from expunge.objectives import (
    FixedWeights,
    MascSettings,
    MethodSpec,
    PrimalDual,
    Term,
    TermInputs,
    kl_sum,
    masc_hinge,
    rmu_direction,
)
from expunge.train._measure import margins_of
from expunge.train._schedule import gates

Weights = FixedWeights | PrimalDual
# Inputs that come from the head at the labelled tokens of the answers.
_OF_ANSWERS = frozenset({"logprob", "ref_logprob", "entropy", "uniform", "kl", "shifted", "margin"})


@dataclass(frozen=True)
class Example:
    """A row of an update.

    Attributes:
        row: its index in the runner.
        forget: to be forgotten; False: to be kept.
        start: leading labelled tokens that are left out of the loss.
    """

    row: int
    forget: bool
    start: int = 0


@dataclass(frozen=True)
class Counts:
    """What one update divides by, whatever its parts.

    Attributes:
        forget: terms of the forget loss, as its `per` says.
        retain: terms of the retain loss.
        forget_rows: forget rows with an active token.
        forget_tokens: active tokens of the forget rows.
    """

    forget: int
    retain: int
    forget_rows: int
    forget_tokens: int


@dataclass(frozen=True)
class PartLoss:
    """Losses of a part of an update, weighted and divided by the counts of the whole update.

    Attributes:
        forget: with gradient; None where there is nothing to go down, so that no backward pass is needed.
        retain: as `forget`.
        forget_sum: the forget term alone, neither weighted nor divided; the cross-entropy of a term that `ascends`.
        retain_sum: as `forget_sum`.
        anchor_sum: KL of the anchor.
        violation_sum: violations of the forget rows, where they were computed.
        closed: forget rows whose gate is closed.
    """

    forget: Tensor | None = None
    retain: Tensor | None = None
    forget_sum: float = 0.0
    retain_sum: float = 0.0
    anchor_sum: float | None = None
    violation_sum: float | None = None
    closed: int = 0


class Objective(Protocol):
    """What the loop asks of a method."""

    @property
    def uses_retain(self) -> bool:
        """Whether retain rows take part."""

    @property
    def weights(self) -> Weights:
        """Weights of the two terms."""

    def counts(self, examples: Sequence[Example]) -> Counts:
        """What an update of these rows divides by."""

    def part(self, examples: Sequence[Example], counts: Counts, phase: str) -> PartLoss:
        """One forward pass over a part of an update."""

    def references(self, forget: Sequence[int], retain: Sequence[int]) -> dict[str | int, list[int]]:
        """Rows of which the reference model is asked, by kind (see `RowRunner.keep_reference`)."""


class MascObjective:
    """MASC: λ · hinge + weight · KL_retain + anchor · KL_forget without the targets; rows within the tolerance rest.

    Args:
        runner: of the model.
        masc: settings; the tolerance is filled in.
        gate: rows within the tolerance get no gradient.
        slack: tokens more that have to be within (see `gates`).
    """

    def __init__(self, runner: RowRunner, masc: MascSettings, *, gate: bool, slack: int) -> None:
        self.runner, self.masc, self.gate, self.slack = runner, masc, gate, slack
        self.weights: Weights = FixedWeights(masc.weight, masc.kl_weight)

    @property
    def uses_retain(self) -> bool:
        """Whether the KL term has a weight."""
        return self.masc.kl_weight > 0

    def counts(self, examples: Sequence[Example]) -> Counts:
        """Rows of the hinge, tokens of the KL."""
        forget = [self.runner.tokens(example.row) - example.start for example in examples if example.forget]
        rows = sum(tokens > 0 for tokens in forget)
        kept = sum(self.runner.tokens(example.row) for example in examples if not example.forget)
        return Counts(rows, kept, rows, sum(forget))

    def part(self, examples: Sequence[Example], counts: Counts, phase: str) -> PartLoss:
        """The hinge, the anchor and the KL of these rows."""
        runner, masc = self.runner, self.masc
        forget = [example for example in examples if example.forget]
        retain = [example for example in examples if not example.forget]
        ordered = [*forget, *retain]
        labelled = runner.forward([each.row for each in ordered], [each.start for each in ordered])
        found = _Found()
        if forget:
            self._forget(_some(labelled, 0, len(forget)), forget, counts, phase, found)
        if retain:
            part = _some(labelled, len(forget), len(ordered))
            kl = runner.stats(part, kl=runner.reference([each.row for each in retain])).kl
            assert kl is not None
            total = kl_sum(kl).total
            found.retain, found.retain_sum = masc.kl_weight * total / max(counts.retain, 1), total.item()
        return found.part()

    def _forget(self, part: Labelled, forget: Sequence[Example], counts: Counts, phase: str, found: _Found) -> None:
        runner, masc = self.runner, self.masc
        assert masc.tolerance is not None
        rows, starts = [each.row for each in forget], [each.start for each in forget]
        margins = margins_of(runner, masc, part, rows, starts)
        gate = None
        if self.gate:
            tokens = [runner.tokens(row) for row in rows]
            gate = margins.new_tensor(gates(phase, tokens, alpha=masc.tolerance, slack=self.slack))
        # After the stop only what is hard is left: then every token may have to give way.
        spared = runner.copied(rows, starts) if masc.spare_copies and phase == "main" else None
        hinge = masc_hinge(margins, part.row, len(forget), rho=masc.rho, eta=masc.eta, gate=gate, spared=spared)
        loss = masc.weight * hinge.total / max(counts.forget, 1)
        if masc.anchor > 0:
            anchor = runner.stats(part, kl=runner.reference(rows, starts, without_target=True)).kl
            assert anchor is not None
            loss = loss + masc.anchor * kl_sum(anchor).total / max(counts.forget_tokens, 1)
            found.anchor_sum = anchor.detach().sum().item()
        found.forget_sum, found.violation_sum = hinge.total.item(), hinge.violation.nansum().item()
        found.closed = hinge.closed
        # Nothing is above the hinge and nothing is to be kept: a backward pass would give zeros.
        found.forget = loss if found.forget_sum != 0 or masc.anchor > 0 else None

    def references(self, forget: Sequence[int], retain: Sequence[int]) -> dict[str | int, list[int]]:
        """States of the retain rows, and of the forget rows for the anchor or the teacher's competitors."""
        asked = self.masc.anchor > 0 or self.masc.teacher_delta is not None
        return {"states": [*(forget if asked else ()), *(retain if self.uses_retain else ())]}


class TermObjective:
    """A forget term and a retain term by name.

    Args:
        runner: of the model; it has the refusals' rows, too.
        spec: the method.
        weights: of the two terms.
        refusals: row of an answer → row of the refusal to the same question; empty where no term asks for one.
        sign: −1 follows the forget term the other way, as task arithmetic does before it takes off what came of it.
    """

    def __init__(
        self,
        runner: RowRunner,
        spec: MethodSpec,
        weights: Weights,
        refusals: Mapping[int, int] | None = None,
        *,
        sign: float = 1.0,
    ) -> None:
        self.runner, self.spec, self.weights, self.refusals = runner, spec, weights, refusals or {}
        self.sign = sign

    @property
    def uses_retain(self) -> bool:
        """Whether the retain term is one."""
        return bool(self.spec.retain_term.needs)

    def counts(self, examples: Sequence[Example]) -> Counts:
        """Tokens or rows of each term, as its `per` says."""
        forget = [example for example in examples if example.forget]
        tokens = [self.runner.tokens(each.row) - each.start for each in forget]
        retain = [example for example in examples if not example.forget]
        return Counts(
            self._count(self.spec.forget_term, forget),
            self._count(self.spec.retain_term, retain),
            sum(count > 0 for count in tokens),
            sum(tokens),
        )

    def _count(self, term: Term, examples: Sequence[Example]) -> int:
        refused = self._rows_of(self._refusals(examples)) if "refusal_rows" in term.needs else None
        return term.count(self._rows_of(examples), len(examples), refused)

    def part(self, examples: Sequence[Example], counts: Counts, phase: str) -> PartLoss:
        """Both terms of these rows."""
        found = _Found()
        forget = [example for example in examples if example.forget]
        retain = [example for example in examples if not example.forget] if self.uses_retain else []
        spec = self.spec
        sides = [(spec.forget_term, spec.forget_options, forget), (spec.retain_term, spec.retain_options, retain)]
        sides = [side for side in sides if side[2]]
        passes = self._passes([(term, group) for term, _, group in sides])
        for (term, options, group), (answers, refusals) in zip(sides, passes, strict=True):
            total = term(self._inputs(term, options, group, answers, refusals), **options).total
            if group is forget:
                found.forget_sum = -total.item() if term.ascends else total.item()
                found.forget = self.sign * self.weights.forget * total / max(counts.forget, 1)
            else:
                found.retain_sum = total.item()
                found.retain = self.weights.retain * total / max(counts.retain, 1)
        return found.part()

    def _passes(self, sides: Sequence[tuple[Term, Sequence[Example]]]) -> list[tuple[Labelled | None, Labelled | None]]:
        """One forward pass for all that the head is asked about: answers and refusals of both sides."""
        rows: list[Example] = []
        spans: list[tuple[slice | None, slice | None]] = []
        for term, group in sides:
            pair: list[slice | None] = []
            for wanted, members in (
                (bool(_OF_ANSWERS & set(term.needs)), group),
                ("refusal_logprob" in term.needs, self._refusals(group) if "refusal_rows" in term.needs else ()),
            ):
                pair.append(slice(len(rows), len(rows) + len(members)) if wanted else None)
                rows += members if wanted else ()
            spans.append((pair[0], pair[1]))
        if not rows:
            return [(None, None)] * len(sides)
        labelled = self.runner.forward([each.row for each in rows], [each.start for each in rows])

        def cut(span: slice | None) -> Labelled | None:
            return None if span is None else _some(labelled, span.start, span.stop)

        return [(cut(answers), cut(refusals)) for answers, refusals in spans]

    def _inputs(
        self,
        term: Term,
        options: Mapping[str, float | int | None],
        group: Sequence[Example],
        answers: Labelled | None,
        refusals: Labelled | None,
    ) -> TermInputs:
        runner, needs = self.runner, set(term.needs)
        rows, starts = [each.row for each in group], [each.start for each in group]
        values: dict[str, Tensor | int | None] = {}
        if answers is not None:
            values |= self._of_answers(needs, options, answers, rows, starts)
        if "activation" in needs:
            layer = int(options["layer"] or 0)
            values["activation"] = runner.forward(rows, starts, layer=layer).hidden
            if "ref_activation" in needs:
                values["ref_activation"] = runner.reference_activations(rows, starts, layer=layer)
            if "direction" in needs:
                width = values["activation"].shape[1]  # type: ignore[union-attr]
                values["direction"] = rmu_direction(width, seed=int(options["seed"] or 0))
        if "refusal_rows" in needs:
            refused = self._refusals(group)
            values["refusal_rows"] = self._rows_of(refused)
            if refusals is not None:
                values["refusal_logprob"] = runner.stats(refusals, logprob=True).logprob
            if "ref_refusal_logprob" in needs:
                values["ref_refusal_logprob"] = runner.reference_logprobs([each.row for each in refused])
        if "vocabulary" in needs:
            values["vocabulary"] = runner.vocabulary
        return TermInputs(self._rows_of(group), len(group), **values)  # type: ignore[arg-type]

    def _of_answers(
        self,
        needs: set[str],
        options: Mapping[str, float | int | None],
        answers: Labelled,
        rows: Sequence[int],
        starts: Sequence[int],
    ) -> dict[str, Tensor | int | None]:
        runner = self.runner
        margin = None
        if "margin" in needs:
            k, beta, delta = int(options["k"] or 1), float(options["beta"] or 1.0), options["teacher_delta"]
            sets = None if delta is None else runner.competitors(rows, starts, k=k, delta=float(delta))
            margin = Margin(k=k, beta=beta, competitors=sets)
        against = runner.reference(rows, starts) if needs & {"kl", "shifted"} else None
        stats = runner.stats(
            answers,
            margin=margin,
            kl=against if "kl" in needs else None,
            logprob="logprob" in needs,
            entropy="entropy" in needs,
            uniform="uniform" in needs,
        )
        values: dict[str, Tensor | int | None] = {
            name: getattr(stats, name) for name in ("logprob", "entropy", "uniform", "kl", "margin") if name in needs
        }
        if "shifted" in needs:
            values["shifted"] = runner.stats(answers, kl=against, target_shift=float(options["gamma"] or 0.0)).kl
        if "ref_logprob" in needs:
            values["ref_logprob"] = runner.reference_logprobs(rows, starts)
        return values

    def _refusals(self, examples: Iterable[Example]) -> list[Example]:
        return [Example(self.refusals[each.row], each.forget) for each in examples]

    def _rows_of(self, examples: Sequence[Example]) -> Tensor:
        counts = torch.tensor(
            [max(self.runner.tokens(each.row) - each.start, 0) for each in examples], dtype=torch.long
        )
        return torch.arange(len(examples)).repeat_interleave(counts).to(self.runner.device)

    def references(self, forget: Sequence[int], retain: Sequence[int]) -> dict[str | int, list[int]]:
        """What each term asks the reference model for."""
        wanted: dict[str | int, list[int]] = {}
        spec = self.spec
        for term, options, rows in (
            (spec.forget_term, spec.forget_options, forget),
            (spec.retain_term, spec.retain_options, retain),
        ):
            needs = set(term.needs)
            if needs & {"kl", "shifted"} or options.get("teacher_delta") is not None:
                wanted.setdefault("states", []).extend(rows)
            if "ref_logprob" in needs:
                wanted.setdefault("logprob", []).extend(rows)
            if "ref_refusal_logprob" in needs:
                wanted.setdefault("logprob", []).extend(self.refusals[row] for row in rows)
            if "ref_activation" in needs:
                wanted.setdefault(int(options["layer"] or 0), []).extend(rows)
        return wanted


@dataclass
class _Found:
    forget: Tensor | None = None
    retain: Tensor | None = None
    forget_sum: float = 0.0
    retain_sum: float = 0.0
    anchor_sum: float | None = None
    violation_sum: float | None = None
    closed: int = field(default=0)

    def part(self) -> PartLoss:
        return PartLoss(**self.__dict__)


def _some(labelled: Labelled, first: int, end: int) -> Labelled:
    """The tokens of rows `first` to `end`, numbered from 0."""
    chosen = (labelled.row >= first) & (labelled.row < end)
    return Labelled(labelled.hidden[chosen], labelled.row[chosen] - first, labelled.target[chosen])


def make_weights(spec: MethodSpec, *, weighting: str, limit: float | None, step: float) -> Weights:
    """The weighting rule of a run.

    Args:
        spec: the method; its weights are those of a fixed rule, and where dual ascent starts.
        weighting: "fixed" or "primal-dual".
        limit: largest retain loss wanted, for "primal-dual".
        step: step size of the ascent.

    Raises:
        UsageError: the rule is unknown, or lacks what it needs.
    """
    if weighting == "fixed":
        return FixedWeights(spec.forget_weight, spec.retain_weight)
    if limit is None:
        raise UsageError("retain_limit: found none, accepted with weighting primal-dual is a number, the retain loss")
    if not spec.retain_term.needs:
        raise UsageError(f"weighting: found primal-dual with {spec.name}, which has no retain term")
    return PrimalDual(limit, step, spec.retain_weight)
