"""What a reader sees of a comparison: dashes for what was not measured, marks, and the reasons beside them."""

from tests.compare._results import results

from expunge.compare import Comparison


def table(**changes):
    return Comparison(results(**changes)).to_markdown()


def rows(text):
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_numbers_of_the_table():
    found = rows(table())
    assert found["masc"]["seconds"] == "20.0 ± 1.0"
    assert found["masc"]["× best baseline"] == "0.50"
    assert found["masc"]["forget probability"] == "0.200 ± 0.010"
    assert found["npo † ‡ (1 failed)"]["distance"] == "0.300"
    assert found["before unlearning"]["distance"] == "0.700"
    assert found["★ retrained"]["retain probability"] == "0.900"
    assert found["masc"]["model utility"] == "–"


def test_a_metric_that_nothing_has_is_no_column():
    assert "forget quality log10" not in table()


def test_notes():
    text = table()
    for part in ("‡ npo: over-forgetting: blank.", "Failed: t/npo/seed-1: out of memory", "seeds 0, 1", "(root"):
        assert part in text.replace(": root", " (root")
    assert "2 runs side by side" in table(workers=2)
    assert "side by side" not in text


def test_a_name_with_a_bar_stays_in_its_cell():
    text = table(name="a|b")
    assert "a\\|b" in text
