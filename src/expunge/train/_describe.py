"""What a run would do, without doing it."""

from __future__ import annotations

import dataclasses
from typing import Any

from expunge.lm import lora_report
from expunge.train._config import RunConfig
from expunge.train._run import loaded_run


def describe(config: RunConfig) -> dict[str, Any]:
    """What a dry run shows: the resolved configuration, the data after encoding and the trainable weights.

    Raises:
        UsageError: what `unlearn` would refuse before its first update.
    """
    run = loaded_run(config)
    trainable = run.trainable
    weights = sum(parameter.numel() for parameter in trainable.masters.params)
    total = sum(parameter.numel() for parameter in trainable.model.parameters())
    return {
        "config": run.config.to_dict(),
        "data": run.data.counts(),
        "weights": {"trainable": weights, "total": total, "fingerprint": run.fingerprint},
        "lora": dataclasses.asdict(lora_report(trainable.model)) if run.recipe.lora else None,
        "method": run.config.spec.as_dict() if config.method != "masc" else None,
        "reference_bytes": 0 if run.recipe.lora else run.runner.reference_bytes(run.references),
        "tolerance": run.masc.tolerance
        if config.tolerance is not None or config.holdout is None
        else "from the holdout",
    }
