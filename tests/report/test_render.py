import base64
import hashlib
import re

import pytest
from tests.report._html import Page
from tests.report._runs import EVIL, run, write_evaluation, write_run, write_stress

from expunge.errors import UsageError
from expunge.report import MAX_BYTES, read_run, render_report


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return render_report(run(tmp_path_factory.mktemp("runs") / "run"))


def test_it_is_a_pure_function(tmp_path, page):
    assert render_report(run(tmp_path / "run")) == page


def test_nothing_that_came_from_data_is_markup(page):
    parsed = Page(page)
    assert parsed.wrong == []
    assert parsed.open == []
    assert not parsed.all("img")
    assert len(parsed.all("script")) == 3  # data, charts, ours
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    assert parsed.data["examples"]["id"][2].startswith("<script>")
    assert "<script>alert" in parsed.words  # shown as what it is
    assert EVIL[:20] not in page
    raw = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
    assert not set("<>&\u2028") & set(raw)


def test_numbers_can_be_taken_out_again(page):
    data = Page(page).data
    assert data["alpha"] == 0.4
    assert data["examples"]["violation_after"] == [0.2, 0.5, 1.0, 0.3]
    assert data["examples"]["violation_before"] == [1.0, 0.9, 1.0, None]
    assert data["examples"]["verdict"] == ["forgotten", "chance", "left", "forgotten"]
    assert data["course"]["step"] == [1, 2, 3, 4, 5, 6]
    assert [look["stage"] for look in data["course"]["looks"]] == ["probe", "probe", "confirm"]
    assert data["course"]["looks"][2]["stop"] is True
    assert data["tokens"]["0"] == {"before": [4.0, -1.0, 2.0], "after": [0.5, -2.0, 1.5]}
    assert sum(data["margins"]["before"]) == sum(data["margins"]["after"]) == 12
    assert data["margins"]["above"] == {"before": 8 / 12, "after": 4 / 12}
    titles = [chart["title"] for chart in data["course"]["more"]]
    assert titles == ["Gradient norm", "Cosine of forget and retain gradients", "Norm of the deltas"]
    assert list(data["course"]["more"][2]["series"]) == ["forget", "retain"]


def test_the_verdict_has_its_numbers(page, tmp_path):
    words = Page(page).words
    assert "1 of 4 examples are left: mean violation went from 0.950 to 0.330 (tolerance 0.400)" in words
    assert "in 6 updates and 3.0 s; 90.0 % of the utility was kept." in words
    good = Page(render_report(run(tmp_path / "run", forgotten=True, left=[]))).words
    assert "All 4 examples are forgotten" in good
    odd = Page(render_report(run(tmp_path / "odd", forgotten=False, left=[]))).words
    assert "Forgetting 4 examples was not confirmed" in odd


def test_it_fetches_nothing_and_runs_its_own_scripts_only(page):
    parsed = Page(page)
    policy = next(one["content"] for one in parsed.all("meta") if one.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for number in (2, 3):
        digest = hashlib.sha256("".join(parsed.scripts[number]).encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert not [one for one in parsed.elements if "src" in one[1]]
    assert {one["href"][0] for one in parsed.all("a")} == {"#"}
    assert "Licensed to the Apache Software Foundation" in page
    assert len(page.encode()) < MAX_BYTES


def test_places_and_texts_are_not_shown(page):
    assert "secret-place" not in page


def test_tables_and_charts_can_be_heard(page):
    parsed = Page(page)
    assert page.count("<table") == page.count("<caption")
    assert all(one.get("scope") for one in parsed.all("th"))
    charts = [one for one in parsed.all("div") if "data-chart" in one]
    assert len(charts) == 7
    assert all(one["role"] == "img" and len(one["aria-label"]) > 10 for one in charts)
    ids = [one["id"] for _, one in parsed.elements if "id" in one]
    assert len(set(ids)) == len(ids)
    targets = {one["href"][1:] for one in parsed.all("a")}
    assert targets <= set(ids)
    for _, attributes in parsed.elements:
        assert attributes.get("aria-labelledby", "main") in ids


def test_what_was_not_measured_says_so(tmp_path):
    bare = Page(render_report(run(tmp_path / "run", tokens=False, retain_before=None, retain_after=None)))
    assert "not measured: the run has no table of tokens before and after." in bare.words
    assert "what it cost was not measured" in bare.words
    assert bare.data["margins"] is None
    assert bare.data["tokens"] == {}
    assert "Tokens of single examples: not measured" in bare.words


def test_a_run_that_has_not_ended(tmp_path):
    page = Page(render_report(run(tmp_path / "run", finished=False)))
    assert "This run has not ended: 6 updates so far" in page.words
    assert page.data["examples"]["verdict"] == ["unknown"] * 4
    empty = Page(render_report(run(tmp_path / "empty", finished=False, log=False)))
    assert "not measured: the log has no update." in empty.words


def test_many_examples_fit(tmp_path):
    ids = [f"row-{index}-" + "x" * 200 for index in range(3000)]
    page = render_report(run(tmp_path / "run", ids=ids, left=[ids[2999]]))
    assert len(page.encode()) < MAX_BYTES
    data = Page(page).data
    assert len(data["examples"]["id"]) == 300
    assert data["examples"]["verdict"].count("left") == 1  # it was not left out
    assert "Listed are 300 of 3000" in Page(page).words


def test_hashes_are_shown_where_they_are_known(tmp_path, page):
    shown = render_report(run(tmp_path / "run", hashes=["c" * 64, "d" * 64, "e" * 64]))
    rows = [one for one in Page(shown).all("tr") if "data-index" in one]
    assert [one.get("data-hash") for one in rows] == ["c" * 64, "d" * 64, "e" * 64, None]
    assert "data-hash" not in "".join(line for line in page.splitlines() if line.startswith("    <tr"))


def test_an_evaluation_is_shown_with_its_reasons(tmp_path):
    page = Page(render_report(run(tmp_path / "run", evaluation=write_evaluation(tmp_path / "found"))))
    assert page.wrong == []
    assert "forget_rouge_l 0.250 0.200 to 0.300 0.220 ↓ lower 4" in page.words
    assert "privleak not measured" in page.words
    assert "no holdout <script>" in page.words


def test_stress_tests_are_shown_with_what_came_back(tmp_path, page):
    found = Page(render_report(run(tmp_path / "run", stress=write_stress(tmp_path / "found"))))
    assert found.wrong == []
    assert "At most 32.1 % of what was forgotten came back: forget_rouge_l under relearn 4 rows, 10 steps: others." in (
        found.words
    )
    assert "0.200 → 0.450 +0.250 0.150 to 0.350 32.1 % 0.980 0.300" in found.words
    assert "−2.6 %" in found.words
    assert "int8 forget_rouge_l not measured no library <script>" in found.words
    assert "came back" not in page.split('<section id="definitions"')[0]


def test_stress_tests_in_the_run_folder_are_found(tmp_path):
    write_run(tmp_path / "run")
    write_stress(tmp_path / "run" / "stress")
    assert "came back: forget_rouge_l" in Page(render_report(read_run(tmp_path / "run"))).words


def test_results_of_another_model_are_refused(tmp_path):
    write_run(tmp_path / "run")
    other = write_stress(tmp_path / "other", fingerprint="c" * 64)
    with pytest.raises(UsageError, match=r"stress: .* is of another model"):
        read_run(tmp_path / "run", stress=other)
    with pytest.raises(UsageError, match=r"stress: found no stress\.json"):
        read_run(tmp_path / "run", stress=tmp_path)
