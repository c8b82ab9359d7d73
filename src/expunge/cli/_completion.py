"""`expunge completion`: a script with which a shell completes commands, options, values and paths."""

from __future__ import annotations

import argparse
import sys

import shtab

from expunge.cli._main import COMMANDS, make_parser
from expunge.cli._options import VALUES
from expunge.cli._parser import Parser, actions_of
from expunge.suites import SUITES

COMPLETION = """write the script with which a shell completes expunge's commands and options

The script is fixed: no Python runs when a key is pressed. Write it again after
an update.

examples:
  expunge completion bash > ~/.local/share/bash-completion/completions/expunge
  expunge completion zsh > ~/.zfunc/_expunge   (fpath+=~/.zfunc before compinit)
  expunge completion fish > ~/.config/fish/completions/expunge.fish"""

_SHELLS = ("bash", "zsh", "fish")
# What an option's metavar says about its values.
_PATHS = {
    "FILE": shtab.FILE,
    "FILE_OR_DIR": shtab.FILE,
    "PATH": shtab.FILE,
    "MODEL": shtab.FILE,
    "DIR": shtab.DIRECTORY,
    "RUN": shtab.DIRECTORY,
}


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge completion`."""
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=f"one of {', '.join(_SHELLS)}")


def run_completion(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    sys.stdout.write(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Make the script.

    Args:
        shell: bash, zsh or fish.
    """
    root = Parser(prog="expunge", description="make a causal language model forget given training examples")
    root.add_argument("--version", action="store_true", help="show the version")
    commands = root.add_subparsers(parser_class=Parser)
    for name, (_, text) in COMMANDS.items():
        parser = make_parser(name)
        for action in actions_of(parser):
            _describe(action)
        commands.add_parser(name, help=text, parents=[parser], add_help=False)
    made: str = shtab.complete(root, shell)
    return made


def _describe(action: argparse.Action) -> None:
    """Tell shtab the values of an option: names from the code, or paths."""
    names = {**VALUES, "suite": tuple(SUITES)}.get(action.dest)
    if names is not None and action.choices is None:
        action.choices = names
    elif isinstance(action.metavar, str) and action.metavar in _PATHS:
        action.complete = _PATHS[action.metavar]  # type: ignore[attr-defined]
