"""The page of a comparison: its numbers, and nothing of it read as HTML."""

import json

import pytest
from tests.compare._results import results
from tests.report._html import Page
from tests.report._runs import EVIL

from expunge.errors import UsageError
from expunge.report import MAX_BYTES
from expunge.report._study import render_study, write_study


def test_methods_are_compared():
    page = render_study(results())
    parsed = Page(page)
    assert parsed.wrong == []
    assert len(page.encode()) < MAX_BYTES
    assert "Nearest to the retrained model is masc, at a distance of 0.100, in 20" in parsed.words
    assert "the best other method, npo, has 0.300 after 40" in parsed.words
    (plot,) = parsed.data["trades"]
    assert [point["forget"] for point in plot["points"]] == [0.2, 0.05]
    assert [point["seconds"] for point in plot["points"]] == [20.0, 40.0]
    assert plot["retrained"] == {"forget": 0.09, "retain": 0.9}
    assert plot["original"] == {"forget": 0.98, "retain": 0.97}
    assert plot["axes"] == {"forget": "forget probability", "utility": "retain probability"}
    assert parsed.data["results"]["summary"][0]["ratio"] == 0.5
    assert "0.200 ± 0.010" in parsed.words
    assert "1 failed" in parsed.words
    assert "forget quality" not in parsed.words.partition("How it was measured")[0]
    assert page == render_study(results())


def test_nothing_is_read_as_html():
    parsed = Page(render_study(results(name=EVIL, error=EVIL)))
    assert parsed.wrong == []
    assert not parsed.all("img")
    assert len(parsed.all("script")) == 3
    assert parsed.data["results"]["summary"][0]["name"] == EVIL


def test_without_a_distance_it_says_so():
    values = results()
    del values["references"]["t"]["retrained"]
    for row in values["summary"]:
        row["distance"] = {"mean": None, "sd": None, "n": 0}
    words = Page(render_study(values)).words
    assert "No distance to a retrained model" in words
    assert "Retrained model: not measured" in words


def test_only_the_folder_of_a_comparison(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(results()))
    assert write_study(tmp_path).read_text().startswith("<!doctype html>")
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(UsageError, match="accepted is the folder of `expunge compare`"):
        write_study(tmp_path)
