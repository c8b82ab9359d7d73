"""Measuring a model again for the forget file of a run that has ended: whether its numbers hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.errors import UsageError
from expunge.objectives import MascSettings
from expunge.stopping import left_over
from expunge.train._config import RunConfig
from expunge.train._evaluate import Evaluation
from expunge.train._folder import RunFolder
from expunge.train._prepare import check_lengths, encode_data, load, read_data
from expunge.train._progress import Watch
from expunge.train._result import Summary, summarise_scores

# What decides how the forget file is read and scored.
_SAME = ("template", "system", "max_length", "dtype", "seed")


@dataclass(frozen=True)
class Measured:
    """What a model gives for the examples to forget.

    Attributes:
        summary: means over the examples; no answers are generated.
        left: examples above the tolerance by more than their sampling error; None: the run measured margins against
            its reference, which is not there.
    """

    summary: Summary
    left: int | None


def remeasure(
    model: str | Path,
    forget: str | Path,
    config: Mapping[str, Any],
    masc: Mapping[str, Any],
    *,
    columns: Mapping[str, str] | None = None,
    device: str | None = None,
    progress: Watch | None = None,
) -> Measured:
    """Score the examples to forget with a saved model, as the run did at its end.

    Args:
        model: the saved model.
        forget: the file that was forgotten.
        config: of the run, resolved; folders need not be in it.
        masc: `resolved_masc` of the run.
        columns: names in the file, where they are not the usual.
        device: where to compute; None: the accelerator if there is one.
        progress: called with what is being done.

    Raises:
        UsageError: a file cannot be read, or the configuration is one of another version.
    """
    same = {name: config[name] for name in _SAME if name in config}
    given = {"model": str(model), "forget": str(forget), "out": ".", "columns": dict(columns or {}), "device": device}
    # NOTE: the method only says how the weights were changed, which is over.
    try:
        settings = MascSettings(**masc)
    except TypeError as error:
        raise UsageError(f"resolved_masc: found one of another version ({error})") from None
    if settings.tolerance is None:
        raise UsageError("resolved_masc: found no tolerance, accepted is that of a finished run")
    run = dataclasses.replace(RunConfig.from_dict(same | given), masc=settings)
    data = read_data(run)
    loaded = load(run)
    data = encode_data(data, loaded.tokenizer, run)
    check_lengths(loaded.model, data)
    evaluation = Evaluation(run, settings, data, RunFolder(run.out), progress or (lambda _: None))
    table = evaluation.score(loaded, data.forget, "after")
    left = None
    if settings.teacher_delta is None:
        left = len(left_over(table.values("violation"), table.values("tokens"), settings.tolerance))
    return Measured(summarise_scores(table, []), left)
