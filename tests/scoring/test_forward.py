"""Rows that share a prompt are run after it; the result is that of each row alone."""

import numpy as np
import pytest
import torch
from tests.lm._tiny import ARCHITECTURES, tiny_model

from expunge.data import Corpus, Row
from expunge.lm import Split, split_model
from expunge.scoring import ScoreSettings, score_rows
from expunge.scoring import _forward as forward

NUMBERS = ("logprob_sum", "exact", "violation", "certificate", "suffix_exact", "min_k")


def rows():
    """Three prompts with 4, 3 and 1 answers, and one row without a prompt to share."""
    generator = torch.Generator().manual_seed(1)

    def draw(count):
        return tuple(torch.randint(3, 96, (count,), generator=generator).tolist())

    found = []
    for length, answers in ((9, 4), (4, 3), (6, 1), (1, 2)):
        prompt = draw(length)
        for _ in range(answers):
            answer = draw(2 + len(found))
            found.append(Row(str(len(found)), len(found), (*prompt, *answer), (*[-100] * length, *answer), length))
    return Corpus(tuple(found), (), 0)


@pytest.fixture
def runs(monkeypatch):
    """Sizes of the batches that shared a prompt."""
    seen = []
    plain = forward.SharedPrompts.run

    def run(self, every, batch):
        seen.append(len(batch))
        return plain(self, every, batch)

    monkeypatch.setattr(forward.SharedPrompts, "run", run)
    return seen


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_shared_prompts_change_nothing(name, runs):
    model, corpus = tiny_model(name), rows()
    alone = [score_rows(model, Corpus((row,), (), 0), pad_id=0).rows for row in corpus.rows]
    assert runs == []
    together = score_rows(model, corpus, pad_id=0, settings=ScoreSettings(batch_size=3)).rows
    for column in NUMBERS:
        expected = np.concatenate([getattr(one, column) for one in alone])
        np.testing.assert_allclose(getattr(together, column), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_the_usual_families_do_share(name, runs):
    score_rows(tiny_model(name), rows(), pad_id=0, settings=ScoreSettings(batch_size=3))
    assert sum(runs[1:]) == 7  # the first is the probe


def test_a_model_without_a_recognised_head_runs_rows_whole(runs):
    model, corpus = tiny_model("llama"), rows()
    expected = score_rows(split_model(model), corpus, pad_id=0).rows
    del runs[:]
    found = score_rows(Split(model=model, head=None), corpus, pad_id=0).rows
    assert runs == []
    np.testing.assert_allclose(found.logprob_sum, expected.logprob_sum, rtol=1e-4, atol=1e-4)


def test_a_cache_that_cannot_be_used_is_noticed(monkeypatch, runs):
    model, corpus = tiny_model("llama"), rows()
    expected = score_rows(model, corpus, pad_id=0).rows
    plain = forward.SharedPrompts._body

    def broken(self, ids, mask, positions, cache):
        return plain(self, ids, mask, torch.zeros_like(positions), cache)

    monkeypatch.setattr(forward.SharedPrompts, "_body", broken)
    del runs[:]
    found = score_rows(model, corpus, pad_id=0).rows
    assert len(runs) == 1  # the probe, which disagreed
    np.testing.assert_allclose(found.logprob_sum, expected.logprob_sum, rtol=1e-5, atol=1e-5)
