"""Tensors kept by row: in memory up to a limit, beyond it dropped, or in a memory-mapped file where they must stay."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

from expunge.errors import RunError


class Budget:
    """Bytes that the stores of one run may take together in memory.

    Args:
        limit: bytes.

    Attributes:
        limit: as given.
        used: bytes taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def take(self, size: int) -> bool:
        """Take `size` bytes if they are left; returns whether they were."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True


class KeptRows:
    """One tensor for each row.

    What can be computed again is dropped when the budget is spent; what cannot is moved to files that are mapped into
    memory, which the system reads as they are needed and which are gone with the process.

    Args:
        budget: shared with other stores.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._rows: dict[int, Tensor] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._rows

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]

    def keep(self, states: Mapping[int, Tensor], *, must: bool = False) -> None:
        """Keep the tensors of some rows, all or none.

        Args:
            states: row → tensor, not attached to a graph.
            must: they cannot be computed again.

        Raises:
            RunError: they must be kept and the disk has no room for them.
        """
        size = sum(state.numel() * state.element_size() for state in states.values())
        if self._budget.take(size):
            self._rows.update(states)
        elif must:
            self._rows.update(_mapped(states))


def _mapped(states: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """CPU copies in a file that is mapped into memory; the file has no name any more, so nothing is left behind."""
    found: dict[int, Tensor] = {}
    parts: dict[torch.dtype, list[int]] = {}
    for index, state in states.items():
        if state.numel() == 0:
            found[index] = state
        else:
            parts.setdefault(state.dtype, []).append(index)
    for dtype, rows in parts.items():
        numbers = sum(states[row].numel() for row in rows)
        handle, path = tempfile.mkstemp(prefix="expunge-reference-")
        try:
            # Written, not only made longer: a full disk is an error here and a crash when a mapped page has no room.
            with os.fdopen(handle, "wb") as file:
                for row in rows:
                    file.write(states[row].cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            whole = torch.from_file(path, shared=False, size=numbers, dtype=dtype)
        except OSError as error:
            raise RunError(
                f"reference: cannot keep {numbers * dtype.itemsize / 1e6:.0f} MB in {tempfile.gettempdir()}: "
                f"{error.strerror or error}"
            ) from None
        finally:
            os.unlink(path)
        start = 0
        for row in rows:
            end = start + states[row].numel()
            found[row] = whole[start:end].view(states[row].shape)
            start = end
    return found
