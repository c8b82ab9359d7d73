"""The command line: every wrong input ends in one line and exit code 2, and leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from tests.train._runs import examples, options, write

from expunge.cli import main
from expunge.cli._main import COMMANDS, make_parser
from expunge.cli._parser import actions_of
from expunge.train import RunConfig


def words(model, data, out, **changes):
    """The options of a quick run as arguments."""
    values = options(model, data, out, **changes)
    found = ["unlearn", values.pop("model")]
    for name, value in values.items():
        parts = str(value).split() if name in ("columns", "cut", "betas") else [str(value)]
        found += [] if value is None else [f"--{name.replace('_', '-')}", *parts]
    return found


def refused(capsys, arguments, *named):
    """Run, and return the one error line."""
    code = main([str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    lines = [line for line in errors.splitlines() if not re.match(r"(loading|measuring|scoring)", line)]
    assert code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("expunge: ")
    assert output == ""
    for name in named:
        assert name in lines[0]
    return lines[0]


GOOD = json.dumps({"prompt": "w3", "completion": "w4"})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, ["no such file"]),
        ("", ["empty file"]),
        (GOOD + "\n" + GOOD + "\n{oops\n", ["line 3"]),
        ('{"Frage": "w3", "Antwort": "w4"}\n', ["Frage", "Antwort", "prompt+completion"]),
        (json.dumps({"prompt": "w3", "completion": "w4 " * 600}), ["max_length", "row id"]),
    ],
)
def test_bad_files(tmp_path, capsys, knowing, data, content, named):
    bad = tmp_path / "bad.jsonl"
    if content is not None:
        bad.write_text(content)
    refused(capsys, words(knowing, data | {"forget": bad}, tmp_path / "out"), "forget", *named)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"retain": "FORGET"}, ["forget", "retain", "identical"]),
        ({"k": 96}, ["k: found 96", "96"]),
        ({"rho": 1.5}, ["rho: found 1.5"]),
        ({"tolerance": -0.1}, ["tolerance: found -0.1"]),
        ({"eta": 0}, ["eta: found 0"]),
        ({"beta": -1}, ["beta: found -1"]),
        ({"targets": "nope"}, ["nope", "q_proj"]),
        ({"preset": "tofo"}, ["preset: found 'tofo'", "tofu"]),
        ({"method": "nope"}, ["method: found 'nope'", "masc", "npo+kl"]),
        ({"colour": "red"}, ["--colour"]),
        ({"k": "many"}, ["--k", "'many'", "a whole number"]),
        ({"lr": "fast"}, ["--lr", "'fast'", "a number"]),
        ({"template": "no fields"}, ["template", "no fields"]),
        ({"columns": "prompt"}, ["--columns", "'prompt'"]),
        ({"forget": None}, ["forget: found none"]),
        ({"retain": None}, ["retain: found none"]),
        ({"device": "abacus"}, ["device", "abacus"]),
    ],
)
def test_bad_options(tmp_path, capsys, knowing, data, changes, named):
    if changes.get("retain") == "FORGET":
        changes = {"retain": data["forget"]}
    refused(capsys, words(knowing, data, tmp_path / "out", **changes), *named)
    assert list(tmp_path.iterdir()) == []


def test_unknown_command(capsys):
    refused(capsys, ["unlern"], "'unlern'", "unlearn, plan, resume", "did you mean unlearn?")


def test_unknown_model(tmp_path, capsys, data):
    refused(capsys, words("./nowhere", data, tmp_path / "out"), "./nowhere")
    assert list(tmp_path.iterdir()) == []


def test_taken_folder(tmp_path, capsys, knowing, data):
    (tmp_path / "note").write_text("mine")
    refused(capsys, words(knowing, data, tmp_path), "out: ", str(tmp_path), "not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_model_without_a_chat_template(tmp_path, capsys, knowing, data):
    model = tmp_path / "m"
    shutil.copytree(knowing, model)
    (model / "chat_template.jinja").unlink()
    refused(capsys, words(model, data, tmp_path / "out"), "chat template", "--template plain")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, ["cannot read"]),
        ("rho: [1", ["no YAML", "line"]),
        ("- 1\n", ["list"]),
        ("", ["NoneType"]),
        ("colour: red\n", ["'colour'", "rho"]),
        ("rho: high\n", ["rho", "'high'"]),
        ("show_text: 3\n", ["show_text", "true or false"]),
        ("seed: abc\n", ["seed", "'abc'"]),
        ("targets: 7\n", ["targets", "7"]),
    ],
)
def test_bad_yaml(tmp_path, capsys, knowing, data, text, named):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    refused(capsys, [*words(knowing, data, tmp_path / "out"), "--config", file], *named)
    assert not (tmp_path / "out").exists()


def shown(capsys, arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_dry_run_round_trips(tmp_path, capsys, knowing, data):
    found = shown(capsys, [*words(knowing, data, tmp_path / "out", cut="0.1 0.3"), "--dry-run"])
    config = RunConfig.from_dict(found["config"])
    assert config.to_dict() == RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))).to_dict()
    assert (config.masc.cut, config.recipe.lr, config.model) == ((0.1, 0.3), 1e-2, knowing)
    assert found["tolerance"] == "from the holdout"
    assert found["data"]["forget"]["rows"] == 4
    assert 0 < found["weights"]["trainable"] < found["weights"]["total"]
    assert list(tmp_path.iterdir()) == []


def test_yaml_is_overridden_by_flags(tmp_path, capsys, knowing, data):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {knowing}\nrho: 0.6\nlr: 1e-3\ncut: null\nlora-dropout: 0\ntargets: [q_proj]\nbatch: 3\n")
    arguments = ["unlearn", "--config", file, "--out", tmp_path / "out", "--batch", "5", "--dry-run"]
    for name, path in data.items():
        arguments += [f"--{name}", path]
    config = RunConfig.from_dict(shown(capsys, arguments)["config"])
    assert (config.masc.rho, config.masc.cut, config.recipe.lr, config.recipe.batch) == (0.6, None, 1e-3, 5)
    assert config.recipe.targets == ("q_proj",)
    assert config.masc.eta == 0.25


def test_template_with_a_written_new_line(tmp_path, capsys, knowing, data):
    arguments = words(knowing, data, tmp_path / "out")
    found = shown(capsys, [*arguments, "--template", r"Q: {prompt}\nA: {completion}", "--dry-run"])
    assert found["config"]["template"] == "Q: {prompt}\nA: {completion}"


def test_json_result_and_exit_codes(tmp_path, capsys, knowing, data):
    found = shown(capsys, [*words(knowing, data, tmp_path / "out"), "--json"])
    assert found["forgotten"] is True
    assert "answers" not in found
    assert main(words(knowing, data, tmp_path / "spent", epochs=1, lr=1e-6, tolerance=0.1)) == 3
    output = capsys.readouterr().out
    assert output.startswith("Not finished: 4 of 4 examples are left")
    assert "row-0" in output
    assert main(["resume", str(tmp_path / "spent")]) == 2


def test_plain_result(tmp_path, capsys, knowing, data):
    assert main(words(knowing, data, tmp_path / "out")) == 0
    output, errors = capsys.readouterr()
    assert output.startswith("Forgotten: 4 of 4 examples")
    assert "forget (4) before" in output
    assert "model: " in output
    assert "loading" in errors


def test_interrupted_by_a_signal_then_resumed(tmp_path, capsys, knowing, data):
    program = [sys.executable, "-m", "expunge"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    slow = words(knowing, data, tmp_path / "out", lr=1e-6, epochs=2000, tolerance=0.1, checkpoint_every=1000)
    process = subprocess.Popen([*program, *slow], stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if line.startswith("forgetting"):
            break
    process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
    assert process.wait(60) == 130
    assert re.fullmatch(r"expunge: interrupted at step \d+; `expunge resume .*", errors.splitlines()[-1])
    saved = json.loads((tmp_path / "out" / "run.json").read_text())
    saved["config"]["recipe"]["epochs"] = 1
    (tmp_path / "out" / "run.json").write_text(json.dumps(saved))
    assert main(["resume", str(tmp_path / "out"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["reason"].startswith("not stopped within 1 passes")


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom expunge.cli import main\nassert main(['--help']) == 0\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert {"unlearn", "resume", "demo"} <= set(done.stdout.split())


def test_several_processes_are_refused(tmp_path, capsys, monkeypatch, knowing, data):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capsys, words(knowing, data, tmp_path / "out"), "WORLD_SIZE: found 2", "torchrun")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_option_has_a_help_text(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: expunge {command} ")
    assert text.splitlines()[1] == ""  # a short usage line
    assert max(map(len, text.splitlines())) <= 80
    actions = [action for action in actions_of(make_parser(command)) if not hasattr(action, "add_parser")]
    assert all(action.help and len(action.help) > 8 for action in actions)


def test_a_window_of_rows_is_not_needed_to_forget_one(tmp_path, capsys, knowing, data):
    """One example is enough: probes are as large as what there is."""
    one = write(tmp_path / "one.jsonl", examples(range(1)))
    assert main(words(knowing, data | {"forget": str(one)}, tmp_path / "out")) == 0
    assert "1 of 1 examples" in capsys.readouterr().out


def test_a_request_is_signed_and_the_report_written(tmp_path, capsys, knowing, data):
    arguments = words(knowing, data, tmp_path / "run", request="ticket-1", ledger=tmp_path / "deletions")
    assert main([str(argument) for argument in arguments]) == 0
    output = capsys.readouterr().out
    assert "report.html" in output
    assert "request ticket-1 is signed" in output
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Forgotten" in page
    assert (tmp_path / "run" / "scores" / "forget-after-tokens.parquet").is_file()
    assert main(["ledger", "verify", str(tmp_path / "deletions")]) == 0
    file = next((tmp_path / "deletions").glob("*.jsonl"))
    file.write_text(file.read_text().replace("ticket-1", "ticket-2"))
    assert main(["ledger", "verify", str(tmp_path / "deletions")]) == 1
    capsys.readouterr()
    again = words(knowing, data, tmp_path / "other", request="ticket-3", ledger=tmp_path / "deletions")
    refused(capsys, again, "ledger: ", "line 2")
    assert not (tmp_path / "other").exists()


def test_a_ledger_without_a_request_is_refused(tmp_path, capsys, knowing, data):
    refused(capsys, words(knowing, data, tmp_path / "run", ledger=tmp_path / "d"), "--request")
    assert list(tmp_path.iterdir()) == []
