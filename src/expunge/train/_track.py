"""Experiment trackers, through accelerate: the numbers of the run log, live, where somebody already watches others."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expunge._files import shown_model
from expunge.errors import UsageError

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
# The others have no course, and a plan names folders.
_EVENTS = ("step", "look", "measure", "result")
# Places, and what may hold words of the data.
_UNTOLD = ("forget", "retain", "holdout", "earlier", "out", "refusals", "columns", "template", "system", "track")


def check_tracker(name: str | None) -> None:
    """Refuse a tracker that is not installed, before any work.

    Raises:
        UsageError: it is not.
    """
    if name is not None and importlib.util.find_spec(name) is None:
        raise UsageError(f"track: found {name}, which is not installed; `pip install {name}`")


class Tracker:
    """Sends numbers to a tracker: never an id or a text, and never at the price of the run.

    Metrics are named as in `log.jsonl`: event, `/`, name (`step/forget_loss`, `look/mean`, `measure/above`).

    Args:
        name: of `TRACKERS`.
        out: run folder; TensorBoard writes to `tensorboard/` in it, the others where they are set up to.
        config: resolved configuration of the run.

    Attributes:
        notes: what a user should know: at most that the tracker failed.
    """

    def __init__(self, name: str, out: Path, config: Mapping[str, Any]) -> None:
        self.name = name
        self.notes: list[str] = []
        self._tracker: Any = None
        with self._guarded():
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            kind: Any = LOGGER_TYPE_TO_CLASS[name]
            made = kind(name, str(out)) if kind.requires_logging_directory else kind("expunge")
            made.start()
            made.store_init_configuration(told(config))
            self._tracker = made

    def __call__(self, event: str, values: Mapping[str, Any]) -> None:
        """Send the numbers of an event of the log."""
        if self._tracker is None or event not in _EVENTS:
            return
        found = numbers(event, values)
        if found:
            with self._guarded():
                # A decision has its step among its numbers.
                self._tracker.log(found, step=(values.get("numbers") or values).get("step"))

    def finish(self) -> None:
        """Send what is left and end."""
        if self._tracker is not None:
            with self._guarded():
                self._tracker.finish()
            self._tracker = None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker may raise anything, and the run is worth more than its curve
            self._tracker = None
            self.notes.append(f"{self.name} failed ({type(error).__name__}) and got no more; the run's own log has all")


def numbers(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event by their metric's name; those of a mapping behind another `/`.

    Example:
        >>> numbers("step", {"step": 3, "forget_loss": 0.5, "delta_norm": {"forget": 2.0}, "phase": "main"})
        {'step/forget_loss': 0.5, 'step/delta_norm/forget': 2.0}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            # A decision's numbers are the look's own.
            found |= numbers(event if name == "numbers" else f"{event}/{name}", value)
        elif name != "step" and isinstance(value, int | float) and type(value) is not bool and math.isfinite(value):
            found[f"{event}/{name}"] = value
    return found


def told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for a tracker: flat, without places, texts and what is not set."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in _UNTOLD or value is None:
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": one for inner, one in told(value).items()}
        elif name == "model":
            found[name] = shown_model(str(value))
        else:
            found[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def result_numbers(result: Any) -> dict[str, Any]:
    """The means of a result, by part: `result/forget_after/violation`."""
    parts = ("forget_before", "forget_after", "retain_before", "retain_after")
    means = {name: dataclasses.asdict(getattr(result, name)) for name in parts if getattr(result, name) is not None}
    return {"step": result.steps, "left": len(result.left), "seconds": result.unlearn_seconds, **means}
