"""docs/methods.md says what the code does, and its example runs."""

import re
from pathlib import Path

from expunge.objectives import FORGET_TERMS, NAMED_METHODS, RETAIN_TERMS

TEXT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL).group(1)


def table(title):
    """First column without back-ticks → cells of the row."""
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return {row[0].strip("`"): row[1:] for row in cells}


def number(text):
    return None if text in ("–", "none") else float(text)


def test_the_tables_of_terms_are_those_of_the_code():
    mean = {"token": "tokens", "row": "rows", "refusal_token": "refusal tokens"}
    for title, terms in (("Forget terms", FORGET_TERMS), ("Retain terms", RETAIN_TERMS)):
        found = table(title)
        assert set(found) == set(terms)
        for name, (_, over, needs, *_, paper) in found.items():
            term = terms[name]
            assert tuple(re.findall(r"`(\w+)`", needs)) == term.needs
            if name != "none":
                assert over == mean[term.per]
                assert re.search(r"https://arxiv\.org/abs/[\d.]+\d", paper).group() in term.reference


def test_the_table_of_methods_is_that_of_the_code():
    found = table("Named methods")
    assert list(found) == list(NAMED_METHODS)
    for name, (forget, retain, forget_weight, retain_weight, options, recipe) in found.items():
        spec = NAMED_METHODS[name]
        if "preset" in (forget_weight, retain_weight, options):
            assert name == "masc"
            continue
        if spec.kind == "loop":
            assert (forget.strip("`"), retain.strip("`")) == (spec.forget, spec.retain)
            assert number(forget_weight) == spec.forget_weight
            assert retain == "`none`" or number(retain_weight) == spec.retain_weight
        pairs = dict(pair.split(" ") for pair in options.split(", ") if pair)
        assert {key: number(value) for key, value in pairs.items()} == {**spec.forget_options, **spec.retain_options}
        told = [number(value) for value in recipe.split(", ")] if recipe else [None] * 4
        assert told == [spec.recipe.epochs, spec.recipe.lr, spec.recipe.batch, spec.recipe.weight_decay]


def test_the_example_runs_and_is_short():
    (code,) = re.findall(r"```python\n(.*?)```", section("Write your own term"), re.DOTALL)
    assert len(code.splitlines()) < 30
    try:
        exec(compile(code, "docs/methods.md", "exec"), {})
        assert "ceiling" in FORGET_TERMS
    finally:
        FORGET_TERMS.pop("ceiling", None)
