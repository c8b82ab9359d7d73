import dataclasses

import pytest

from expunge.errors import UsageError
from expunge.objectives import MascSettings, preset


def test_presets_hold_the_values_of_the_paper():
    common = {"min_prefix": 32, "probe": 4, "every": 2, "anchor": 0.0, "spare_copies": False}
    expected = {
        "tofu": {
            "weight": 0.05, "rho": 0.7, "eta": 0.25, "k": 10, "beta": 1.0, "teacher_delta": None, "kl_weight": 0.0,
            "cut": (0.2, 0.6), "min_suffix": 32, "tolerance": 0.475, "confirm": 32,
        },
        "muse-news": {
            "weight": 0.5, "rho": 0.7, "eta": 0.5, "k": 2, "beta": 5.0, "teacher_delta": 0.5, "kl_weight": 1.0,
            "cut": (0.6, 0.6), "min_suffix": 128, "tolerance": 0.55, "confirm": 64,
        },
        "qwen2.5-tofu": {
            "weight": 0.1, "rho": 0.5, "eta": 0.5, "k": 10, "beta": 1.0, "teacher_delta": None, "kl_weight": 1.0,
            "cut": (0.2, 0.6), "min_suffix": 32, "tolerance": 0.2, "confirm": 64,
        },
    }  # fmt: skip
    for name, values in expected.items():
        assert dataclasses.asdict(preset(name)) == values | common


def test_unknown_presets_list_the_known_ones():
    with pytest.raises(UsageError, match=r"'tof'.*muse-news.*qwen2\.5-tofu.*tofu") as error:
        preset("tof")
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weight", -0.1),
        ("weight", float("nan")),
        ("rho", 0.0),
        ("rho", 1.0),
        ("eta", 0.0),
        ("eta", float("inf")),
        ("k", 0),
        ("k", 2.5),
        ("beta", 0.0),
        ("teacher_delta", -1.0),
        ("kl_weight", -1.0),
        ("cut", (0.6, 0.2)),
        ("cut", (0.2,)),
        ("cut", (0.0, 2.0)),
        ("cut", ("a", "b")),
        ("cut", 0.5),
        ("min_prefix", -1),
        ("min_suffix", 0),
        ("tolerance", 1.1),
        ("tolerance", -0.1),
        ("probe", 0),
        ("confirm", 3),
        ("every", 0),
        ("every", True),
    ],
)
def test_bad_values_name_option_value_and_range(option, value):
    with pytest.raises(UsageError, match=f"^{option}: found ") as error:
        MascSettings(**{option: value})
    message = str(error.value)
    assert repr(value) in message
    assert "accepted is" in message
    assert "\n" not in message


@pytest.mark.parametrize("options", [{"tolerance": None}, {"cut": None}, {"teacher_delta": 0.0}, {"weight": 0}])
def test_edges_are_accepted(options):
    settings = MascSettings(**options)
    assert all(getattr(settings, name) == value for name, value in options.items())


def test_lists_from_configuration_files_become_tuples():
    settings = MascSettings(cut=[0.2, 0.6])
    assert settings == MascSettings(cut=(0.2, 0.6))
    assert hash(settings) == hash(MascSettings(cut=(0.2, 0.6)))
