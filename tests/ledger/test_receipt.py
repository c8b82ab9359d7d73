import copy
import json

import pytest
from tests.ledger._ledgers import ledger

from expunge.errors import UsageError
from expunge.ledger import is_receipt, read_receipt, verify_receipt


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return ledger(tmp_path_factory.mktemp("ledger"), "one", "two")


def test_a_receipt_is_checked_without_the_ledger(made, tmp_path):
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(made.receipt("one"), indent=2))
    assert is_receipt(file)
    assert not is_receipt(made.path)
    receipt = read_receipt(file)
    assert verify_receipt(receipt).ok
    assert verify_receipt(receipt, public_key=made.verify().public_key).ok
    assert not verify_receipt(receipt, public_key="0" * 64).ok


def _leaves(value, path=()):
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(one, (*path, name))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _leaves(one, (*path, index))
    else:
        yield path


def test_every_changed_value_of_a_receipt_is_found(made):
    receipt = made.receipt("one")
    for path in _leaves({name: receipt[name] for name in ("header", "entry")}):
        changed = copy.deepcopy(receipt)
        place = changed
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = "x" if place[path[-1]] != "x" else "y"
        assert not verify_receipt(changed).ok, path


def test_an_entry_under_the_header_of_another_ledger_is_found(made, tmp_path):
    other = ledger(tmp_path, "one")
    receipt = made.receipt("one") | {"header": other.lines()[0]}
    assert not verify_receipt(receipt).ok


def test_an_opened_hash_proves_one_text_and_no_other(made):
    matches = made.prove("Ada", request="one")
    receipt = made.receipt("one", opened=matches)
    assert verify_receipt(receipt, text=" Ada\n").ok
    assert "not the one" in str(verify_receipt(receipt, text="Here").problems[0])
    assert "opens no hash" in str(verify_receipt(made.receipt("one"), text="Ada").problems[0])
    for wrong in ([{"row": 9, "part": "answer", "key": "00"}], [{}], [1], "x"):
        assert not verify_receipt(receipt | {"opened": wrong}, text="Ada").ok


def test_what_is_no_receipt_is_refused(tmp_path):
    file = tmp_path / "x.json"
    for content in ("", "[]", '{"kind": "expunge-receipt", "version": 2}'):
        file.write_text(content)
        with pytest.raises(UsageError, match="receipt"):
            read_receipt(file)
    for wrong in ({}, {"header": 1, "entry": None}, {"header": float("nan")}):
        assert not verify_receipt(wrong).ok
