"""Running rows of a corpus through a model: what does not change while training is computed once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from expunge.errors import RunError
from expunge.lm._activations import layer_output
from expunge.lm._head import Head, Split
from expunge.lm._kept import Budget, KeptRows
from expunge.lm._margin import Margin
from expunge.lm._rows import PreparedRow, TokenRow, ignores_right_padding, prepare
from expunge.lm._scan import Reference
from expunge.lm._stats import TokenStats, competitor_ids, token_stats, token_stats_from_logits
from expunge.lm._trunk import Trunk, evaluating

# What the reference model is asked for: "states" (last hidden states), "logprob", or the number of a layer.
Kind = str | int
# Rows in one forward pass on a CPU: short and long rows apart, so that less of the work is padding.
ROWS_AT_ONCE = 8
# Longest padded row with plain attention on a CPU: its scores take heads · length² numbers a row.
PLAIN_LENGTH = 256
# Every new shape costs seconds once on a CPU: lengths are padded to a multiple of this.
PAD_TO = 16
# Most bytes of the caches in memory.
CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class Labelled:
    """Hidden states at the places that predict labelled tokens, row after row, left to right.

    Attributes:
        hidden: (N, d) after the final norm; (N, V) logits where the model has no recognised head; the output of one
            layer where that was asked for.
        row: (N,) int64, position of the token's row in the list that was asked for.
        target: (N,) int64, the labelled tokens.
    """

    hidden: Tensor
    row: Tensor
    target: Tensor


@dataclass(frozen=True)
class _Active:
    place: int  # in the list that was asked for
    index: int
    start: int  # leading labelled tokens that are left out
    row: PreparedRow


class RowRunner:
    """Runs rows by index; keeps lower hidden states, reference hidden states and teacher competitors.

    Rows are computed for the cache in fixed groups, so that the kept numbers do not depend on the order in which a run,
    or its resumption, asks for them.

    Args:
        split: the model, adapter included.
        rows: all rows of the run.
        pad_id: id for padding (any; padding is masked by position).
        groups: disjoint lists of row indices that are computed together; rows in none are computed alone.
        first_layer: first trained layer (see `Trunk`).
        without_adapter: returns a context in which the model is the reference model; None for full fine-tuning, where
            the reference must be kept by `keep_reference` before the first update.
        pad_to: lengths are padded to a multiple of this.
        cache_bytes: limit of the caches in memory; beyond it, what can be computed again is not kept, and what cannot
            is kept in a mapped file.
    """

    def __init__(
        self,
        split: Split,
        rows: Sequence[TokenRow],
        *,
        pad_id: int,
        groups: Sequence[Sequence[int]] = (),
        first_layer: int = 0,
        without_adapter: Callable[[], AbstractContextManager[None]] | None = None,
        pad_to: int = PAD_TO,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.split = split
        self.trunk = Trunk(split, first_layer)
        self.pad_id, self.pad_to = pad_id, pad_to
        self._without_adapter = without_adapter
        self._device = next(split.model.parameters()).device
        self._needs_mask = not ignores_right_padding(split)
        self._rows = [prepare(row) for row in rows]
        self._group = {index: tuple(group) for group in groups for index in group}
        budget = Budget(cache_bytes)
        self._lower = KeptRows(budget)
        # What the reference model is asked for, by kind: "states", "logprob", or the number of a layer.
        self._references: dict[Kind, KeptRows] = {}
        self._budget = budget
        self._competitors: dict[int, Tensor] = {}
        # NOTE: where all weights are trained the head changes, too; it is copied when states are first asked for.
        self._reference_head, self._live = split.head, without_adapter is None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device

    @property
    def cached_bytes(self) -> int:
        """Memory that the caches take."""
        return self._budget.used

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return _vocabulary(self.split) if self.split.head is None else self.split.head.weight.shape[0]

    @property
    def rows_at_once(self) -> int | None:
        """Most rows of one forward pass; None: any number."""
        return ROWS_AT_ONCE if self._device.type == "cpu" else None

    def tokens(self, index: int) -> int:
        """Number of labelled tokens of a row."""
        return len(self._rows[index].targets)

    def length(self, index: int) -> int:
        """Number of tokens of a row that are fed."""
        return len(self._rows[index].ids)

    def copied(self, indices: Sequence[int], starts: Sequence[int] | None = None) -> Tensor:
        """Which labelled tokens the row's prompt contains, too, (N,) bool, in the order of `forward`.

        Args:
            indices: rows.
            starts: as for `forward`.
        """
        starts = starts or [0] * len(indices)
        return torch.cat([self._rows[i].copied[s:] for i, s in zip(indices, starts, strict=True)]).to(self._device)

    def forward(
        self, indices: Sequence[int], starts: Sequence[int] | None = None, *, layer: int | None = None
    ) -> Labelled:
        """Hidden states of the labelled tokens, with gradient where the caller has it enabled.

        Args:
            indices: rows, in the order of the result.
            starts: for each row, how many of its leading labelled tokens are left out; None: none.
            layer: the output of this decoder layer instead of the last hidden states; what is above it is not run.

        Returns:
            The labelled tokens; rows in which none is active cost nothing.

        Raises:
            UsageError: the model has no such layer.
        """
        starts = starts or [0] * len(indices)
        active = [
            _Active(place, index, start, self._rows[index])
            for place, (index, start) in enumerate(zip(indices, starts, strict=True))
            if start < self.tokens(index)
        ]
        if not active:
            return self._nothing()
        active.sort(key=lambda one: (len(one.row.ids), one.place))
        size = self.rows_at_once or len(active)
        parts = [self._part(active[first : first + size], layer) for first in range(0, len(active), size)]
        owner = torch.cat([part.row for part in parts])
        # Back to the order that was asked for; tokens of a row stay in theirs.
        order = torch.sort(owner, stable=True).indices
        hidden, target = torch.cat([part.hidden for part in parts]), torch.cat([part.target for part in parts])
        return Labelled(hidden[order], owner[order], target[order])

    def _part(self, active: Sequence[_Active], layer: int | None) -> Labelled:
        """One forward pass over rows of similar length."""
        rows = [one.row for one in active]
        length = self._length(max(len(row.ids) for row in rows))
        if layer is not None:
            ids, mask = self._pad_ids(rows, length)
            with self._attention(length), layer_output(self.split.model, layer, stop=True) as found:
                self.split.body(ids, mask) if self.split.head is not None else self.split.logits(ids, mask)
            output = found.hidden
        elif self.trunk.first_layer:
            lower = self._lower_states([one.index for one in active])
            with self._attention(length):
                output = self.trunk.upper(*self._pad_hidden(lower, length))
        else:
            ids, mask = self._pad_ids(rows, length)
            with self._attention(length):
                output = self.split.body(ids, mask) if self.split.head is not None else self.split.logits(ids, mask)
        batch = torch.cat([torch.full((len(one.row.places) - one.start,), j) for j, one in enumerate(active)])
        place = torch.cat([one.row.places[one.start :] for one in active]).to(self._device)
        target = torch.cat([one.row.targets[one.start :] for one in active]).to(self._device)
        owner = torch.tensor([one.place for one in active])[batch].to(self._device)
        return Labelled(output[batch.to(self._device), place], owner, target)

    def _nothing(self) -> Labelled:
        parameter = next(p for p in self.split.model.parameters() if p.requires_grad)
        empty = torch.zeros(0, dtype=torch.long, device=self._device)
        head = self.split.head
        # As wide as with tokens: the margin's k is checked against the vocabulary.
        width = head.weight.shape[1] if head is not None else _vocabulary(self.split)
        return Labelled(parameter.flatten()[:1].expand(0, width), empty, empty)

    @contextmanager
    def _attention(self, length: int) -> Iterator[None]:
        """On a CPU, short rows use the plain attention: the backward pass of the fused one takes twice as long there.

        Measured on SmolLM2-135M, 16 rows of 128 tokens, bfloat16, ten layers: forward and backward 0.70 s, not 1.0 s.
        """
        config = None if self.split.inner is None else cast(Any, self.split.inner).config
        former = getattr(config, "_attn_implementation", None)
        if config is None or self._device.type != "cpu" or former != "sdpa" or length > PLAIN_LENGTH:
            yield
            return
        config._attn_implementation = "eager"
        try:
            yield
        finally:
            config._attn_implementation = former

    def stats(
        self,
        labelled: Labelled,
        *,
        margin: Margin | None = None,
        kl: Reference | Tensor | None = None,
        target_shift: float = 0.0,
        logprob: bool = False,
        entropy: bool = False,
        uniform: bool = False,
        hit: bool = False,
    ) -> TokenStats:
        """Token statistics by the head, or from logits where the model has no recognised head; see `token_stats`.

        Args:
            labelled: from `forward`.
            margin: ask for margin.
            kl: ask for kl, to what `reference` gave.
            target_shift: γ by which the reference's logit of the target is lowered in kl.
            logprob: ask for logprob.
            entropy: ask for entropy.
            uniform: ask for uniform.
            hit: ask for hit.
        """
        wanted: dict[str, Any] = {"margin": margin, "logprob": logprob, "entropy": entropy, "uniform": uniform}
        wanted["hit"] = hit
        if self.split.head is None:
            logits = cast(Tensor | None, kl)
            return token_stats_from_logits(
                labelled.hidden, labelled.target, kl=logits, target_shift=target_shift, **wanted
            )
        states = cast(Reference | None, kl)
        if states is not None and target_shift:
            states = replace(states, target_shift=target_shift)
        return token_stats(labelled.hidden, self.split.head, labelled.target, kl=states, **wanted)

    def reference(
        self, indices: Sequence[int], starts: Sequence[int] | None = None, *, without_target: bool = False
    ) -> Reference | Tensor:
        """The reference model at the same tokens: hidden states with its head, or logits without a recognised head.

        Raises:
            RunError: `without_target` for a model without a recognised head.
        """
        hidden = self._joined("states", indices, starts)
        if self._reference_head is None:
            if without_target:
                raise RunError("the anchor needs a model whose head is recognised; this one's is not (--anchor 0)")
            return hidden
        return Reference(hidden, self._reference_head, without_target)

    def reference_logprobs(self, indices: Sequence[int], starts: Sequence[int] | None = None) -> Tensor:
        """Log-probabilities of the same tokens under the reference model, (N,) without gradient; one number a token."""
        return self._joined("logprob", indices, starts)

    def reference_activations(
        self, indices: Sequence[int], starts: Sequence[int] | None = None, *, layer: int
    ) -> Tensor:
        """Output of a decoder layer of the reference model at the same tokens, (N, d) without gradient."""
        return self._joined(layer, indices, starts)

    def competitors(self, indices: Sequence[int], starts: Sequence[int] | None, *, k: int, delta: float) -> Tensor:
        """Teacher-anchored competitor ids, (N, k), −1 where a set is smaller; kept after the first time."""
        starts = starts or [0] * len(indices)
        missing = [index for index in indices if index not in self._competitors]
        if missing and self._reference_head is None:
            raise RunError("teacher-anchored competitors need a model whose head is recognised; this one's is not")
        for index in missing:
            states = self._joined("states", [index], None)
            targets = self._rows[index].targets.to(self._device)
            head = cast(Head, self._reference_head)
            self._competitors[index] = competitor_ids(states, head, targets, k=k, delta=delta)
        return torch.cat([self._competitors[index][start:] for index, start in zip(indices, starts, strict=True)])

    def reference_bytes(self, wanted: Mapping[Kind, Sequence[int]]) -> int:
        """Bytes that `keep_reference` takes: known before it starts."""
        parameter = next(self.split.model.parameters())
        wide = cast(Any, self.split.model).get_input_embeddings().weight.shape[1]
        states = wide if self.split.head is not None else _vocabulary(self.split)
        total = 0
        for kind, indices in wanted.items():
            each = 4 if kind == "logprob" else (states if kind == "states" else wide) * parameter.element_size()
            total += each * sum(self.tokens(index) for index in set(indices))
        return total

    def keep_reference(
        self, wanted: Mapping[Kind, Sequence[int]], progress: Callable[[int], None] | None = None
    ) -> None:
        """Compute the reference of rows now; full fine-tuning calls it once, before the first update.

        Args:
            wanted: rows by kind: "states" (for kl and competitors), "logprob" (for ratios), or the number of a layer.
            progress: called after each row of each kind.
        """
        for kind, indices in wanted.items():
            done: set[int] = set()
            for index in indices:
                if index not in done:
                    group = self._group.get(index, (index,))
                    self._compute_reference(kind, group)
                    done.update(group)
                if progress is not None:
                    progress(1)
        self._without_adapter = self._without_adapter or _gone

    def _joined(self, kind: Kind, indices: Sequence[int], starts: Sequence[int] | None) -> Tensor:
        """What the reference model says of rows, one after another."""
        kept, found = self._store(kind), dict[int, Tensor]()
        for index in indices:
            if index not in kept and index not in found:
                found.update(self._compute_reference(kind, self._group.get(index, (index,))))
        parts = [kept[index] if index in kept else found[index] for index in indices]
        starts = starts or [0] * len(indices)
        return torch.cat([part[start:].to(self._device) for part, start in zip(parts, starts, strict=True)])

    def _store(self, kind: Kind) -> KeptRows:
        return self._references.setdefault(kind, KeptRows(self._budget))

    @torch.no_grad()
    def _compute_reference(self, kind: Kind, group: Sequence[int]) -> dict[int, Tensor]:
        if kind == "states" and self._live and self._reference_head is not None:
            self._reference_head, self._live = _frozen(self._reference_head), False
        with (self._without_adapter or _nothing)(), evaluating(self.split.model):
            labelled = self.forward(group, layer=kind if isinstance(kind, int) else None)
        values = labelled.hidden
        if kind == "logprob":
            head = self._reference_head
            if head is None:
                stats = token_stats_from_logits(values, labelled.target, logprob=True)
            else:
                stats = token_stats(values, head, labelled.target, logprob=True)
            values = cast(Tensor, stats.logprob)
        states = {index: values[labelled.row == place].clone() for place, index in enumerate(group)}
        # NOTE: without an adapter to switch off, the reference cannot be computed again: it is kept whatever it takes.
        self._store(kind).keep(states, must=self._without_adapter is None)
        return states

    def _lower_states(self, indices: Sequence[int]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for index in indices:
            if index not in self._lower and index not in found:
                group = self._group.get(index, (index,))
                rows = [self._rows[member] for member in group]
                with evaluating(self.split.model):
                    length = self._length(max(len(row.ids) for row in rows))
                    hidden = self.trunk.lower(*self._pad_ids(rows, length))
                states = {m: hidden[j, : len(rows[j].ids)].clone() for j, m in enumerate(group)}
                self._lower.keep(states)
                found.update(states)
        return [self._lower[index] if index in self._lower else found[index] for index in indices]

    def _pad_ids(self, rows: Sequence[PreparedRow], length: int) -> tuple[Tensor, Tensor | None]:
        ids = torch.full((len(rows), length), self.pad_id)
        for place, row in enumerate(rows):
            ids[place, : len(row.ids)] = row.ids
        return ids.to(self._device), self._mask([len(row.ids) for row in rows], length)

    def _pad_hidden(self, states: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor | None]:
        hidden = states[0].new_zeros((len(states), length, states[0].shape[1]))
        for place, state in enumerate(states):
            hidden[place, : len(state)] = state
        return hidden, self._mask([len(state) for state in states], length)

    def _mask(self, lengths: Sequence[int], length: int) -> Tensor | None:
        """None where the model needs none: in a causal model no token sees the padding to its right."""
        if not self._needs_mask:
            return None
        return (torch.arange(length)[None, :] < torch.tensor(lengths)[:, None]).long().to(self._device)

    def _length(self, longest: int) -> int:
        return -(-longest // self.pad_to) * self.pad_to


def _frozen(head: Head) -> Head:
    bias = None if head.bias is None else head.bias.detach().clone()
    return Head(head.weight.detach().clone(), bias, head.softcap, head.scale)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _gone() -> Iterator[None]:
    raise RunError("the reference of a row was not kept before the first update of a full fine-tuning run")
    yield


def _vocabulary(split: Split) -> int:
    return cast(Any, split.model).get_input_embeddings().weight.shape[0]
