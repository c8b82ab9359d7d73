"""From a run to what is handed over: the card in its README, and the numbers measured again."""

import json
import shutil
from pathlib import Path

import pytest
from tests.train import _runs

from expunge.cli import main
from expunge.ledger import Ledger
from expunge.train import config_from_options, unlearn


@pytest.fixture(scope="module")
def signed(tmp_path_factory, knowing, data):
    """A run and its ledger."""
    folder = tmp_path_factory.mktemp("signed")
    arguments = [
        "unlearn",
        knowing,
        "--forget",
        data["forget"],
        "--retain",
        data["retain"],
        "--out",
        str(folder / "run"),
    ]
    arguments += ["--holdout", data["holdout"], "--request", "ticket-`1`", "--ledger", str(folder / "deletions")]
    for name, value in _runs.options(knowing, {}, "").items():
        if name not in ("model", "out", "device"):
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    assert main(arguments) == 0
    return folder


def card(folder):
    return (folder / "run" / "model" / "README.md").read_text()


def test_a_run_writes_its_card(signed, knowing):
    text, result = card(signed), json.loads((signed / "run" / "result.json").read_text())
    assert text.startswith("---\ntags:\n- unlearning\n- expunge\n---\n\n# knowing, unlearned\n")
    assert "4 examples were to be removed from `knowing`; all are forgotten" in text
    assert "arXiv 2606.02920" in text
    for part in ("forget_before", "forget_after", "retain_after"):
        assert f"{result[part]['violation']:.3f}" in text
    assert "| | forget, before (4) | forget, after (4) | retain, before (6) | retain, after (6) |" in text
    entry = Ledger(signed / "deletions").entry("1")
    assert f"entry 1, request `ticket-'1'`, of a ledger of deletion requests: hash `{entry['hash']}`" in text
    assert result["fingerprint"] in text
    # Nothing of the examples, nor of where things lie.
    assert not any(row["completion"] in text or row["id"] in text for row in _runs.examples(_runs.FORGET))
    assert str(signed) not in text
    assert knowing not in text


def test_the_section_is_replaced_and_the_rest_stays(tmp_path, signed, capsys):
    shutil.copytree(signed, tmp_path / "all")
    file = tmp_path / "all" / "run" / "model" / "README.md"
    file.write_text(f"My words.\n\n{file.read_text()}\nMore \\1 words.\n")
    before = file.read_text()
    assert main(["card", str(tmp_path / "all" / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"card": str(file), "entry": Ledger(signed / "deletions").entry("1")["hash"]}
    assert file.read_text() == before
    assert before.count("## Unlearning") == 1


def test_a_card_of_another_method(tmp_path, knowing, data):
    options = _runs.options(knowing, data, tmp_path / "run", method="npo+kl", epochs=1)
    unlearn(config_from_options({name: value for name, value in options.items() if name != "weight"}))
    text = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "`npo+kl` (" in text
    assert "| minimised | " in text
    assert "ledger" not in text


def test_what_has_no_card(tmp_path, signed, capsys):
    def refused(*words):
        assert main(["card", *map(str, words)]) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        return shown

    shutil.copytree(signed, tmp_path / "all")
    run = tmp_path / "all" / "run"
    assert "no run.json" in refused(tmp_path)
    assert "--request ID" in refused(run, "--ledger", signed / "deletions")
    assert "has no entry of this run" in refused(run, "--request", "other", "--ledger", signed / "deletions")
    (run / "result.json").unlink()
    assert "has not ended" in refused(run)


def test_measured_again(tmp_path, signed, data, capsys):
    book, model = str(signed / "deletions"), str(signed / "run" / "model")
    words = ["ledger", "verify", book, "--model", model, "--measure", data["forget"]]
    assert main(words) == 0
    shown = capsys.readouterr().out
    then = json.loads((signed / "run" / "result.json").read_text())["forget_after"]
    assert f"violation {then['violation']:.3f} (entry: {then['violation']:.3f}), left 0 (entry: 0)" in shown
    assert "the numbers are as the entry says" in shown
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert found["examples"] == [4, 4]
    assert found["probability"] == [pytest.approx(then["probability"], abs=1e-6), then["probability"]]


def test_another_file_is_found(tmp_path, signed, data, capsys):
    words = ["ledger", "verify", str(signed / "deletions"), "--model", str(signed / "run" / "model"), "--measure"]
    assert main([*words, data["retain"]]) == 1
    assert "the numbers are DIFFERENT in examples, probability, exact, violation, left" in capsys.readouterr().out


def test_columns_of_the_file(tmp_path, signed, data, capsys):
    rows = [json.loads(line) for line in Path(data["forget"]).read_text(encoding="utf-8").splitlines()]
    renamed = [{"Frage": row["prompt"], "Antwort": row["completion"]} for row in rows]
    file = tmp_path / "forget.json"
    file.write_text(json.dumps(renamed))
    words = ["ledger", "verify", str(signed / "deletions"), "--model", str(signed / "run" / "model")]
    assert main([*words, "--measure", str(file), "--columns", "prompt=Frage", "completion=Antwort"]) == 0
    assert "as the entry says" in capsys.readouterr().out
    for wrong in (["--measure", str(file)], ["--columns", "prompt=Frage"]):
        capsys.readouterr()
        assert main([*words[: 3 if "--measure" in wrong else None], *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
