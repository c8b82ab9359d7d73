"""Many tensors updated as one: the methods that the update uses, on top of `torch._foreach_*`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor


class TensorList:
    """A list of tensors with the tensor methods that schemes and rules use; every method is one `torch._foreach` call.

    A rule written with in-place tensor methods (`abs_`, `sqrt_`, `add_`, `div_`, `lerp_`, …) runs on a `Tensor` and on
    a `TensorList` alike. On CUDA one call is a few kernels for all tensors instead of one kernel for each.

    Attributes:
        tensors: the tensors, in the caller's order; all on one device and of one dtype.
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def add_(self, other: TensorList | float, *, alpha: float = 1.0) -> TensorList:
        """Self += alpha · other."""
        if isinstance(other, TensorList):
            torch._foreach_add_(self.tensors, other.tensors, alpha=alpha)
        else:
            torch._foreach_add_(self.tensors, alpha * other)
        return self

    def sub_(self, other: TensorList | float, *, alpha: float = 1.0) -> TensorList:
        """Self −= alpha · other."""
        if isinstance(other, TensorList):
            torch._foreach_sub_(self.tensors, other.tensors, alpha=alpha)
        else:
            torch._foreach_sub_(self.tensors, alpha * other)
        return self

    def mul_(self, other: TensorList | float) -> TensorList:
        """Self *= other."""
        torch._foreach_mul_(self.tensors, _plain(other))
        return self

    def div_(self, other: TensorList | float) -> TensorList:
        """Self /= other."""
        torch._foreach_div_(self.tensors, _plain(other))
        return self

    def lerp_(self, end: TensorList, weight: float) -> TensorList:
        """Self += weight · (end − self)."""
        torch._foreach_lerp_(self.tensors, end.tensors, weight)
        return self

    def addcmul_(self, left: TensorList, right: TensorList, *, value: float = 1.0) -> TensorList:
        """Self += value · left · right."""
        torch._foreach_addcmul_(self.tensors, left.tensors, right.tensors, value=value)
        return self

    def addcdiv_(self, left: TensorList, right: TensorList, *, value: float = 1.0) -> TensorList:
        """Self += value · left / right."""
        torch._foreach_addcdiv_(self.tensors, left.tensors, right.tensors, value=value)
        return self

    def abs_(self) -> TensorList:
        """Absolute values, in place."""
        torch._foreach_abs_(self.tensors)
        return self

    def sqrt_(self) -> TensorList:
        """Roots, in place."""
        torch._foreach_sqrt_(self.tensors)
        return self

    def sign_(self) -> TensorList:
        """Signs, in place."""
        torch._foreach_sign_(self.tensors)
        return self

    def reciprocal_(self) -> TensorList:
        """1 / values, in place."""
        torch._foreach_reciprocal_(self.tensors)
        return self

    def neg_(self) -> TensorList:
        """Negated, in place."""
        torch._foreach_neg_(self.tensors)
        return self

    def copy_(self, source: TensorList) -> TensorList:
        """The values of `source`, in place."""
        torch._foreach_copy_(self.tensors, source.tensors)
        return self

    def clone(self) -> TensorList:
        """A copy with tensors of its own."""
        return TensorList([tensor.clone() for tensor in self.tensors])


def _plain(other: TensorList | float) -> list[Tensor] | float:
    return other.tensors if isinstance(other, TensorList) else other


Value = TypeVar("Value", Tensor, TensorList)


def times(left: Value, right: Value | float, out: Tensor | None) -> Value:
    """Left · right, into `out` where one is given (tensors only)."""
    if isinstance(left, TensorList):
        return cast(Value, TensorList(torch._foreach_mul(left.tensors, _plain(cast("TensorList | float", right)))))
    return cast(Value, torch.mul(left, cast("Tensor | float", right), out=out))


def plus(left: Value, right: Value, alpha: float, out: Tensor | None) -> Value:
    """Left + alpha · right, into `out` where one is given (tensors only)."""
    if isinstance(left, TensorList):
        return cast(Value, TensorList(torch._foreach_add(left.tensors, cast(TensorList, right).tensors, alpha=alpha)))
    return cast(Value, torch.add(left, cast(Tensor, right), alpha=alpha, out=out))


def larger_(left: Value, right: Value) -> Value:
    """The larger of two values, into `left`."""
    if isinstance(left, TensorList):
        torch._foreach_maximum_(left.tensors, cast(TensorList, right).tensors)
        return left
    return cast(Value, torch.maximum(left, cast(Tensor, right), out=left))
