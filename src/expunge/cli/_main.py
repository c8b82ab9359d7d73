"""The command line: subcommands by exact name, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version

from expunge.errors import ExpungeError, UsageError

# name: (module, what it is for). A module is imported when its subcommand is used: `expunge --help` needs no torch.
_COMMANDS = {
    "unlearn": ("expunge.cli._unlearn", "make a model forget the examples of a file"),
    "resume": ("expunge.cli._unlearn", "continue an interrupted run"),
    "demo": ("expunge.cli._demo", "see a small language model learn 16 people and forget two"),
    "finetune": ("expunge.cli._finetune", "teach a model examples: targets and references"),
    "evaluate": ("expunge.cli._evaluate", "measure what is forgotten and kept, by a benchmark"),
    "report": ("expunge.cli._report", "make a page that shows what runs forgot, and what it cost"),
    "ledger": ("expunge.cli._ledger", "keep and check the signed list of deletion requests"),
}

_USAGES = {
    "unlearn": "expunge unlearn MODEL --forget FILE --retain FILE --out DIR [options]",
    "resume": "expunge resume DIR [options]",
    "demo": "expunge demo [options]",
    "finetune": "expunge finetune MODEL --data FILE... --out DIR [options]",
    "evaluate": "expunge evaluate MODEL --suite NAME --data DIR [options]",
    "report": "expunge report RUN... [options]",
    "ledger": "expunge ledger ACTION FILE_OR_DIR [options]",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None: those of the process.

    Returns:
        0 done; 1 failure; 2 wrong input; 3 budget spent before everything was forgotten; 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except ExpungeError as error:
        sys.stderr.write(f"expunge: {' '.join(str(error).split())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("expunge: interrupted; a run's folder holds its last checkpoint (`expunge resume DIR`)\n")
        return 130


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    if words[0] == "--version":
        sys.stdout.write(f"expunge {version('expunge')}\n")
        return 0
    name = words[0]
    if name not in _COMMANDS:
        raise UsageError(f"command: found {name!r}, accepted is one of {', '.join(_COMMANDS)}")
    from expunge.cli._options import Parser

    module = import_module(_COMMANDS[name][0])
    text: str = getattr(module, name.upper())
    parser = Parser(
        prog=f"expunge {name}",
        usage=_USAGES[name],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    getattr(module, f"add_{name}")(parser)
    run: Callable[[argparse.Namespace], int] = getattr(module, f"run_{name}")
    try:
        parsed = parser.parse_args(list(words[1:]))
    except SystemExit as end:  # --help
        return int(end.code or 0)
    return run(parsed)


def _usage() -> str:
    lines = ["usage: expunge COMMAND ...", "", "Make a causal language model forget given training examples.", ""]
    lines += [f"  {name:<10} {text}" for name, (_, text) in _COMMANDS.items()]
    lines += ["", "`expunge COMMAND --help` shows the options. `expunge demo` shows what it does.", ""]
    return "\n".join(lines)
