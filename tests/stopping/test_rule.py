import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expunge.errors import UsageError
from expunge.stopping import Observation, StoppingRule, left_over, sampling_error


def seen(step, stage, *values):
    return Observation(step, stage, values, [str(i) for i in range(len(values))])


def run(rule, violation_at, steps):
    """A training loop without training: returns every decision."""
    decisions = []
    for step in range(1, steps + 1):
        while (count := rule.wants(step)) is not None:
            stage = "confirm" if rule.pending else "probe"
            decisions.append(rule.update(seen(step, stage, *[violation_at(step, stage)] * count)))
        if rule.stopped_at is not None:
            break
    return decisions


def test_scripted_crossing_at_seven_stops_at_seven():
    rule = StoppingRule(0.5, probe=4, confirm=8, every=1)
    decisions = run(rule, lambda step, stage: 0.4 if step >= 7 else 0.9, 20)
    assert rule.stopped_at == 7
    assert [d.stop for d in decisions] == [False] * 7 + [True]
    assert [d.stage for d in decisions[-2:]] == ["confirm", "done"]
    assert decisions[-1].numbers["examples"] == 8
    assert rule.wants(8) is None


def test_looks_only_at_multiples_of_every():
    rule = StoppingRule(0.5, probe=4, confirm=8, every=3)
    assert [rule.wants(step) for step in range(7)] == [4, None, None, 4, None, None, 4]
    run(rule, lambda step, stage: 0.4 if step >= 7 else 0.9, 20)
    assert rule.stopped_at == 9


def test_a_lucky_probe_does_not_stop():
    rule = StoppingRule(0.5, probe=1, confirm=2, every=1)
    decisions = run(rule, lambda step, stage: 0.4 if stage == "probe" else 0.6, 3)
    assert [d.stage for d in decisions] == ["confirm", "probe"] * 3
    assert rule.stopped_at is None
    assert "training goes on" in decisions[-1].reason


def test_equal_to_the_tolerance_passes():
    rule = StoppingRule(0.5, probe=1, confirm=1, every=1)
    assert rule.update(seen(1, "probe", 0.5)).stage == "confirm"
    assert rule.update(seen(1, "confirm", 0.5)).stop


def test_each_step_is_looked_at_once():
    rule = StoppingRule(0.5, probe=1, confirm=2, every=2)
    rule.update(seen(2, "probe", 0.9))
    assert rule.wants(2) is None
    assert rule.wants(4) == 1


def test_an_unanswered_confirmation_is_forgotten_at_the_next_step():
    rule = StoppingRule(0.5, probe=1, confirm=2, every=1)
    rule.update(seen(1, "probe", 0.1))
    assert rule.wants(2) == 1
    with pytest.raises(ValueError, match="no probe passed"):
        rule.update(seen(2, "confirm", 0.1, 0.1))


def test_full_observations_decide_at_any_step():
    rule = StoppingRule(0.5, probe=1, confirm=2, every=2)
    assert not rule.update(seen(1, "full", 0.9, 0.4)).stop
    assert rule.update(seen(1, "full", 0.5, 0.4)).stop
    assert rule.stopped_at == 1


def test_reason_and_numbers():
    decision = StoppingRule(0.475, probe=4, confirm=32).update(seen(2, "probe", 0.5, 0.7, 0.9, 0.7))
    assert decision.reason == "step 2: mean violation 0.700 > 0.475 on 4 examples (probe); training goes on"
    # deviations -.2, 0, .2, 0: variance .08/3, standard error sqrt(.08/3/4)
    assert decision.numbers["standard_error"] == pytest.approx(math.sqrt(0.08 / 12))
    assert decision.numbers["mean"] == pytest.approx(0.7)
    assert (decision.numbers["lowest"], decision.numbers["highest"]) == (0.5, 0.9)
    json.dumps(decision.numbers, allow_nan=False)


