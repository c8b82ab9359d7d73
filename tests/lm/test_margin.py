"""The margin, its search and the teacher-anchored sets."""

import math

import pytest
import torch
from tests.lm._plain import plain, random_case

from expunge.errors import UsageError
from expunge.lm import Head, Margin, competitor_ids, token_stats, token_stats_from_logits
from expunge.lm._margin import largest

HEADS = [{}, {"softcap": 2.0, "scale": 0.7}]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("beta", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("k", [1, 3, 39])
def test_margin_value(k, beta, head):
    hidden, weight, bias, targets = random_case()
    module = Head(weight, bias, **head)
    found = token_stats(hidden, module, targets, margin=Margin(k, beta)).margin
    torch.testing.assert_close(found, plain(module.logits(hidden), targets, k, beta)["margin"])


def test_k_and_beta_reach_the_margin():
    hidden, weight, bias, targets = random_case()
    values = [
        token_stats(hidden, Head(weight, bias), targets, margin=Margin(k, beta)).margin.tolist()
        for k, beta in [(1, 1.0), (3, 1.0), (3, 2.0)]
    ]
    assert values[0] != values[1] != values[2] != values[0]


def test_margin_by_hand():
    # z = (0, ln 2, ln 3, 0); y = 2; the 2 largest others: ln 2 and 0 → ln 3 − ln(2 + 1) = 0.
    head = Head(torch.tensor([[0.0], [math.log(2)], [math.log(3)], [0.0]]))
    stats = token_stats(torch.ones(1, 1), head, torch.tensor([2]), margin=Margin(2), logprob=True, hit=True, rank=True)
    torch.testing.assert_close(stats.margin, torch.zeros(1))
    torch.testing.assert_close(stats.logprob, torch.tensor([math.log(3 / 7)]))
    assert (stats.hit.item(), stats.rank.item()) == (1.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "k"), [(40, 40), (1000, 3), (1024, 1), (4133, 10), (4133, 17)])
def test_two_stage_search_is_exact(vocabulary, k, dtype):
    # bfloat16 with few distinct values: many ties, also across blocks.
    scores = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(k)).to(dtype)
    scores[0] = -torch.inf
    scores[1, -20:] += 9  # the winners sit in the tail that is not part of a block
    ids = largest(scores, k)
    assert all(len(set(row)) == k for row in ids.tolist())
    found = scores.gather(1, ids).sort(1, descending=True).values
    assert torch.equal(found, scores.topk(k, 1).values)


def test_competitors_replace_the_search_and_leave_the_target_out():
    hidden, weight, bias, targets = random_case(n=2)
    targets = torch.tensor([4, 9])
    head = Head(weight, bias)
    sets = torch.tensor([[1, 4, 7], [2, -1, -1]])
    found = token_stats(hidden, head, targets, margin=Margin(beta=2.0, competitors=sets)).margin
    z = head.logits(hidden)
    expected = [
        2 * z[0, 4] - torch.logsumexp(2 * z[0, [1, 7]], 0),
        2 * z[1, 9] - 2 * z[1, 2],
    ]
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(
        token_stats_from_logits(z, targets, margin=Margin(beta=2.0, competitors=sets)).margin, found
    )


def test_empty_competitor_sets_are_refused():
    hidden, weight, _, _ = random_case(n=2)
    sets = torch.tensor([[1, 2], [5, -1]])
    with pytest.raises(UsageError, match="row 1 names no token other than its target"):
        token_stats(hidden, Head(weight), torch.tensor([3, 5]), margin=Margin(competitors=sets))
    with pytest.raises(UsageError, match=r"shape \(2, K\), found \(1, 2\)"):
        token_stats(hidden, Head(weight), torch.tensor([3, 5]), margin=Margin(competitors=sets[:1]))


@pytest.mark.parametrize(("k", "delta"), [(3, None), (2, 0.5), (3, 0.0), (None, 1.5), (39, 100.0)])
def test_competitor_ids(k, delta):
    hidden, weight, bias, targets = random_case(n=8)
    head = Head(weight, bias, softcap=5.0)
    found = competitor_ids(hidden, head, targets, k=k, delta=delta)
    z = head.logits(hidden)
    for n, y in enumerate(targets.tolist()):
        order = [v for v in z[n].argsort(descending=True).tolist() if v != y][: k or 40]
        expected = [v for v in order if delta is None or z[n, v] >= z[n, order[0]] - delta]
        assert [v for v in found[n].tolist() if v >= 0] == expected
    assert found.shape[1] == k or (k is None and (found >= 0).sum(1).max() == found.shape[1])
    token_stats(hidden, head, targets, margin=Margin(competitors=found))


def test_top_k_sets_give_the_searched_margin():
    hidden, weight, bias, targets = random_case()
    head = Head(weight, bias)
    sets = competitor_ids(hidden, head, targets, k=4, delta=None)
    torch.testing.assert_close(
        token_stats(hidden, head, targets, margin=Margin(competitors=sets)).margin,
        token_stats(hidden, head, targets, margin=Margin(4)).margin,
    )


def test_certificate_bounds_the_logprob():
    for seed in range(5):
        hidden, weight, bias, targets = random_case(seed, n=20)
        for k in (1, 5, 39):
            stats = token_stats(hidden, Head(weight, bias), targets, margin=Margin(k), logprob=True)
            bound = torch.nn.functional.logsigmoid(stats.margin)
            assert (bound >= stats.logprob - 1e-12).all()
        torch.testing.assert_close(bound, stats.logprob)  # S = all others: equality


def test_wrong_settings():
    hidden, weight, _, targets = random_case()
    with pytest.raises(UsageError, match="margin k must be at least 1, found 0"):
        Margin(0)
    with pytest.raises(UsageError, match="margin beta must be positive, found 0"):
        Margin(beta=0)
    with pytest.raises(UsageError, match="needs k, delta or both"):
        competitor_ids(hidden, Head(weight), targets, k=None, delta=None)
    with pytest.raises(UsageError, match="delta must be at least 0, found -1"):
        competitor_ids(hidden, Head(weight), targets, k=2, delta=-1)
    with pytest.raises(UsageError, match="k must be below the vocabulary size 40, found 40"):
        competitor_ids(hidden, Head(weight), targets, k=40, delta=None)
