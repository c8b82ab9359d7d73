import json

import pytest
from tests.suites._data import write_lines, write_muse, write_tofu

from expunge.errors import UsageError
from expunge.suites import SUITES, Source
from expunge.suites import _source as source_module


def tofu(folder, rows=None, split=None):
    return SUITES["tofu"].read(Source(folder, rows), split)


def table(plan, name):
    return next(one for one in (*plan.texts, *plan.questions) if one.name == name)


def test_tofu_in_its_own_layout(tmp_path):
    plan = tofu(write_tofu(tmp_path), {"forget": "0:4", "holdout": "4:8"})
    assert [one.name for one in plan.texts if one.level == "tokens"] == ["forget", "holdout"]
    assert plan.ids("forget") == ("0", "1", "2", "3")
    assert plan.ids("holdout") == ("4", "5", "6", "7")
    assert plan.ids("forget.perturbed")[:4] == ("0/0", "0/1", "0/2", "1/0")
    assert plan.ids("real_authors.paraphrased") == ()
    assert {one.name for one in plan.questions} == {
        "forget.answers",
        "forget.answers_otherwise",
        "retain.answers",
        "real_authors.answers",
        "world_facts.answers",
    }
    assert plan.notes == ()


def test_missing_parts_are_noted_not_refused(tmp_path):
    plan = tofu(write_tofu(tmp_path, parts=()))
    assert len(plan.notes) == 4
    assert "retain" in plan.notes[0]


def test_which_rows_are_forgotten(tmp_path):
    write_tofu(tmp_path)
    (tmp_path / "forget05_perturbed.jsonl").write_text((tmp_path / "forget10_perturbed.jsonl").read_text())
    with pytest.raises(UsageError, match="found forget05, forget10 to forget"):
        tofu(tmp_path)
    assert len(tofu(tmp_path, split="forget05").ids("forget")) == 8
    with pytest.raises(UsageError, match=r"found no forget01_perturbed\.jsonl"):
        tofu(tmp_path, split="forget01")


def test_muse_in_its_own_layout(tmp_path):
    plan = SUITES["muse"].read(Source(write_muse(tmp_path / "m")))
    prompt = table(plan, "knowmem_forget").rows[0].prompt
    assert prompt.startswith("Question: ")
    assert prompt.count("Question: ") == 3  # two solved examples
    assert table(plan, "knowmem_retain").rows[0].prompt.count("Question: ") == 1
    assert table(plan, "verbmem.answers").raw
    assert table(plan, "verbmem").rows[0].limit == 128
    assert len(plan.ids("forget")) == len(plan.ids("holdout")) == 4
    with pytest.raises(UsageError, match="the suite muse has none"):
        SUITES["muse"].read(Source(tmp_path / "m"), "forget10")
    with pytest.raises(UsageError, match="found no verbmem, knowmem or privleak"):
        SUITES["muse"].read(Source(tmp_path))


def test_own_files_in_any_format(tmp_path):
    (tmp_path / "forget.csv").write_text("question,answer,paraphrase,id\nw3?,w4,w5?,a\nw6?,w7,,b\n")
    write_lines(tmp_path / "retain.jsonl", [{"text": "w3 w4 w5"}])
    plan = SUITES["mine"].read(Source(tmp_path))
    assert plan.ids("forget") == ("a", "b")
    assert plan.ids("forget.asked_otherwise") == ("a",)
    assert plan.ids("retain.answers") == ()  # raw text is scored, not asked
    assert plan.notes == ("the data has no holdout: what needs it is not measured",)


def test_a_file_of_paraphrases_names_forget_rows(tmp_path):
    write_lines(tmp_path / "forget.jsonl", [{"id": "a", "prompt": "w3", "completion": "w4"}])
    write_lines(tmp_path / "paraphrase.jsonl", [{"id": "a", "prompt": "w9", "completion": "w4"}])
    assert table(SUITES["mine"].read(Source(tmp_path)), "forget.answers_otherwise").rows[0].prompt == "w9"
    write_lines(tmp_path / "paraphrase.jsonl", [{"id": "z", "prompt": "w9", "completion": "w4"}])
    with pytest.raises(UsageError, match="1 rows have ids that no forget row has"):
        SUITES["mine"].read(Source(tmp_path))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"forget": "a:b"}, "forget: found 'a:b'"),
        ({"forget": "9:12"}, "forget has 8 rows, the selection leaves none"),
        ({"forgot": "0:1"}, "found 'forgot', accepted is one of forget"),
    ],
)
def test_bad_selections(tmp_path, rows, message):
    with pytest.raises(UsageError, match=message):
        tofu(write_tofu(tmp_path), rows)


@pytest.mark.parametrize("place", ["nowhere", "./nowhere/at/all", "../nowhere"])
def test_no_such_folder(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="data: found no folder"):
        Source(place)


def test_bad_columns_name_the_row_and_not_its_text(tmp_path):
    write_tofu(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "forget10_perturbed.jsonl").read_text().splitlines()]
    rows[1]["perturbed_answer"] = 5
    write_lines(tmp_path / "forget10_perturbed.jsonl", rows)
    with pytest.raises(UsageError, match=r"forget: row 2 .* column perturbed_answer") as caught:
        tofu(tmp_path)
    assert rows[1]["question"] not in str(caught.value)


def test_hub_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []

    def read_rows(source, *, name, split="train", allow_hub=True):
        asked.append((source, split))
        if "forget" not in source:
            raise UsageError("no such configuration")
        return [{"question": "w3", "answer": "w4", "paraphrased_answer": "w5", "perturbed_answer": ["w6"]}]

    monkeypatch.setattr(source_module, "read_rows", read_rows)
    plan = tofu("locuslab/TOFU")
    assert asked[0] == ("locuslab/TOFU:forget10_perturbed", "train")
    assert plan.ids("forget") == ("0",)
    asked.clear()
    with pytest.raises(UsageError):
        SUITES["muse"].read(Source("muse-bench/MUSE-News"))
    assert ("muse-bench/MUSE-News:knowmem", "retain_qa") in asked


def test_hashes_are_those_of_the_content(tmp_path):
    first = tofu(write_tofu(tmp_path / "a")).hashes()
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a").iterdir():  # the same rows as an array
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        (tmp_path / "b" / path.name.replace("jsonl", "json")).write_text(json.dumps(rows))
    assert tofu(tmp_path / "b").hashes() == first
    assert tofu(tmp_path / "a", {"forget": "0:7"}).hashes()["forget"] != first["forget"]
