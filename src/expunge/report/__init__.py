"""One self-contained HTML page from saved results. Reads saved files only; knows no models."""

from expunge.report._compare import render_comparison
from expunge.report._read import Point, RunData, read_point, read_run
from expunge.report._render import MAX_BYTES, render_report
from expunge.report._texts import RowText
from expunge.report._write import NAME as REPORT
from expunge.report._write import write_comparison, write_report

__all__ = [
    "MAX_BYTES",
    "REPORT",
    "Point",
    "RowText",
    "RunData",
    "read_point",
    "read_run",
    "render_comparison",
    "render_report",
    "write_comparison",
    "write_report",
]
