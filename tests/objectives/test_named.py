import json

import pytest

from expunge.errors import UsageError
from expunge.objectives import FORGET_TERMS, NAMED_METHODS, PRESETS, RETAIN_TERMS, MethodSpec, parse_method

DEFAULT = PRESETS["default"]  # the project's own, which changes with what it measures
# name → forget term, retain term, weights, options of the forget term (those of the inputs included)
EXPECTED = {
    "ga": ("ga", "none", 1.0, 1.0, {}),
    "graddiff": ("ga", "ce", 1.0, 1.0, {}),
    "ga+kl": ("ga", "kl", 1.0, 1.0, {}),
    "npo": ("npo", "none", 1.0, 1.0, {"beta": 0.1}),
    "npo+gd": ("npo", "ce", 1.0, 1.0, {"beta": 0.1}),
    "npo+kl": ("npo", "kl", 1.0, 1.0, {"beta": 0.1}),
    "simnpo": ("simnpo", "ce", 0.1375, 1.0, {"beta": 2.5, "gamma": 0.0}),
    "rmu": ("rmu", "rmu-retain", 1.0, 1200.0, {"c": 6.5, "layer": 7, "seed": 0}),
    "dpo+gd": ("dpo", "ce", 1.0, 1.0, {"beta": 0.1}),
    "dpo+kl": ("dpo", "kl", 1.0, 1.0, {"beta": 0.1}),
    "idk": ("idk", "none", 1.0, 1.0, {}),
    "idk+gd": ("idk", "ce", 1.0, 1.0, {}),
    "idk+ap": ("idk", "ap", 1.0, 1.0, {}),
    "me+gd": ("me-uniform", "ce", 0.1, 1.0, {}),
    "undial": ("undial", "none", 1.0, 1.0, {"gamma": 10.0}),
    "wga+gd": ("wga", "ce", 1.0, 1.0, {"beta": 1.0}),
    "satimp+gd": ("satimp", "ce", 1.0, 0.1, {"beta1": 5.0, "beta2": 1.0}),
    "ce-u+gd": ("ce-u", "ce", 1.0, 1.0, {}),
    "task-vector": ("task-vector", "none", 1.0, 1.0, {"scale": 1.0}),
    "masc": ("masc", "kl", DEFAULT.weight, DEFAULT.kl_weight, {
        "rho": DEFAULT.rho, "eta": DEFAULT.eta, "k": DEFAULT.k, "beta": DEFAULT.beta,
        "teacher_delta": DEFAULT.teacher_delta,
    }),
}  # fmt: skip


def test_methods_hold_the_values_of_the_papers():
    assert list(NAMED_METHODS) == list(EXPECTED)
    for name, (forget, retain, forget_weight, retain_weight, options) in EXPECTED.items():
        spec = NAMED_METHODS[name]
        assert (spec.name, spec.forget, spec.retain) == (name, forget, retain)
        assert (spec.forget_weight, spec.retain_weight) == (forget_weight, retain_weight)
        assert dict(spec.forget_options) == options
        assert spec.reference.startswith("https://arxiv.org/abs/")
        assert spec.kind == ("weights" if name == "task-vector" else "loop")


def test_recipes_hold_the_values_of_the_papers():
    recipes = {name: spec.recipe for name, spec in NAMED_METHODS.items()}
    for name in ("ga", "graddiff", "ga+kl", "idk", "idk+gd", "idk+ap", "me+gd"):
        assert (recipes[name].epochs, recipes[name].lr) == (5, 1e-5)
        assert (recipes[name].batch, recipes[name].weight_decay) == (32, 0.01)
    assert (recipes["simnpo"].epochs, recipes["undial"].lr, recipes["wga+gd"].batch) == (10, 1e-4, 16)
    assert recipes["ce-u+gd"].skip_first == 1
    assert all(recipe.skip_first == 0 for name, recipe in recipes.items() if name != "ce-u+gd")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_method_is_read_from_its_name(name):
    assert parse_method(name) == NAMED_METHODS[name]
    assert json.loads(json.dumps(parse_method(name).as_dict()))["forget_options"] == EXPECTED[name][4]


@pytest.mark.parametrize("retain", sorted(RETAIN_TERMS))
@pytest.mark.parametrize("forget", sorted(FORGET_TERMS))
def test_any_forget_term_goes_with_any_retain_term(forget, retain):
    spec = parse_method(f"forget={forget},retain={retain}")
    assert spec == parse_method(f" retain = {retain} , forget = {forget} ")
    assert spec.name == f"forget={forget},retain={retain}"
    assert (spec.forget_term, spec.retain_term) == (FORGET_TERMS[forget], RETAIN_TERMS[retain])
    assert dict(spec.forget_options) == {n: o.default for n, o in spec.forget_term.options.items()}
    assert FORGET_TERMS[forget].formula in spec.formula


