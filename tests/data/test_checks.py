import dataclasses

import pytest

from expunge.data import Message, Record, check_pair
from expunge.errors import UsageError


def chat(prompt, answer, identity="0", system=None):
    first = () if system is None else (Message("system", system),)
    return Record(identity, (*first, Message("user", prompt), Message("assistant", answer)), None)


def test_overlap_after_white_space():
    with pytest.raises(UsageError, match=r"1 of 1 forget rows .*ids x.*identical.*--allow-overlap") as caught:
        check_pair([chat("Who is A?", "B", "x")], [chat("Who is A? ", "B")])
    assert "Who" not in str(caught.value)
    report = check_pair([chat("Who is A?", "B", "x")], [chat("Who is A? ", "B")], allow_overlap=True)
    assert report.overlap_ids == ("x",)
    assert report.identical


def test_composed_and_decomposed_are_equal():
    report = check_pair([chat("é", "B")], [chat("e\u0301", "B")], allow_overlap=True)
    assert len(report.overlap_ids) == 1


@pytest.mark.parametrize("other", [chat("who is A?", "B"), chat("Who is A?", "C"), Record("0", None, "Who is A? B")])
def test_different_rows(other):
    report = check_pair([chat("Who is A?", "B")], [other])
    assert report.overlap_ids == ()
    assert not report.identical


def test_system_turn_does_not_matter_but_history_does():
    assert check_pair([chat("a", "b")], [chat("a", "b", system="s")], allow_overlap=True).overlap_ids == ("0",)
    turns = (Message("user", "x"), Message("assistant", "y"), Message("user", "a"), Message("assistant", "b"))
    assert check_pair([chat("a", "b")], [Record("0", turns, None)]).overlap_ids == ()


def test_texts_and_duplicates_are_counted():
    forget = [Record(str(i), None, text) for i, text in enumerate(["a b", "a  b", "c"])]
    retain = [Record(str(i), None, text) for i, text in enumerate(["d", "d", "d ", "e"])]
    report = check_pair(forget, retain)
    assert (report.forget_rows, report.retain_rows) == (3, 4)
    assert (report.duplicate_forget, report.duplicate_retain) == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.forget_rows = 0


def test_message_has_five_ids_and_names():
    rows = [chat(f"q{i}", "a", f"id{i}") for i in range(7)]
    with pytest.raises(UsageError, match=r"7 of 7 forget rows are also among the 8 holdout rows") as caught:
        check_pair(rows, [*rows, chat("z", "a")], names=("forget", "holdout"))
    assert "id4, …" in str(caught.value)
    assert "id5" not in str(caught.value)
    assert "identical" not in str(caught.value)


def test_empty_sets():
    assert not check_pair([], []).identical
