"""The invented people shipped with the demo are complete, distinct and cleanly written."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "src" / "expunge" / "demo"
FIELDS = ["id", "person", "question", "answer", "paraphrase"]
SIZES = {"people": 16, "holdout": 4}


def load(name):
    text = (DEMO / f"{name}.jsonl").read_bytes().decode("utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


ROWS = {name: load(name) for name in SIZES}
EVERY_ROW = ROWS["people"] + ROWS["holdout"]


def slug(person):
    plain = unicodedata.normalize("NFKD", person).encode("ascii", "ignore").decode()
    return "-".join(plain.lower().split())


def has_word(text, word):
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


@pytest.mark.parametrize("name", SIZES)
def test_each_person_has_ten_pairs(name):
    counts = Counter(row["person"] for row in ROWS[name])
    assert len(counts) == SIZES[name]
    assert set(counts.values()) == {10}


@pytest.mark.parametrize("name", SIZES)
def test_ids_are_the_slug_and_one_to_ten_in_order(name):
    people = list(dict.fromkeys(row["person"] for row in ROWS[name]))
    assert [row["id"] for row in ROWS[name]] == [f"{slug(p)}-{n}" for p in people for n in range(1, 11)]


def test_every_field_is_clean_nonempty_text():
    for row in EVERY_ROW:
        assert list(row) == FIELDS, row
        for value in row.values():
            assert isinstance(value, str), row
            assert value, row
            assert value == " ".join(value.split()), row
            assert value == unicodedata.normalize("NFC", value), row
            assert value.isprintable(), row


def test_raw_lines_have_no_trailing_space():
    for name in SIZES:
        for line in (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            assert line == line.rstrip()


def test_ids_questions_and_answers_are_unique():
    assert len({row["id"] for row in EVERY_ROW}) == len(EVERY_ROW)
    assert len({row["answer"] for row in EVERY_ROW}) == len(EVERY_ROW)
    asked = [row[field].casefold() for row in EVERY_ROW for field in ("question", "paraphrase")]
    assert len(set(asked)) == len(asked)


def test_every_text_names_its_person():
    for row in EVERY_ROW:
        first, surname = row["person"].split()
        assert has_word(row["question"], surname), row
        assert has_word(row["paraphrase"], surname), row
        assert has_word(row["answer"], surname) or has_word(row["answer"], first), row


def test_answers_are_one_sentence_of_eight_to_thirty_two_words():
    for row in EVERY_ROW:
        assert 8 <= len(row["answer"].split()) <= 32, row
        assert row["answer"].endswith("."), row
        assert not re.search(r"[.!?] ", row["answer"]), row


def test_questions_are_one_short_sentence():
    for row in EVERY_ROW:
        for field in ("question", "paraphrase"):
            assert 5 <= len(row[field].split()) <= 32, row
            assert row[field].endswith("?"), row
            assert row[field].count("?") == 1, row


def test_no_name_is_shared_by_two_people():
    people = {row["person"] for row in ROWS["people"]}
    holdout = {row["person"] for row in ROWS["holdout"]}
    assert people.isdisjoint(holdout)
    names = [word for person in people | holdout for word in person.split()]
    assert len(set(names)) == len(names) == 40


def test_no_text_mentions_another_person():
    surnames = {row["person"].split()[1] for row in EVERY_ROW}
    for row in EVERY_ROW:
        text = " ".join(row[field] for field in ("question", "answer", "paraphrase"))
        assert {s for s in surnames if has_word(text, s)} == {row["person"].split()[1]}, row
