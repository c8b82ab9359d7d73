"""Storages: in how many bits the running averages are kept, and which parameters are excepted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from expunge.errors import UsageError
from expunge.optim import _codebooks, _sharding
from expunge.optim._rules import looks_like_embedding
from expunge.optim._workspace import Workspace

KINDS = ("32bit", "bf16", "8bit", "4bit")
KEEP_32BIT = ("*embed*", "*lm_head*", "*wte*", "*wpe*", "*norm*", "*.ln_*", "*bias")
_BLOCK_SIZES = tuple(2**power for power in range(5, 17))
_BLOCKS = {"8bit": 256, "4bit": 128}
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Storage:
    """How running averages are kept.

    "32bit": float32 (float64 for float64 parameters). "bf16": bfloat16 with stochastic rounding. "8bit", "4bit": one
    code a value and one float32 scale a block; first moments and deltas with a signed dynamic code book, second moments
    as their roots with an unsigned one, so that they are never negative and only zero is stored as zero.

    Small tensors, vectors (norms, biases), embeddings and heads keep 32 bits. A parameter without a name goes by its
    shape: a matrix with at least 16,384 rows and 8 times as many rows as columns is taken for an embedding or a head.
    Shapes are those of the full parameter, also where it is sharded.

    Attributes:
        kind: "32bit", "bf16", "8bit" or "4bit".
        block: values that share a scale, a power of two from 32 to 65,536; None for 256 ("8bit") or 128 ("4bit").
        rounding: "stochastic" or "nearest"; None for "stochastic". An average changes by a small part of its value in
            an update: rounded to the nearest, it stays where it is. Stochastic rounding draws from a fixed table by
            the update count: a resumed run rounds as one that was never stopped.
        keep_32bit: name patterns (`fnmatch`) of parameters that keep 32 bits, in place of the default ones; () puts
            every matrix into the storage, also unnamed ones.
        min_size: parameters with fewer values keep 32 bits.

    Raises:
        UsageError: a value is not accepted, or has no effect.
    """

    kind: str = "32bit"
    block: int | None = None
    rounding: str | None = None
    keep_32bit: tuple[str, ...] = KEEP_32BIT
    min_size: int = 4096

    def __post_init__(self) -> None:
        """Check every value."""
        if self.kind not in KINDS:
            raise UsageError(f"storage: found {self.kind!r}, accepted is one of {', '.join(KINDS)}")
        if self.block is not None:
            if self.kind not in _BLOCKS:
                raise UsageError(f"block: found {self.block!r} with storage {self.kind!r}, which has no blocks")
            if self.block not in _BLOCK_SIZES:
                raise UsageError(f"block: found {self.block!r}, accepted is a power of two from 32 to 65536")
        if self.rounding not in (None, "nearest", "stochastic"):
            raise UsageError(f"rounding: found {self.rounding!r}, accepted is 'nearest' or 'stochastic'")
        if isinstance(self.keep_32bit, str) or not all(isinstance(pattern, str) for pattern in self.keep_32bit):
            raise UsageError(f"keep_32bit: found {self.keep_32bit!r}, accepted is a sequence of name patterns")
        object.__setattr__(self, "keep_32bit", tuple(self.keep_32bit))
        if not isinstance(self.min_size, int) or self.min_size < 0:
            raise UsageError(f"min_size: found {self.min_size!r}, accepted is a whole number from 0")
        self._check_effect()

    def _check_effect(self) -> None:
        if self.kind == "32bit":
            for option, default in (("rounding", None), ("keep_32bit", KEEP_32BIT), ("min_size", 4096)):
                if getattr(self, option) != default:
                    raise UsageError(f"{option}: found {getattr(self, option)!r} with storage '32bit', has no effect")

    def check_patterns(self, names: Iterable[str | None]) -> None:
        """Refuse patterns of the user that match no name.

        Raises:
            UsageError: the first pattern without a match.
        """
        if self.keep_32bit == KEEP_32BIT:
            return
        known = [name for name in names if name is not None]
        for pattern in self.keep_32bit:
            if not any(fnmatchcase(name, pattern) for name in known):
                hint = "" if known else " (parameters have no names: pass model.named_parameters())"
                raise UsageError(f"keep_32bit: found {pattern!r}, which matches no parameter{hint}")

    def codec(self, name: str | None, shape: Sequence[int]) -> Codec:
        """How the averages of one parameter are kept: by its name (None where unnamed) and its full shape."""
        if self.kind == "32bit" or len(shape) < 2 or math.prod(shape) < self.min_size:
            return FloatCodec()
        if name is None:
            kept = self.keep_32bit == KEEP_32BIT and looks_like_embedding(shape)
        else:
            kept = any(fnmatchcase(name, pattern) for pattern in self.keep_32bit)
        if kept:
            return FloatCodec()
        stochastic = self.rounding != "nearest"
        if self.kind == "bf16":
            return BrainCodec(stochastic)
        return BlockCodec(8 if self.kind == "8bit" else 4, self.block or _BLOCKS[self.kind], stochastic)


class Codec(Protocol):
    """Keeps one average of one parameter in tensors, and gives pieces of it as float32.

    Attributes:
        block: pieces start at multiples of it.
        direct: `load` gives a view of what is stored, so that nothing has to be saved.
        resolution: relative rounding error of a large value of a block; 0 where nothing is rounded.
    """

    @property
    def resolution(self) -> float: ...

    @property
    def block(self) -> int: ...

    @property
    def direct(self) -> bool: ...

    def shapes(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the stored tensors, by the suffix of their key."""

    def load(self, stored: Stored, span: slice, room: Workspace, slot: str) -> Tensor:
        """Values of a span, 1-D; a view of the stored tensor or of the workspace's buffer `slot`."""

    def save(self, stored: Stored, span: slice, values: Tensor, room: Workspace, draw: int) -> None:
        """Store the values of a span; may overwrite `values`. `draw` selects the random numbers."""


