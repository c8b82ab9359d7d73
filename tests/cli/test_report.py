import json

import pytest
from tests.ledger._ledgers import entry
from tests.report._runs import write_evaluation, write_run

from expunge.cli import main
from expunge.ledger import Ledger


def test_one_run_and_several(tmp_path, capsys, monkeypatch):
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
    assert main(["report", str(one)]) == 0
    assert "run/report.html (0." in capsys.readouterr().out.replace("\n", "")
    assert (one / "report.html").is_file()
    star = write_evaluation(tmp_path / "star")
    page = tmp_path / "page.html"
    assert main(["report", str(one), str(two), "--retrained", str(star), "--out", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(page), "bytes": page.stat().st_size}
    text = page.read_text(encoding="utf-8")
    assert '"name":"a/run"' in text
    assert '"name":"b/run"' in text
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(one), str(two)]) == 0
    assert (tmp_path / "comparison.html").is_file()


def test_hashes_come_from_a_ledger(tmp_path):
    run, book = write_run(tmp_path / "run"), Ledger(tmp_path / "book")
    rows = [{"text": f"text {index}"} for index in range(4)]
    line = book.append(entry("ticket", rows=rows))
    book.append(entry("other"))
    assert main(["report", str(run), "--ledger", str(tmp_path / "book"), "--request", "ticket"]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    for tags in line["fields"]["rows"]["tags"]:
        assert tags["text"] in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "RUN", "--show-text"], "show-text: goes with one run only"),
        (["RUN", "--retrained", "x"], "retrained: goes with several runs only"),
        (["RUN", "--request", "x"], "request: goes with a --ledger only"),
        (["nowhere"], "found no run.json"),
        (["RUN", "--show-text"], "forget"),
        ([], "RUN"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, words, message, capsys):
    run = write_run(tmp_path / "run")
    assert main(["report", *(str(run) if word == "RUN" else word for word in words)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
