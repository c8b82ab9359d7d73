"""`docs/cli.md`: every command with its options, made from the parsers.

python -m expunge.cli._reference > docs/cli.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from expunge.cli._main import COMMANDS, EXIT_CODES, make_parser
from expunge.cli._parser import subparsers_of

_INTRODUCTION = """# The command line

Made by `make reference` from the parsers themselves: `expunge COMMAND --help` says the same. Every command takes
`--help`; those that print a result take `--json` for machines. Errors are one line on standard error."""


def reference() -> str:
    """The page, as Markdown."""
    codes = ", ".join(f"{code} {text}" for code, text in EXIT_CODES.items())
    lines = [_INTRODUCTION, "", f"Exit codes: {codes}.", ""]
    lines += [f"- [`expunge {name}`](#expunge-{name}): {text}" for name, (_, text) in COMMANDS.items()]
    for name in COMMANDS:
        lines += _command(make_parser(name))
    return "\n".join(lines) + "\n"


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    title, _, examples = (parser.description or "").partition("\n\n")
    yield from ("", f"## {parser.prog}", "", _sentence(" ".join(title.split())), "")
    yield from ("```", parser.format_usage().removeprefix("usage: ").strip(), "```", "")
    if examples:
        yield from ("```", examples.strip(), "```", "")
    yield from _options(parser)
    for sub in subparsers_of(parser).values():
        yield from (f"### {sub.prog}", "", _sentence(sub.description or ""), "")
        yield from _options(sub)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if _is_shown(action)]
        if rows:
            title = {"positional arguments": "", "options": ""}.get(group.title or "", group.title)
            yield from ([f"**{title}**", ""] if title else [])
            yield from ("| | |", "|---|---|", *rows, "")


def _is_shown(action: argparse.Action) -> bool:
    return not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = action.metavar if action.metavar is not None else "" if action.nargs == 0 else action.dest.upper()
    value = " ".join(value) if isinstance(value, tuple) else value
    value += "..." if action.nargs in ("+", "*") else ""
    text = (action.help or "").replace("%%", "%").replace("|", "\\|")
    return f"| {' '.join(part for part in (names, f'`{value}`' if value else '') if part)} | {text} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
