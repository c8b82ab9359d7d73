"""Schemes and rules against plain numbers, and the limits that the paper states."""

import math

import pytest
import torch
from tests.optim.reference import Scalar

from expunge.optim import (
    SGD,
    AdamW,
    BaseDelta,
    Decoupled,
    Lion,
    Muon,
    ObjectiveOptimizer,
    RMSprop,
    Shared,
    Storage,
    orthogonalise,
)
from expunge.optim._schemes import layouts, term

RULES = {
    "adamw": AdamW(),
    "adam": "adam",
    "sgd": SGD(),
    "nesterov": SGD(nesterov=True),
    "lion": Lion(),
    "rmsprop": RMSprop(),
}
SCHEMES = {"shared": Shared(), "decoupled": Decoupled(), "base_delta": BaseDelta()}
NAMES = ("forget", "retain", "third")


def gradients(steps, size, seed=0):
    """Objectives in an irregular order, with gradients of their own mean and scale."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        o = int(torch.randint(3, (), generator=generator))
        mean = (0.5, -0.3, 0.1)[o]
        yield NAMES[o], (mean + torch.randn(size, generator=generator, dtype=torch.float64)) * 10.0 ** (-o)


def compare(rule, scheme, reference_options, scheme_name, steps=50, foreach=None):
    start = [0.7, -1.2, 0.0, 3.0, -0.4]
    weight = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = ObjectiveOptimizer(
        [weight], lr=0.01, scheme=scheme, rule=RULES[rule], weight_decay=0.1, foreach=foreach
    )
    scalars = [Scalar(rule, scheme_name, w, 0.01, 0.1, **reference_options) for w in start]
    for step, (objective, grad) in enumerate(gradients(steps, len(start))):
        weight.grad = grad.clone()
        optimizer.step(objective=objective)
        assert torch.equal(weight.grad, grad)
        for scalar, g in zip(scalars, grad.tolist(), strict=True):
            scalar.step(objective, g)
        wanted = {key: [s.states()[key] for s in scalars] for key in scalars[0].states()}
        state = optimizer.state[weight]
        assert {key for key in state if not key.startswith("step")} == set(wanted)
        for key, values in wanted.items():
            assert state[key].tolist() == pytest.approx(values, rel=1e-10, abs=1e-14), (step, key)
        assert weight.tolist() == pytest.approx([s.w for s in scalars], rel=1e-9, abs=1e-12), step


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("rule", list(RULES))
def test_every_state_after_each_of_50_steps_is_the_equations(rule, scheme, foreach):
    compare(rule, SCHEMES[scheme], {}, scheme, foreach=foreach)


@pytest.mark.parametrize("options", [{"base_first": True}, {"coefficient": 0.5}, {"coefficient": 0.0}])
@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
def test_variants_of_base_delta_are_the_equations(rule, options):
    scheme = BaseDelta(base_first=options.get("base_first", False), base_coefficient=options.get("coefficient", 1.0))
    compare(rule, scheme, options, "base_delta")


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("rule", ["adamw", "rmsprop"])
def test_the_floor_of_second_moments_is_the_equation(rule, foreach):
    compare(rule, BaseDelta(floor=0.8), {"floor": 0.8}, "base_delta", foreach=foreach)
    with pytest.raises(AssertionError):  # It has an effect on these gradients.
        compare(rule, BaseDelta(floor=0.8), {}, "base_delta", foreach=foreach)


def test_rounding_storages_have_a_floor_of_their_own():
    scheme = BaseDelta()
    first, second = layouts(scheme, AdamW(), "forget")
    assert term(scheme, second, 4, 9).floor == 0.0
    exact = 1 / (1 - 0.95**9)
    assert term(scheme, second, 4, 9, 2.0**-6).floor == pytest.approx(2.0**-6 * exact)
    assert term(BaseDelta(floor=0.5), second, 4, 9, 2.0**-6).floor == pytest.approx(0.5 * exact)
    assert term(scheme, first, 4, 9, 2.0**-6).floor == 0.0


def test_base_and_delta_that_cancel_do_not_move_a_weight_far_where_there_is_a_floor():
    # Gradients of "retain" are a hundredth of those of "forget": its second moment is what is left of B̂ + Δ̂.
    def furthest(kind, floor=0.0):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        storage = kind if kind == "32bit" else Storage(kind, min_size=0)
        optimizer = ObjectiveOptimizer([("w", weight)], lr=1.0, scheme=BaseDelta(floor=floor), storage=storage)
        largest = 0.0
        for step in range(40):
            before = weight.detach().clone()
            weight.grad = torch.randn(64, 64) * (1.0 if step % 2 == 0 else 0.01)
            optimizer.step(objective=("forget", "retain")[step % 2])
            largest = max(largest, (weight.detach() - before).abs().max().item())
        return largest

    # Measured, in learning rates: bf16 10.7, 8 bits 5.4, 4 bits 5.1; without their floors 52,000 to 67,000.
    found = {kind: furthest(kind) for kind in ("bf16", "8bit", "4bit")}
    assert max(found.values()) < 20, found
    # The paper's absolute value in exact arithmetic: 31,000. With a floor as an option it is bounded too.
    assert furthest("32bit") > 1000
    assert furthest("32bit", floor=1 / 64) < 20


@pytest.mark.parametrize("split", ["first", "second"])
@pytest.mark.parametrize("scheme", ["decoupled", "base_delta"])
def test_one_moment_alone_can_be_split(scheme, split):
    made = Decoupled(split=split) if scheme == "decoupled" else BaseDelta(split=split)
    compare("adamw", made, {"split": split}, scheme)


def test_base_betas_reach_the_base():
    def base_after(base_betas):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = ObjectiveOptimizer([weight], lr=0.1, scheme=BaseDelta(base_betas=base_betas))
        weight.grad = torch.ones(1)
        optimizer.step(objective="a")
        state = optimizer.state[weight]
        return state["exp_avg"].item(), state["exp_avg_sq"].item()

    assert base_after((0.5, 0.75)) == pytest.approx((0.5, 0.25))
    assert base_after(None) == pytest.approx((0.1, 0.05))


def test_muon_is_the_equations_on_matrices():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 4))
    start = weight.detach().clone()
    optimizer = ObjectiveOptimizer([weight], lr=0.02, rule=Muon(dtype=torch.float32), weight_decay=0.1)
    B, n, D, t = torch.zeros(6, 4), 0, {}, {}
    expected = start
    for objective in ("a", "b", "b", "a", "a"):
        g = torch.randn(6, 4)
        weight.grad = g
        optimizer.step(objective=objective)
        hat = B / (1 - 0.9**n) if n else torch.zeros_like(B)
        D[objective] = 0.95 * D.get(objective, 0) + 0.05 * (g - hat)
        t[objective] = t.get(objective, 0) + 1
        mean = hat + D[objective] / (1 - 0.95 ** t[objective])
        B, n = 0.9 * B + 0.1 * g, n + 1
        direction = orthogonalise(0.95 * mean + 0.05 * g, dtype=torch.float32) * 0.2 * math.sqrt(6)
        expected = (1 - 0.02 * 0.1) * expected - 0.02 * direction
        torch.testing.assert_close(optimizer.state[weight][f"exp_avg/{objective}"], D[objective])
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"], B)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-5)


def test_orthogonalise_gives_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((24, 16), (16, 24), (16, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), dtype=torch.float32))
        # Its authors state about [0.7, 1.2]; square random matrices have singular values near 0, which lag behind.
        assert values.max() < 1.25
        assert values.min() > (0.5 if shape[0] != shape[1] else 0.0)
    assert orthogonalise(torch.zeros(3, 2)).tolist() == [[0, 0]] * 3


def directions(scheme, rule, forget, retain, updates):
    """Direction of every update: forget and retain take turns, each with its constant gradient."""
    weight = torch.nn.Parameter(torch.zeros(len(forget), dtype=torch.float64))
    optimizer = ObjectiveOptimizer([weight], lr=1.0, scheme=scheme, rule=rule)
    found = []
    for update in range(updates):
        objective, gradient = (("forget", forget), ("retain", retain))[update % 2]
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        before = weight.detach().clone()
        optimizer.step(objective=objective)
        found.append(before - weight.detach())
    return found


@pytest.mark.parametrize("rule", ["adamw", "sgd", "nesterov", "rmsprop"])
def test_identical_gradients_give_the_direction_of_shared(rule):
    # Base and gradient are the same constant, so B̂ = g from the second update on and only the first delta of "forget",
    # made against an empty base, is left. It decays by β each forget update: after t of them it weighs
    # (1 − β)·βᵗ⁻¹/(1 − βᵗ) of g. At t = 120: 0.1·0.9¹¹⁹ = 4e-7 of the first moment, 0.05·0.95¹¹⁹ = 1.1e-4 of the
    # second, which the root halves (AdamW). RMSprop, α = 0.99, t = 400: 0.01·0.99³⁹⁹ = 1.8e-4, likewise. Retain never
    # saw an empty base: its direction is that of `shared`.
    updates = 800 if rule == "rmsprop" else 240
    gradient = [0.5, -2.0, 1e-3]
    ours = directions(BaseDelta(), RULES[rule], gradient, gradient, updates)
    theirs = directions(Shared(), RULES[rule], gradient, gradient, 4 * updates)
    tolerance = {"adamw": 6e-5, "rmsprop": 1e-4}.get(rule, 5e-6)
    torch.testing.assert_close(ours[-2], theirs[-1], rtol=tolerance, atol=0)
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-6, atol=0)
    # The transient: the third update (forget's second) is far from it.
    if rule in ("adamw", "sgd"):
        assert not torch.allclose(ours[2], theirs[-1], rtol=1e-2)


def test_opposite_gradients_give_the_direction_of_decoupled_up_to_the_ripple():
    # Taking turns with ±g the base does not vanish: it alternates between ±g(1 − β_b)/(1 + β_b) = ±g/19 (β_b = 0.9).
    # The delta sees g ∓ ripple, always with the same sign for one objective, and the sum has the ripple back:
    # B̂ + Δ̂ = g exactly in the limit, for every constant gradient. What is left after the transient is rounding.
    gradient = [0.5, -2.0, 1e-3]
    opposite = [-g for g in gradient]
    for rule, tolerance in (("adamw", 1e-6), ("sgd", 1e-6)):
        ours = directions(BaseDelta(), RULES[rule], gradient, opposite, 500)
        theirs = directions(Decoupled(), RULES[rule], gradient, opposite, 2000)
        torch.testing.assert_close(ours[-2], theirs[-2], rtol=tolerance, atol=0)
        torch.testing.assert_close(ours[-1], theirs[-1], rtol=tolerance, atol=0)


def test_the_base_keeps_a_ripple_under_opposite_gradients():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = ObjectiveOptimizer([weight], lr=0.1)
    for update in range(400):
        weight.grad = torch.tensor([1.0 if update % 2 == 0 else -1.0], dtype=torch.float64)
        optimizer.step(objective=("forget", "retain")[update % 2])
    state = optimizer.state[weight]
    assert state["exp_avg"].item() == pytest.approx(-1 / 19, rel=1e-9)
    assert state["exp_avg/forget"].item() == pytest.approx(1 + 1 / 19, rel=1e-6)
    found = optimizer.diagnostics()
    assert found.cosine["forget", "retain"] == pytest.approx(-1.0)
    # Read after a retain update, the base has retain's sign: forget's average is the delta less the ripple.
    assert found.base["forget"] == pytest.approx((1 / 19) / 1.0, rel=1e-5)
    assert found.delta["forget"] == pytest.approx((1 + 1 / 19) / 1.0, rel=1e-5)
