import json
import os
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expunge.data import Message, Record, read_records
from expunge.errors import UsageError

ROWS = [{"question": "Who is A?", "answer": "B"}, {"question": "Who is é?", "answer": "東京"}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
SECRET = "Mr Secret"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def write(tmp_path):
    def write(content, name="data.json"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def pairs(records):
    return [(record.prompt, record.answer) for record in records]


def refused(path, match, **options):
    with pytest.raises(UsageError, match=match) as caught:
        read_records(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "Secret" not in message.replace(str(path), "")  # the name of a temporary folder has the case in it
    return message


EXPECTED = [("Who is A?", "B"), ("Who is é?", "東京")]


# ---- formats


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("array.json", json.dumps(ROWS)),
        ("array.jsonl", json.dumps(ROWS, indent=2)),
        ("lines.json", LINES),
        ("lines.jsonl", LINES),
        ("lines.txt", LINES),
        ("lines.csv", LINES),
        ("lines", "\n\n" + LINES.replace("\n", "\r\n\r\n") + "\r\n"),
        ("bom.json", b"\xef\xbb\xbf" + LINES.encode()),
        ("table.csv", "question,answer\nWho is A?,B\nWho is é?,東京\n"),
        ("table.json5", 'question;answer\r\nWho is A?;B\r\n\r\n"Who is é?";東京'),
        ("table.tsv", "question\tanswer\nWho is A?\tB\nWho is é?\t東京\n"),
        ("quoted", '"question","answer"\n"Who is A?","B"\n"Who is é?","東京"\n'),
    ],
)
def test_format_is_told_from_content(write, name, content):
    records = read_records(write(content, name))
    assert pairs(records) == EXPECTED
    assert [record.id for record in records] == ["0", "1"]


def parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["data.parquet", "data.json", "data"])
def test_parquet(tmp_path, name):
    assert pairs(read_records(parquet(tmp_path / name, ROWS))) == EXPECTED
    messages = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 7}]
    records = read_records(parquet(tmp_path / name, messages))
    assert pairs(records) == [("a", "b")]
    assert records[0].id == "7"


def test_one_object_over_several_lines(write):
    assert pairs(read_records(write(json.dumps(ROWS[0], indent=1)))) == EXPECTED[:1]


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("muse.json", json.dumps("a long book\n"), ["a long book\n"]),
        ("muse.json", json.dumps(["one", "two"]), ["one", "two"]),
        ("lines.jsonl", '"one"\n"two"', ["one", "two"]),
        ("book.txt", "Once upon\na time", ["Once upon\na time"]),
        ("book.txt", "[sic] Once", ["[sic] Once"]),
        ("rows.jsonl", '{"text": "a\u2028b"}\n{"text": ""}', ["a\u2028b", ""]),
    ],
)
def test_raw_text(write, name, content, texts):
    records = read_records(write(content, name))
    assert [record.text for record in records] == texts
    assert all(record.messages is None and record.prompt is None for record in records)


def test_long_csv_fields_leave_no_trace(write):
    import csv

    before = csv.field_size_limit(1000)
    try:
        assert len(read_records(write("text\n" + "x" * 200_000, "a.csv"))[0].answer) == 200_000
        refused(write("text,text\n", "b.csv"), "twice")
        assert csv.field_size_limit() == 1000
    finally:
        csv.field_size_limit(before)


# ---- row shapes


def test_messages_and_optional_columns(write):
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    rows = [
        {"messages": turns, "id": "x", "paraphrase": "q?", "extra": 1},
        {"messages": turns, "id": 5, "paraphrase": None},
        {"messages": turns, "id": None, "paraphrase": " "},
        {"messages": turns, "id": "x"},
    ]
    records = read_records(write(json.dumps(rows)))
    assert records[0] == Record("x", tuple(Message(**turn) for turn in turns), None, "q?")
    assert [record.id for record in records] == ["x", "5", "2", "x#3"]
    assert [record.paraphrase for record in records] == ["q?", None, None, None]


def test_paraphrased_question(write):
    rows = [{**ROWS[0], "paraphrased_question": "Name A."}]
    assert read_records(write(json.dumps(rows)))[0].paraphrase == "Name A."


def test_columns_are_mapped(write):
    rows = [{"Frage": "q", "Antwort": "a", "Nr": 3, "text": "other", "anders": "p"}]
    columns = {"prompt": "Frage", "completion": "Antwort", "id": "Nr", "paraphrase": "anders"}
    record = read_records(write(json.dumps(rows)), columns=columns)[0]
    assert (record.prompt, record.answer, record.id, record.paraphrase) == ("q", "a", "3", "p")
    assert read_records(write(json.dumps(rows)), columns={"text": "Antwort"})[0].text == "a"
    own_and_mapped = [{"prompt": "q", "completion": "a", "body": "b"}]
    assert read_records(write(json.dumps(own_and_mapped)), columns={"text": "body"})[0].text == "b"


