"""What is compared: targets × methods × optimizers × seeds, checked before anything runs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expunge.compare._file import fill, read_file
from expunge.compare._names import check_known, check_name, items, mapping, text, typed
from expunge.compare._scales import axes_of
from expunge.compare._stress import parse_stress
from expunge.errors import UsageError
from expunge.objectives import NAMED_METHODS
from expunge.suites import SUITES, EvaluateSettings, MeasureSettings, metric_names
from expunge.train import OPTION_GROUPS, RECIPES, RunConfig, config_from_options

if TYPE_CHECKING:
    from expunge.stress import StressSettings

PARTS = ("forget", "retain", "holdout", "paraphrase")
_KEYS = ("suite", "data", "targets", "options", "methods", "optimizers", "seeds", "evaluate", "stress", "axes")
_OPTIONS = tuple(name for group in OPTION_GROUPS for name in group.names)
# What a target, the seeds and the comparison itself decide.
_NOT_OPTIONS = ("model", "forget", "retain", "out", "seed")
_TOFU_SPLIT = re.compile(r"forget(\d\d)")


@dataclass(frozen=True)
class Part:
    """Rows of a target.

    Attributes:
        source: file, or hub dataset "owner/name:configuration".
        rows: which of its rows, as "start:end"; None: all.
        split: of a hub dataset.
    """

    source: str
    rows: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Target:
    """A model to unlearn, and what it is to forget.

    Attributes:
        name: of the target, also of its folder.
        model: as `expunge unlearn` takes it.
        retrained: model that never saw the rows to forget; None: there is none.
        parts: forget, and optionally retain, holdout and paraphrase.
        data: what the suite reads, a folder or hub name; None: the parts themselves (suite mine).
        split: what TOFU forgets, such as "forget10"; None: the only one in the folder.
    """

    name: str
    model: str
    retrained: str | None
    parts: Mapping[str, Part]
    data: str | None
    split: str | None = None


@dataclass(frozen=True)
class Entry:
    """A method or an optimizer.

    Attributes:
        name: in tables, and of its folder.
        options: options of `expunge unlearn`, the budget among them.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    Attributes:
        target: what is unlearned.
        method: how.
        optimizer: with which optimizer; None: the method's.
        seed: of the run.
    """

    target: Target
    method: Entry
    optimizer: Entry | None
    seed: int

    @property
    def name(self) -> str:
        """Path of the cell's folder in that of all cells."""
        optimizer = [] if self.optimizer is None else [self.optimizer.name]
        return "/".join([self.target.name, self.method.name, *optimizer, f"seed-{self.seed}"])

    @property
    def options(self) -> dict[str, Any]:
        """Options of method and optimizer."""
        return {**self.method.options, **({} if self.optimizer is None else self.optimizer.options)}


@dataclass(frozen=True)
class Study:
    """A comparison.

    Attributes:
        name: of the file, without its ending.
        suite: tofu, muse or mine.
        targets: what is unlearned.
        options: options of `expunge unlearn` for all runs; a method's own win.
        methods: how.
        optimizers: with which optimizers; empty: each method's own.
        seeds: of the runs.
        evaluate: how the models are evaluated.
        stress: how they are stressed; None: not at all.
        axes: metrics of the plot: what is forgotten, what is kept.
        source: the file as it was read, placeholders as they are.
    """

    name: str
    suite: str
    targets: tuple[Target, ...]
    options: Mapping[str, Any]
    methods: tuple[Entry, ...]
    optimizers: tuple[Entry, ...]
    seeds: tuple[int, ...]
    evaluate: EvaluateSettings
    stress: StressSettings | None
    axes: tuple[str, str]
    source: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def cells(self) -> list[Cell]:
        """All runs, seed by seed, so that early results are of every method."""
        optimizers: tuple[Entry | None, ...] = self.optimizers or (None,)
        combined = itertools.product(self.targets, self.seeds, self.methods, optimizers)
        return [Cell(target, method, optimizer, seed) for target, seed, method, optimizer in combined]

    def config(self, cell: Cell, files: Mapping[str, str], out: Path) -> RunConfig:
        """The run of a cell.

        The holdout is given to the runs that measure their tolerance on it: those that MASC's rule ends and that have
        no tolerance or preset of their own. Answers are generated by the evaluation, not by the run.

        Args:
            cell: one of `cells()`.
            files: of the target's parts.
            out: run folder.

        Raises:
            UsageError: an option is wrong.
        """
        options = {"sample": 0, "retain_sample": 0} | dict(self.options) | cell.options
        holdout = options.pop("holdout", files.get("holdout"))
        given = {"model": cell.target.model, "forget": files["forget"], "out": str(out), "seed": cell.seed}
        if "retain" in files:
            given["retain"] = files["retain"]
        config = config_from_options(options | given, where=cell.name)
        fixed = config.budget or config.tolerance is not None or config.preset != "default"
        return dataclasses.replace(config, holdout=None if fixed else holdout)


