import json

import pytest
from tests.report._runs import run, write_evaluation, write_run
from tests.train import _runs

from expunge.errors import RunError, UsageError
from expunge.report import read_point, read_run, render_report, write_report
from expunge.train import unlearn


@pytest.fixture(scope="module")
def real(knowing, data, tmp_path_factory):
    """The folder of a real run of a tiny model."""
    out = tmp_path_factory.mktemp("real") / "run"
    unlearn(_runs.config(knowing, data, out))
    return out


def test_the_page_of_a_real_run(real):
    page = write_report(real)
    assert page == real / "report.html"
    text = page.read_text(encoding="utf-8")
    assert '"kind":"run"' in text
    assert "row-0" in text
    assert _runs.examples([0])[0]["completion"] not in text


def test_texts_are_read_when_they_are_to_be_shown(real):
    run = read_run(real, show_text=True)
    assert [len(one.tokens) for one in run.texts] == run.column("forget-after", "tokens")
    page = render_report(run)
    assert run.texts[0].answer in page
    assert "handle it as you would handle them" in page
    assert run.texts[0].answer not in repr(run)


def test_texts_of_another_file_are_refused(real, tmp_path):
    run = json.loads((real / "run.json").read_text())
    run["config"]["forget"] = str(_runs.write(tmp_path / "f.jsonl", _runs.examples([1])))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    (tmp_path / "run" / "model").symlink_to(real / "model")
    with pytest.raises(UsageError, match="gives 1 rows, the run had 4"):
        read_run(tmp_path / "run", show_text=True)
    (tmp_path / "run" / "model").unlink()
    with pytest.raises(UsageError, match="found no tokenizer"):
        read_run(tmp_path / "run", show_text=True)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"found no run\.json"):
        read_run(tmp_path)
    folder = write_run(tmp_path / "run")
    for name, content in (("log.jsonl", "{}\nno\n"), ("result.json", "[]"), ("scores/forget-after.parquet", "x")):
        former = (folder / name).read_bytes()
        (folder / name).write_text(content)
        with pytest.raises(UsageError, match=name.split("/")[-1].replace(".", r"\.")):
            read_run(folder)
        (folder / name).write_bytes(former)
    with pytest.raises(UsageError, match="evaluation"):
        read_run(folder, evaluation=tmp_path)


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    events = len(read_run(folder).log)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert len(read_run(folder).log) == events


def test_a_point_is_read_from_an_evaluation_or_a_run(tmp_path):
    point = read_point(write_evaluation(tmp_path / "found"), "retrained")
    assert (round(point.forget, 6), round(point.retain, 6)) == (0.2, 0.9)
    assert read_point(write_run(tmp_path / "run"), "x").retain is None
    with pytest.raises(UsageError, match="x: found no score table"):
        read_point(tmp_path, "x")


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(RunError, match="cannot write"):
        write_report(folder, tmp_path / "nowhere" / "page.html")
    assert write_report(folder, tmp_path / "page.html").read_text() == render_report(read_run(folder))
    assert run(tmp_path / "other", name="named").name == "named"
