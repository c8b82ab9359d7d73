"""Forward passes over rows: in batches by length, and with a prompt that several rows share computed once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from expunge.data import IGNORE, Row, batches_by_length
from expunge.lm import Split, labelled_positions

_PREFIX_PAD, _SUFFIX_PAD = 32, 16
# Keys and values of a prompt are kept for each row: those of long ones would fill the memory.
_LONGEST_SHARED = 512


@dataclass(frozen=True)
class Places:
    """The labelled tokens of a batch of rows.

    Attributes:
        rows: (B,) index of each row.
        owner: (N,) int64 on the CPU, which of the B rows a token belongs to, ascending.
        targets: (N,) int64, the tokens.
        hidden: (N, d) hidden states that predict them; (N, V) logits where the model has no recognised head.
    """

    rows: tuple[int, ...]
    owner: Tensor
    targets: Tensor
    hidden: Tensor


def forwards(split: Split, rows: Sequence[Row], *, batch_size: int, pad_id: int) -> Iterator[Places]:
    """Run every row once, in some order.

    Args:
        split: the model, in evaluation mode.
        rows: what to run.
        batch_size: rows in a forward pass.
        pad_id: any valid id; it is masked.
    """
    groups = _groups(rows) if len(rows) > 1 else []
    shared = SharedPrompts(split, pad_id) if groups else None
    together: set[int] = set()
    if shared is not None and shared.usable:
        for chosen in _shared_batches(rows, groups, batch_size):
            together.update(index for _, index in chosen)
            yield shared.run(rows, chosen)
    alone = [index for index in range(len(rows)) if index not in together]
    if not alone:
        return
    device = next(split.model.parameters()).device
    for batch in batches_by_length([rows[index] for index in alone], batch_size=batch_size, pad_id=pad_id):
        owner, positions, targets = labelled_positions(batch.labels)
        ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
        output = split.logits(ids, mask) if split.head is None else split.body(ids, mask)
        hidden = output[owner.to(device), positions.to(device)]
        yield Places(tuple(alone[place] for place in batch.rows), owner, targets.to(device), hidden)


class SharedPrompts:
    """Runs rows after their prompts, each prompt once: its keys and values are kept for all its rows.

    Args:
        split: the model.
        pad_id: any valid id; it is masked.

    Attributes:
        usable: whether this model's cache allows it; checked on a few random ids against rows run whole.
    """

    def __init__(self, split: Split, pad_id: int) -> None:
        self.split, self.pad_id = split, pad_id
        self.device = next(split.model.parameters()).device
        names = inspect.signature(split.inner.forward).parameters if split.inner is not None else {}
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.usable = self._cache_name in names and "position_ids" in names and self._agrees()

    def run(self, rows: Sequence[Row], batch: Sequence[tuple[int, int]]) -> Places:
        """Run rows.

        Args:
            rows: all rows.
            batch: (number of the group, index of the row), rows of a group side by side.
        """
        numbers = list(dict.fromkeys(number for number, _ in batch))
        first = {number: index for number, index in reversed(batch)}
        prompts = [rows[first[number]].input_ids[: rows[first[number]].prompt_length - 1] for number in numbers]
        cache, prompt_mask = self._prompts(prompts)
        chosen = torch.tensor([numbers.index(number) for number, _ in batch], device=self.device)
        cache.batch_select_indices(chosen)
        indices = [index for _, index in batch]
        ids, mask, labels = self._suffixes([rows[index] for index in indices])
        mask = torch.cat([prompt_mask[chosen], mask], dim=1)
        hidden = self._body(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :], cache)
        owner, positions, targets = labelled_positions(labels)
        found = hidden[owner.to(self.device), positions.to(self.device)]
        return Places(tuple(indices), owner, targets.to(self.device), found)

    def _prompts(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Tensor]:
        """Cache of the prompts, padded on the left, and their mask."""
        width = _padded(max(map(len, prompts)), _PREFIX_PAD)
        ids = torch.tensor([[self.pad_id] * (width - len(one)) + list(one) for one in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=self.device)
        cache = DynamicCache()
        self._body(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        return cache, mask

    def _suffixes(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and mask from the last token of the prompt on, padded on the right; labels stay on the CPU."""
        parts = [(row.input_ids[row.prompt_length - 1 :], row.labels[row.prompt_length - 1 :]) for row in rows]
        width = _padded(max(len(ids) for ids, _ in parts), _SUFFIX_PAD)
        ids = torch.tensor([[*ids, *[self.pad_id] * (width - len(ids))] for ids, _ in parts], device=self.device)
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in parts], device=self.device)
        labels = torch.tensor([[IGNORE, *labels[1:], *[IGNORE] * (width - len(labels))] for _, labels in parts])
        return ids, mask, labels

    def _body(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        inner: Any = self.split.inner
        options = {"use_cache": True, self._cache_name: cache}
        output = inner(input_ids=ids, attention_mask=mask, position_ids=positions, **options)
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Whether rows run after their prompts give what they give when run whole."""
        if self.split.head is None:
            return False
        config: Any = getattr(self.split.inner, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            return False
        vocabulary = self.split.head.weight.shape[0]
        drawn = torch.randint(vocabulary, (24,), generator=torch.Generator().manual_seed(0)).tolist()
        rows = [
            _probe_row(drawn[:5], drawn[10:13]),
            _probe_row(drawn[:5], drawn[13:15]),
            _probe_row(drawn[5:8], drawn[15:19]),
        ]
        try:
            found = self.run(rows, [(0, 0), (0, 1), (1, 2)])
            cache = self._prompts([drawn[:4]])[0]
            if any(type(layer) is not DynamicLayer for layer in cache.layers):
                return False
            whole = [self.split.body(torch.tensor([row.input_ids], device=self.device))[0] for row in rows]
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError):
            return False
        expected = torch.cat([one[row.prompt_length - 1 : -1] for one, row in zip(whole, rows, strict=True)])
        tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 0.05
        return float((found.hidden - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), 1.0)


def _probe_row(prompt: list[int], answer: list[int]) -> Row:
    labels = (*[IGNORE] * len(prompt), *answer)
    return Row("probe", 0, (*prompt, *answer), labels, len(prompt))


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _groups(rows: Sequence[Row]) -> list[list[int]]:
    """Rows with one prompt, where that is two rows or more and the prompt neither one token nor very long."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if 1 < row.prompt_length <= _LONGEST_SHARED:
            found.setdefault(row.input_ids[: row.prompt_length], []).append(index)
    return [group for group in found.values() if len(group) > 1]


def _shared_batches(rows: Sequence[Row], groups: Sequence[list[int]], size: int) -> Iterator[list[tuple[int, int]]]:
    """Batches of (group, row), the longest first; prompts of a batch are of similar length."""

    def lengths(group: list[int]) -> tuple[int, int]:
        longest = max(len(rows[index].input_ids) - rows[index].prompt_length for index in group)
        prefix = _padded(rows[group[0]].prompt_length - 1, _PREFIX_PAD)
        return -prefix, -longest

    batch: list[tuple[int, int]] = []
    width = 0
    for number, group in enumerate(sorted(groups, key=lengths)):
        prefix = lengths(group)[0]
        if batch and prefix != width:
            yield batch
            batch = []
        width = prefix
        for index in sorted(group, key=lambda index: -len(rows[index].input_ids)):
            batch.append((number, index))
            if len(batch) == size:
                yield batch
                batch = []
    if batch:
        yield batch
