"""Stress tests on a tiny model: prefixes and quantisation recomputed, the model's folder unchanged, all resumable."""

import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from tests.lm._tokenizer import tiny
from tests.suites._data import tofu_row, write_tofu
from tests.train import _runs

from expunge.data import encode_records, read_records
from expunge.errors import UsageError
from expunge.lm import load_model
from expunge.metrics import rouge_l_recall
from expunge.stress import StressSettings, quantised, stress
from expunge.stress import _stress as module
from expunge.stress._quantise import NotMeasuredError
from expunge.suites import EvaluateSettings, MeasureSettings

EVALUATE = EvaluateSettings(
    measure=MeasureSettings(batch_size=4, max_new_tokens=12), rows={"forget": "0:4"}, resamples=50, device="cpu"
)
RELEARN = {"relearn_rows": 2, "relearn_steps": 8, "relearn_batch": 2, "relearn_lr": 1e-2, "relearn_full": True}


# QLoRA (arXiv 2305.14314), appendix E, to four digits.
NF4 = torch.tensor(
    [
        *(-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0),
        *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1),
    ],
    dtype=torch.float64,
)


def settings(*tests, **changes):
    return StressSettings(evaluate=EVALUATE, tests=tests, **changes)


# The tests that need no further library.
WANTED = settings("relearn", "paraphrase", "prefix", "samples", samples=3, **RELEARN)


def by_metric(result, test, setting=""):
    return {row["metric"]: row for row in result.rows if row["test"] == test and setting in row["setting"]}


def digest(folder):
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


@pytest.fixture(scope="module")
def tofu(tmp_path_factory):
    return write_tofu(tmp_path_factory.mktemp("tofu"))


@pytest.fixture(scope="module")
def forgotten(tmp_path_factory):
    """A model that knows what is to be kept, and not what was to be forgotten."""
    folder = tmp_path_factory.mktemp("models") / "forgotten"
    return _runs.make_model(folder, numbers=_runs.RETAIN)


@pytest.fixture(scope="module")
def stressed(tofu, forgotten, knowing, tmp_path_factory):
    """Results folder and result; the model's folder stays as it was."""
    out = tmp_path_factory.mktemp("stress") / "out"
    before = digest(forgotten)
    result = stress(forgotten, "tofu", tofu, original=knowing, out=out, settings=WANTED)
    assert digest(forgotten) == before
    return out, result


def test_rows_have_before_after_and_what_came_back(stressed):
    _, result = stressed
    assert {row["test"] for row in result.rows} == {"relearn", "paraphrase", "prefix", "samples"}
    for row in result.rows:
        if row["change"] is None:
            assert row["reason"]
            continue
        assert row["change"] == pytest.approx(row["after"] - row["before"], abs=1e-6)
        low, high = row["interval"]
        assert low <= row["change"] + 1e-9
        assert row["change"] - 1e-9 <= high
        if row["recovered"] is not None:
            share = row["change"] / (row["original"] - row["before"])
            assert row["recovered"] == pytest.approx(share)


def test_relearning_brings_back_what_is_taught_and_leaves_the_rest_to_be_seen(stressed):
    _, result = stressed
    details = result.details["relearn"]
    assert len(set(details["rows"])) == RELEARN["relearn_rows"]
    assert details["loss"][1] < details["loss"][0]
    everyone = by_metric(result, "relearn", ": all")["forget_probability"]
    others = by_metric(result, "relearn", ": others")["forget_probability"]
    assert (everyone["n"], others["n"]) == (4, 2)
    assert everyone["change"] > others["change"]
    # The taught rows' change follows from the two means.
    taught = (everyone["change"] * 4 - others["change"] * 2) / 2
    assert taught > 0.2
    assert "retain_probability" not in by_metric(result, "relearn", ": others")
    assert everyone["recovered"] > 0.1


