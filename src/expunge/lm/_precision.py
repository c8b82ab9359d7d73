"""Float32 master copies of low-precision weights, so that small updates are not rounded away."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LOW = (torch.bfloat16, torch.float16)


class MasterWeights:
    """Float32 copies of trainable bfloat16 and float16 parameters; an optimizer updates the copies.

    A bfloat16 weight of 1.0 cannot move by 1e-5: its neighbours are 0.004 away. The master copy adds such steps up, and
    the model gets the rounded sum. Parameters of float32 or wider are their own master: nothing is copied.

    The cycle is `loss.backward()`, `grads_to_masters()` (after each backward pass when accumulating), an optimizer step
    over `masters`, `to_model()`, `zero_grad()`.

    Args:
        params: the parameters to train, in a fixed order; frozen ones are left out.
        widened: the model is saved in a narrower type than the one it is held in.

    Attributes:
        masters: one float32 parameter for each trainable parameter, in the order given; what the optimizer gets.

    Example:
        >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> master = MasterWeights([weight])
        >>> optimizer = torch.optim.SGD(master.masters, lr=1.0)
        >>> for _ in range(1000):
        ...     weight.grad = torch.full_like(weight, 1e-5)
        ...     master.grads_to_masters()
        ...     optimizer.step()
        ...     master.to_model()
        ...     master.zero_grad()
        >>> round(master.masters[0].item(), 3)
        0.99
    """

    def __init__(self, params: Iterable[nn.Parameter], *, widened: bool = False) -> None:
        self._widened = widened
        self.params: list[nn.Parameter] = [param for param in params if param.requires_grad]
        if len({id(param) for param in self.params}) != len(self.params):
            raise ValueError("params: the same parameter was given twice")
        self.masters: list[nn.Parameter] = [
            nn.Parameter(param.detach().to(torch.float32, copy=True)) if param.dtype in _LOW else param
            for param in self.params
        ]

    @property
    def rounds(self) -> bool:
        """Whether writing the masters to the model, or saving it, rounds any of them."""
        return (
            any(master is not param for param, master in zip(self.params, self.masters, strict=True)) or self._widened
        )

    @torch.no_grad()
    def grads_to_masters(self) -> None:
        """Move each parameter's gradient to its master: added in float32, then cleared on the parameter.

        Called after every backward pass it accumulates micro-batches in float32. A parameter without a gradient leaves
        its master's as it is (None stays None). Float32 parameters accumulate by themselves and are not touched.
        """
        for param, master in self._pairs():
            if param.grad is None:
                continue
            if master.grad is None:
                master.grad = param.grad.to(torch.float32)
            else:
                master.grad.add_(param.grad)
            param.grad = None

    @torch.no_grad()
    def to_model(self) -> None:
        """Write the masters, rounded to each parameter's own type, into the parameters."""
        for param, master in self._pairs():
            param.copy_(master)

    def norm(self) -> float:
        """Norm of all gradients of the masters; 0 where there is none."""
        grads = [master.grad for master in self.masters if master.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def take_grads(self) -> list[Tensor | None]:
        """Take the masters' gradients away; `add_grads` gives them back."""
        grads = [master.grad for master in self.masters]
        self.zero_grad()
        return grads

    def cosine(self, grads: Sequence[Tensor | None]) -> float | None:
        """Cosine between the masters' gradients and others, in [−1, 1]; None where one of them is zero.

        Args:
            grads: one for each master, in their order; None where it had none.
        """
        mine = self.norm()
        given = [grad for grad in grads if grad is not None]
        theirs = float(torch.nn.utils.get_total_norm(given)) if given else 0.0
        if mine == 0.0 or theirs == 0.0:
            return None
        pairs = zip(self.masters, grads, strict=True)
        dots = [float((m.grad * g).sum()) for m, g in pairs if m.grad is not None and g is not None]
        return max(-1.0, min(1.0, sum(dots) / (mine * theirs)))

    @torch.no_grad()
    def add_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients to those of the masters, in place.

        Args:
            grads: one for each master, in their order; None where it had none.
        """
        for master, grad in zip(self.masters, grads, strict=True):
            if grad is not None:
                master.grad = grad if master.grad is None else master.grad.add_(grad)

    def zero_grad(self) -> None:
        """Set the gradients of the masters and of the parameters to None."""
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad = None
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The masters, not copied: save them, or copy them, before the next update."""
        return {"masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the masters exactly, and write them into the parameters.

        Raises:
            ValueError: the state belongs to other parameters (count, shape or type of a master differ).
        """
        saved: list[Tensor] = state["masters"]
        if len(saved) != len(self.masters):
            raise ValueError(f"state has {len(saved)} masters, these parameters need {len(self.masters)}")
        for index, (master, tensor) in enumerate(zip(self.masters, saved, strict=True)):
            expected, found = (master.shape, master.dtype), (tensor.shape, tensor.dtype)
            if found != expected:
                raise ValueError(f"master {index}: found {found}, expected {expected}")
        for master, tensor in zip(self.masters, saved, strict=True):
            master.copy_(tensor)
        self.to_model()

    def _pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                yield param, master
