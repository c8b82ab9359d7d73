"""Suites on a tiny model: published formulas recomputed from the stored tables, results kept by their key."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import hmean, ks_2samp
from tests.suites._data import write_muse, write_tofu
from tests.train import _runs

from expunge.data import Corpus
from expunge.errors import UsageError
from expunge.lm import load_model
from expunge.suites import EvaluateSettings, MeasureSettings, _measure, evaluate
from expunge.suites import _evaluate as module
from expunge.suites._encode import end_of

SETTINGS = EvaluateSettings(
    measure=MeasureSettings(batch_size=4), rows={"forget": "0:4", "holdout": "4:8"}, resamples=50, device="cpu"
)


@pytest.fixture(scope="module")
def tofu(tmp_path_factory):
    return write_tofu(tmp_path_factory.mktemp("tofu"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model that knows a little less."""
    return _runs.make_model(tmp_path_factory.mktemp("models") / "other", steps=24)


@pytest.fixture(scope="module")
def results(tofu, knowing, other, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "out"
    return out, evaluate(knowing, "tofu", tofu, retrained=other, out=out, settings=SETTINGS)


def stored(out, name):
    return pq.read_table(out / "scores" / f"{name}.parquet").to_pydict()


def ratios(out, part):
    """Truth ratios as published: exp of the mean loss difference, from the stored tables alone."""
    right = stored(out, f"{part}.paraphrased" if part in ("forget", "retain") else part)
    wrong = stored(out, f"{part}.perturbed")
    found = []
    for identity, logprob in zip(right["id"], right["logprob_mean"], strict=True):
        pairs = zip(wrong["id"], wrong["logprob_mean"], strict=True)
        losses = [-value for one, value in pairs if one.split("/")[0] == identity]
        found.append(math.exp(-np.mean(losses) - logprob))
    return np.array(found)


def test_published_formulas_recomputed_from_stored_rows(results):
    out, found = results
    parts = []
    for part in ("retain", "real_authors", "world_facts"):
        logprob = np.array(stored(out, part)["logprob_mean"])
        probability = np.exp(logprob)
        if part != "retain":
            wrong = stored(out, f"{part}.perturbed")
            sums = np.zeros(len(probability))
            for identity, value in zip(wrong["id"], wrong["logprob_mean"], strict=True):
                sums[int(identity.split("/")[0])] += math.exp(value)
            probability = probability / (probability + sums)
        rouge = np.mean(stored(out, f"{part}.answers")["rouge_l"])
        truth = np.maximum(0, 1 - ratios(out, part)).mean()
        for name, value in (("probability", probability.mean()), ("rouge_l", rouge), ("truth_ratio", truth)):
            assert found.metric(f"{part}_{name}").value == pytest.approx(value, rel=1e-9)
            parts.append(value)
    assert found.metric("model_utility").value == pytest.approx(hmean(parts))
    forget = ratios(out, "forget")
    assert found.metric("forget_truth_ratio").value == pytest.approx(np.minimum(forget, 1 / forget).mean())
    test = ks_2samp(forget, ratios(out / "retrained", "forget"))
    assert found.metric("forget_quality").value == pytest.approx(test.pvalue)
    assert found.metric("forget_quality_ks").value == pytest.approx(test.statistic)


def test_attacks_recomputed_from_stored_tokens(results):
    out, found = results
    scores = {}
    for part in ("forget", "holdout"):
        lists = pq.read_table(out / "scores" / f"{part}.tokens.parquet").to_pydict()
        for column, name in (("logprob", "min_k"), ("normalised", "min_k_plus")):
            lowest = [np.sort(row)[: max(1, int(0.4 * len(row) + 1e-9))].mean() for row in lists[column]]
            scores[part, name] = np.array(lowest)
        table = stored(out, part)
        scores[part, "loss"] = np.array(table["logprob_mean"])
        scores[part, "zlib"] = scores[part, "loss"] / np.array(table["zlib"])
    for name in ("loss", "zlib", "min_k", "min_k_plus"):
        members, others = scores["forget", name][:, None], scores["holdout", name][None]
        expected = ((members > others) + 0.5 * (members == others)).mean()
        assert found.metric(f"mia_{name}").value == pytest.approx(expected)


def test_what_is_written(results, knowing):
    out, found = results
    values = json.loads((out / "evaluation.json").read_text())
    assert values["stamp"]["fingerprint"] == load_model(knowing, device="cpu").fingerprint
    assert values["stamp"]["dtype"] == "float32"
    assert values["stamp"]["settings"]["batch_size"] == 4
    assert {"expunge", "torch", "scipy"} <= set(values["stamp"]["versions"])
    assert set(values["stamp"]["data"]) >= {"forget", "forget.answers?"}
    named = {metric["name"]: metric for metric in values["metrics"]}
    assert named["forget_probability"]["interval"][0] <= named["forget_probability"]["value"]
    assert named["forget_probability"]["reference"] == pytest.approx(found.metric("forget_probability").reference)
    for metric in named.values():
        assert metric["value"] is not None or metric["reason"]
    rows = json.loads((out / "rows.json").read_text())
    assert len(rows["metrics"]["forget_rouge_l"]) == len(rows["ids"]["forget"]) == 4
    answers = stored(out, "forget.answers")
    assert {"id", "prompt", "prediction", "reference", "rouge_l", "prob"} <= set(answers)
    assert answers["prob"] == pytest.approx(np.exp(stored(out, "forget")["logprob_mean"]).tolist())
    for name in ("evaluation.json", "measurement.json", "rows.json"):  # ids and numbers only
        text = (out / name).read_text()
        assert not any(word in text for word in answers["reference"])
        assert str(out) not in text
    assert not list(out.rglob("*.part"))


def test_each_distinct_row_is_scored_once_and_each_prompt_asked_once(knowing, tofu, monkeypatch):
    scored, asked = [], []
    plain_score, plain_generate = _measure.score_rows, _measure.generate

    def score_rows(split, corpus: Corpus, **options):
        scored.extend((row.input_ids, row.labels) for row in corpus.rows)
        return plain_score(split, corpus, **options)

    def generate(model, tokenizer, prompts, **options):
        asked.extend(map(tuple, prompts))
        return plain_generate(model, tokenizer, prompts, **options)

    monkeypatch.setattr(_measure, "score_rows", score_rows)
    monkeypatch.setattr(_measure, "generate", generate)
    found = evaluate(knowing, "tofu", tofu, settings=SETTINGS)
    assert len(scored) == len(set(scored))
    assert len(asked) == len(set(asked))
    texts = sum(len(table.rows) for table in found.measured.plan.texts)
    assert len(scored) < texts  # retain and real authors share a row here
    assert found.metric("forget_quality").value is None


def test_results_do_not_depend_on_the_batch_size(knowing, tofu, results):
    small = dataclasses.replace(SETTINGS, measure=MeasureSettings(batch_size=1))
    found = evaluate(knowing, "tofu", tofu, settings=small)
    for metric in results[1].metrics:
        if metric.value is not None and not metric.name.startswith(
            ("forget_quality", "mia_reference", "privleak", "privacy")
        ):
            assert found.metric(metric.name).value == pytest.approx(metric.value, rel=1e-4, abs=1e-5)


def test_the_same_key_uses_the_tables_again(knowing, other, tofu, results, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(results[0], out)

    def refuse(*_args, **_options):
        raise AssertionError("scored again")

    monkeypatch.setattr(module, "measure", refuse)
    found = evaluate(knowing, "tofu", tofu, retrained=other, out=out, settings=SETTINGS)
    assert [one.value for one in found.metrics] == [one.value for one in results[1].metrics]
    seeded = dataclasses.replace(SETTINGS, seed=7)  # of the bootstrap: the tables stay
    again = evaluate(knowing, "tofu", tofu, retrained=other, out=out, settings=seeded)
    assert [one.value for one in again.metrics] == [one.value for one in found.metrics]
    assert [one.interval for one in again.metrics] != [one.interval for one in found.metrics]
    # a folder of results in the place of the model
    stored_results = evaluate(knowing, "tofu", tofu, retrained=str(out / "retrained"), out=out, settings=SETTINGS)
    assert stored_results.metric("forget_quality").value == found.metric("forget_quality").value


def test_one_changed_weight_is_another_key(knowing, tofu, results):
    loaded = load_model(knowing, device="cpu")
    with torch.no_grad():
        next(loaded.model.parameters())[0, 0] += 1.0
    with pytest.raises(UsageError, match="has results of another model"):
        evaluate(loaded, "tofu", tofu, out=results[0], settings=SETTINGS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": {"forget": "0:3", "holdout": "4:8"}}, "other rows"),
        ({"measure": MeasureSettings(k=3)}, "other settings"),
    ],
)
def test_other_rows_or_settings_are_refused(knowing, tofu, results, changes, named):
    with pytest.raises(UsageError, match=f"has results of {named}"):
        evaluate(knowing, "tofu", tofu, out=results[0], settings=dataclasses.replace(SETTINGS, **changes))


def test_stored_tables_of_other_rows_cannot_be_compared_with(knowing, tofu, results):
    rows = dataclasses.replace(SETTINGS, rows={"forget": "0:3", "holdout": "4:8"})
    with pytest.raises(UsageError, match=r"retrained: the tables in .* are of other rows \(forget"):
        evaluate(knowing, "tofu", tofu, retrained=str(results[0]), settings=rows)
    options = dataclasses.replace(SETTINGS, measure=MeasureSettings(max_new_tokens=3))
    with pytest.raises(UsageError, match="were made with max_new_tokens 80"):
        evaluate(knowing, "tofu", tofu, retrained=str(results[0]), settings=options)


def test_a_model_compared_with_itself_warns(knowing, tofu):
    found = evaluate(knowing, "tofu", tofu, retrained=knowing, settings=SETTINGS)
    assert found.metric("forget_quality").value == 1.0
    assert any(note.startswith("warning: the retrained model is the evaluated model") for note in found.notes)
    assert found.metric("mia_reference").value is None


def test_the_original_model_gives_a_privacy_score(knowing, other, tofu, tmp_path):
    options = {"retrained": other, "original": knowing, "out": tmp_path / "out", "settings": SETTINGS}
    found = evaluate(other, "tofu", tofu, **options)
    assert (tmp_path / "out" / "original" / "measurement.json").is_file()
    score = found.metric("privacy_score")
    assert score.value == 1.0 or score.reason


@pytest.mark.parametrize("option", ["model", "retrained", "original"])
@pytest.mark.parametrize("spec", ["./nowhere", "missing.gguf", "a/b/c"])
def test_bad_paths_fail_before_weights_are_loaded(option, spec, knowing, tofu, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def refuse(*_args, **_options):
        raise AssertionError("loaded")

    monkeypatch.setattr(module, "load_model", refuse)
    options = {option: spec} if option != "model" else {}
    model = spec if option == "model" else knowing
    with pytest.raises(UsageError, match=f"{option}: found no {spec}"):
        evaluate(model, "tofu", tofu, settings=SETTINGS, **options)


@pytest.mark.parametrize("option", ["model", "retrained"])
def test_folders_and_files_without_a_model(option, knowing, tofu, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_model", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "note.txt").write_text("no model")
    for name in ("empty", "bare", "note.txt"):
        place = str(tmp_path / name)
        model, others = (place, {}) if option == "model" else (knowing, {option: place})
        with pytest.raises(UsageError, match=f"{option}: found"):
            evaluate(model, "tofu", tofu, **others)


def test_long_prompts_lose_their_start_and_keep_what_opens_every_text():
    class Tokenizer:
        bos_token_id = 1

    assert end_of(Tokenizer, [1, 5, 6, 7, 8], 3) == [1, 7, 8]
    assert end_of(Tokenizer, [4, 5, 6, 7, 8], 3) == [6, 7, 8]
    assert end_of(Tokenizer, [1, 5], 3) == [1, 5]
    assert end_of(Tokenizer, [1, 5, 6], 1) == [6]


def test_muse(knowing, other, tmp_path):
    data = write_muse(tmp_path / "muse")
    found = evaluate(
        knowing, "muse", data, retrained=other, out=tmp_path / "out", settings=EvaluateSettings(device="cpu")
    )
    answers = stored(tmp_path / "out", "verbmem.answers")
    assert found.metric("verbmem").value == pytest.approx(np.mean(answers["rouge_l_f1"]))
    a, r = (evaluate_auc(tmp_path / "out" / place) for place in ("", "retrained"))
    if r < 1:
        assert found.metric("privleak").value == pytest.approx(100 * ((1 - a) - (1 - r)) / (1 - r))
    else:
        assert found.metric("privleak").value is None
    assert found.metric("utility").n == 6
    assert found.metric("verbmem_exact_memorisation").n == 4


def evaluate_auc(folder):
    sides = []
    for part in ("forget", "holdout"):
        rows = pq.read_table(folder / "scores" / f"{part}.tokens.parquet").to_pydict()["logprob"]
        sides.append(np.array([np.sort(row)[: max(1, int(0.4 * len(row) + 1e-9))].mean() for row in rows]))
    return ((sides[0][:, None] > sides[1][None]) + 0.5 * (sides[0][:, None] == sides[1][None])).mean()


def test_long_texts_are_windows_whose_tokens_are_joined(knowing, tmp_path):
    data = write_muse(tmp_path / "muse")
    text = " ".join(f"w{3 + index % 50}" for index in range(90))
    (data / "privleak" / "forget.json").write_text(json.dumps([text, text + " w4"]))
    settings = EvaluateSettings(measure=MeasureSettings(max_length=32), device="cpu")
    found = evaluate(knowing, "muse", data, out=tmp_path / "out", settings=settings)
    tokens = pq.read_table(tmp_path / "out" / "scores" / "forget.tokens.parquet").to_pydict()
    assert [len(row) for row in tokens["logprob"]] == [89, 90]
    assert stored(tmp_path / "out", "forget")["tokens"] == [89, 90]
    assert found.metric("mia_min_k").n == 6


def test_a_row_without_an_answer_is_missing_not_zero(knowing, tmp_path):
    rows = [
        json.loads(line) for line in (write_tofu(tmp_path / "t") / "forget10_perturbed.jsonl").read_text().splitlines()
    ]
    rows[1]["answer"] = " "
    (tmp_path / "t" / "forget10_perturbed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = evaluate(knowing, "tofu", tmp_path / "t", settings=SETTINGS)
    metric = found.metric("forget_probability")
    assert (metric.n, metric.nulls, metric.per_row[1]) == (3, 1, None)
    assert found.metric("forget_rouge_l").nulls == 1
    # once as asked in training, once as asked otherwise
    assert any("2 rows have nothing to score" in note for note in found.notes)


def test_unknown_names(knowing, tofu, results):
    with pytest.raises(UsageError, match="suite: found 'toffee', accepted is one of tofu, muse, mine"):
        evaluate(knowing, "toffee", tofu)
    with pytest.raises(UsageError, match="'forget_quali', accepted is one of model_utility"):
        results[1].metric("forget_quali")
    with pytest.raises(UsageError, match="resamples: found 1"):
        EvaluateSettings(resamples=1)


def test_the_interval_of_distinct_n_holds_its_value(results):
    found = results[1].metric("forget_distinct_2")
    assert found.interval[0] <= found.value <= found.interval[1]
