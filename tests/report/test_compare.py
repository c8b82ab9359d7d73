import pytest
from tests.report._html import Page
from tests.report._runs import EVIL, run

from expunge.errors import UsageError
from expunge.report import MAX_BYTES, Point, render_comparison


def test_runs_are_compared(tmp_path):
    one = run(tmp_path / "one")
    two = run(tmp_path / "two", name=EVIL, forgotten=True, left=[], seconds={"train": 8.0})
    three = run(tmp_path / "three", name="one", finished=False)
    page = render_comparison([one, two, three], retrained=Point("retrained", 0.2, 0.9))
    parsed = Page(page)
    assert parsed.wrong == []
    assert len(page.encode()) < MAX_BYTES
    assert not parsed.all("img")
    assert "1 of 3 runs forgot every example; the fastest is" in parsed.words
    data = parsed.data
    assert [point["seconds"] for point in data["points"]] == [3.0, 8.0, None]
    assert [point["name"] for point in data["points"]][::2] == ["one", "one (2)"]
    assert data["retrained"] == {"forget": 0.2, "retain": 0.9}
    assert data["original"] == {"forget": 0.98, "retain": 0.9}
    assert data["courses"][0]["points"] == [[0, 0.95], [6, 0.33]]
    assert "★ retrained" in parsed.words
    assert page == render_comparison([one, two, three], retrained=Point("retrained", 0.2, 0.9))


def test_without_a_retrained_model_it_says_so(tmp_path):
    page = Page(render_comparison([run(tmp_path / "one"), run(tmp_path / "two")]))
    assert "Retrained model: not measured" in page.words
    assert "None of 2 runs forgot every example." in page.words
    assert "All settings are the same." in page.words
    with pytest.raises(UsageError, match="accepted are two or more"):
        render_comparison([run(tmp_path / "three")])
