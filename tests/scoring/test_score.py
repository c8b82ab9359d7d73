import math

import numpy as np
import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from expunge.data import Corpus, Row
from expunge.errors import UsageError
from expunge.lm import Split, split_model
from expunge.metrics import certificate, certificate_coarse, extraction_strength
from expunge.objectives import masc_hinge
from expunge.scoring import score

VOCABULARY = 64
NUMBERS = ("logprob_sum", "logprob_mean", "exact", "violation", "certificate", "certificate_coarse", "suffix_exact")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=128, **SIZES)
    return decided(LlamaForCausalLM(config), 50.0)


def cohere():
    torch.manual_seed(0)
    return decided(CohereForCausalLM(CohereConfig(vocab_size=VOCABULARY, logit_scale=0.25, **SIZES)), 200.0)


def decided(model, spread):
    """Spread the logits, so that margins lie on both sides of every threshold used here."""
    with torch.no_grad():
        model.lm_head.weight.mul_(spread)
    return model.eval()


def corpus_of(model, count=7):
    """Rows whose answers are partly what the model itself would say, so that hits and misses both occur."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (4 + 7 * index % 13,), generator=generator).tolist()
        prompt = len(ids)
        for _ in range(2 + 3 * index):
            with torch.no_grad():
                best = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            lucky = torch.rand((), generator=generator) < 0.7
            ids.append(best if lucky else int(torch.randint(VOCABULARY, (), generator=generator)))
        rows.append(Row(str(index), index, tuple(ids), tuple([-100] * prompt + ids[prompt:]), prompt))
    return Corpus(tuple(rows), (), 0)


def reference(model, row, rho, k, beta):
    """The definitions, token by token, in float64 from the model's own logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.input_ids])).logits[0].double()
    logprobs, margins, hits = [], [], []
    for position, label in enumerate(row.labels):
        if label == -100 or position == 0:
            continue
        z = logits[position - 1]
        logprobs.append(float(z[label] - z.logsumexp(0)))
        others = torch.cat([z[:label], z[label + 1 :]]).sort(descending=True).values[:k]
        margins.append(float(beta * z[label] - (beta * others).logsumexp(0)))
        hits.append(int(z.argmax()) == label)
    violation = sum(m > math.log(rho / (1 - rho)) for m in margins) / len(margins)
    return {
        "logprob_sum": sum(logprobs),
        "logprob_mean": sum(logprobs) / len(logprobs),
        "exact": sum(hits) / len(hits),
        "violation": violation,
        "certificate": certificate(margins) if beta == 1 else None,
        "certificate_coarse": certificate_coarse(violation, len(margins), rho),
        "suffix_exact": extraction_strength(hits),
    }


@pytest.mark.parametrize("build", [llama, cohere])
@pytest.mark.parametrize(("rho", "k", "beta"), [(0.7, 10, 1.0), (0.5, 3, 1.0), (0.7, 2, 5.0)])
def test_scores_equal_the_definitions(build, rho, k, beta):
    model = build()
    corpus = corpus_of(model)
    table = score(model, corpus, pad_id=0, rho=rho, k=k, beta=beta, batch_size=3)
    assert table.id == tuple(row.id for row in corpus.rows)
    for row, found in zip(corpus.rows, table.to_rows(), strict=True):
        assert found["tokens"] == sum(label != -100 for label in row.labels)
        expected = reference(model, row, rho, k, beta)
        for name in NUMBERS:
            assert found[name] == (
                None if expected[name] is None else pytest.approx(expected[name], rel=1e-5, abs=1e-5)
            )
    assert 0 < table.mean("exact") < 1
    assert 0 < table.mean("suffix_exact") < 1
    assert 0 < table.mean("violation") < 1


def test_options_reach_the_result():
    model = llama()
    corpus = corpus_of(model)
    tables = [score(model, corpus, pad_id=0, **options) for options in ({}, {"rho": 0.99}, {"k": 1}, {"beta": 0.3})]
    assert tables[1].mean("violation") < tables[0].mean("violation")
    assert tables[2].mean("certificate") > tables[0].mean("certificate")
    assert tables[3].mean("violation") < tables[0].mean("violation")


@pytest.mark.parametrize("pad_id", [0, 9])
def test_scores_do_not_depend_on_batch_size_or_padding(pad_id):
    model = llama()
    corpus = corpus_of(model)
    alone = score(model, corpus, pad_id=0, batch_size=1)
    together = score(model, corpus, pad_id=pad_id, batch_size=8)
    for name in NUMBERS:
        np.testing.assert_allclose(getattr(alone, name), getattr(together, name), rtol=1e-5, atol=1e-5)


