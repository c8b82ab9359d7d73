"""`expunge plan`."""

from __future__ import annotations

import argparse
import json
import sys

from expunge.cli._options import add_run_options, option_values
from expunge.cli._show import console
from expunge.train import check_plan, config_from_options, plan_run

PLAN = """say what a run would take, memory and disk, before anything large is read

Takes the options of `expunge unlearn`. Without --forget, rows are taken to be
as long as --max-length allows, which is the most a run can take.

examples:
  expunge plan smollm2-135m --full
  expunge plan ./my-model --forget forget.jsonl --retain retain.jsonl --out run
  expunge plan ./model --full --optimizer-storage 8bit --max-length 1024 --json

exit code: 0 it fits; 2 it does not, or wrong input"""

# What stands for files that are not there yet.
_ASSUMED = "assumed"


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge plan`."""
    add_run_options(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run_plan(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    values = option_values(arguments)
    assumed = values.get("forget") is None
    if assumed:
        values = {"retain": _ASSUMED} | values | {"forget": _ASSUMED}
    config = config_from_options({"out": "run"} | values, where=arguments.config or "options").resolved()
    plan, shape, data = plan_run(config, assumed=assumed)
    if arguments.json:
        sys.stdout.write(json.dumps(plan.to_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        for line in plan.lines():
            console().print(line, markup=False, soft_wrap=True)
    if config.plan_check:
        check_plan(plan, config, shape, data)
    return 0
