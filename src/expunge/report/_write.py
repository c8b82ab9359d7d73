"""Pages on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expunge._files import write_whole
from expunge.errors import RunError
from expunge.report._compare import render_comparison
from expunge.report._read import Point, RunData, read_run
from expunge.report._render import render_report

NAME, COMPARISON = "report.html", "comparison.html"


def write_report(folder: str | Path, out: str | Path | None = None, **options: Any) -> Path:
    """Write the page of a run, whole or not at all.

    Args:
        folder: of the run.
        out: the file; None: `report.html` in the run folder.
        options: as for `read_run`.

    Returns:
        The file.

    Raises:
        UsageError: the folder is not a run's.
        RunError: the page cannot be written.
    """
    target = Path(out).expanduser() if out is not None else Path(folder).expanduser() / NAME
    return _write(target, render_report(read_run(folder, **options)))


def write_comparison(runs: Sequence[RunData], out: str | Path | None = None, *, retrained: Point | None = None) -> Path:
    """Write the page that compares runs, whole or not at all.

    Args:
        runs: two or more.
        out: the file; None: `comparison.html` in the current folder.
        retrained: where the model stands that never saw what was forgotten.

    Raises:
        RunError: the page cannot be written.
    """
    target = Path(COMPARISON if out is None else out).expanduser()
    return _write(target, render_comparison(runs, retrained=retrained))


def _write(target: Path, page: str) -> Path:
    try:
        write_whole(target, lambda aside: aside.write_text(page, encoding="utf-8"))
    except OSError as error:
        raise RunError(f"out: cannot write {target}: {error.strerror}") from None
    return target
