"""General ability through EleutherAI's evaluation harness, an optional extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from expunge.errors import RunError, UsageError
from expunge.lm import LoadedModel
from expunge.metrics import Metric, Scale

_STDERR = "_stderr"
_LOWER = ("perplexity", "bits_per_byte", "brier_score", "wer", "ter")


def check_installed(tasks: Sequence[str]) -> None:
    """Refuse tasks without the harness, before any weights are loaded.

    Raises:
        UsageError: the package is missing.
    """
    if tasks and importlib.util.find_spec("lm_eval") is None:
        raise UsageError('tasks: the package lm-eval is not installed; run `pip install "expunge[lm-eval]"`')


def run_tasks(
    loaded: LoadedModel,
    tasks: Sequence[str],
    *,
    include: str | None = None,
    batch_size: int = 16,
    limit: int | None = None,
    seed: int = 0,
) -> list[Metric]:
    """Run tasks by name.

    Args:
        loaded: the model.
        tasks: names of the harness's tasks, or of those in `include`.
        include: a folder with task files (YAML); None: the harness's own tasks only.
        batch_size: of the harness.
        limit: rows of each task; None: all.
        seed: of everything random in the harness.

    Returns:
        One metric for each task and number; the interval is ± 1.96 standard errors, as the harness gives them.

    Raises:
        UsageError: the package is missing, or a task is unknown.
        RunError: the harness failed.
    """
    check_installed(tasks)
    from lm_eval import simple_evaluate  # heavy, and an optional extra
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise UsageError(
            f"tasks: found {unknown[0]!r}, accepted are names of lm-eval's tasks or of those in --task-files"
        )
    try:
        wrapped = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)
        seeds: dict[str, Any] = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"), seed)
        found = simple_evaluate(
            model=wrapped, tasks=list(tasks), task_manager=manager, limit=limit, fewshot_random_seed=seed, **seeds
        )
    except Exception as error:  # the harness raises whatever a task's data, template or metric raises
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RunError(f"tasks: lm-eval failed: {first[:200]}") from None
    samples = (found or {}).get("n-samples", {})
    metrics = []
    for task, values in (found or {}).get("results", {}).items():
        count = int(samples.get(task, {}).get("effective", 0))
        metrics += _task_metrics(task, values, count)
    return metrics


def _task_metrics(task: str, values: dict[str, Any], count: int) -> list[Metric]:
    """The numbers of one task; keys are "metric,filter"."""
    metrics = []
    for key, value in values.items():
        name, _, chosen = key.partition(",")
        if not isinstance(value, int | float) or isinstance(value, bool) or not chosen or name.endswith(_STDERR):
            continue
        error = values.get(f"{name}{_STDERR},{chosen}")
        half = 1.96 * error if isinstance(error, int | float) else None
        lower = any(part in name for part in _LOWER)
        scale = Scale("as lm-eval has it", 0.0, None if lower else 1.0, "lower" if lower else "higher")
        interval = None if half is None else (value - half, value + half)
        label = f"lm_eval/{task}/{name}" + ("" if chosen == "none" else f"/{chosen}")
        metrics.append(Metric(label, float(value), scale, interval, n=count))
    return metrics