def test_a_split_scores_like_its_model_and_the_fallback_like_the_head():
    model = llama()
    corpus = corpus_of(model)
    expected = score(model, corpus, pad_id=0)
    for split in (split_model(model), Split(model=model, head=None)):
        table = score(split, corpus, pad_id=0)
        for name in NUMBERS:
            np.testing.assert_allclose(getattr(table, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


def test_violation_is_that_of_the_objective():
    model = llama()
    corpus = corpus_of(model)
    table = score(model, corpus, pad_id=0, rho=0.6)
    margins, rows = [], []
    for index, row in enumerate(corpus.rows):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.input_ids])).logits[0]
        for position in range(row.prompt_length, len(row.input_ids)):
            z, label = logits[position - 1], row.labels[position]
            others = torch.cat([z[:label], z[label + 1 :]]).topk(10).values
            margins.append(z[label] - others.logsumexp(0))
            rows.append(index)
    result = masc_hinge(torch.stack(margins), torch.tensor(rows), len(corpus.rows), rho=0.6)
    assert table.violation.tolist() == pytest.approx(result.violation.tolist(), rel=1e-6)


def test_certificates_bound_the_log_probability():
    model = llama()
    table = score(model, corpus_of(model), pad_id=0)
    assert (table.logprob_sum <= table.certificate + 1e-6).all()
    assert (table.certificate <= table.certificate_coarse + 1e-6).all()
    sharp = score(model, corpus_of(model), pad_id=0, k=2, beta=5.0)
    assert sharp.certificate is None
    assert (sharp.logprob_sum <= sharp.certificate_coarse + 1e-6).all()


@pytest.mark.parametrize(("rho", "beta"), [(0.4, 5.0), (0.7, 0.5)])
def test_where_the_coarse_certificate_is_no_bound_it_is_missing(rho, beta):
    model = llama()
    table = score(model, corpus_of(model, 2), pad_id=0, rho=rho, beta=beta)
    assert table.certificate_coarse is None
    assert table.mean("certificate_coarse") is None


def test_rows_without_a_predicted_label_are_not_measured():
    rows = (
        Row("a", 0, (5, 6, 7), (-100, -100, -100), 3),
        Row("b", 1, (5, 6, 7), (-100, -100, 7), 2),
        Row("c", 2, (5,), (5,), 0),
    )
    table = score(llama(), Corpus(rows, (), 0), pad_id=0)
    assert table.tokens.tolist() == [0, 1, 0]
    found = table.to_rows()
    assert all(found[0][name] is None and found[2][name] is None for name in NUMBERS)
    assert all(found[1][name] is not None for name in NUMBERS)
    assert table.mean("exact") == found[1]["exact"]


def test_an_empty_corpus_gives_an_empty_table():
    table = score(llama(), Corpus((), (), 0), pad_id=0)
    assert len(table) == 0
    assert table.mean("exact") is None
    assert len(table.by_record()) == 0


def test_dropout_is_off_and_modes_are_restored():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, embd_pdrop=0.5)
    model = GPT2LMHeadModel(config).train()
    model.transformer.h[0].eval()
    flags = [module.training for module in model.modules()]
    corpus = corpus_of(llama())
    first, second = (score(model, corpus, pad_id=0) for _ in range(2))
    assert first.to_rows() == second.to_rows()
    assert [module.training for module in model.modules()] == flags
    with pytest.raises(IndexError):
        score(model, Corpus((Row("a", 0, (5, VOCABULARY), (-100, 6), 1),), (), 0), pad_id=0)
    assert [module.training for module in model.modules()] == flags
    assert torch.is_grad_enabled()


def test_bfloat16_sums_run_in_double():
    model = llama().bfloat16()
    ids = tuple([3] * 100)
    table = score(model, Corpus((Row("a", 0, ids, (-100, *ids[1:]), 1),), (), 0), pad_id=0)
    assert table.logprob_sum.dtype == np.float64
    assert table.logprob_sum[0] == pytest.approx(99 * table.logprob_mean[0], rel=1e-12)


def test_progress():
    seen = []
    model = llama()
    score(model, corpus_of(model), pad_id=0, batch_size=3, progress=lambda *at: seen.append(at))
    assert seen == [(3, 7), (6, 7), (7, 7)]


@pytest.mark.parametrize("options", [{"rho": 1.0}, {"k": 0}, {"beta": 0.0}, {"batch_size": 0}, {"k": VOCABULARY}])
def test_bad_options_are_usage_errors(options):
    model = llama()
    with pytest.raises(UsageError, match=next(iter(options))):
        score(model, corpus_of(model, 1), pad_id=0, **options)
