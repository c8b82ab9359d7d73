"""Requests one after another: what was forgotten before is measured again, and named where it comes back."""

import dataclasses
import json

import pytest
from tests.train import _runs

from expunge.cli import main
from expunge.data import encode_records, read_records
from expunge.errors import UsageError
from expunge.lm import load_model
from expunge.report import read_run, render_report
from expunge.scoring import score
from expunge.train import Earlier, UnlearnResult, resume, unlearn
from expunge.train._run import _known_again


@pytest.fixture(scope="module")
def requests(tmp_path_factory, knowing):
    """Rows 0-1 and then rows 2-3 are forgotten, rows 4-9 are kept."""
    folder = tmp_path_factory.mktemp("requests")
    numbers = {"first": range(0, 2), "second": range(2, 4), "retain": _runs.RETAIN}
    files = {name: str(_runs.write(folder / f"{name}.jsonl", _runs.examples(rows))) for name, rows in numbers.items()}
    common = {"retain": files["retain"], "tolerance": 0.4}
    first = unlearn(_runs.config(knowing, {"forget": files["first"], **common}, folder / "one"))
    config = _runs.config(
        first.model, {"forget": files["second"], **common}, folder / "two", earlier=[files["first"]], checkpoint_every=1
    )
    return folder, files, config, unlearn(config)


def violations(model, file, rho):
    """Share of tokens above the threshold of each row, by the scores of the saved model."""
    loaded = load_model(model)
    corpus = encode_records(read_records(file), loaded.tokenizer)
    return score(loaded.model, corpus, pad_id=loaded.pad_id, rho=rho).values("violation")


def test_what_was_forgotten_before_is_measured(requests):
    _, files, config, result = requests
    assert result.forgotten
    found = violations(result.model, files["first"], config.resolved().masc.rho)
    assert result.earlier.after.examples == 2
    assert result.earlier.after.violation == pytest.approx(sum(found) / 2)
    before = violations(config.model, files["first"], config.resolved().masc.rho)
    assert result.earlier.before.violation == pytest.approx(sum(before) / 2)
    assert result.earlier.after.generated == 0
    assert result.earlier.back == []
    assert result.exit_code == 0


def test_it_is_told_everywhere(requests):
    folder, _, _, result = requests
    saved = json.loads((folder / "two" / "result.json").read_text())
    assert UnlearnResult.from_dict(saved).earlier == result.earlier
    assert "earlier, after (2)" in (folder / "two" / "model" / "README.md").read_text()
    page = render_report(read_run(folder / "two"))
    assert "2 examples of earlier requests: mean violation " in page
    assert "none known again" in page
    assert str(folder) not in page


def test_a_resumed_run_measures_the_same(requests):
    folder, _, config, result = requests
    other = dataclasses.replace(config, out=str(folder / "again"))
    with pytest.raises(Exception, match="interrupted"):
        unlearn(other, interrupted=lambda: True)
    assert resume(folder / "again").earlier == result.earlier


def test_what_comes_back_is_named_and_ends_otherwise(requests):
    *_, result = requests
    worse = Earlier(result.earlier.before, result.earlier.after, ["row-0"])
    assert dataclasses.replace(result, earlier=worse).exit_code == 3
    (note,) = _known_again(worse)
    assert "1 of 2 examples of earlier requests are known again (ids): row-0" in note
    assert _known_again(result.earlier) == _known_again(None) == ()


def test_rows_that_come_back_are_found(requests, knowing):
    """The model of the first request is put back to what knows everything: its rows are above the tolerance again."""
    folder, _, config, _ = requests
    from expunge.train._evaluate import Evaluation
    from expunge.train._run import _Run

    run = _Run(config.resolved(), None, None)
    run.folder.path = folder / "two"
    run._load()
    run.evaluation = Evaluation(run.config, run.masc, run.data, run.folder, run.watch)
    before = {"earlier": requests[3].earlier.before}
    loaded = load_model(knowing)
    run.evaluation.earlier_table = run.evaluation.score(loaded, run.data.earlier, "after")
    found = run._earlier(before, {"earlier": requests[3].earlier.after})
    assert found.back == ["row-0", "row-1"]


def test_several_files_on_the_command_line(requests, tmp_path, capsys, knowing, data):
    _, files, _, result = requests
    rest = _runs.write(tmp_path / "rest.jsonl", _runs.examples(range(4, 6)))
    kept = _runs.write(tmp_path / "kept.jsonl", _runs.examples(range(6, 10)))
    words = ["unlearn", result.model, "--forget", rest, "--retain", kept, "--out", tmp_path / "run", "--tolerance", 0.4]
    words += ["--earlier", files["first"], files["second"], "--epochs", 20, "--lr", 1e-2, "--batch", 2, "--upper", 1.0]
    words += ["--retain-batch", 2, "--every", 2, "--probe", 2, "--weight", 1.0, "--sample", 0, "--extra-epochs", 20]
    assert main([str(word) for word in words]) in (0, 3)
    assert "earlier (4) after" in capsys.readouterr().out
    import pyarrow.parquet as pq

    ids = pq.read_table(tmp_path / "run" / "scores" / "earlier-after.parquet")["id"].to_pylist()
    assert ids == ["1/row-0", "1/row-1", "2/row-2", "2/row-3"]


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        (["forget"], "forget rows are also among the 4 earlier rows"),
        (["retain"], "retain rows are also among the 6 earlier rows"),
        (["nothing"], "earlier"),
    ],
)
def test_files_that_contradict_each_other(tmp_path, knowing, data, earlier, message):
    config = _runs.config(knowing, data, tmp_path / "run", earlier=[data.get(name, name) for name in earlier])
    with pytest.raises(UsageError, match=message):
        unlearn(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", ["file.jsonl", [1]])
def test_a_list_of_files_is_wanted(knowing, data, tmp_path, wrong):
    with pytest.raises(UsageError, match=r"earlier: found .*, accepted is a list of files"):
        _runs.config(knowing, data, tmp_path / "run", earlier=wrong)
