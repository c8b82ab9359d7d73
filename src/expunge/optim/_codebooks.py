"""Code books of the blockwise storages, and the tables that make them fast.

A value x of a block is stored as the index of the nearest entry of a code book to x / max|block|. Searching a book of
256 entries costs about 40 ns a value on a CPU; here the value is rounded to float16 and its 16 bits index a table with
the answer for every float16 number, which costs half a nanosecond. Any code book costs the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from expunge.errors import UsageError


def dynamic_code_book(bits: int, *, signed: bool) -> Tensor:
    """The dynamic tree code: 7 decades (3 for 4 bits), twice as many values in every larger one.

    Decade i of D has 2^i values of each sign (unsigned: 2^(i+1) values), the upper ends of as many equal steps of
    [0.1, 1]·10^(i − D + 1); and there is 0. The published code takes the middles of the steps and adds +1, so that a
    block's largest value is exact only where it is positive: a negative one shrinks with every update, in 4 bits by
    11 %. With the ends both signs have their 1.

    Args:
        bits: 4 or 8.
        signed: both signs, else values from 0 only.

    Returns:
        (2**bits − 1,) float32, rising, from −1 (unsigned: 0) to 1; 0 is among them.

    Raises:
        UsageError: another number of bits.

    Example:
        >>> [round(value, 3) for value in dynamic_code_book(4, signed=True).tolist()][7:]
        [0.0, 0.01, 0.055, 0.1, 0.325, 0.55, 0.775, 1.0]

    References:
        Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016, arXiv 1511.04561; Dettmers et al.,
        "8-bit Optimizers via Block-wise Quantization", ICLR 2022, arXiv 2110.02861.
    """
    if bits not in (4, 8):
        raise UsageError(f"bits: found {bits!r}, accepted is 4 or 8")
    decades = bits - 1
    values = [0.0]
    for decade in range(decades):
        steps = 2 ** (decade if signed else decade + 1)
        for step in range(1, steps + 1):
            end = (0.1 + 0.9 * step / steps) * 10.0 ** (decade - decades + 1)
            values.extend([end, -end] if signed else [end])
    return torch.tensor(sorted(values), dtype=torch.float32)


@lru_cache(maxsize=32)
def decode_table(bits: int, signed: bool, device: torch.device) -> Tensor:
    """What each code stands for: (2**bits − 1,) float32.

    An unsigned statistic is stored as its root: the table holds the squares, so that decoding costs nothing more.
    """
    book = dynamic_code_book(bits, signed=signed)
    return (book if signed else book.square()).to(device)


@lru_cache(maxsize=32)
def nearest_table(bits: int, signed: bool, device: torch.device) -> Tensor:
    """The nearest code of every float16 number, by its 16 bits: (65536,) uint8.

    In an unsigned book no positive number gets the code of zero: a second moment that vanishes by rounding would turn
    the next step into a division by almost nothing.
    """
    position = _positions(bits, signed)
    book = dynamic_code_book(bits, signed=signed)
    low = position.floor().long().clamp(max=len(book) - 2)
    numbers = _all_float16(signed)
    upper = (numbers - book[low]) > (book[low + 1] - numbers)
    code = low + upper.long()
    if not signed:
        code[numbers > 0] = code[numbers > 0].clamp(min=1)
    return code.to(torch.uint8).to(device)


@lru_cache(maxsize=32)
def position_table(bits: int, signed: bool, device: torch.device) -> Tensor:
    """Where every float16 number lies between codes: (65536,) int16, 256 · (code + share of the way to the next one).

    Adding a random number of [0, 256) and keeping the upper byte is stochastic rounding; its bias is at most 1/512 of
    the step between two codes. In an unsigned book positive numbers are at code 1 or above, as in `nearest_table`.
    """
    position = _positions(bits, signed)
    if not signed:
        positive = _all_float16(signed) > 0
        position[positive] = position[positive].clamp(min=1.0)
    # Above 127.996 the number wraps to a negative int16; its upper byte is the code all the same.
    fixed = (position * 256.0).round().to(torch.int32)
    return fixed.to(torch.int16).to(device)


def _all_float16(signed: bool) -> Tensor:
    """Every float16 number by its bits, within the code book's range; NaN as 0 (its block's scale keeps the NaN)."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    return numbers.nan_to_num(nan=0.0).clamp(-1.0 if signed else 0.0, 1.0)


def _positions(bits: int, signed: bool) -> Tensor:
    book = dynamic_code_book(bits, signed=signed)
    numbers = _all_float16(signed)
    low = (torch.searchsorted(book, numbers, right=True) - 1).clamp(0, len(book) - 2)
    return low + (numbers - book[low]) / (book[low + 1] - book[low])
