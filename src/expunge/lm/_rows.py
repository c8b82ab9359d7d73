"""Rows of token ids as the runner feeds them, and whether padding on their right needs a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from expunge.lm._head import Split
from expunge.lm._stats import IGNORE_INDEX
from expunge.lm._trunk import evaluating


class TokenRow(Protocol):
    """What the runner needs of a row: ids and labels of the same length, −100 where not labelled."""

    @property
    def input_ids(self) -> Sequence[int]: ...

    @property
    def labels(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class PreparedRow:
    """What is fed of a row, and where its labelled tokens are predicted."""

    ids: Tensor  # (n,) the ids that are fed: those before the last labelled token
    places: Tensor  # (m,) positions that predict the labelled tokens
    targets: Tensor  # (m,)
    copied: Tensor  # (m,) bool, targets that are among the tokens before the first labelled one, too


def prepare(row: TokenRow) -> PreparedRow:
    """Cut a row after its last labelled token."""
    places = [t - 1 for t, label in enumerate(row.labels) if label != IGNORE_INDEX and t > 0]
    last = places[-1] + 1 if places else 1
    targets, prompt = [row.labels[t + 1] for t in places], set(row.input_ids[: places[0] + 1] if places else ())
    copied = torch.tensor([target in prompt for target in targets], dtype=torch.bool)
    return PreparedRow(torch.tensor(row.input_ids[:last]), torch.tensor(places), torch.tensor(targets), copied)


@torch.no_grad()
def ignores_right_padding(split: Split) -> bool:
    """Whether the model gives real tokens the same states without a mask as with one, where padding is on the right."""
    run = split.body if split.head is not None else split.logits
    device = next(split.model.parameters()).device
    ids = torch.arange(1, 13, device=device).view(2, 6)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with evaluating(split.model):
        try:
            masked, bare = run(ids, mask)[mask.bool()], run(ids, None)[mask.bool()]
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return False
    scale = float(masked.abs().max())
    return float((masked - bare).abs().max()) <= (1e-5 if masked.dtype == torch.float32 else 0.02) * max(scale, 1.0)
