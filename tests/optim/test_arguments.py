"""Wrong arguments, options and inputs are refused, before anything moves."""

import pytest
import torch
from tests.optim.common import Halved, make, run

from expunge.errors import UsageError
from expunge.optim import (
    SGD,
    AdamW,
    Alternate,
    BaseDelta,
    Decoupled,
    DualOptim,
    DualOptimPlus,
    Lion,
    Muon,
    ObjectiveOptimizer,
    RMSprop,
    Statistic,
    Storage,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr: found -1.0"),
        ({"lr": float("nan")}, "lr: found nan"),
        ({"lr": {}}, "empty mapping"),
        ({"lr": {"a": 0.0}}, "lr of 'a': found 0.0"),
        ({"weight_decay": -0.1}, "weight_decay: found -0.1"),
        ({"scheme": "triple"}, "scheme: found 'triple', accepted is one of base_delta, decoupled, shared"),
        ({"rule": "adagrad"}, "rule: found 'adagrad'"),
        ({"storage": "2bit"}, "storage: found '2bit'"),
        ({"foreach": "yes"}, "foreach: found 'yes'"),
        ({"param_rounding": "up"}, "param_rounding: found 'up'"),
        ({"param_rounding": "stochastic"}, "without a bfloat16 parameter"),
        ({"rule": SGD(momentum=0.0)}, "tracks no statistic"),
        ({"rule": "sgd", "scheme": Decoupled(split="first")}, "has only a first moment"),
        ({"rule": "rmsprop", "scheme": BaseDelta(split="first")}, "has only a second moment"),
        ({"storage": Storage("8bit", min_size=0), "foreach": True}, "storage '8bit', which is updated one by one"),
        ({"rule": Halved(), "foreach": True}, "rule 'halved', which is updated one by one"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    options = {"lr": 0.1, **arguments}
    with pytest.raises(ValueError, match=message):
        ObjectiveOptimizer([torch.nn.Parameter(torch.ones(4, 4))], **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AdamW(betas=(0.9, 1.0)), r"betas: found 1.0, accepted is a number in \[0, 1\)"),
        (lambda: AdamW(betas=(0.9,)), "betas"),
        (lambda: AdamW(eps=0.0), "eps: found 0.0"),
        (lambda: SGD(momentum=1.0), "momentum: found 1.0"),
        (lambda: SGD(momentum=0.0, nesterov=True), "nesterov"),
        (lambda: Muon(steps=0), "steps: found 0"),
        (lambda: Muon(adjust="no"), "adjust: found 'no'"),
        (lambda: Muon(other=Muon()), "other"),
        (lambda: BaseDelta(base_betas=(0.9, -0.1)), "base_betas: found -0.1"),
        (lambda: BaseDelta(split="third"), "split: found 'third', accepted is one of both, first, second"),
        (lambda: BaseDelta(base_coefficient=-1.0), "base_coefficient: found -1.0"),
        (lambda: Statistic("step", 0.9), "Statistic.name: found 'step'"),
        (lambda: Statistic("a", 0.9, moment=3), "Statistic.moment: found 3"),
    ],
)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(UsageError, match=message):
        build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "sgd", "eps": 1e-6}, "eps: found 1e-06, but rule 'sgd' has no use for it"),
        ({"rule": "sgd", "betas": (0.9, 0.9)}, "no use for its number 2"),
        ({"rule": "rmsprop", "betas": (0.8, 0.95)}, "no use for its number 1"),
        ({"rule": AdamW(), "betas": (0.8, 0.95)}, "no use for its number 1"),
        ({"rule": "lion", "base_betas": (0.9, 0.5)}, "has no moment 2"),
        ({"rule": "none"}, "rule: found 'none'"),
    ],
)
def test_short_constructors_refuse_what_has_no_effect(options, message):
    with pytest.raises(UsageError, match=message):
        DualOptimPlus([torch.nn.Parameter(torch.ones(2))], lr=0.1, **options)


def test_short_constructors_pass_their_arguments_on():
    weight = [torch.nn.Parameter(torch.ones(2))]
    plus = DualOptimPlus(weight, 0.1, (0.8, 0.7), (0.6, 0.5), 1e-6, 0.2, "adamw", "8bit")
    assert plus.rule == AdamW((0.8, 0.7), 1e-6)
    assert plus.scheme == BaseDelta((0.6, 0.5))
    assert (plus.storage, plus.param_groups[0]["weight_decay"]) == (Storage("8bit"), 0.2)
    assert DualOptim(weight, 0.1, rule="sgd", betas=(0.7, 0.95)).rule == SGD(momentum=0.7)
    assert Alternate(weight, 0.1, rule="lion", betas=(0.7, 0.8)).rule == Lion((0.7, 0.8))
    assert Alternate(weight, 0.1, rule="rmsprop", betas=(0.9, 0.8), eps=1e-5).rule == RMSprop(0.8, 1e-5)
    assert Alternate(weight, 0.1, rule="muon", betas=(0.7, 0.8)).rule == Muon(momentum=0.7, other=AdamW((0.7, 0.8)))


def test_wrong_inputs_of_a_step_are_refused_before_anything_moves():
    weights = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    optimizer = DualOptimPlus(weights, lr=0.1)
    weights[0].grad = torch.ones(4, 2)
    weights[1].grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(
        ValueError, match=r"gradient of a parameter \(4, 2\): found torch.sparse_coo, accepted is dense"
    ):
        optimizer.step(objective="forget")
    assert torch.equal(weights[0], torch.ones(4, 2))
    assert not optimizer.state
    for objective in ("", 3):
        with pytest.raises(ValueError, match="objective"):
            optimizer.step(objective=objective)
    with pytest.raises(ValueError, match="accepted is floating"):
        DualOptimPlus([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    with pytest.raises(ValueError, match="betas: found in a parameter group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "betas": (0.9, 0.9)})
    with pytest.raises(ValueError, match="accepted is floating"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="a set"):
        optimizer.add_param_group({"params": {torch.nn.Parameter(torch.ones(2))}})
    with pytest.raises(ValueError, match="float64"):
        DualOptimPlus([torch.nn.Parameter(torch.ones(64, 64, dtype=torch.float64))], lr=0.1, storage="8bit")


def test_a_state_of_another_combination_is_refused():
    optimizer, params = make()
    run(optimizer, params, 2)
    other, _ = make(scheme="decoupled")
    with pytest.raises(UsageError, match="state_dict: found one saved with 'base_delta/both adamw"):
        other.load_state_dict(optimizer.state_dict())