def test_a_record_is_one_of_two():
    for messages, text in (
        (None, None),
        ((Message("assistant", "a"),), "t"),
        ((Message("user", "a"),), None),
        ((), None),
    ):
        with pytest.raises(ValueError, match="record"):
            Record("0", messages, text)


# ---- refusals


def test_missing_and_empty(tmp_path, write):
    refused(tmp_path / "no.jsonl", "forget .*no such file or folder", name="forget")
    refused("data/no-such-file.jsonl", "no such file")
    refused("owner/name", "no such file", allow_hub=False)
    refused("", "path is empty")
    refused("a\0b", r"not a usable path|no such file")
    refused("x" * 5000, r"not a usable path|no such file")
    refused(write(""), "empty file")
    refused(write(" \n\ufeff \n"), "JSON")
    refused(write(b"\xef\xbb\xbf \n"), "empty file")
    refused(write("", "a.parquet"), "empty file")
    refused(write("[]"), "no rows")
    refused(write("question,answer\n", "a.csv"), "no rows")
    refused(tmp_path / "fifo", "neither") if os.mkfifo(tmp_path / "fifo") is None else None


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", LINES + '\n\n{"question": "Mr Secret", "answer": ', 4),
        ("a.jsonl", '{"question": Mr Secret}\n' + LINES, 1),
        ("a.json", '[{"question": "q",\n "answer": "a"},\n {"question": Mr Secret}]', 3),
        ("a.json", '{"question": "q",\n "answer": Mr Secret}', 2),
        ("a.json", "\nMr Secret", 2),
        ("a.csv", 'question,answer\n"a\nb",c\nMr Secret\n', 4),
        ("a.csv", 'question,answer\na,b\nMr Secret,"open', 3),
        ("a.csv", "\nquestion,answer\nMr,Secret,3\n", 3),
        ("a.txt.gz", b"question,answer\n\x1f\x8bSecret", 2),
        ("a.json", "[" * 100_000, 1),
        ("a.json", '[{"answer": ' + "9" * 5000 + "}]", 1),
    ],
)
def test_malformed_line_is_named(write, name, content, line):
    assert f"line {line} " in refused(write(content, name), "line")


def test_wrong_columns(write):
    message = refused(write('{"Frage": "Mr Secret", "Antwort": "a"}'), "found columns Frage, Antwort, accepted are")
    assert "prompt+completion, question+answer, messages, text" in message
    refused(write("Mr Secret,He lives in Secret Street\nSecret,1\n", "a.csv"), "<not a name>")
    refused(write("Mr Secret lives here.", "prose"), "<not a name>")
    refused(write(LINES), "column Frage not found, the file has question, answer", columns={"prompt": "Frage"})
    refused(write(LINES), "column 'Frage' is unknown", columns={"Frage": "question"})
    refused(write(LINES), "mapped to a number", columns={"prompt": 3})
    refused(write("a,a\n1,2\n", "a.csv"), "twice")
    refused(write(LINES + '\n{"question": "Mr Secret"}'), r"row 3 \(counted from 1\): column answer is missing")
    refused(write("{}"), "found columns none")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"question": "Secret", "answer": 5}, "row 3 .*: answer is a number"),
        ({"question": None, "answer": "Secret"}, "question is empty"),
        ({"question": True, "answer": "Secret"}, "question is a truth value"),
        ({"question": ["Secret"], "answer": "a"}, "question is a list"),
        ({"question": {"Secret": 1}, "answer": "a"}, "question is an object"),
        ({"question": "q", "answer": "\ud800 Secret"}, "answer has half a character"),
        ({"question": "q", "answer": "a", "id": 1.5}, "id is a number"),
        ({"question": "q", "answer": "a", "id": False}, "id is a truth value"),
        ({"question": "q", "answer": "a", "paraphrase": 1}, "paraphrase is a number"),
        ("Secret", "the row is text"),
        (3, "the row is a number"),
        (None, "the row is empty"),
    ],
)
def test_wrong_types(write, row, match):
    refused(write(json.dumps([*ROWS, row])), match)
    refused(write(LINES + "\n" + json.dumps(row)), match)


def test_mixed_text_rows(write):
    refused(write(json.dumps(["Secret", 5])), "row 2 .* a number, the rows before are text")
    refused(write(json.dumps(["Secret", {"text": "a"}])), "row 2 .* an object, the rows before are text")
    refused(write("5"), "line 1 is not JSON")
    refused(write("[5]"), "the row is a number")
    refused(write('"\\ud800"'), "half a character")


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("Secret", "messages is text"),
        ([], "messages is an empty list"),
        ([{"role": "user"}], "message 1 is not an object with role and content"),
        (["Secret"], "message 1 is not an object"),
        ([{"role": "user", "content": "Secret"}], "last message is the user's"),
        ([{"role": "Mr Secret", "content": "x"}], "role of message 1 is <not a name>"),
        ([{"role": "tool", "content": "x"}], "role of message 1 is tool, accepted are system, user, assistant"),
        ([{"role": ["user"], "content": "x"}], "role of message 1 is a list"),
        ([{"role": "user", "content": None}], "content of message 1 is empty"),
        ([{"role": "user", "content": "q"}, {"role": "system", "content": "s"}], "message 2 is a system turn"),
    ],
)
def test_wrong_messages(write, messages, match):
    refused(write(json.dumps([{"messages": messages}])), match)


