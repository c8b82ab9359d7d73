"""A run from flat option names: those of the command line, of its YAML file and of `expunge.unlearn(...)`."""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from expunge.errors import UsageError
from expunge.objectives import MascSettings, preset
from expunge.train._config import RunConfig
from expunge.train._recipe import Recipe, base_recipe


@dataclasses.dataclass(frozen=True)
class OptionGroup:
    """Options that belong to one dataclass.

    Attributes:
        title: what they are about.
        kind: the dataclass.
        names: its fields that are options, in order.
    """

    title: str
    kind: type
    names: tuple[str, ...]

    def help(self) -> dict[str, str]:
        """Return the help text of each option: the `Attributes` of the dataclass's docstring, one line each."""
        section = (self.kind.__doc__ or "").split("Attributes:", 1)[1].split("\n\n")[0]
        entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE)
        texts = {name: re.sub(r"\s+", " ", text).strip().rstrip(".") for name, text in entries}
        return {name: texts[name] for name in self.names}


def _group(title: str, kind: type, hidden: frozenset[str] = frozenset()) -> OptionGroup:
    return OptionGroup(title, kind, tuple(f.name for f in dataclasses.fields(kind) if f.name not in hidden))


# `tolerance` is the run's: it may come from a holdout.
OPTION_GROUPS: tuple[OptionGroup, ...] = (
    _group("run", RunConfig, frozenset({"masc", "recipe"})),
    _group("method", MascSettings, frozenset({"tolerance"})),
    _group("weights", Recipe),
)
# Without effect where another method is chosen: its settings are `method_options`; the others are of the measurement.
_ONLY_MASC = ("weight", "eta", "kl_weight", "anchor", "cut", "min_prefix", "min_suffix")


def config_from_options(values: Mapping[str, Any], *, where: str = "options") -> RunConfig:
    """Join flat names into a checked configuration; what is not named is the preset's.

    Args:
        values: option name → value. A path may be a `Path`, a number may be a text such as YAML's `1e-3`.
        where: what the names were read from, for the message about an unknown one.

    Returns:
        The configuration; `masc` and `recipe` are None where none of their options is given.

    Raises:
        UsageError: an unknown name, a value of a wrong type or out of range, or no model, forget file or folder.

    Example:
        >>> config = config_from_options({"model": "m", "forget": "f.jsonl", "out": "run", "lr": "1e-3", "rho": 0.6})
        >>> config.recipe.lr, config.masc.rho, config.masc.eta == preset("default").eta
        (0.001, 0.6, True)
    """
    known = {name for group in OPTION_GROUPS for name in group.names}
    for name in values:
        if name not in known:
            raise UsageError(f"{where}: found unknown option {name!r}, accepted are {', '.join(sorted(known))}")
    run, masc, recipe = (_typed(group, values) for group in OPTION_GROUPS)
    for name in ("model", "forget", "out"):
        if run.get(name) is None:
            raise UsageError(f"{name}: found none, accepted is {OPTION_GROUPS[0].help()[name]}")
    config = RunConfig(**run)  # checks the preset's name
    if config.method != "masc":
        for name in _ONLY_MASC:
            if name in masc:
                raise UsageError(f"{name}: found with method {config.method}, accepted is it with masc only")
    base = base_recipe(config.method, config.preset, lora=recipe.get("lora"))
    return dataclasses.replace(
        config,
        masc=dataclasses.replace(preset(config.preset), **masc) if masc else None,
        recipe=dataclasses.replace(base, **recipe) if recipe else None,
    )


def option_types(hint: Any) -> tuple[Any, ...]:
    """Return the types a field accepts: the members of a union, or the one type.

    Example:
        >>> option_types(int | None)
        (<class 'int'>, <class 'NoneType'>)
    """
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _typed(group: OptionGroup, values: Mapping[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(group.kind)
    return {name: _cast(name, values[name], option_types(hints[name])) for name in group.names if name in values}


def _cast(name: str, value: Any, accepted: tuple[Any, ...]) -> Any:
    """The value as its field's type; numbers out of range are left to the dataclass."""
    if value is None:
        if type(None) in accepted:
            return None
        raise UsageError(f"{name}: found none, accepted is a value (leave the name away for the preset's)")
    if float in accepted and isinstance(value, str):  # to YAML, 1e-3 is a text
        try:
            return float(value)
        except ValueError:
            raise UsageError(f"{name}: found {value!r}, accepted is a number") from None
    if float in accepted and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if str in accepted:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str):
            raise UsageError(f"{name}: found {value!r}, accepted is a text")
        return text
    if bool in accepted and not isinstance(value, bool):
        raise UsageError(f"{name}: found {value!r}, accepted is true or false")
    if dict[str, str] in accepted and not isinstance(value, dict):
        raise UsageError(f"{name}: found {value!r}, accepted is a mapping of names to values")
    return value