@dataclass(frozen=True)
class Stored:
    """The tensors of one average, flat.

    Attributes:
        values: values or codes.
        scales: scale of each block, (blocks, 1); None without blocks.
        signed: whether the average can be negative.
    """

    values: Tensor
    scales: Tensor | None
    signed: bool


def stored(state: Mapping[str, Tensor], key: str, signed: bool) -> Stored:
    """One average as it is stored: its local tensors, flat."""
    scales = state.get(key + ":scale")
    return Stored(_sharding.local(state[key]).view(-1), None if scales is None else scales[:, None], signed)


@dataclass(frozen=True)
class FloatCodec:
    """float32, or float64 where the parameter is."""

    @property
    def resolution(self) -> float:
        """Exact."""
        return 0.0

    @property
    def block(self) -> int:
        """No blocks."""
        return 1

    @property
    def direct(self) -> bool:
        """Updated in place."""
        return True

    def shapes(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """One tensor of the parameter's shape."""
        return {"": (tuple(shape), torch.float64 if dtype == torch.float64 else torch.float32)}

    def load(self, stored: Stored, span: slice, room: Workspace, slot: str) -> Tensor:
        """A view."""
        return stored.values[span]

    def save(self, stored: Stored, span: slice, values: Tensor, room: Workspace, draw: int) -> None:
        """Nothing: `load` gave a view."""


@dataclass(frozen=True)
class BrainCodec:
    """bfloat16.

    Attributes:
        stochastic: rounded up with the probability of the part that is cut off, else to the nearest.
    """

    stochastic: bool

    @property
    def resolution(self) -> float:
        """Eight significant bits."""
        return 2.0**-8

    @property
    def block(self) -> int:
        """No blocks."""
        return 1

    @property
    def direct(self) -> bool:
        """Copied."""
        return False

    def shapes(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """One tensor of the parameter's shape."""
        return {"": (tuple(shape), torch.bfloat16)}

    def load(self, stored: Stored, span: slice, room: Workspace, slot: str) -> Tensor:
        """As float32."""
        part = stored.values[span]
        return room.take(slot, part.numel()).copy_(part)

    def save(self, stored: Stored, span: slice, values: Tensor, room: Workspace, draw: int) -> None:
        """Rounded to bfloat16."""
        if self.stochastic:
            cut_to_bfloat16_(values, room.noise_bits(values.numel(), draw))
        stored.values[span].copy_(values)


def cut_to_bfloat16_(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values stochastically to numbers that bfloat16 has, in place.

    Args:
        values: float32; infinities and NaN stay.
        bits: int32 in [0, 65536), as many as values.

    Returns:
        `values`.
    """
    values.view(torch.int32).add_(bits).bitwise_and_(-65536)
    return values


@dataclass(frozen=True)
class BlockCodec:
    """Codes with a scale a block.

    Attributes:
        bits: 8 or 4 (two codes a byte: the first half of a block in the low, the second half in the high bits).
        size: values in a block.
        stochastic: stochastic rounding between neighbouring codes, else the nearest code.
    """

    bits: int
    size: int
    stochastic: bool

    @property
    def resolution(self) -> float:
        """About half a step of the code book's largest decade, 0.9/64 or 0.9/4, as part of a middling value."""
        return 2.0**-6 if self.bits == 8 else 2.0**-3

    @property
    def block(self) -> int:
        """Values in a block."""
        return self.size

    @property
    def direct(self) -> bool:
        """Decoded."""
        return False

    def shapes(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Codes of whole blocks, and the scales."""
        blocks = -(-math.prod(shape) // self.size)
        return {
            "": ((blocks * self.size * self.bits // 8,), torch.uint8),
            ":scale": ((blocks,), torch.float32),
        }

    def load(self, stored: Stored, span: slice, room: Workspace, slot: str) -> Tensor:
        """Decoded values: entry of the code book times the block's scale."""
        codes, scales = self._piece(stored, span)
        padded = scales.numel() * self.size
        if self.bits == 4:
            pairs, codes = codes.view(-1, self.size // 2), room.take("codes", padded, torch.uint8)
            halves = codes.view(-1, 2, self.size // 2)
            halves[:, 0].copy_(pairs).bitwise_and_(15)
            halves[:, 1].copy_(pairs).bitwise_right_shift_(4)
        values = room.take(slot, padded)
        _look_up(_codebooks.decode_table(self.bits, stored.signed, codes.device), codes, values, room)
        room.take(slot, padded, width=self.size).mul_(scales)
        count = span.stop - span.start
        return values if padded == count else values[:count]

    def save(self, stored: Stored, span: slice, values: Tensor, room: Workspace, draw: int) -> None:
        """Encode; the scale is the block's largest absolute value."""
        codes, scales = self._piece(stored, span)
        padded = scales.numel() * self.size
        if values.numel() != padded:
            whole = room.take("padded", padded)
            whole[values.numel() :].zero_()
            whole[: values.numel()].copy_(values)
            values = whole
        blocks, scratch = values.view(-1, self.size), room.take("scratch", padded, width=self.size)
        torch.amax(torch.abs(blocks, out=scratch) if stored.signed else blocks, 1, keepdim=True, out=scales)
        # A block of zeros, or of nothing above the smallest normal number, must not divide by zero.
        inverse = torch.reciprocal(scales.clamp_(min=_TINY), out=room.take("inverse", scales.numel(), width=1))
        torch.mul(blocks, inverse, out=scratch)
        keys = room.take("keys", padded, torch.float16, width=self.size)
        keys.copy_(scratch if stored.signed else scratch.sqrt_())
        if self.bits == 8:
            self._to_codes(codes, stored.signed, room, draw)
            return
        unpacked = room.take("codes", padded, torch.uint8)
        self._to_codes(unpacked, stored.signed, room, draw)
        halves = unpacked.view(-1, 2, self.size // 2)
        torch.bitwise_or(halves[:, 0], halves[:, 1] << 4, out=codes.view(-1, self.size // 2))

    def _to_codes(self, codes: Tensor, signed: bool, room: Workspace, draw: int) -> None:
        """Codes of the float16 numbers in the workspace's "keys"."""
        count = codes.numel()
        keys = room.take("keys", count, torch.float16, bits=torch.uint16)
        if not self.stochastic:
            _look_up(_codebooks.nearest_table(self.bits, signed, codes.device), keys, codes, room)
            return
        # The caches are full: a key that has been looked up lends its memory to what was found.
        places = room.take("keys", count, torch.float16, bits=torch.int16)
        _look_up(_codebooks.position_table(self.bits, signed, codes.device), keys, places, room)
        places.add_(room.noise_bytes(count, draw))
        codes.copy_(torch.bitwise_right_shift(places, room.eight, out=places))

    def _piece(self, stored: Stored, span: slice) -> tuple[Tensor, Tensor]:
        """Codes, flat, and scales, one a row, of the blocks of a span."""
        assert stored.scales is not None
        first, last = span.start // self.size, -(-span.stop // self.size)
        width = self.size * self.bits // 8
        return stored.values[first * width : last * width], stored.scales[first:last]


def _look_up(table: Tensor, keys: Tensor, out: Tensor, room: Workspace) -> None:
    """out[i] = table[keys[i]]; `keys` may share memory with `out`."""
    count, threads = keys.numel(), torch.get_num_threads() if keys.device.type == "cpu" else 1
    if threads > 1 and count >= threads * 16384 and count % threads == 0:
        # `index_select` on a vector runs in one thread; `gather` on a matrix in one a row.
        rows = room.take("rows", count, torch.int64).copy_(keys).view(threads, -1)
        torch.gather(table.expand(threads, -1), 1, rows, out=out.view(threads, -1))
        return
    index = room.take("scratch", count, torch.float32, bits=torch.int32).copy_(keys)
    torch.index_select(table, 0, index, out=out)
