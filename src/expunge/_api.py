"""`expunge.unlearn` and `expunge.resume`: a run from a configuration or from plain options, with its report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from expunge import train
from expunge.errors import UsageError
from expunge.report import REPORT, write_report
from expunge.train import Progress, RunConfig, UnlearnResult, config_from_options


def unlearn(
    config: RunConfig | None = None,
    /,
    *,
    progress: Callable[[Progress], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    **options: Any,
) -> UnlearnResult:
    """Make a model forget the examples of a file, and stop by itself when they are forgotten.

    Args:
        config: the whole run as one value; or none, and the run as options.
        progress: called often with what the run is doing.
        interrupted: asked after every update; True ends the run with a checkpoint.
        options: the names of the command line with `_` for `-`: `model`, `forget` and `out` are needed, `retain` with
            every preset whose retain term has a weight. `expunge unlearn --help` lists all with their defaults; they
            are the fields of `RunConfig`, and of the settings of its method and recipe.

    Returns:
        The result, which is also in the run folder.

    Raises:
        UsageError: the input or an option is wrong; nothing was written.
        RunError: it failed while working; what is in the folder can be resumed.

    Example:
        result = expunge.unlearn(
            model="smollm2-135m", forget="forget.jsonl", retain="retain.jsonl", out="run", lr=1e-3, rho=0.7
        )
    """
    if config is None:
        config = config_from_options(options)
    elif not isinstance(config, RunConfig):
        raise UsageError(f"config: found a {type(config).__name__}, accepted is a RunConfig, or options by name")
    elif options:
        raise UsageError(f"options: found {', '.join(sorted(options))} beside a RunConfig, accepted is one of the two")
    result = train.unlearn(config, progress=progress, interrupted=interrupted)
    write_report(result.out)
    return result


def resume(
    out: str | Path,
    *,
    progress: Callable[[Progress], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> UnlearnResult:
    """Continue an interrupted run where its last checkpoint was taken, as if it had not stopped.

    A complete run that lacks its report only gets it.

    Args:
        out: the run folder.
        progress: as for `unlearn`.
        interrupted: as for `unlearn`.

    Raises:
        UsageError: there is nothing to resume, or model, data or packages are not those of the run.
    """
    result = train.finished(out)
    if result is None or (Path(result.out) / REPORT).is_file():  # a complete run is refused
        result = train.resume(out, progress=progress, interrupted=interrupted)
    write_report(result.out)
    return result
