"""Evaluation mode that leaves a model as it was found."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off, and put every submodule's own mode back afterwards, also after an error.

    Args:
        model: any module; its submodules may be in different modes.
    """
    # One flag per module: model.train() would also switch on what was deliberately frozen in eval mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
