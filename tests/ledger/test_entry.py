import json

import pytest
from tests.ledger._ledgers import run_folder

from expunge.errors import UsageError
from expunge.ledger import Ledger, entry_from_run


@pytest.fixture
def forget(tmp_path):
    file = tmp_path / "forget.jsonl"
    rows = [{"prompt": "Who?", "completion": "Ada"}, {"prompt": "Where?", "completion": "Here"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_an_entry_holds_numbers_and_no_ids_places_or_texts(tmp_path, forget):
    run = run_folder(tmp_path / "run", forget)
    entry = entry_from_run(run, "ticket-17")
    assert entry.rows == [{"text": "Who?\nAda", "answer": "Ada"}, {"text": "Where?\nHere", "answer": "Here"}]
    fields = entry.fields()
    assert fields["results"]["left"] == 1
    assert fields["model_before"] == {"name": "base", "fingerprint": "a" * 64}
    assert fields["certificate"] == {
        "meaning": fields["certificate"]["meaning"],
        "examples": 2,
        "tokens": 8,
        "certified": 2,
        "highest": -4.0,
        "median": -5.0,
        "violation_mean": 0.375,
        "violation_highest": 0.5,
    }
    line = json.dumps(Ledger(tmp_path / "deletions").append(entry))
    # A plain hash of the rows could be guessed from a guessed text.
    for hidden in ("name-of-a-person", "secret-place", "Ada", "Here", "f" * 64):
        assert hidden not in line
    assert [one.row for one in Ledger(tmp_path / "deletions").prove("Where? Here")] == [1]


def test_another_file_is_refused_by_its_rows(tmp_path, forget):
    run = run_folder(tmp_path / "run", forget)
    forget.write_text('{"prompt": "Who?", "completion": "Ada"}\n')
    with pytest.raises(UsageError, match="has 1 rows, accepted are the 2 of the run"):
        entry_from_run(run, "x")
    forget.unlink()
    with pytest.raises(UsageError):
        entry_from_run(run, "x")


def test_an_unfinished_run_is_refused(tmp_path, forget):
    run = run_folder(tmp_path / "run", forget)
    (run / "scores" / "forget-after.parquet").unlink()
    assert entry_from_run(run, "x").certificate is None
    (run / "result.json").write_text("{}")
    with pytest.raises(UsageError, match="found a run without 'model'"):
        entry_from_run(run, "x")
    (run / "result.json").unlink()
    with pytest.raises(UsageError, match="accepted is the folder of a finished run"):
        entry_from_run(run, "x")


@pytest.mark.parametrize(
    ("model", "shown"),
    [("owner/name", "owner/name"), ("/a/b/c", "c"), ("./b/c", "c"), ("smollm2-135m", "smollm2-135m")],
)
def test_a_hub_id_stays_and_folders_go(tmp_path, forget, model, shown):
    run = run_folder(tmp_path / "run", forget)
    values = json.loads((run / "run.json").read_text())
    values["config"]["model"] = model
    (run / "run.json").write_text(json.dumps(values))
    entry = entry_from_run(run, "x")
    assert entry.model_before["name"] == entry.config["model"] == shown
