import json

import pytest
from tests.ledger._ledgers import ledger, run_folder

from expunge.cli import main


@pytest.fixture
def run(tmp_path):
    forget = tmp_path / "forget.jsonl"
    forget.write_text('{"prompt": "Who?", "completion": "Ada"}\n{"prompt": "Where?", "completion": "Here"}\n')
    return run_folder(tmp_path / "run", forget)


def test_from_a_run_to_a_proof(tmp_path, run, capsys):
    book, receipt, text = tmp_path / "book", tmp_path / "receipt.json", tmp_path / "mine.txt"
    assert main(["ledger", "add", str(book), str(run), "--request", "ticket-17"]) == 0
    assert "entry 1: ticket-17, 2 rows" in capsys.readouterr().out
    assert main(["ledger", "show", str(book)]) == 0
    shown = capsys.readouterr().out
    assert "ticket-17" in shown
    assert "1 left" in shown
    assert main(["ledger", "show", str(book), "--request", "ticket-17"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == {"count": 2}
    assert main(["ledger", "verify", str(book), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert main(["ledger", "export", str(book), "--request", "1", "--out", str(receipt)]) == 0
    assert main(["ledger", "verify", str(receipt), "--public-key", found["public_key"]]) == 0
    text.write_text("Ada\n")
    assert main(["ledger", "verify", str(receipt), "--text-file", str(text)]) == 1
    assert main(["ledger", "prove", str(book), "--text-file", str(text), "--out", str(receipt)]) == 0
    assert "the answer of row 1 of request ticket-17" in capsys.readouterr().out
    assert main(["ledger", "verify", str(receipt), "--text-file", str(text)]) == 0
    text.write_text("Bob")
    assert main(["ledger", "prove", str(book), "--text-file", str(text)]) == 1
    assert main(["ledger", "verify", str(book), "--head", found["head"], "--receipt", str(receipt)]) == 0
    assert main(["ledger", "verify", str(book), "--head", "0" * 64]) == 1


def test_a_tampered_ledger_is_named(tmp_path, capsys):
    made = ledger(tmp_path, "one", "two")
    made.path.write_bytes(made.path.read_bytes().replace(b'"left":0', b'"left":1', 1))
    assert main(["ledger", "verify", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "line 2: field 'results' was changed" in shown
    assert "ledger: CHANGED (1 found)" in shown
    assert main(["ledger", "show", str(tmp_path)]) == 2


def test_the_model_is_compared(tmp_path, knowing, capsys, monkeypatch):
    from tests.ledger._ledgers import entry

    from expunge.ledger import Entry, Ledger
    from expunge.lm import load_model

    fingerprint = load_model(knowing, dtype="auto").fingerprint
    usual = {name: getattr(entry(), name) for name in Entry.__dataclass_fields__}
    book = Ledger(tmp_path)
    book.append(Entry(**usual | {"model_after": {"name": "m", "fingerprint": fingerprint}, "request": "same"}))
    book.append(Entry(**usual | {"model_before": {"name": "m", "fingerprint": fingerprint}, "request": "before"}))
    book.append(Entry(**usual | {"request": "other"}))
    for request, code, text in (("same", 0, "ended with"), ("before", 1, "from before"), ("other", 1, "another")):
        assert main(["ledger", "verify", str(tmp_path), "--model", knowing, "--request", request]) == code
        assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "nothing"], "cannot read"),
        (["show"], "FILE_OR_DIR"),
        ([], "ACTION"),
        (["burn", "x"], "burn"),
        (["verify", "BOOK", "--text-file", "x"], "--text-file: does not go with a ledger"),
        (["export", "BOOK", "--request", "9"], "request: found '9'"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, words, message, capsys):
    ledger(tmp_path, "one")
    assert main(["ledger", *(str(tmp_path) if word == "BOOK" else word for word in words)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
