"""The KL with the target taken out of both distributions (the anchor term)."""

import pytest
import torch

from expunge.errors import UsageError
from expunge.lm import Head, Reference, token_stats


def _setup(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    weight = torch.randn(30, 8, dtype=torch.float64, generator=generator)
    reference = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    return hidden, weight, reference, torch.randint(30, (5,), generator=generator)


def _plain(logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """By definition, row by row, over the other V - 1 ids."""
    values = []
    for z, z0, y in zip(logits, reference, targets.tolist(), strict=True):
        others = [v for v in range(len(z)) if v != y]
        q, p = torch.softmax(z0[others], 0), torch.softmax(z[others], 0)
        values.append((q * (q / p).log()).sum())
    return torch.stack(values)


def test_value_and_gradient_equal_the_definition():
    hidden, weight, reference, targets = _setup()
    hidden.requires_grad_()
    weight.requires_grad_()
    found = token_stats(hidden, Head(weight), targets, kl=Reference(reference, Head(weight.detach()), True)).kl
    plain = _plain(hidden @ weight.T, reference @ weight.detach().T, targets)
    torch.testing.assert_close(found, plain)
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), (hidden, weight)),
        torch.autograd.grad(plain.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradcheck():
    hidden, weight, reference, targets = _setup(1)
    head = Head(weight)
    assert torch.autograd.gradcheck(
        lambda h: token_stats(h, head, targets, kl=Reference(reference, head, True), chunk=2).kl,
        (hidden.requires_grad_(),),
    )


def test_says_nothing_of_the_target():
    """Only the target's logit differs: the full KL is large, the one without it is zero."""
    hidden, weight, _, targets = _setup(2)
    bias = torch.zeros(30, dtype=torch.float64)
    row, target = hidden[:1], targets[:1]
    lifted = bias.clone()
    lifted[target] += 9.0
    found = [
        token_stats(row, Head(weight, lifted), target, kl=Reference(row, Head(weight, bias), without)).kl.item()
        for without in (True, False)
    ]
    assert found[0] == pytest.approx(0.0, abs=1e-12)
    assert found[1] > 0.1


def test_other_statistics_of_the_distribution_need_their_own_call():
    hidden, weight, reference, targets = _setup()
    with pytest.raises(UsageError, match="without_target"):
        token_stats(hidden, Head(weight), targets, kl=Reference(reference, Head(weight), True), logprob=True)
