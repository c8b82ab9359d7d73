import math

import numpy as np
import pytest
import torch
from tests.scoring.test_score import corpus_of, llama

from expunge.errors import UsageError
from expunge.scoring import TokenTable, score_rows

NUMBERS = ("logprob", "margin", "entropy", "rank", "hit", "normalised")


@pytest.fixture(scope="module")
def scored():
    from expunge.scoring import ScoreSettings

    model = llama()
    corpus = corpus_of(model)
    return model, corpus, score_rows(model, corpus, pad_id=0, settings=ScoreSettings(batch_size=3, tokens=True))


def test_every_token_equals_its_definition(scored):
    model, corpus, found = scored
    for index, row in enumerate(corpus.rows):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.input_ids])).logits[0].double()
        places = [place for place, label in enumerate(row.labels) if label != -100 and place > 0]
        logp = torch.log_softmax(logits[[place - 1 for place in places]], dim=-1).numpy()
        target = [row.labels[place] for place in places]
        own = logp[np.arange(len(target)), target]
        mean = (np.exp(logp) * logp).sum(1)
        variance = (np.exp(logp) * (logp - mean[:, None]) ** 2).sum(1)
        expected = {
            "logprob": own,
            "entropy": -mean,
            "rank": (logp > own[:, None]).sum(1),
            "hit": (logp.argmax(1) == target).astype(float),
            "normalised": (own - mean) / np.sqrt(np.maximum(variance, 1e-6)),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(found.tokens.rows(name)[index], values, rtol=1e-3, atol=1e-4)


def test_rows_are_sums_of_their_tokens(scored):
    _, _, found = scored
    for index, tokens in enumerate(found.tokens.rows("logprob")):
        assert found.rows.logprob_sum[index] == pytest.approx(tokens.sum())
        lowest = np.sort(tokens)[: max(1, int(0.4 * len(tokens) + 1e-9))]
        assert found.rows.min_k[index] == pytest.approx(lowest.mean())
    for index, hits in enumerate(found.tokens.rows("hit")):
        assert found.rows.exact[index] == pytest.approx(hits.mean())


def test_parquet_keeps_every_number(scored, tmp_path):
    _, _, found = scored
    path = tmp_path / "tokens.parquet"
    found.tokens.to_parquet(path)
    again = TokenTable.from_parquet(path)
    assert again.id == found.tokens.id
    for name in NUMBERS:
        np.testing.assert_array_equal(getattr(again, name), getattr(found.tokens, name))
    (tmp_path / "other.parquet").write_text("no")
    for bad in ("other.parquet", "missing.parquet"):
        with pytest.raises(UsageError, match="no table of tokens"):
            TokenTable.from_parquet(tmp_path / bad)


def small(records):
    count = len(records)
    offsets = np.arange(count + 1) * 2
    return TokenTable(
        tuple(map(str, range(count))), np.array(records), offsets, *(np.arange(2.0 * count) for _ in NUMBERS)
    )


def test_windows_are_joined_in_order():
    joined = small([7, 3, 7]).by_record()
    assert joined.id == ("0", "1")
    assert joined.record.tolist() == [7, 3]
    assert [row.tolist() for row in joined.rows("logprob")] == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0]]


def test_take_and_bad_names():
    table = small([0, 1, 2])
    assert [row.tolist() for row in table.take([2, 0]).rows("hit")] == [[4.0, 5.0], [0.0, 1.0]]
    with pytest.raises(UsageError, match="'loss'"):
        table.rows("loss")
    with pytest.raises(ValueError, match="offsets"):
        TokenTable(("a",), np.zeros(1), np.array([0]), *(np.zeros(0) for _ in NUMBERS))
    assert len(table) == 3
    assert not any(math.isnan(value) for value in table.logprob)