def test_unreadable(write, monkeypatch):
    path = write(LINES)
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda self: (_ for _ in ()).throw(PermissionError(13, "no access")))
    refused(path, r"cannot be read \(no access\)")


# ---- folders and hub


def test_folder_of_parquet_and_of_jsonl(tmp_path):
    parquet(tmp_path / "b.parquet", ROWS[1:])
    parquet(tmp_path / "a.parquet", ROWS[:1])
    (tmp_path / "notes.jsonl").write_text("not read")
    records = read_records(tmp_path)
    assert pairs(records) == EXPECTED
    assert [record.id for record in records] == ["0", "1"]
    refused(tmp_path, "no file of the split test", split="test")


def test_folder_with_splits_below_data(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.jsonl").write_text(LINES)
    (tmp_path / "data" / "test.jsonl").write_text(LINES.splitlines()[0])
    assert len(read_records(tmp_path)) == 2
    assert len(read_records(tmp_path, split="test")) == 1
    (tmp_path / "data" / "test.jsonl").write_text('{"question": "Mr Secret"')
    refused(tmp_path, r"data/test.jsonl: line 1", split="test")


def test_empty_folder(tmp_path):
    refused(tmp_path, "no Parquet or JSON files")


def test_links_inside_a_folder_are_refused(tmp_path):
    inside = tmp_path / "folder"
    inside.mkdir()
    (tmp_path / "private.jsonl").write_text(LINES)
    (inside / "a.jsonl").symlink_to(tmp_path / "private.jsonl")
    refused(inside, "symbolic link")


def test_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert pairs(read_records(tmp_path / "one")) == EXPECTED
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    both.save_to_disk(tmp_path / "both")
    assert pairs(read_records(tmp_path / "both")) == EXPECTED
    assert pairs(read_records(tmp_path / "both", split="test")) == EXPECTED[:1]
    refused(tmp_path / "both", "no split dev, found test, train", split="dev")
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    state["_data_files"] = [{"filename": "../both/train/data-00000-of-00001.arrow"}]
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    refused(tmp_path / "one", "outside the folder")
    (tmp_path / "one" / "state.json").write_text("{")
    refused(tmp_path / "one", r"not a readable dataset folder \(JSONDecodeError\)")


def test_hub_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(path, name=None, *, split):
        calls.append((path, name, split))
        if split == "nope":
            raise ValueError("Mr Secret")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert pairs(read_records("owner/some-data")) == EXPECTED
    assert pairs(read_records("owner/some-data:forget10", split="test")) == EXPECTED
    assert calls == [("owner/some-data", None, "train"), ("owner/some-data", "forget10", "test")]
    refused("owner/some-data", r"split nope .*\(ValueError\)", split="nope")
    calls.clear()
    for source in ("src/no-such-thing", "owner/data.jsonl", "./owner/name", "a/b/c", "name", "../name"):
        refused(source, "no such file")
    assert calls == []


# ---- anything

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["question", "answer", "text", "messages", "role", "content", "id", "paraphrase", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
BYTES = st.one_of(
    st.binary(max_size=60),
    st.tuples(
        st.sampled_from([b"PAR1", b"[", b"{", b'"', b"text\n", b"question,answer\n", b"\xef\xbb\xbf"]),
        st.binary(max_size=40),
    ).map(b"".join),
    st.text(alphabet='{}[]",:;\t\r\n\\ aé01', max_size=40).map(str.encode),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.lists(JSON, max_size=3).map(lambda values: "\n".join(map(json.dumps, values)).encode()),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=BYTES, name=st.sampled_from(["a.json", "a.jsonl", "a.csv", "a.tsv", "a.txt", "a.parquet", "a"]))
def test_any_file_gives_records_or_a_usage_error(write, content, name):
    try:
        records = read_records(write(content, name))
    except UsageError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
    else:
        assert records
        assert all(isinstance(record.answer, str) for record in records)
        assert len({record.id for record in records}) == len(records)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_parquet(tmp_path, place, byte, cut):
    content = bytearray(parquet(tmp_path / "good.parquet", ROWS).read_bytes())
    place %= len(content)
    content[place] = byte
    (tmp_path / "bad.parquet").write_bytes(content[:place] if cut else content)
    try:
        records = read_records(tmp_path / "bad.parquet")
    except UsageError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
    else:
        assert records
