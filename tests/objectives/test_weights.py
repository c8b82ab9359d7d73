import json
import math

import pytest

from expunge.errors import UsageError
from expunge.objectives import FixedWeights, PrimalDual


def test_fixed_weights_stay():
    weights = FixedWeights(0.5, 2.0)
    assert (weights.forget, weights.retain, weights.update(9.0), weights.retain) == (0.5, 2.0, 2.0, 2.0)
    weights.load_state_dict(json.loads(json.dumps(weights.state_dict())))
    with pytest.raises(UsageError, match="weights: found saved"):
        FixedWeights(0.5, 1.0).load_state_dict(weights.state_dict())


def test_dual_ascent_by_hand():
    weights = PrimalDual(limit=1.0, step=0.5, initial=2.0)
    assert (weights.forget, weights.retain) == (1.0, 2.0)
    assert [weights.update(loss) for loss in (3.0, 1.0, 0.0, -9.0, 0.5, 2.0)] == [3.0, 3.0, 2.5, 0.0, 0.0, 0.5]


def test_dual_ascent_finds_the_multiplier_of_a_quadratic():
    """min −x subject to x² ≤ 1 has x = 1 and λ = 1/2; for fixed λ the minimum of −x + λx² is at x = 1/(2λ)."""
    weights = PrimalDual(limit=1.0, step=0.05, initial=2.0)
    for _ in range(500):
        weights.update((1 / (2 * weights.retain)) ** 2)
    assert weights.retain == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("option", ["limit", "step", "initial"])
def test_options_reach_the_result(option):
    changed = {"limit": 1.0, "step": 0.5, "initial": 2.0} | {option: 0.25}
    assert PrimalDual(**changed).update(3.0) != PrimalDual(1.0, 0.5, 2.0).update(3.0)


def test_a_saved_rule_goes_on_where_it_was():
    losses = [3.0, 0.2, 5.0, 1.1]
    straight, first, second = (PrimalDual(1.0, 0.5, 2.0) for _ in range(3))
    expected = [straight.update(loss) for loss in losses]
    found = [first.update(loss) for loss in losses[:2]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [second.update(loss) for loss in losses[2:]] == expected
    assert second.state_dict() == straight.state_dict()


def test_states_of_other_rules_are_refused():
    rule = PrimalDual(1.0, 0.5, 2.0)
    for other in (FixedWeights().state_dict(), PrimalDual(1.5, 0.5, 2.0).state_dict()):
        with pytest.raises(UsageError, match="weights: found saved"):
            rule.load_state_dict(other)
    with pytest.raises(UsageError, match="weights: found saved"):
        FixedWeights().load_state_dict(rule.state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedWeights(forget=-1.0), "forget_weight: found -1.0, accepted is a number from 0"),
        (lambda: FixedWeights(retain=math.nan), "retain_weight: found nan, accepted is a number from 0"),
        (lambda: PrimalDual(math.inf), "limit: found inf, accepted is a finite number"),
        (lambda: PrimalDual(1.0, step=0.0), "step: found 0.0, accepted is a number above 0"),
        (lambda: PrimalDual(1.0, step="1"), "step: found '1', accepted is a number above 0"),
        (lambda: PrimalDual(1.0, initial=-1.0), "initial: found -1.0, accepted is a number from 0"),
    ],
)
def test_bad_options_are_usage_errors(make, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        make()


def test_a_loss_that_is_not_finite_changes_nothing():
    rule = PrimalDual(1.0, 0.5, 2.0)
    with pytest.raises(ValueError, match="retain_loss: found nan"):
        rule.update(math.nan)
    assert rule.state_dict() == PrimalDual(1.0, 0.5, 2.0).state_dict()