def test_prefix_is_recomputed_by_a_plain_greedy_loop(stressed, forgotten, tmp_path):
    _, result = stressed
    loaded = load_model(forgotten, device="cpu")
    tokenizer, model = loaded.tokenizer, loaded.model
    records = read_records(_runs.write(tmp_path / "rows.jsonl", _runs.examples(_runs.FORGET)))
    exact, recall = {25: [], 0: []}, {25: [], 0: []}
    for share in exact:
        for one in encode_records(records, tokenizer).rows:
            answer = [token for token in one.input_ids[one.prompt_length :] if token != tokenizer.eos_token_id]
            given = len(answer) * share // 100
            ids = [*one.input_ids[: one.prompt_length], *answer[:given]]
            written = []
            for _ in range(12):
                with torch.no_grad():
                    token = model(torch.tensor([[*ids, *written]])).logits[0, -1].argmax().item()
                if token == tokenizer.eos_token_id:
                    break
                written.append(token)
            rest = answer[given:]
            exact[share].append(sum(a == b for a, b in zip(written, rest, strict=False)) / len(rest))
            recall[share].append(rouge_l_recall(tokenizer.decode(written), tokenizer.decode(rest)))
    row = by_metric(result, "prefix", "25 %")
    assert row["forget_rest_exact_tokens"]["after"] == pytest.approx(sum(exact[25]) / 4)
    assert row["forget_rest_rouge_l"]["after"] == pytest.approx(sum(recall[25]) / 4)
    assert row["forget_rest_exact_tokens"]["before"] == pytest.approx(sum(exact[0]) / 4)
    nothing = [row["reason"] for row in result.rows if row["setting"] == "0 %"]
    assert len(nothing) == 2
    assert all("nothing is given" in reason for reason in nothing)


def test_best_of_several_is_no_less_than_their_mean(stressed):
    _, result = stressed
    best, mean = (by_metric(result, "samples", name)["forget_rouge_l"] for name in ("best", "mean"))
    assert best["before"] == mean["before"]
    assert best["after"] >= mean["after"]
    assert "of 3, temperature 1" in best["setting"]


def test_what_is_kept_names_rows_and_no_texts(stressed):
    out, _ = stressed
    kept = "".join(path.read_text() for path in out.rglob("*.json"))
    for number in _runs.FORGET:
        row = tofu_row(number)
        assert row["answer"] not in kept
        assert row["question"] not in kept


def test_finished_tests_are_not_done_again(stressed, tofu, forgotten, knowing, monkeypatch):
    out, former = stressed

    def never(*_arguments, **_options):
        raise AssertionError("done again")

    for name in ("score", "go_on", "corpus"):
        monkeypatch.setattr(module.Bench, name, never)
    again = stress(forgotten, "tofu", tofu, original=knowing, out=out, settings=WANTED)
    assert again.rows == former.rows


def test_a_cut_off_run_keeps_its_tests(tofu, forgotten, tmp_path, monkeypatch):
    real = module.Bench.go_on

    def cut(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Bench, "go_on", cut)
    wanted = settings("paraphrase", "samples", samples=2)
    with pytest.raises(KeyboardInterrupt):
        stress(forgotten, "tofu", tofu, out=tmp_path, settings=wanted)
    assert not (tmp_path / "stress.json").exists()
    kept = sorted(path.name.split("-")[0] for path in (tmp_path / "tests").iterdir())
    assert kept == ["paraphrase", "plain"]
    monkeypatch.setattr(module.Bench, "go_on", real)
    result = stress(forgotten, "tofu", tofu, out=tmp_path, settings=wanted)
    assert "plain" not in result.seconds
    assert by_metric(result, "samples", "best")["forget_rouge_l"]["n"] == 4


def test_stored_results_stand_for_a_model(stressed, tofu, knowing, tmp_path):
    """The folder of a finished run is as good as the model it was of."""
    out, former = stressed
    wanted = settings("paraphrase")
    result = stress(knowing, "tofu", tofu, retrained=str(out), out=tmp_path, settings=wanted)
    theirs = by_metric(former, "paraphrase")["forget_probability"]["after"]
    assert by_metric(result, "paraphrase")["forget_probability"]["retrained"] == pytest.approx(theirs)
    assert result.references["retrained"] == former.fingerprint


