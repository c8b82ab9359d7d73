"""Configurations: what is refused, what a preset holds, and the way to JSON and back."""

import json
from pathlib import Path

import pytest

from expunge.errors import UsageError
from expunge.objectives import MascSettings, preset
from expunge.train import RECIPES, Recipe, RunConfig

BASE = {"model": "m", "forget": "f.jsonl", "out": "run", "retain": "r.jsonl"}


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (RunConfig, "method", "nope"),
        (RunConfig, "preset", "tofo"),
        (RunConfig, "preset", ["tofu"]),
        (RunConfig, "dtype", "int8"),
        (RunConfig, "tolerance", 1.5),
        (RunConfig, "tolerance", float("nan")),
        (RunConfig, "max_length", 1),
        (RunConfig, "checkpoint_every", 0),
        (RunConfig, "holdout_probe", -1),
        (RunConfig, "threads", 0),
        (RunConfig, "micro_batch", True),
        (RunConfig, "seed", "abc"),
        (RunConfig, "show_text", "yes"),
        (RunConfig, "forget", 5),
        (Recipe, "rank", 0),
        (Recipe, "batch", 1.5),
        (Recipe, "warmup", -1),
        (Recipe, "lora_alpha", 0),
        (Recipe, "lora_dropout", 1.0),
        (Recipe, "upper", 0),
        (Recipe, "lr", float("inf")),
        (Recipe, "weight_decay", -0.1),
        (Recipe, "max_grad_norm", 0),
        (Recipe, "targets", 5),
        (Recipe, "lora", "no"),
        (Recipe, "betas", 5),
        (Recipe, "betas", (0.9, "x")),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(kind, option, value):
    with pytest.raises(UsageError, match=f"^{option}: found .*accepted (is|are) ") as caught:
        kind(**((BASE if kind is RunConfig else {}) | {option: value}))
    assert "\n" not in str(caught.value)


def test_resolved_fills_in_the_preset():
    config = RunConfig(**BASE, preset="tofu", tolerance=0.3).resolved()
    assert config.recipe == RECIPES["tofu"]
    assert config.masc.tolerance == 0.3
    assert config.masc.weight == 0.05
    assert config.resolved() == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retain": None, "holdout": "h"}, "^retain: found none"),
        ({"masc": MascSettings(tolerance=None)}, "^tolerance: found none"),
        ({"tolerance": 0.3, "adapter_only": True, "recipe": Recipe(lora=False)}, "^adapter_only: "),
    ],
)
def test_resolved_refuses_what_is_missing(changes, message):
    with pytest.raises(UsageError, match=message):
        RunConfig(**(BASE | changes)).resolved()


def test_the_tofu_preset_needs_no_retain_file():
    assert RunConfig(model="m", forget="f", out="o", preset="tofu").resolved().retain is None


def test_round_trip_through_json():
    config = RunConfig(
        **(BASE | {"out": Path("run")}),
        columns={"prompt": "q"},
        tolerance=0.1,
        masc=MascSettings(cut=(0.1, 0.2)),
        recipe=Recipe(targets=("a", "b")),
    )
    for one in (config, config.resolved()):
        assert RunConfig.from_dict(json.loads(json.dumps(one.to_dict()))) == one


@pytest.mark.parametrize("where", [None, "masc", "recipe"])
def test_from_dict_refuses_an_unknown_name(where):
    values = RunConfig(**BASE, tolerance=0.2).resolved().to_dict()
    (values if where is None else values[where])["colour"] = 1
    with pytest.raises(UsageError, match="'colour'"):
        RunConfig.from_dict(values)


# The numbers of the paper, as the issue gives them.
AUTHORS = {
    "tofu": {
        **{"weight": 0.05, "rho": 0.7, "eta": 0.25, "k": 10, "beta": 1.0, "tolerance": 0.475, "kl_weight": 0.0},
        **{"cut": (0.2, 0.6), "min_prefix": 32, "min_suffix": 32, "probe": 4, "confirm": 32, "every": 2},
        "teacher_delta": None,
    },
    "muse-news": {
        **{"weight": 0.5, "rho": 0.7, "eta": 0.5, "k": 2, "beta": 5.0, "tolerance": 0.55, "kl_weight": 1.0},
        **{"cut": (0.6, 0.6), "min_prefix": 32, "min_suffix": 128, "probe": 4, "confirm": 64},
        "teacher_delta": 0.5,
    },
    "qwen2.5-tofu": {
        **{"weight": 0.1, "rho": 0.5, "eta": 0.5, "k": 10, "beta": 1.0, "tolerance": 0.2, "kl_weight": 1.0},
        **{"cut": (0.2, 0.6), "probe": 4, "confirm": 64, "teacher_delta": None},
    },
}


@pytest.mark.parametrize("name", AUTHORS)
def test_presets_of_the_authors(name):
    settings, recipe = preset(name), RECIPES[name]
    assert {option: getattr(settings, option) for option in AUTHORS[name]} == AUTHORS[name]
    assert (recipe.lora, recipe.rank, recipe.lora_alpha, recipe.lora_dropout) == (True, 16, 32, 0.05)
    assert recipe.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (recipe.lr, recipe.batch, recipe.epochs, recipe.upper) == (1e-4, 2, 3, 1.0)
    assert (recipe.gate, recipe.focus) == (False, False)
