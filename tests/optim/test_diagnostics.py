"""What the states say about the gradients."""

import pytest
import torch
from tests.optim.common import STORAGES, make, run

from expunge.optim import BaseDelta, DualOptimPlus


def test_diagnostics_follow_the_gradients():
    generator = torch.Generator().manual_seed(0)
    for angle_sign in (1.0, -1.0):
        weight = torch.nn.Parameter(torch.zeros(50, 4))
        optimizer = DualOptimPlus([weight], lr=1e-3)
        direction = torch.randn(50, 4, generator=generator)
        for step in range(200):
            weight.grad = direction * (1.0 if step % 2 == 0 else angle_sign)
            optimizer.step(objective=("forget", "retain")[step % 2])
        found = optimizer.diagnostics()
        assert found.cosine["forget", "retain"] == pytest.approx(angle_sign, abs=1e-3)
        if angle_sign > 0:
            assert found.base["forget"] == pytest.approx(1.0, abs=1e-3)
            assert found.delta["forget"] < 1e-3
        else:
            assert found.base["forget"] < 0.06
            assert found.delta["forget"] > 0.94


@pytest.mark.parametrize("storage", list(STORAGES))
def test_diagnostics_are_the_states(storage):
    optimizer, params = make(storage=storage)
    run(optimizer, params, 7)
    exact, exact_params = make()
    run(exact, exact_params, 7)
    found, truth = optimizer.diagnostics(), exact.diagnostics()
    state = [exact.state[param] for param in exact_params]
    hat = [s["exp_avg"] / (1 - 0.9**7) for s in state]
    mean = {
        name: torch.cat(
            [(b + s[f"exp_avg/{name}"] / (1 - 0.9**count)).flatten() for b, s in zip(hat, state, strict=True)]
        )
        for name, count in (("forget", 3), ("retain", 4))
    }
    expected = torch.cosine_similarity(mean["forget"], mean["retain"], dim=0).item()
    assert truth.cosine["forget", "retain"] == pytest.approx(expected, abs=1e-6)
    base = torch.cat([b.flatten() for b in hat]).norm()
    assert truth.base["retain"] == pytest.approx((base / mean["retain"].norm()).item(), rel=1e-5)
    assert found.cosine["forget", "retain"] == pytest.approx(expected, abs=0.1 if storage == "4bit" else 0.01)


def test_diagnostics_are_none_where_they_are_not_defined():
    shared, params = make(scheme="shared")
    run(shared, params, 4)
    assert shared.diagnostics().objectives == ()
    decoupled, params = make(scheme="decoupled")
    run(decoupled, params, 4)
    found = decoupled.diagnostics()
    assert found.cosine["forget", "retain"] is not None
    assert found.base == {"forget": None, "retain": None}
    second, params = make(scheme=BaseDelta(split="second"))
    run(second, params, 4)
    assert second.diagnostics().cosine == {("forget", "retain"): None}
    rms, params = make(rule="rmsprop")
    run(rms, params, 4)
    assert rms.diagnostics().cosine == {("forget", "retain"): None}
    zero, params = make()
    for objective in ("a", "b"):
        for param in params:
            param.grad = torch.zeros_like(param)
        zero.step(objective=objective)
    found = zero.diagnostics()
    assert found.cosine["a", "b"] is None
    assert found.delta == {"a": None, "b": None}
