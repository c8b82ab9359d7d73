"""A hash of a model's weights, to key results and to prove which weights were used."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from expunge.lm._compute import stored_dtype


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the sorted names, types, shapes and bytes of a model's parameters.

    One changed weight changes it; saving and loading does not. Tied weights count once, under the name that comes
    first in the model. Weights that are held in a wider type than their checkpoint's count as of that type. A PEFT
    model is hashed as it is, adapters included; once merged it hashes as a plain model.

    Args:
        model: any module, on any device.

    Returns:
        64 hexadecimal digits.
    """
    return fingerprint_tensors(dict(model.named_parameters()))


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The fingerprint a model with exactly these parameters would have."""
    items = sorted(tensors.items())
    # hashlib releases the interpreter lock, so tensors are hashed in parallel.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests: Iterable[bytes] = pool.map(_digest, items)
        total = hashlib.sha256()
        for digest in digests:
            total.update(digest)
    return total.hexdigest()


def _digest(item: tuple[str, Tensor]) -> bytes:
    name, tensor = item
    tensor = tensor.detach().to(stored_dtype(tensor))
    digest = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    if tensor.numel():
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
