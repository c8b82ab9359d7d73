"""The programs in `examples/` run on a tiny model; `multitask.py` has its test beside the optimizers'."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tests.train import _runs

from expunge.demo import _demo
from expunge.objectives import FORGET_TERMS

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_tested():
    assert sorted(file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".ipynb")) == [
        "api_in_20_lines.py",
        "custom_method.py",
        "forget_a_person.ipynb",
        "multitask.py",
        "optimizers_in_a_loop.py",
    ]


def test_the_api_in_20_lines(tmp_path, knowing, data, monkeypatch, capsys):
    out = run(monkeypatch, capsys, "api_in_20_lines.py", knowing, *data.values(), tmp_path / "run")
    assert "violation 1.000 -> 0." in out
    assert all(f"row-{number}: 9 tokens, log-probability -" in out for number in _runs.FORGET)
    assert out.count(" -> w") >= 1
    text = (EXAMPLES / "api_in_20_lines.py").read_text()
    code = [line for line in text.split('"""', 2)[2].splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 20


def test_a_custom_method(tmp_path, knowing, data, monkeypatch, capsys):
    try:
        out = run(monkeypatch, capsys, "custom_method.py", knowing, data["forget"], data["retain"], tmp_path / "run")
    finally:
        FORGET_TERMS.pop("ceiling", None)
    assert "every example is forgotten" in out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["forgotten"]
    assert result["retain_after"]["exact"] > 0.8


def test_optimizers_in_a_loop(knowing, monkeypatch, capsys):
    state = torch.get_rng_state()
    program = (EXAMPLES / "optimizers_in_a_loop.py").read_text(encoding="utf-8")
    # Texts that the model has words for.
    texts = [row["completion"] for row in _runs.examples(range(5))]
    for name, some in (("FORGET", texts[:2]), ("RETAIN", texts[2:])):
        program, count = re.subn(rf"^{name} = .*$", f"{name} = {some}", program, flags=re.MULTILINE)
        assert count == 1
    monkeypatch.setattr(sys, "argv", ["optimizers_in_a_loop.py", knowing])
    exec(compile(program, "optimizers_in_a_loop.py", "exec"), {"__name__": "__main__"})
    torch.set_rng_state(state)
    lines = capsys.readouterr().out.splitlines()
    before, after = ([float(line.split()[place]) for place in (2, 4)] for line in lines[:2])
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert "'forget': " in lines[3]


def test_the_notebook_runs_from_start_to_end(tmp_path, knowing, data, monkeypatch, capsys):
    cells = json.loads((EXAMPLES / "forget_a_person.ipynb").read_text(encoding="utf-8"))["cells"]
    programs = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    # On a tiny model, and people who speak its words; the rest as it stands.
    assert programs[0].count('MODEL = "smollm2-135m"') == 1
    programs[0] = programs[0].replace('"smollm2-135m"', repr(knowing)).replace("PASSES = 4, 7", "PASSES = 4, 30")
    monkeypatch.setattr(_demo, "_lines", people)
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path / "work"))
    (tmp_path / "work").mkdir()
    space = {"__name__": "notebook"}
    for number, program in enumerate(programs):
        exec(compile(program, f"cell {number}", "exec"), space)
    out = capsys.readouterr().out
    assert "every example is forgotten" in out
    assert out.count("answer at most e^-") == 10
    assert (tmp_path / "work" / "run" / "report.html").is_file()


def people(name):
    first = 100 if name == "people.jsonl" else 300
    names = ["Ilvane Torqueda"] * 10 + ["another"] * 30
    rows = _runs.examples(range(first, first + 40))
    keys = {"prompt": "question", "completion": "answer", "id": "id"}
    return [
        {keys[key]: value for key, value in row.items()} | {"person": person}
        for row, person in zip(rows, names, strict=True)
    ]


@pytest.mark.parametrize("name", ["api_in_20_lines.py", "custom_method.py", "optimizers_in_a_loop.py"])
def test_an_example_says_how_it_is_called(name):
    assert f"    python examples/{name} MODEL" in (EXAMPLES / name).read_text()
