"""From saved results to one self-contained page: no network, no clock, every value escaped."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

from expunge.report._definitions import DEFINITIONS
from expunge.report._examples import VERDICTS, examples, margins
from expunge.report._numbers import MISSING, bound, embed, percent, rounded, seconds, share
from expunge.report._read import RunData
from expunge.report._steps import course, listed
from expunge.report._view import (
    cards,
    evaluation_rows,
    means,
    notes,
    settings,
    stress_rows,
    stress_sentence,
    threshold,
    tolerance,
    verdict,
)

MAX_BYTES = 1_500_000
_SCRIPTS = ("base.js", "charts.js", "examples.js")


def render_report(run: RunData) -> str:
    """One HTML page of a run.

    A pure function of the saved results: the same results give the same page. Texts of examples are in it only where
    `run.texts` is given.

    Args:
        run: saved results.

    Returns:
        The page, under `MAX_BYTES` bytes of UTF-8.

    Example:
        page = render_report(read_run("run"))
    """
    alpha, tau = tolerance(run), threshold(run)
    steps, rows, distribution = course(run.log), examples(run, alpha), margins(run, tau)
    stop = (run.result or {}).get("stopped_at")
    data = {
        "kind": "run",
        "name": run.name,
        "alpha": alpha,
        "tau": tau,
        "stop": stop,
        "course": steps,
        "margins": distribution,
        "examples": _columns(rows["rows"]),
        "tokens": rows["tokens"],
    }
    return page(
        "run.html",
        title=run.name,
        data=data,
        run=run,
        verdict=verdict(run),
        cards=cards(run),
        course=steps,
        listed=listed(steps),
        margins=distribution,
        examples=rows,
        verdicts=VERDICTS,
        means=means(run),
        evaluation=evaluation_rows(run),
        stress=stress_rows(run),
        stress_said=stress_sentence(run),
        settings=settings(run),
        notes=notes(run),
        alpha=alpha,
        tau=tau,
        stop=stop,
    )


def page(template: str, *, title: str, data: dict[str, Any], **values: Any) -> str:
    """Fill a template with scripts, styles and data inlined."""
    scripts = [_asset("vendor", "echarts.common.min.js"), "\n".join(_asset("assets", name) for name in _SCRIPTS)]
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            style=Markup(_asset("assets", "report.css")),
            scripts=[Markup(script) for script in scripts],
            policy=_policy(scripts),
            data=embed(data),
            definitions=DEFINITIONS,
            **values,
        )
    )


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Numbers of the table of examples, for whoever wants to compute with them."""
    found: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in ("id", "tokens", "verdict", "index")}
    names = {"violation_before": "before", "violation_after": "after"}
    names |= {"probability_before": "p_before", "probability_after": "p_after", "certificate": "certificate"}
    return found | {name: rounded([row[key] for row in rows], 5) for name, key in names.items()}


def _policy(scripts: list[str]) -> str:
    """What a browser lets the page do: run these scripts and no other, and fetch nothing."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@lru_cache
def _asset(folder: str, name: str) -> str:
    return files("expunge.report").joinpath(folder, name).read_text(encoding="utf-8")


class _Assets(BaseLoader):
    """Templates of the package."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str | None, Any]:
        """Read one."""
        return _asset("assets", template), None, None


@lru_cache
def _environment() -> Environment:
    environment = Environment(
        loader=_Assets(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"share": share, "percent": percent, "seconds": seconds, "bound": bound}
    environment.globals |= {"MISSING": MISSING, "names": {one.key: one.name for one in DEFINITIONS}}
    return environment
