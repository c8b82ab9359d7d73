import json
import multiprocessing
import os
import stat
from datetime import datetime

import pytest
from tests.ledger._ledgers import AT, entry, ledger

from expunge.errors import UsageError
from expunge.ledger import Ledger, verify_file


def test_entries_are_chained_signed_and_numbered(tmp_path):
    made = ledger(tmp_path / "deletions", "one", "two", "three")
    header, *entries = made.lines()
    assert [line["fields"]["number"] for line in entries] == [1, 2, 3]
    assert [line["fields"]["previous"] for line in entries] == [header["hash"], *(one["hash"] for one in entries[:-1])]
    assert entries[0]["fields"]["at"] == "2026-01-02T03:04:05Z"
    found = made.verify()
    assert (found.ok, found.entries, found.head) == (True, 3, entries[-1]["hash"])
    assert found.public_key == header["fields"]["public_key"]
    assert verify_file(made.path) == found
    assert made.path == tmp_path / "deletions" / "ledger.jsonl"


def test_appending_keeps_the_former_bytes(tmp_path):
    made = ledger(tmp_path, "one")
    before = made.path.read_bytes()
    made.append(entry("two"))
    assert made.path.read_bytes().startswith(before)
    assert made.verify().ok


def test_keys_are_the_owners_only_and_texts_are_nowhere(tmp_path):
    made = ledger(tmp_path / "deletions", "one")
    for file in made.keys_folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.keys_folder.stat().st_mode) == 0o700
    text = made.path.read_text()
    assert "Ada" not in text
    secret = (made.keys_folder / "rows.key").read_text().strip()
    assert secret not in text
    assert secret not in repr(made.__dict__)


def test_keys_readable_by_others_are_refused(tmp_path):
    made = ledger(tmp_path, "one")
    (made.keys_folder / "signing.pem").chmod(0o644)
    with pytest.raises(UsageError, match="mode 0644, accepted is 0600"):
        made.append(entry("two"))


def test_keys_elsewhere(tmp_path):
    made = Ledger(tmp_path / "a.jsonl", keys=tmp_path / "vault")
    made.append(entry())
    assert sorted(file.name for file in (tmp_path / "vault").iterdir()) == ["rows.key", "signing.pem"]
    with pytest.raises(UsageError, match="cannot read"):
        Ledger(tmp_path / "a.jsonl").append(entry())
    other = ledger(tmp_path / "other", "one")
    with pytest.raises(UsageError, match="not the ones of"):
        Ledger(tmp_path / "a.jsonl", keys=other.keys_folder).append(entry())


@pytest.mark.parametrize(("file", "content"), [("signing.pem", "no key"), ("rows.key", "abc"), ("rows.key", "é" * 64)])
def test_damaged_keys_are_named(tmp_path, file, content):
    made = ledger(tmp_path, "one")
    (made.keys_folder / file).write_text(content)
    with pytest.raises(UsageError, match=file.replace(".", r"\.")):
        made.append(entry("two"))


def test_nothing_is_added_to_a_changed_ledger(tmp_path):
    made = ledger(tmp_path, "one")
    data = made.path.read_bytes().replace(b'"left":0', b'"left":1')
    made.path.write_bytes(data)
    with pytest.raises(UsageError, match=r"line 2: field 'results' was changed; nothing was added"):
        made.append(entry("two"))
    assert made.path.read_bytes() == data


def test_cut_off_lines_are_shown_by_a_head_or_a_receipt(tmp_path):
    made = ledger(tmp_path, "one", "two")
    head, receipt = made.verify().head, made.receipt("two")
    assert made.verify(head=head, receipts=[receipt]).ok
    lines = made.path.read_bytes().splitlines(keepends=True)
    made.path.write_bytes(b"".join(lines[:-1]))
    assert made.verify().ok  # nothing in the file itself can tell
    assert "cut off" in str(made.verify(head=head).problems[0])
    assert "receipt for 'two'" in str(made.verify(receipts=[receipt]).problems[0])
    made.path.write_bytes(b"".join(lines)[:-1])
    assert "cut off" in str(made.verify().problems[0])


def test_the_key_can_be_pinned(tmp_path):
    one, other = ledger(tmp_path / "a", "x"), ledger(tmp_path / "b", "x")
    key = one.verify().public_key
    assert one.verify(public_key=key.upper()).ok
    assert not other.verify(public_key=key).ok
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        one.verify(public_key="abc")


def test_requests_are_found_by_name_and_number(tmp_path):
    made = ledger(tmp_path, "one", "two", "one")
    assert made.entry("two")["fields"]["number"] == 2
    assert made.entry("one")["fields"]["number"] == 3
    assert made.entry("1")["fields"]["number"] == 1
    with pytest.raises(UsageError, match="the ledger has 3, the newest are 'one', 'two', 'one'"):
        made.entry("four")


def test_a_text_is_found_and_equal_texts_cannot_be_linked(tmp_path):
    made = ledger(tmp_path, "one", "two")
    found = made.prove("  Who?\n Ada ")
    assert [(one.number, one.row, one.part) for one in found] == [(1, 0, "text"), (2, 0, "text")]
    assert [(one.number, one.row, one.part) for one in made.prove("Here", request="two")] == [(2, 1, "answer")]
    assert made.prove("Bob") == []
    one, two = (line["fields"]["rows"]["tags"] for line in made.entries())
    tags = [tag for rows in (one, two) for row in rows for tag in row.values()]
    assert len(set(tags)) == len(tags) == 8


def test_composed_and_decomposed_letters_are_one_text(tmp_path):
    made = Ledger(tmp_path)
    made.append(entry(rows=({"text": "Jos\u00e9"},)))
    assert made.prove("Jose\u0301")


def test_a_time_without_a_zone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="time zone"):
        Ledger(tmp_path).append(entry(), at=datetime(2026, 1, 1))
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("request_name", ["", "  ", "a\nb", "x" * 201])
def test_a_request_needs_a_name(request_name):
    with pytest.raises(UsageError, match="request"):
        entry(request_name)


def test_a_failed_write_leaves_the_ledger(tmp_path, monkeypatch):
    made = ledger(tmp_path, "one")
    before = made.path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(Exception, match="No space left"):
        made.append(entry("two"))
    assert made.path.read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))


def _append(folder, name, count):
    for index in range(count):
        Ledger(folder).append(entry(f"{name}-{index}"), at=AT)


def test_two_processes_append_to_one_ledger(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append, args=(tmp_path, name, 8)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    found = Ledger(tmp_path).verify()
    assert found.ok
    assert found.entries == 16
    names = {line["fields"]["request"] for line in Ledger(tmp_path).entries()}
    assert names == {f"{name}-{index}" for name in "ab" for index in range(8)}


def test_the_file_is_json_lines(tmp_path):
    lines = ledger(tmp_path, "one").path.read_text().splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [["digests", "fields", "hash", "signature"]] * 2
