"""Options of `expunge unlearn`, made from the dataclasses they fill; a YAML file uses the same names."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import Any

import yaml

from expunge.cli._parser import Pairs
from expunge.errors import UsageError
from expunge.objectives import NAMED_METHODS
from expunge.optim import RULES
from expunge.train import OPTION_GROUPS, RECIPES, TRACKERS, RunConfig, config_from_options, option_types

_METAVARS = {
    "forget": "FILE",
    "retain": "FILE",
    "holdout": "FILE",
    "out": "DIR",
    "method": "NAME",
    "preset": "NAME",
    "dtype": "NAME",
    "track": "NAME",
    "device": "NAME",
}

# Names that an option accepts, for completion.
VALUES: dict[str, tuple[str, ...]] = {
    "method": tuple(NAMED_METHODS),
    "stop": ("rule", "budget"),
    "weighting": ("fixed", "primal-dual"),
    "preset": tuple(RECIPES),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "track": TRACKERS,
    "update": ("joint", "alternate"),
    "optimizer": ("adamw", "dualoptim", "dualoptim+"),
    "optimizer_rule": tuple(RULES),
    "optimizer_storage": ("32bit", "bf16", "8bit", "4bit"),
}


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of the run, the method and the recipe."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=OPTION_GROUPS[0].help()["model"])
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options; flags override it")
    for options in OPTION_GROUPS:
        group = parser.add_argument_group(f"{options.title} options")
        texts, hints = options.help(), typing.get_type_hints(options.kind)
        for field in dataclasses.fields(options.kind):
            if field.name == "lora":
                group.add_argument("--lora", dest="lora", action="store_true", default=None, help=texts["lora"])
                group.add_argument("--full", dest="lora", action="store_false", default=None, help="train all weights")
            elif field.name in options.names and field.name != "model":
                _add(group, field, hints[field.name], texts[field.name])


def build_config(arguments: argparse.Namespace) -> RunConfig:
    """Join the YAML file and the flags into a checked configuration.

    Raises:
        UsageError: an unknown name, a value out of range, or a missing model, forget file or folder.
    """
    return config_from_options(option_values(arguments), where=arguments.config or "options")


def option_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the YAML file and the flags say, by option name; flags win.

    Raises:
        UsageError: the file cannot be read.
    """
    values = read_yaml(arguments.config) if arguments.config else {}
    flags = {name: getattr(arguments, name) for options in OPTION_GROUPS for name in options.names}
    return values | {name: value for name, value in flags.items() if value is not None}


def read_yaml(path: str) -> dict[str, Any]:
    """Read a mapping of options.

    Raises:
        UsageError: the file is missing, no YAML, or no mapping.
    """
    try:
        values = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        place = f" (line {where.line + 1})" if where is not None else ""
        raise UsageError(f"config: {path} is no YAML{place}; accepted is a mapping of option names to values") from None
    if not isinstance(values, dict):
        raise UsageError(
            f"config: {path} holds a {type(values).__name__}, accepted is a mapping of option names to values"
        )
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _add(group: Any, field: dataclasses.Field[Any], hint: Any, text: str) -> None:
    flag = "--" + field.name.replace("_", "-")
    members = option_types(hint)
    default = _default(field)
    text = f"{text}{default}".replace("%", "%%")
    if bool in members:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif field.name in ("cut", "betas", "base_betas"):
        names = ("LOW", "HIGH") if field.name == "cut" else ("FIRST", "SECOND")
        group.add_argument(flag, nargs=2, type=reader(float), metavar=names, help=text)
    elif field.name == "earlier":
        group.add_argument(flag, nargs="+", metavar="FILE", help=text.removesuffix(" [()]"))
    elif field.name == "targets":
        group.add_argument(flag, type=lambda value: tuple(value.split(",")), metavar="NAME,NAME", help=text)
    elif dict[str, str] in members:
        metavar = "OURS=THEIRS" if field.name == "columns" else "NAME=VALUE"
        group.add_argument(flag, nargs="+", action=Pairs, metavar=metavar, help=text)
    else:
        kind = str if str in members else next(member for member in members if member in (int, float))
        metavar = _METAVARS.get(field.name, {int: "N", float: "X", str: "TEXT"}[kind])
        read = read_template if field.name == "template" else reader(kind)
        group.add_argument(flag, type=read, metavar=metavar, help=text)


def reader(kind: type) -> Any:
    """Return a function that reads an option's text as that type, with the house's message where it is none."""
    accepted = {int: "a whole number", float: "a number", str: "a text"}[kind]

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"found {text!r}, accepted is {accepted}") from None

    return read


def read_template(text: str) -> str:
    r"""A shell passes on the two characters `\n` where a new line is meant."""
    return text.replace("\\n", "\n")


def _default(field: dataclasses.Field[Any]) -> str:
    if any(field.name in options.names for options in OPTION_GROUPS[1:]):
        return " [preset's]"
    return "" if field.default in (dataclasses.MISSING, None) else f" [{field.default}]"