def test_options_go_to_the_term_that_has_them():
    assert parse_method("npo+kl", {"beta": "0.2"}).forget_options["beta"] == 0.2
    spec = parse_method("idk+ap", {"beta": 0.3, "retain_weight": "2", "forget_weight": 0})
    assert (spec.retain_options["beta"], spec.retain_weight, spec.forget_weight) == (0.3, 2.0, 0.0)
    spec = parse_method("forget=dpo,retain=ap", {"forget.beta": 0.5})
    assert (spec.forget_options["beta"], spec.retain_options["beta"]) == (0.5, 0.1)
    assert parse_method("task-vector", {"scale": 5}).forget_options["scale"] == 5.0
    assert NAMED_METHODS["npo+kl"].forget_options["beta"] == 0.1


def test_the_layer_of_rmu_is_one_for_both_terms():
    spec = parse_method("rmu", {"layer": -2})
    assert (spec.forget_options["layer"], spec.retain_options["layer"]) == (-2, -2)
    spec = parse_method("rmu", {"layer": 3, "retain.layer": 5})
    assert (spec.forget_options["layer"], spec.retain_options["layer"]) == (3, 5)


def test_the_formula_has_weights_and_options_as_they_are():
    found = parse_method("simnpo", {"gamma": 0.25}).formula
    assert found.startswith("0.1375 · [mean over rows of")
    assert found.endswith("forget.beta = 2.5, forget.gamma = 0.25")
    assert parse_method("ga").formula == "[mean over tokens of log π(y)]"
    assert "s = 2" in parse_method("task-vector", {"scale": 2}).formula
    assert "teacher_delta = none" in parse_method("masc").formula


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("NPO", {}, "method: found 'NPO', accepted is forget=NAME,retain=NAME or one of ce-u\\+gd, .*wga\\+gd"),
        ("forget=npo", {}, "method: found 'forget=npo', accepted is"),
        ("forget=npo,forget=ga", {}, "method: found .*, accepted is"),
        ("forget=npo,retain=kl,beta=1", {}, "method: found .*, accepted is"),
        ("", {}, "method: found '', accepted is"),
        ("forget=sim,retain=kl", {}, "forget: found 'sim', accepted is one of ce-u, .*wga"),
        ("forget=npo,retain=k", {}, "retain: found 'k', accepted is one of ap, ce, kl, none, rmu-retain"),
        ("forget=kl,retain=kl", {}, "forget: found 'kl', accepted is one of"),
        ("npo", {"beta": 0}, "beta: found 0, accepted is a number above 0"),
        ("npo", {"beta": "x"}, "beta: found 'x', accepted is a number above 0"),
        ("npo", {"gamma": 1}, "gamma: found an option that npo does not have, accepted is one of forget.beta, f"),
        ("npo", {"retain.beta": 1}, "retain.beta: found an option that npo does not have"),
        ("npo", {"other.beta": 1}, "other.beta: found an option that npo does not have"),
        ("npo", {"retain_weight": -1}, "retain_weight: found -1, accepted is a number from 0"),
        ("forget=dpo,retain=ap", {"beta": 1}, "beta: found it in both terms of .*, accepted is forget.beta or ret"),
        ("task-vector", {"retain_weight": 1}, "retain_weight: found an option that task-vector does not have"),
        ("rmu", {"layer": 1.5}, "layer: found 1.5, accepted is a whole number"),
    ],
)
def test_mistakes_are_one_line(text, options, message):
    with pytest.raises(UsageError, match=f"^{message}") as error:
        parse_method(text, options)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_specs_check_themselves():
    with pytest.raises(UsageError, match=r"forget\.nope: found an unknown option, accepted is beta"):
        MethodSpec("mine", "npo", forget_options={"nope": 1})
    with pytest.raises(UsageError, match="forget_weight: found -1"):
        MethodSpec("mine", "npo", forget_weight=-1)
    with pytest.raises(UsageError, match="forget: found 'nope', accepted is one of ce-u"):
        MethodSpec("mine", "nope")
    with pytest.raises(UsageError, match="retain: found 'nope', accepted is one of ap"):
        MethodSpec("mine", "npo", "nope")
    with pytest.raises(UsageError, match="forget: found 'npo', accepted is one of task-vector"):
        MethodSpec("mine", "npo", kind="weights")
    with pytest.raises(ValueError, match="task-vector: found arithmetic on weights"):
        _ = NAMED_METHODS["task-vector"].forget_term
    with pytest.raises(TypeError):
        NAMED_METHODS["npo"].forget_options["beta"] = 1.0
