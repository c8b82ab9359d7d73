"""Flat option names to a configuration: each reaches its place, wrong ones are named."""

import dataclasses
from pathlib import Path

import pytest

from expunge.errors import UsageError
from expunge.objectives import preset
from expunge.train import OPTION_GROUPS, RECIPES, RunConfig, config_from_options

NEEDED = {"model": "m", "forget": "f.jsonl", "out": "run"}


def test_without_options_the_preset_decides():
    config = config_from_options(NEEDED)
    assert config == RunConfig(**NEEDED)
    assert config.masc is None
    assert config.recipe is None


def test_options_change_the_named_preset_and_nothing_else():
    config = config_from_options(NEEDED | {"preset": "tofu", "lr": 3e-4, "k": 5, "seed": 3})
    assert config.recipe == dataclasses.replace(RECIPES["tofu"], lr=3e-4)
    assert config.masc == dataclasses.replace(preset("tofu"), k=5)
    assert config.seed == 3


def test_tolerance_is_the_runs():
    config = config_from_options(NEEDED | {"tolerance": 0.25})
    assert config.tolerance == 0.25
    assert config.masc is None


def test_names_are_unique_and_have_help():
    names = [name for group in OPTION_GROUPS for name in group.names]
    assert len(names) == len(set(names))
    assert all(text for group in OPTION_GROUPS for text in group.help().values())


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("out", Path("some") / "run", str(Path("some") / "run")),
        ("tolerance", "2e-1", 0.2),
        ("tolerance", 1, 1.0),
        ("holdout", None, None),
        ("columns", {"prompt": "Frage"}, {"prompt": "Frage"}),
    ],
)
def test_values_become_the_fields_type(name, given, kept):
    found = getattr(config_from_options(NEEDED | {name: given}), name)
    assert found == kept
    assert type(found) is type(kept)


def test_lists_of_a_file_become_tuples():
    config = config_from_options(NEEDED | {"cut": [0.1, 0.5], "targets": ["q_proj"]})
    assert config.masc.cut == (0.1, 0.5)
    assert config.recipe.targets == ("q_proj",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 1}, "options: found unknown option 'learning_rate', accepted are .*beta.*lr.*weight_decay"),
        ({"masc": None}, "found unknown option 'masc'"),
        ({"model": None}, "model: found none, accepted is"),
        ({"out": 5}, "out: found 5, accepted is a text"),
        ({"lr": "fast"}, "lr: found 'fast', accepted is a number"),
        ({"lr": -1}, r"lr: found -1\.0, accepted is a number above 0"),
        ({"lr": None}, "lr: found none, accepted is a value"),
        ({"lora": "false"}, "lora: found 'false', accepted is true or false"),
        ({"rank": 1.5}, r"rank: found 1\.5, accepted is a whole number from 1"),
        ({"preset": "none"}, "preset: found 'none', accepted is one of default"),
        ({"columns": "prompt=Frage"}, "columns: found 'prompt=Frage', accepted is a mapping"),
    ],
)
def test_wrong_options_are_usage_errors(options, message):
    with pytest.raises(UsageError, match=message):
        config_from_options(NEEDED | options)


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_needed_options(name):
    with pytest.raises(UsageError, match=f"{name}: found none"):
        config_from_options({key: value for key, value in NEEDED.items() if key != name})