def test_one_example_has_no_standard_error():
    assert StoppingRule(0.5, probe=1).update(seen(2, "probe", 0.5)).numbers["standard_error"] is None


@pytest.mark.parametrize("values", [(), (math.nan,), (0.5, math.inf), (-0.1,), (1.1,)])
def test_what_cannot_be_averaged_is_refused(values):
    with pytest.raises(ValueError, match="violation"):
        seen(1, "probe", *values)


@pytest.mark.parametrize(
    "arguments", [(1, "probes", [0.5], ["a"]), (-1, "probe", [0.5], ["a"]), (1, "probe", [0.5], ["a", "b"])]
)
def test_malformed_observations_are_refused(arguments):
    with pytest.raises(ValueError, match="accepted is"):
        Observation(*arguments)


def test_order_is_enforced():
    rule = StoppingRule(0.5, probe=1, confirm=1, every=1)
    rule.update(seen(3, "probe", 0.9))
    with pytest.raises(ValueError, match="step"):
        rule.update(seen(2, "probe", 0.9))
    rule.update(seen(4, "full", 0.1))
    with pytest.raises(ValueError, match="stopped at 4"):
        rule.update(seen(5, "probe", 0.1))


@pytest.mark.parametrize(
    "options", [{"tolerance": 1.1}, {"tolerance": math.nan}, {"probe": 0}, {"confirm": 3}, {"every": 0}]
)
def test_bad_options_are_usage_errors(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        StoppingRule(**({"tolerance": 0.5} | options))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 12))
def test_saved_and_loaded_at_any_point_is_never_stopped(means, pause):
    def play(rule, start):
        out = []
        for step in range(start, len(means)):
            while (count := rule.wants(step)) is not None:
                stage = "confirm" if rule.pending else "probe"
                out.append(rule.update(seen(step, stage, *[means[step]] * count)))
        return out

    whole = play(StoppingRule(0.3, probe=2, confirm=3, every=2), 0)
    first = StoppingRule(0.3, probe=2, confirm=3, every=2)
    head = []
    for step in range(min(pause, len(means))):
        if (count := first.wants(step)) is not None:
            head.append(first.update(seen(step, "probe", *[means[step]] * count)))
            # paused between a probe and its confirmation, when there is one
            state = json.loads(json.dumps(first.state_dict()))
            first = StoppingRule(0.3, probe=2, confirm=3, every=2)
            first.load_state_dict(state)
            if first.pending:
                head.append(first.update(seen(step, "confirm", *[means[step]] * first.confirm)))
    assert head + play(first, min(pause, len(means))) == whole


def test_state_of_other_settings_is_refused():
    with pytest.raises(UsageError, match="settings"):
        StoppingRule(0.5).load_state_dict(StoppingRule(0.4).state_dict())


def test_sampling_error_by_hand():
    assert sampling_error(0.5, 100) == pytest.approx(0.098)
    assert sampling_error(0.2, 16, z=1.0) == pytest.approx(0.1)
    assert sampling_error(0.0, 5) == 0.0
    assert sampling_error(1.0, 5) == 0.0


@pytest.mark.parametrize("arguments", [(0.5, 0), (1.5, 10), (0.5, 10, -1.0)])
def test_sampling_error_refuses(arguments):
    with pytest.raises(ValueError, match="accepted is"):
        sampling_error(*arguments)


def test_left_over_grants_short_examples_more():
    # alpha .5: 100 tokens allow up to .598, 4 tokens up to .99
    assert left_over([0.59, 0.60, 0.60, 1.0, 0.1], [100, 100, 4, 4, 100], 0.5) == [1, 3]
    assert left_over([], [], 0.5) == []
    assert left_over([0.51], [10], 0.5, z=0.0) == [0]


def test_left_over_refuses_what_was_not_measured():
    with pytest.raises(ValueError, match="violation 1"):
        left_over([0.1, math.nan], [1, 1], 0.5)
    with pytest.raises(ValueError, match="tokens"):
        left_over([0.1], [], 0.5)
