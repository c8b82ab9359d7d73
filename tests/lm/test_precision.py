"""Master weights keep what bfloat16 rounds away."""

import pytest
import torch
from torch import nn

from expunge.lm import MasterWeights


def _parameter(*values, dtype=torch.bfloat16):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def test_small_updates_add_up():
    weight = _parameter(1.0)
    master = MasterWeights([weight])
    optimizer = torch.optim.SGD(master.masters, lr=1.0)
    for _ in range(1000):
        weight.grad = torch.full_like(weight, 1e-5)
        master.grads_to_masters()
        optimizer.step()
        master.to_model()
        master.zero_grad()
    assert master.masters[0].item() == pytest.approx(0.990, abs=1e-4)
    assert weight.item() == torch.tensor(master.masters[0].item()).bfloat16().item() != 1.0


def test_without_masters_the_updates_are_lost():
    weight = _parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(1000):
        weight.grad = torch.full_like(weight, 1e-5)
        optimizer.step()
    assert weight.item() == 1.0


def test_gradients_accumulate_in_float32():
    weight = _parameter(1.0)
    master = MasterWeights([weight])
    for value in (1.0, 2**-10, 2**-10):  # bfloat16 would keep 1.0
        weight.grad = torch.full_like(weight, value)
        master.grads_to_masters()
        assert weight.grad is None
    assert master.masters[0].grad.item() == 1.0 + 2**-9
    assert master.masters[0].grad.dtype == torch.float32


def test_no_gradient_stays_none_and_does_not_erase_one():
    first, second = _parameter(1.0), _parameter(2.0)
    master = MasterWeights([first, second])
    first.grad = torch.ones_like(first)
    master.grads_to_masters()
    master.grads_to_masters()
    assert master.masters[0].grad.item() == 1.0
    assert master.masters[1].grad is None
    master.zero_grad()
    assert master.masters[0].grad is None


def test_float32_parameters_are_their_own_master():
    low, high = _parameter(1.0), _parameter(1.0, dtype=torch.float32)
    frozen = _parameter(1.0).requires_grad_(False)
    master = MasterWeights([high, frozen, low])
    assert master.masters[0] is high
    assert len(master.masters) == 2
    high.grad = torch.ones_like(high)
    master.grads_to_masters()
    assert high.grad.item() == 1.0


def test_state_is_exact_and_needs_no_copy():
    low, high = _parameter(1.0, 2.0), _parameter(1.0, dtype=torch.float32)
    master = MasterWeights([low, high])
    with torch.no_grad():
        master.masters[0].copy_(torch.tensor([1.0001, 2.0003]))
        high.fill_(3.0)
    state = master.state_dict()
    assert [tensor.data_ptr() for tensor in state["masters"]] == [each.data_ptr() for each in master.masters]
    other = MasterWeights([_parameter(0.0, 0.0), _parameter(0.0, dtype=torch.float32)])
    other.load_state_dict(state)
    assert torch.equal(other.masters[0], master.masters[0])
    assert torch.equal(other.params[0], master.masters[0].bfloat16())
    assert other.params[1].item() == 3.0
    with torch.no_grad():
        other.masters[0].zero_()
    assert master.masters[0][0].item() != 0.0


@pytest.mark.parametrize("other", [[(1.0,)], [(1.0, 2.0), (1.0,)], []])
def test_foreign_state_is_refused(other):
    state = MasterWeights([_parameter(1.0, 2.0)]).state_dict()
    with pytest.raises(ValueError, match="master"):
        MasterWeights([_parameter(*values) for values in other]).load_state_dict(state)


def test_a_master_of_another_type_is_refused():
    state = MasterWeights([_parameter(1.0, dtype=torch.float64)]).state_dict()
    with pytest.raises(ValueError, match=r"master 0: .*float64"):
        MasterWeights([_parameter(1.0, dtype=torch.float32)]).load_state_dict(state)


def test_a_parameter_given_twice_is_refused():
    weight = _parameter(1.0)
    with pytest.raises(ValueError, match="twice"):
        MasterWeights([weight, weight])
