"""What `run.json` says of a run, and whether a resumed run stands on the same."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import torch

from expunge.errors import UsageError
from expunge.lm import LoadedModel
from expunge.objectives import MascSettings
from expunge.train._config import RunConfig
from expunge.train._prepare import Data

_PACKAGES = ("expunge", "torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors")
# Those that decide what a step computes.
_SAME = ("expunge", "torch", "transformers", "peft")


def describe_run(config: RunConfig, masc: MascSettings, source: str, loaded: LoadedModel, data: Data) -> dict[str, Any]:
    """Enough to repeat the run and to see that nothing it stands on has changed.

    Args:
        config: resolved.
        masc: with the tolerance.
        source: where the tolerance came from.
        loaded: the model before training.
        data: encoded.
    """
    weight = next(loaded.model.parameters())
    return {
        "config": config.to_dict(),
        "method": config.spec.as_dict() if config.method != "masc" else None,
        "resolved_masc": dataclasses.asdict(masc),
        "tolerance_source": source,
        "versions": {name: _version(name) for name in _PACKAGES},
        "weights": loaded.fingerprint,
        "data": data.counts(),
        "device": str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "notes": list(loaded.notes),
    }


def check_same(saved: dict[str, Any], loaded: LoadedModel, data: Data, source: str) -> None:
    """Compare what a run was started with to what is there now.

    Raises:
        UsageError: packages, weights or data differ.
    """
    for name in _SAME:
        if saved["versions"].get(name) != _version(name):
            raise UsageError(
                f"resume: found {name} {_version(name)}, accepted is {saved['versions'].get(name)}, "
                "with which the run was started"
            )
    dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    if saved.get("dtype", dtype) != dtype:
        raise UsageError(
            f"resume: this machine computes in {dtype}, accepted is one that computes in {saved['dtype']}, "
            "as the run did"
        )
    if saved["weights"] != loaded.fingerprint:
        raise UsageError(f"resume: the weights of {source} are not those the run was started with")
    now = data.counts()
    for name in ("forget", "retain", "holdout", "earlier"):
        if (now.get(name) or {}).get("fingerprint") != (saved["data"].get(name) or {}).get("fingerprint"):
            raise UsageError(f"resume: the {name} data are not those the run was started with")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
