"""The generated reference, and what the command line looks like where nobody watches."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ledger._ledgers import ledger

from expunge.cli import main
from expunge.cli._main import COMMANDS, make_parser
from expunge.cli._parser import actions_of, subparsers_of
from expunge.cli._reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == reference(), "stale: run `make reference`"


def test_the_page_has_every_option():
    text = reference()
    for name in COMMANDS:
        section = text.split(f"## expunge {name}\n")[1].split("\n## ")[0]
        for action in actions_of(make_parser(name)):
            for flag in action.option_strings:
                assert f"`{flag}`" in section or flag in ("-h", "--help"), (name, flag)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])
def test_every_command_speaks_to_machines(name):
    parser = make_parser(name)
    for one in subparsers_of(parser).values() or [parser]:
        assert any("--json" in action.option_strings for action in one._actions), one.prog


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_fits_eighty_columns_and_has_examples(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert f"expunge {name} " in shown.split("\n\n", 1)[1]


def test_the_help_of_all_is_one_screen(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def run(arguments, **environment):
    """Standard output of the command on a terminal."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "expunge", *arguments]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "HF_HUB_OFFLINE": "1", **environment}
    started = subprocess.Popen(words, stdout=theirs, stderr=subprocess.DEVNULL, env=env)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    assert started.wait() == 0
    return b"".join(parts).decode()


def test_colours_end_where_they_are_not_wanted(tmp_path, capsys):
    ledger(tmp_path, "one")
    words = ["ledger", "show", str(tmp_path)]
    assert "\x1b[" in run(words, NO_COLOR="")
    assert not re.search(r"\x1b\[[\d;]*[34]\dm", run(words, NO_COLOR="1"))
    assert main(words) == 0
    assert "\x1b" not in capsys.readouterr().out
