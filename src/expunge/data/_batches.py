"""From token rows to padded tensors, and the order in which training visits them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expunge.data._encode import IGNORE, Row
from expunge.errors import UsageError


@dataclass(frozen=True)
class Batch:
    """Right-padded rows.

    Attributes:
        input_ids: (B, T) int64.
        attention_mask: (B, T) int64, 1 for tokens of the row and 0 for padding, whatever id pads.
        labels: (B, T) int64, -100 where nothing is labelled.
        rows: (B) index of each row in the corpus.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    rows: tuple[int, ...]


def collate(rows: Sequence[Row], *, pad_id: int, pad_to: int = 32, indices: Sequence[int] | None = None) -> Batch:
    """Pad rows on the right to one length, a multiple of `pad_to`.

    Args:
        rows: (B) rows, B >= 1.
        pad_id: token id to pad with; may be the end-of-turn token, since masks go by position.
        pad_to: >= 1; a few fixed lengths keep memory and compiled kernels reusable.
        indices: (B) index of each row in the corpus; 0 to B - 1 by default.

    Raises:
        ValueError: no rows, a negative `pad_id`, `pad_to` below 1, or as many indices as rows not given.

    Example:
        >>> row = Row("0", 0, (5, 6, 7, 2), (-100, -100, 7, 2), 2)
        >>> collate([row], pad_id=2, pad_to=6).labels.tolist()
        [[-100, -100, 7, 2, -100, -100]]
    """
    if not rows:
        raise ValueError("collate needs at least one row")
    if pad_id < 0 or pad_to < 1:
        raise ValueError(f"pad_id must be at least 0 and pad_to at least 1, got {pad_id} and {pad_to}")
    indices = range(len(rows)) if indices is None else indices
    if len(indices) != len(rows):
        raise ValueError(f"{len(indices)} indices for {len(rows)} rows")
    length = -(-max(len(row.input_ids) for row in rows) // pad_to) * pad_to
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORE, dtype=torch.int64)
    for place, row in enumerate(rows):
        size = len(row.input_ids)
        input_ids[place, :size] = torch.tensor(row.input_ids, dtype=torch.int64)
        attention_mask[place, :size] = 1
        labels[place, :size] = torch.tensor(row.labels, dtype=torch.int64)
    return Batch(input_ids, attention_mask, labels, tuple(indices))


def batches_by_length(rows: Sequence[Row], *, batch_size: int, pad_id: int, pad_to: int = 32) -> list[Batch]:
    """Batches for evaluation: every row once, sorted by length so that little is padding.

    The longest come first, so that a lack of memory shows at once. `Batch.rows` leads back to the order of the corpus.

    Raises:
        ValueError: `batch_size` below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].input_ids))
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [collate([rows[i] for i in group], pad_id=pad_id, pad_to=pad_to, indices=group) for group in groups]


class EpochSampler:
    """Endless shuffled passes over items; each pass (epoch) visits every item once, in an order of its own.

    The order of a pass depends on the seed and the number of the pass only, so the whole state is a count. A draw may
    span two passes and can then hold one item twice.

    Args:
        items: what to draw from, such as `range(len(corpus.rows))` or a selection of row indices. At least one.
        seed: of the shuffling.

    Raises:
        ValueError: no items.
    """

    def __init__(self, items: Sequence[int], *, seed: int = 0) -> None:
        if not len(items):
            raise ValueError("EpochSampler needs at least one item")
        self._items = tuple(int(item) for item in items)
        self._seed = int(seed)
        self._drawn = 0
        self._order: tuple[int, tuple[int, ...]] | None = None

    @property
    def epoch(self) -> int:
        """Number of completed passes."""
        return self._drawn // len(self._items)

    def next(self, k: int) -> list[int]:
        """Draw the next `k` items.

        Raises:
            ValueError: `k` is negative.
        """
        if k < 0:
            raise ValueError(f"k must be at least 0, got {k}")
        drawn = []
        for _ in range(k):
            epoch, position = divmod(self._drawn, len(self._items))
            drawn.append(self._permutation(epoch)[position])
            self._drawn += 1
        return drawn

    def _permutation(self, epoch: int) -> tuple[int, ...]:
        if self._order is None or self._order[0] != epoch:
            digest = hashlib.sha256(f"{self._seed}:{epoch}".encode()).digest()
            # 63 bits: manual_seed takes signed 64-bit integers on every platform.
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            order = torch.randperm(len(self._items), generator=generator).tolist()
            self._order = (epoch, tuple(self._items[place] for place in order))
        return self._order[1]

    def _fingerprint(self) -> str:
        return hashlib.sha256(",".join(map(str, self._items)).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """State that survives JSON: the seed, how many items were drawn, and which items there are."""
        return {"seed": self._seed, "drawn": self._drawn, "items": len(self._items), "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UsageError: the state belongs to other items.
        """
        if state["fingerprint"] != self._fingerprint():
            raise UsageError(
                f"the checkpoint was made with other data: it has {state['items']} items, this run {len(self._items)}"
            )
        self._seed, self._drawn, self._order = int(state["seed"]), int(state["drawn"]), None
