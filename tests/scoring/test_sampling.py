import pytest
import torch
from tests.scoring.test_generate import Letters, llama, prompts

from expunge.errors import UsageError
from expunge.scoring import Sampling, generate
from expunge.scoring._generate import _Choice


def sample(seed=0, temperature=1.0, batch_size=32, given=None):
    options = {"pad_id": 0, "max_new_tokens": 8, "batch_size": batch_size}
    sampling = Sampling(temperature=temperature, seed=seed)
    return [g.tokens for g in generate(llama(), Letters(), given or prompts(5), sampling=sampling, **options)]


def test_samples_depend_on_the_seed_and_not_on_the_batch():
    assert sample() == sample(batch_size=2)
    assert sample(seed=1) != sample()


def test_one_prompt_many_times_gives_many_samples():
    found = sample(given=[prompts(1)[0]] * 6)
    assert len(set(found)) > 1


def test_a_low_temperature_is_greedy():
    greedy = [g.tokens for g in generate(llama(), Letters(), prompts(5), pad_id=0, max_new_tokens=8)]
    assert sample(temperature=1e-4) == greedy
    assert sample(temperature=20.0) != greedy


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, float("-inf")]])
    draws = Sampling(seed=5).draws(0, 4000)[:, None]
    chosen = _Choice(draws, 2.0)(logits.expand(4000, 4), range(4000), 0)
    shares = torch.bincount(chosen, minlength=4) / 4000
    torch.testing.assert_close(shares, torch.softmax(logits[0] / 2.0, 0), atol=0.03, rtol=0)
    assert shares[3] == 0


def test_only_the_nucleus_is_drawn_from():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    draws = Sampling(seed=5).draws(0, 4000)[:, None]

    def shares(top_p):
        chosen = _Choice(draws, 1.0, top_p)(logits.expand(4000, 4), range(4000), 0)
        return torch.bincount(chosen, minlength=4) / 4000

    torch.testing.assert_close(shares(0.75), torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)
    assert shares(0.81)[2] > 0
    assert shares(0.81)[3] == 0
    assert shares(1e-6)[0] == 1.0


@pytest.mark.parametrize("top_p", [0.0, 1.5, float("nan")])
def test_bad_nucleus(top_p):
    with pytest.raises(UsageError, match="top_p: found"):
        Sampling(top_p=top_p)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_temperatures(temperature):
    with pytest.raises(UsageError, match="temperature: found"):
        Sampling(temperature=temperature)
