"""Rules are PyTorch's optimizers where PyTorch has them, and give the exact values of the pitfalls."""

import pytest
import torch

from expunge.optim import SGD, Adam, AdamW, Alternate, DualOptim, DualOptimPlus, Muon, ObjectiveOptimizer, RMSprop

TORCH = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, weight_decay=0.1),
    "plain": lambda params: torch.optim.SGD(params, lr=0.01),
}


AS_TORCH = {
    "adamw": AdamW(),
    "adam": Adam(),
    "sgd": SGD(l2=True),
    "nesterov": SGD(nesterov=True, l2=True),
    "rmsprop": RMSprop(l2=True),
    "plain": SGD(momentum=0.0),
}


@pytest.mark.parametrize("rule", sorted(TORCH))
def test_shared_is_pytorchs_optimizer(rule):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.randn(9, 7)), torch.nn.Parameter(torch.empty(9, 7))
    theirs.data.copy_(ours.data)
    decay = 0.0 if rule == "plain" else 0.1
    left = ObjectiveOptimizer([ours], lr=0.01, scheme="shared", rule=AS_TORCH[rule], weight_decay=decay)
    right = TORCH[rule]([theirs])
    for step in range(20):
        ours.grad = torch.randn(9, 7)
        theirs.grad = ours.grad.clone()
        left.step(objective=("a", "b")[step % 2])
        right.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_pytorchs_optimizer(adjust):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.randn(9, 7)), torch.nn.Parameter(torch.empty(9, 7))
    theirs.data.copy_(ours.data)
    left = ObjectiveOptimizer([ours], lr=0.02, scheme="shared", rule=Muon(adjust=adjust), weight_decay=0.1)
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    right = torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn=adjust)
    for _ in range(5):
        ours.grad = torch.randn(9, 7)
        theirs.grad = ours.grad.clone()
        left.step()
        right.step()
        # Both iterate in bfloat16; the inputs' float32 rounding may differ.
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-3)


def test_muon_leaves_embeddings_heads_and_vectors_to_its_companion():
    muon = Muon()
    assert muon.select("model.layers.0.q_proj.weight", (8, 8)) is muon
    for name, shape in (("model.embed_tokens.weight", (8, 8)), ("lm_head.weight", (8, 8)), ("norm.weight", (8,))):
        assert muon.select(name, shape) is muon.other
    assert muon.select(None, (49152, 576)) is muon.other
    assert muon.select(None, (1536, 576)) is muon


def test_exact_values_of_the_pitfalls():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = DualOptim([weight], lr=0.1)
    for objective, grad in (("forget", 1.0), ("retain", -1.0)):
        weight.grad = torch.tensor([grad])
        optimizer.step(objective=objective)
    state = optimizer.state[weight]
    assert state["exp_avg/forget"].item() == pytest.approx(0.1)
    assert state["exp_avg/retain"].item() == pytest.approx(-0.1)

    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Alternate([weight], lr=0.1, rule=SGD(momentum=0.0))
    seen = []
    for objective, grad in (("forget", 1.0), ("retain", 2.0)):
        weight.grad = torch.tensor([grad])
        optimizer.step(objective=objective)
        seen.append(weight.item())
    assert seen == pytest.approx([-0.1, -0.3])

    for constructor in (Alternate, DualOptim, DualOptimPlus):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = constructor([weight], lr=0.1, weight_decay=0.1)
        weight.grad = torch.zeros(1)
        optimizer.step(objective="forget")
        assert weight.item() == pytest.approx(0.99)


def test_low_precision_weights_are_updated_in_float32_and_rounded_once():
    def drift(rounding):
        weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = ObjectiveOptimizer(
            [weight], lr=1e-5, scheme="shared", rule=SGD(momentum=0.0), param_rounding=rounding
        )
        weight.grad = torch.ones_like(weight)
        for _ in range(1000):
            optimizer.step()
        return weight.float().mean().item()

    # pitfalls 6: 1000 steps of −1e-5 from 1.0. Rounding to the nearest loses them all; stochastic keeps the mean.
    assert drift("nearest") == 1.0
    assert drift("stochastic") == pytest.approx(0.990, abs=5e-4)