def read_study(path: str | Path, settings: Mapping[str, str] | None = None) -> Study:
    """Read a comparison from its YAML file; every name and option in it is checked.

    Args:
        path: the file.
        settings: values of the placeholders `${name}` in it.

    Raises:
        UsageError: names what is wrong, and the closest name where one is unknown.
    """
    source = read_file(path)
    try:
        mapping("file", source, _KEYS)
        return parse_study(fill(source, settings or {}), name=Path(path).stem, source=source)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def parse_study(values: Mapping[str, Any], *, name: str, source: Mapping[str, Any] | None = None) -> Study:
    """A comparison from plain values.

    Args:
        values: as in a file, placeholders filled in.
        name: of the comparison.
        source: the values with placeholders; None: `values`.

    Raises:
        UsageError: as `read_study`.
    """
    mapping("file", values, _KEYS)
    for key in ("suite", "targets", "methods"):
        if key not in values:
            raise UsageError(f"{key}: found none, accepted is {_WANTED[key]}")
    suite = text("suite", values["suite"])
    check_known("suite", suite, SUITES)
    data = None if values.get("data") is None else text("data", values["data"])
    options = _options("options", values.get("options", {}))
    targets = tuple(
        _target(check_name("targets", key), value, suite, data)
        for key, value in mapping("targets", values["targets"]).items()
    )
    if not targets:
        raise UsageError(f"targets: found none, accepted is {_WANTED['targets']}")
    evaluate = _evaluate(values.get("evaluate", {}), options)
    study = Study(
        name=name,
        suite=suite,
        targets=targets,
        options=options,
        methods=_entries("methods", values["methods"]),
        optimizers=_entries("optimizers", values["optimizers"]) if "optimizers" in values else (),
        seeds=_seeds(values.get("seeds", [0])),
        evaluate=evaluate,
        stress=None if values.get("stress") is None else parse_stress(values["stress"], evaluate),
        axes=_axes(values.get("axes", {}), suite),
        source=values if source is None else source,
    )
    _check_configs(study)
    return study


_WANTED = {
    "suite": f"one of {', '.join(SUITES)}",
    "targets": "a mapping of names to model, forget, …",
    "methods": "a list of entries, each with a name",
}


def _check_configs(study: Study) -> None:
    """Every cell makes a run that `expunge unlearn` would take."""
    for cell in study.cells():
        files = {part: one.source for part, one in cell.target.parts.items()}
        try:
            study.config(cell, files, Path("out")).resolved()
        except UsageError as error:
            raise UsageError(f"{cell.name.rpartition('/')[0]}: {error}") from None


def _target(name: str, value: object, suite: str, data: str | None) -> Target:
    where = f"targets: {name}"
    found = mapping(where, value, ("model", "retrained", "data", "split", *PARTS))
    if "model" not in found:
        raise UsageError(f"{where}: model: found none, accepted is a hub id, a folder, a GGUF file or smollm2-135m")
    data = text(f"{where}: data", found["data"]) if "data" in found else data
    if data is None and suite != "mine":
        raise UsageError(f"{where}: data: found none, accepted is a folder in the layout of {suite}, or a hub name")
    split = found.get("split")
    parts = {part: _part(f"{where}: {part}", found[part]) for part in PARTS if found.get(part) is not None}
    if split is not None:
        if suite != "tofu" or _TOFU_SPLIT.fullmatch(str(split)) is None:
            raise UsageError(f"{where}: split: found {split!r} with {suite}, accepted is forgetNN with tofu")
        parts = _split_parts(str(data), str(split)) | parts
    if "forget" not in parts:
        raise UsageError(f"{where}: forget: found none, accepted is a file, a hub dataset, or a split (tofu)")
    if "paraphrase" in parts and data is not None:
        raise UsageError(f"{where}: paraphrase: found with data, accepted is it where the suite reads the parts (mine)")
    retrained = None if found.get("retrained") is None else text(f"{where}: retrained", found["retrained"])
    return Target(name, text(f"{where}: model", found["model"]), retrained, parts, data, split and str(split))


