import pytest
import torch

from expunge.errors import UsageError
from expunge.objectives import task_vector


def test_by_hand():
    base, tuned = (
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)},
        {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor(1.0)},
    )
    found = task_vector(base, tuned, 0.5)
    assert found["a"].tolist() == [0.5, 2.0]
    assert found["b"].item() == 4.0
    assert list(found) == ["a", "b"]


def test_scale_zero_is_the_base_and_a_copy():
    base = {"w": torch.randn(3), "h": torch.randn(3).bfloat16(), "steps": torch.tensor(7)}
    found = task_vector(base, {name: value + 1 for name, value in base.items()}, 0.0)
    for name, value in base.items():
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype
        assert found[name].data_ptr() != value.data_ptr()


def test_inputs_stay_as_they_are_and_carry_no_gradient():
    base, tuned = {"w": torch.ones(2, requires_grad=True)}, {"w": torch.full((2,), 3.0, requires_grad=True)}
    found = task_vector(base, tuned, 1.0)["w"]
    assert found.tolist() == [-1.0, -1.0]
    assert not found.requires_grad
    assert base["w"].tolist() == [1.0, 1.0]


def test_half_precision_is_rounded_once():
    # 1 − 3·(1.0078125 − 1): bfloat16 arithmetic would round 3·0.0078125 and the difference apart
    generator = torch.Generator().manual_seed(0)
    base, tuned = torch.randn(500, generator=generator).bfloat16(), torch.randn(500, generator=generator).bfloat16()
    found = task_vector({"w": base}, {"w": tuned}, 0.37)["w"]
    exact = (base.double() - 0.37 * (tuned.double() - base.double())).bfloat16()
    assert found.dtype == torch.bfloat16
    assert (found == exact).float().mean() > 0.99  # float32 sums may lie on the other side of a rounding boundary
    naive = base - 0.37 * (tuned - base)
    assert not torch.equal(naive, exact)


def test_counters_come_from_the_base():
    found = task_vector({"steps": torch.tensor([5])}, {"steps": torch.tensor([9])}, 1.0)
    assert found["steps"].tolist() == [5]


@pytest.mark.parametrize(
    ("tuned", "message"),
    [
        ({}, "w: found no such tensor in tuned"),
        ({"w": torch.zeros(2), "v": torch.zeros(2)}, "v: found no such tensor in base"),
        ({"w": torch.zeros(3)}, r"w: found shape \(3,\) in tuned, accepted is \(2,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tuned, message):
    with pytest.raises(ValueError, match=message):
        task_vector({"w": torch.zeros(2)}, tuned, 1.0)


@pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf"), True])
def test_bad_scales_are_usage_errors(scale):
    with pytest.raises(UsageError, match=r"^scale: found"):
        task_vector({}, {}, scale)
