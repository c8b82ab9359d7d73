"""Options of `expunge unlearn`, made from the dataclasses they fill; a YAML file uses the same names."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from expunge.errors import UsageError
from expunge.objectives import MascSettings, preset
from expunge.train import RECIPES, Recipe, RunConfig

# Which dataclass an option belongs to; `tolerance` is the run's (it may come from a holdout).
_GROUPS: tuple[tuple[str, type, frozenset[str]], ...] = (
    ("run", RunConfig, frozenset({"masc", "recipe"})),
    ("method", MascSettings, frozenset({"tolerance"})),
    ("weights", Recipe, frozenset()),
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError`, so that the command line ends them in one line."""

    def error(self, message: str) -> typing.NoReturn:
        """Raise instead of printing usage."""
        raise UsageError(f"{self.prog}: {message}")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of the run, the method and the recipe."""
    parser.add_argument("model", nargs="?", help=_help(RunConfig)["model"])
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options; flags override it")
    for title, kind, hidden in _GROUPS:
        group = parser.add_argument_group(f"{title} options")
        texts, hints = _help(kind), typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name not in hidden | {"model", "lora"}:
                _add(group, field, hints[field.name], texts[field.name])
            elif field.name == "lora":
                group.add_argument("--lora", dest="lora", action="store_true", default=None, help=texts["lora"])
                group.add_argument("--full", dest="lora", action="store_false", default=None, help="train all weights")


def build_config(arguments: argparse.Namespace) -> RunConfig:
    """Join the YAML file and the flags into a checked configuration.

    Raises:
        UsageError: an unknown name, a value out of range, or a missing model, forget file or folder.
    """
    values = read_yaml(arguments.config) if arguments.config else {}
    known = {
        field.name for _, kind, hidden in _GROUPS for field in dataclasses.fields(kind) if field.name not in hidden
    }
    for name in values:
        if name not in known:
            raise UsageError(
                f"{arguments.config}: found unknown option {name!r}, accepted are {', '.join(sorted(known))}"
            )
    values.update({name: getattr(arguments, name) for name in known if getattr(arguments, name, None) is not None})
    for name in ("model", "forget", "out"):
        if values.get(name) is None:
            option = "MODEL" if name == "model" else f"--{name}"
            raise UsageError(f"{option}: found none, accepted is {_help(RunConfig)[name]}")
    run, masc, recipe = ({k: v for k, v in values.items() if k in _names(kind, hidden)} for _, kind, hidden in _GROUPS)
    name = run.get("preset", "default")
    config = RunConfig(**_typed(RunConfig, run))  # checks the preset's name
    return dataclasses.replace(
        config,
        masc=dataclasses.replace(preset(name), **_typed(MascSettings, masc)) if masc else None,
        recipe=dataclasses.replace(RECIPES[name], **_typed(Recipe, recipe)) if recipe else None,
    )


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


def _names(kind: type, hidden: frozenset[str]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind) if field.name not in hidden}


def _typed(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Whole numbers become floats, and YAML's `1e-3` (a text to YAML) a number, where a float is meant."""
    hints = typing.get_type_hints(kind)
    found = {}
    for name, value in values.items():
        if isinstance(value, str) and float in _members(hints[name]) and str not in _members(hints[name]):
            try:
                value = float(value)
            except ValueError:
                raise UsageError(f"{name}: found {value!r}, accepted is a number") from None
        elif isinstance(value, int) and not isinstance(value, bool) and int not in _members(hints[name]):
            value = float(value) if float in _members(hints[name]) else value
        found[name] = value
    return found


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _add(group: Any, field: dataclasses.Field[Any], hint: Any, text: str) -> None:
    flag = "--" + field.name.replace("_", "-")
    members = _members(hint)
    default = _default(field)
    text = f"{text}{default}".replace("%", "%%")
    if bool in members:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif any(typing.get_origin(member) is tuple for member in members) and field.name == "cut":
        group.add_argument(flag, nargs=2, type=float, metavar=("LOW", "HIGH"), help=text)
    elif field.name == "targets":
        group.add_argument(flag, type=lambda value: tuple(value.split(",")), metavar="NAME,NAME", help=text)
    elif field.name == "columns":
        group.add_argument(flag, nargs="+", action=_Columns, metavar="OURS=THEIRS", help=text)
    else:
        kind = next((member for member in members if member in (int, float)), str)
        if field.name == "template" or kind is str:
            kind = str
        group.add_argument(flag, type=_reader(kind), metavar={int: "N", float: "X", str: "TEXT"}[kind], help=text)


def _reader(kind: type) -> Any:
    def read(text: str) -> Any:
        return kind(text)

    read.__name__ = {int: "whole number", float: "number", str: "text"}[kind]
    return read


class _Columns(argparse.Action):
    """`prompt=Frage completion=Antwort` → a mapping."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        pairs = [value.partition("=") for value in values]
        wrong = [value for value, pair in zip(values, pairs, strict=True) if not pair[1] or not pair[0] or not pair[2]]
        if wrong:
            parser.error(f"--columns: found {wrong[0]!r}, accepted is OURS=THEIRS, such as prompt=Question")
        setattr(namespace, self.dest, {ours: theirs for ours, _, theirs in pairs})


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default is None or field.name in _preset_names():
        return "" if field.name not in _preset_names() else " [preset's]"
    return f" [{field.default}]"


def _preset_names() -> set[str]:
    return {field.name for kind in (MascSettings, Recipe) for field in dataclasses.fields(kind)} - {"tolerance"}


def _help(kind: type) -> dict[str, str]:
    """Help texts: the `Attributes` of a dataclass's docstring, one line each."""
    section = (kind.__doc__ or "").split("Attributes:", 1)[1].split("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip().rstrip(".") for name, text in entries}


def split_command(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The subcommand and its arguments."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)