def _part(where: str, value: object) -> Part:
    if isinstance(value, str):
        return Part(text(where, value))
    found = mapping(where, value, ("file", "rows", "split"))
    if "file" not in found:
        raise UsageError(f"{where}: file: found none, accepted is a file or a hub dataset")
    rows = found.get("rows")
    if rows is not None and (not isinstance(rows, str) or re.fullmatch(r"\d*:\d*", rows) is None):
        raise UsageError(f"{where}: rows: found {rows!r}, accepted is START:END, such as '0:100'")
    return Part(text(f"{where}: file", found["file"]), rows, text(f"{where}: split", found.get("split", "train")))


def _split_parts(data: str, split: str) -> dict[str, Part]:
    """TOFU's own files: what is forgotten, the others, and on the hub rows that were never trained on."""
    number = int(split.removeprefix("forget"))
    retain = f"retain{100 - number}"
    if Path(data).expanduser().is_dir():
        return {"forget": Part(f"{data}/{split}.jsonl"), "retain": Part(f"{data}/{retain}.jsonl")}
    names = {"forget": split, "retain": retain, "holdout": f"holdout{number:02d}"}
    return {part: Part(f"{data}:{name}") for part, name in names.items()}


def _entries(where: str, value: object) -> tuple[Entry, ...]:
    found: dict[str, Entry] = {}
    for one in items(where, value):
        values = mapping(where, one)
        name = check_name(f"{where}: name", values.pop("name", None))
        if name in found:
            raise UsageError(f"{where}: found {name} twice, accepted are unlike names")
        if where == "methods" and "method" not in values and name in NAMED_METHODS:
            values["method"] = name
        options = _options(f"{where}: {name}", values)
        if where == "methods" and "method" not in options:
            check_known(f"{where}: {name}: no method is given, and as one the name", name, NAMED_METHODS)
        found[name] = Entry(name, options)
    return tuple(found.values())


def _options(where: str, value: object) -> dict[str, Any]:
    accepted = [name for name in _OPTIONS if name not in _NOT_OPTIONS]
    found = mapping(where, value)
    for name in found:
        if name in _NOT_OPTIONS:
            raise UsageError(f"{where}: found {name}, which the comparison's targets and seeds decide")
        check_known(f"{where}: option", name, accepted)
    if "preset" in found:
        check_known(f"{where}: preset", found["preset"], RECIPES)
    method = found.get("method")
    if isinstance(method, str) and "=" not in method:
        check_known(f"{where}: method", method, NAMED_METHODS)
    if found.get("holdout") is not None:
        raise UsageError(f"{where}: holdout: found {found['holdout']!r}, accepted is none; targets say which file")
    return found


def _seeds(value: object) -> tuple[int, ...]:
    seeds = items("seeds", value)
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0 or seeds.count(seed) > 1:
            raise UsageError(f"seeds: found {seed!r}, accepted are unlike whole numbers from 0")
    return tuple(seeds)


def _evaluate(value: object, options: Mapping[str, Any]) -> EvaluateSettings:
    """Settings of the evaluation; templates and hardware are the runs' where nothing else is said."""
    kinds = {kind: {one.name for one in dataclasses.fields(kind)} for kind in (MeasureSettings, EvaluateSettings)}
    accepted = sorted((kinds[MeasureSettings] | kinds[EvaluateSettings]) - {"measure", "split"})
    found = mapping("evaluate", value, accepted)
    shared = ("template", "system", "dtype", "device")
    found = {name: options[name] for name in shared if options.get(name) is not None} | found
    for name, one in found.items():
        kind = MeasureSettings if name in kinds[MeasureSettings] else EvaluateSettings
        found[name] = typed(f"evaluate: {name}", one, typing.get_type_hints(kind)[name])
    measure = MeasureSettings(**{name: one for name, one in found.items() if name in kinds[MeasureSettings]})
    rest = {name: one for name, one in found.items() if name not in kinds[MeasureSettings]}
    return EvaluateSettings(measure=measure, **rest)


def _axes(value: object, suite: str) -> tuple[str, str]:
    found = mapping("axes", value, ("forget", "utility"))
    usual = dict(zip(("forget", "utility"), axes_of(suite), strict=True))
    for axis, name in found.items():
        if not str(name).startswith("lm_eval/"):
            check_known(f"axes: {axis}", name, metric_names(suite))
    return found.get("forget", usual["forget"]), found.get("utility", usual["utility"])
