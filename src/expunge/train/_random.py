"""The states of every random generator that a step may draw from."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Read the generators of Python, numpy and torch, and of every device in use; tensors and plain values."""
    name, keys, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put every generator where `random_states` found it; those of devices that are not there are left out."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(states["cuda"])
    if states["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])