def test_data_without_paraphrases_have_a_reason(tmp_path, data, forgotten):
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, path in data.items():
        shutil.copy(path, mine / f"{name}.jsonl")
    result = stress(forgotten, "mine", mine, out=tmp_path / "out", settings=settings("paraphrase"))
    assert all(row["after"] is None and "no paraphrased" in row["reason"] for row in result.rows)
    assert result.rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_layers_are_near_and_the_former_ones_come_back(family, bits):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    model = tiny(family).eval()
    ids = torch.arange(3, 19)[None]
    modules = list(model.modules())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        plain = model(ids).logits
        with quantised(model, bits) as what:
            found = model(ids).logits
        after = model(ids).logits
    assert list(model.modules()) == modules
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(plain, after)
    assert not torch.equal(plain, found)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D"]
    in_decoder = [m for m in linear if m is not model.get_output_embeddings()]
    assert what.layers == len(in_decoder)
    assert what.weights == sum(m.weight.numel() for m in in_decoder)
    # Rounding to 8 bits by rows, to 4 by blocks of normal quantiles: 0.6 % and 9 % of normal weights' norm.
    low, high = {8: (0.003, 0.01), 4: (0.08, 0.1)}[bits]
    assert low < what.error < high
    assert what.error == pytest.approx(plain_error(in_decoder, bits), rel=0.05)


def plain_error(layers, bits):
    """‖Q(W) − W‖ / ‖W‖ by the formats' definitions."""
    wrong = whole = 0.0
    for layer in layers:
        weight = layer.weight.detach().double()
        weight = weight.T.contiguous() if type(layer).__name__ == "Conv1D" else weight
        if bits == 8:
            scale = weight.abs().amax(1, keepdim=True) / 127
            back = (weight / scale).round() * scale
        else:
            blocks = weight.reshape(-1, 64)
            scale = blocks.abs().amax(1, keepdim=True)
            nearest = (blocks / scale)[..., None].sub(NF4).abs().argmin(-1)
            back = (NF4[nearest] * scale).reshape(weight.shape)
        wrong += (back - weight).square().sum().item()
        whole += weight.square().sum().item()
    return (wrong / whole) ** 0.5


def test_former_layers_come_back_after_an_error():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = tiny("llama").eval()
    modules = list(model.modules())
    with pytest.raises(RuntimeError, match="stop"), quantised(model, 4):
        raise RuntimeError("stop")
    assert list(model.modules()) == modules


def test_a_missing_library_is_the_reason(tofu, forgotten, tmp_path, monkeypatch):
    monkeypatch.setattr("expunge.stress._quantise.LIBRARY", "no_such_library")
    with pytest.raises(NotMeasuredError, match="not installed"), quantised(tiny("llama"), 8):
        pass
    result = stress(forgotten, "tofu", tofu, out=tmp_path, settings=settings("int8"))
    assert result.rows
    assert all("not installed" in row["reason"] for row in result.rows)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tests": ()}, "tests: found none"),
        ({"tests": ("int5",)}, "tests: found 'int5'"),
        ({"tests": ("int8", "int8")}, "tests: found 'int8'"),
        ({"relearn_rows": 0}, "relearn_rows: found 0"),
        ({"relearn_steps": -1}, "relearn_steps: found -1"),
        ({"relearn_lr": 0.0}, "relearn_lr: found 0.0"),
        ({"relearn_lr": float("nan")}, "relearn_lr: found nan"),
        ({"prefix": (100,)}, "prefix: found 100"),
        ({"prefix": ()}, "prefix: found none"),
        ({"samples": 0}, "samples: found 0"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_options_out_of_range_are_refused(changes, told):
    with pytest.raises(UsageError, match=told):
        StressSettings(**changes)


def test_inputs_are_refused_before_weights_are_loaded(tofu, forgotten, knowing, stressed, tmp_path, monkeypatch):
    out, _ = stressed
    with pytest.raises(UsageError, match="results of another model"):
        stress(knowing, "tofu", tofu, out=out, settings=settings("paraphrase"))

    def never(*_arguments, **_options):
        raise AssertionError("loaded")

    monkeypatch.setattr(module, "load_model", never)
    with pytest.raises(UsageError, match="suite: found 'tofoo'"):
        stress(forgotten, "tofoo", tofu, out=tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        stress(forgotten, "tofu", tofu, out=tofu / "forget10_perturbed.jsonl")
    with pytest.raises(UsageError, match="original"):
        stress(forgotten, "tofu", tofu, original=str(tmp_path / "nothing"), out=tmp_path / "o")
    others = dataclasses.replace(EVALUATE, rows={"forget": "0:2"})
    with pytest.raises(UsageError, match=r"retrained: .* of other rows"):
        stress(
            forgotten, "tofu", tofu, retrained=str(out), out=tmp_path / "o", settings=StressSettings(evaluate=others)
        )
