"""The programs in docs/optim.md run as they stand; the example runs in small."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "optim.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("place", range(len(PROGRAMS)))
def test_programs_of_the_guide(place, capsys):
    exec(compile(PROGRAMS[place], f"docs/optim.md program {place}", "exec"), {"__name__": "guide"})


def test_a_rule_of_ones_own_takes_fewer_than_thirty_lines():
    rule = next(program for program in PROGRAMS if "class Belief" in program)
    assert len(PROGRAMS) == 2
    assert len(rule.strip().splitlines()) < 30


def test_the_multitask_example_draws_every_scheme(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multitask.py", "--steps", "30", "--out", str(tmp_path / "plot.svg")])
    runpy.run_path(str(ROOT / "examples" / "multitask.py"), run_name="__main__")
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert drawn.count("<polyline") == 5
    assert "DualOptim+" in capsys.readouterr().out
