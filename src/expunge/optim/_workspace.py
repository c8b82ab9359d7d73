"""Buffers that an update reuses, and its random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

# Places in the table of random numbers: enough that few repeat, few enough that the table stays in the cache.
_DRAWS = 1 << 14


class Workspace:
    """Scratch memory of one device, made when first asked for; nothing in it outlives an update.

    Attributes:
        device: where it is.
        dtype: of the values that updates compute with.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        # Cutting a view costs a tenth of an operation on a piece, and most pieces have one size: views are kept.
        self._views: dict[tuple[str, torch.dtype, int, int, torch.dtype | None], Tensor] = {}
        # A shift by a Python number makes a tensor of it every time.
        self.eight = torch.tensor(8, dtype=torch.int16, device=device)

    def take(
        self, slot: str, size: int, dtype: torch.dtype | None = None, *, width: int = 0, bits: torch.dtype | None = None
    ) -> Tensor:
        """The first `size` values of the buffer `slot`, with whatever was left in it.

        Args:
            slot: name of the buffer; buffers of different dtypes are different.
            size: number of values.
            dtype: of the buffer; None for the workspace's.
            width: 0 for (size,), else (size / width, width).
            bits: read the same memory as this dtype, of the same size.
        """
        key = (slot, dtype or self.dtype, size, width, bits)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._cut(*key)
        return view

    def _cut(self, slot: str, dtype: torch.dtype, size: int, width: int, bits: torch.dtype | None) -> Tensor:
        buffer = self._buffers.get((slot, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[slot, dtype] = torch.empty(size, dtype=dtype, device=self.device)
            self._views.clear()
        view = buffer[:size] if bits is None else buffer[:size].view(bits)
        return view.view(-1, width) if width else view

    def noise_bytes(self, size: int, draw: int) -> Tensor:
        """Random int16 in [0, 256), 1-D: the same for the same draw and size.

        They come from a fixed table, at a place that `draw` selects: reading costs less than drawing, a resumed run
        rounds as one that was never stopped, and the global random state is left alone.
        """
        return self._table(256, torch.int16, size, draw)

    def noise_bits(self, size: int, draw: int) -> Tensor:
        """Random int32 in [0, 65536), otherwise as `noise_bytes`."""
        return self._table(65536, torch.int32, size, draw)

    def _table(self, limit: int, dtype: torch.dtype, size: int, draw: int) -> Tensor:
        key = ("noise", dtype)
        table = self._buffers.get(key)
        if table is None or table.numel() < size + _DRAWS:
            # One stream for all sizes: a longer table begins as a shorter one.
            generator = torch.Generator().manual_seed(0)
            rows = -(-(size + _DRAWS) // _DRAWS)
            parts = [torch.randint(limit, (_DRAWS,), generator=generator, dtype=torch.int32) for _ in range(rows)]
            table = torch.cat(parts).to(dtype).to(self.device)
            self._buffers[key] = table
        start = draw % _DRAWS
        return table[start : start + size]
