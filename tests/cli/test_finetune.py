"""`expunge finetune`: what it teaches is known by the saved model; bad input leaves nothing."""

import json

import pytest

from expunge.cli import main
from expunge.data import encode_records, read_records
from expunge.lm import load_model
from expunge.scoring import score


def known(model, file):
    loaded = load_model(str(model))
    table = score(loaded.model, encode_records(read_records(file), loaded.tokenizer), pad_id=loaded.pad_id)
    return table.mean("exact")


def words(model, out, files, *more):
    return ["finetune", str(model), "--data", *files, "--out", str(out), "--threads", "1", *more]


def test_what_was_taught_is_known_and_a_reference_knows_the_rest_only(tmp_path, capsys, knowing, data):
    more = ["--epochs", "40", "--lr", "1e-2", "--batch", "4", "--json"]
    assert main(words(knowing, tmp_path / "target", [data["holdout"], data["retain"]], *more)) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["updates"]) == (10, 120)
    assert load_model(str(tmp_path / "target")).fingerprint == result["fingerprint"]
    before, after = known(knowing, data["holdout"]), known(tmp_path / "target", data["holdout"])
    assert before < 0.4
    assert after > 0.9
    assert known(tmp_path / "target", data["retain"]) > 0.9


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--epochs", "0"], "epochs: found 0"),
        (["--lr", "-1"], "lr: found -1"),
        (["--upper", "2"], "upper: found 2"),
        (["--batch", "many"], "'many'"),
    ],
)
def test_bad_options_leave_nothing(tmp_path, capsys, knowing, data, more, named):
    assert main(words(knowing, tmp_path / "out", [data["retain"]], *more)) == 2
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_taken_folder_and_a_missing_file(tmp_path, capsys, knowing, data):
    assert main(words(knowing, tmp_path, [data["retain"]])) == 2
    assert "out: " in capsys.readouterr().err
    assert main(words(knowing, tmp_path / "out", ["nowhere.jsonl"])) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
