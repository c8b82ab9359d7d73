"""The argument parser of every subcommand: errors in one line, with the name that was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from expunge.errors import UsageError, did_you_mean


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError`, so that the command line ends them in one line.

    Options are taken by their full names only, and descriptions are shown as they are written.
    """

    def __init__(self, **settings: Any) -> None:
        usual: dict[str, Any] = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**(usual | settings))

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage."""
        hint = ""
        if "unrecognized" in message:
            unknown = re.search(r"(--?[^\s=]+)", message)
            close = did_you_mean(unknown[1], _flags(self)) if unknown else ""
            hint = close or f"; `{self.prog} --help` lists what is accepted"
        elif "required" in message:
            hint = f"; `{self.prog} --help` shows examples"
        raise UsageError(f"{self.prog}: {message}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """The house's message for a value that is not among the choices, the same under every Python."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            text = f"found {value!r}, accepted is one of {', '.join(names)}{did_you_mean(value, names)}"
            raise argparse.ArgumentError(action, text)


class Pairs(argparse.Action):
    """`prompt=Frage completion=Antwort` → a mapping."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        pairs = [value.partition("=") for value in values]
        wrong = [value for value, pair in zip(values, pairs, strict=True) if not pair[1] or not pair[0] or not pair[2]]
        if wrong:
            example = "prompt=Question" if self.dest == "columns" else "beta=0.1"
            parser.error(f"{option}: found {wrong[0]!r}, accepted is {self.metavar}, such as {example}")
        setattr(namespace, self.dest, {name: value for name, _, value in pairs})


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All positionals and options of a parser, then those of its subcommands."""
    yield from parser._actions
    for sub in subparsers_of(parser).values():
        yield from actions_of(sub)


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Name → parser of the subcommands; empty where there are none."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in actions_of(parser) for flag in action.option_strings if flag.startswith("--")]
