"""The command line: subcommands by exact name, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version

from expunge.cli._parser import Parser
from expunge.errors import ExpungeError, UsageError, did_you_mean

# name: (module, what it is for). A module is imported when its subcommand is used: `expunge --help` needs no torch.
COMMANDS = {
    "unlearn": ("expunge.cli._unlearn", "make a model forget the examples of a file"),
    "plan": ("expunge.cli._plan", "say what a run would take, memory and disk"),
    "resume": ("expunge.cli._unlearn", "continue an interrupted run"),
    "demo": ("expunge.cli._demo", "see a small language model learn 16 people and forget two"),
    "finetune": ("expunge.cli._finetune", "teach a model examples: targets and references"),
    "evaluate": ("expunge.cli._evaluate", "measure what is forgotten and kept, by a benchmark"),
    "stress": ("expunge.cli._stress", "try to bring back what was forgotten"),
    "compare": ("expunge.cli._compare", "compare methods: runs, evaluations, one table and plot"),
    "report": ("expunge.cli._report", "make a page that shows what runs forgot, and what it cost"),
    "card": ("expunge.cli._card", "write what was done into the model's README"),
    "ledger": ("expunge.cli._ledger", "keep and check the signed list of deletion requests"),
    "completion": ("expunge.cli._completion", "write a shell's completion script"),
}

EXIT_CODES = {0: "done", 1: "failure", 2: "wrong input", 3: "not all forgotten", 130: "interrupted", 143: "terminated"}

_USAGES = {
    "unlearn": "expunge unlearn MODEL --forget FILE --retain FILE --out DIR [options]",
    "plan": "expunge plan MODEL [options]",
    "resume": "expunge resume DIR [options]",
    "demo": "expunge demo [options]",
    "finetune": "expunge finetune MODEL --data FILE... --out DIR [options]",
    "evaluate": "expunge evaluate MODEL --suite NAME --data DIR [options]",
    "stress": "expunge stress MODEL --suite NAME --data DIR --out DIR [options]",
    "compare": "expunge compare FILE --out DIR [options]",
    "report": "expunge report RUN... [options]",
    "card": "expunge card RUN [options]",
    "ledger": "expunge ledger ACTION FILE_OR_DIR [options]",
    "completion": "expunge completion bash|zsh|fish",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None: those of the process.

    Returns:
        0 done; 1 failure; 2 wrong input; 3 budget spent before everything was forgotten; 130 interrupted; 143
        terminated.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # bitsandbytes, where it is installed, is imported with peft and misses an optional package by a warning.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        _check_single_process()
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
    if name not in COMMANDS:
        close = did_you_mean(name, COMMANDS)
        raise UsageError(f"command: found {name!r}, accepted is one of {', '.join(COMMANDS)}{close}")
    run: Callable[[argparse.Namespace], int] = getattr(import_module(COMMANDS[name][0]), f"run_{name}")
    try:
        parsed = make_parser(name).parse_args(list(words[1:]))
    except SystemExit as end:  # --help
        return int(end.code or 0)
    return run(parsed)


def _check_single_process() -> None:
    """Under a launcher every process would do the whole work, into the same folder."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise UsageError(
            f"WORLD_SIZE: found {size}, accepted is 1: a run is one process; start it without torchrun or accelerate"
        )


def make_parser(name: str) -> Parser:
    """The parser of a subcommand.

    Args:
        name: of `COMMANDS`.
    """
    module = import_module(COMMANDS[name][0])
    parser = Parser(prog=f"expunge {name}", usage=_USAGES[name], description=getattr(module, name.upper()))
    getattr(module, f"add_{name}")(parser)
    return parser


def _usage() -> str:
    lines = ["usage: expunge COMMAND ...", "", "Make a causal language model forget given training examples.", ""]
    lines += [f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "`expunge COMMAND --help`: examples and options. `expunge demo`: a first look."]
    codes = [f"{code} {text}" for code, text in EXIT_CODES.items()]
    lines += [f"exit code: {', '.join(codes[:4])},", f"           {', '.join(codes[4:])}", ""]
    return "\n".join(lines)
