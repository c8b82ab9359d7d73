"""Every method in the loop, on LoRA and all weights: it runs, its parts are logged apart, and equal plain code."""

import itertools
import json
import math

import pytest
import torch
from tests.lm._tiny import tiny_model
from tests.lm._tokenizer import tiny_tokenizer
from tests.lm.test_runner import plain
from tests.train._runs import config_from_options, examples, weights, write
from torch.nn import functional
from transformers import Qwen2Tokenizer

from expunge.errors import UsageError
from expunge.lm import load_model
from expunge.objectives import NAMED_METHODS, FixedWeights, parse_method
from expunge.train import _run as run_module
from expunge.train import resume, unlearn
from expunge.train._objective import Example, make_weights
from expunge.train._prepare import read_data

METHODS = sorted(NAMED_METHODS)


def byte_tokenizer():
    """Qwen2's own class, which transformers reads back for that model: one token for each character of the rows."""
    characters = ["w", "\u0120", *"0123456789"]
    vocab = {"<unk>": 0, "<s>": 1, "<|endoftext|>": 2} | {char: place for place, char in enumerate(characters, start=3)}
    return Qwen2Tokenizer(vocab=vocab, merges=[])


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Untrained models of two families, saved; long enough for the rows."""
    folder, found = tmp_path_factory.mktemp("families"), {}
    for name in ("llama", "qwen2"):
        model = tiny_model(name, num_hidden_layers=2, max_position_embeddings=128)
        model.save_pretrained(folder / name)
        (tiny_tokenizer() if name == "llama" else byte_tokenizer()).save_pretrained(folder / name)
        found[name] = str(folder / name)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    parts = {"forget": range(4), "retain": range(4, 10)}
    return {name: str(write(folder / f"{name}.jsonl", examples(numbers))) for name, numbers in parts.items()}


def make(model, files, out, **changes):
    usual = {"batch": 2, "retain_batch": 2, "epochs": 2, "lr": 1e-2, "sample": 1, "device": "cpu", "threads": 1}
    usual |= {"tolerance": 0.0, "seed": 1, "template": "plain"}
    if changes.get("method", "").startswith("rmu"):
        changes["method_options"] = {"layer": "0"} | changes.get("method_options", {})
    return config_from_options({"model": model, "out": str(out), **files, **usual, **changes})


def steps(out):
    return [line for line in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if line["event"] == "step"]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_steps(tmp_path, families, files, method, lora, family):
    changes = {"extra_epochs": 0, "rho": 0.01} if method == "masc" else {}
    result = unlearn(make(families[family], files, tmp_path / "run", method=method, lora=lora, **changes))
    logged = steps(tmp_path / "run")
    assert len(logged) >= (2 if method == "masc" else 4)
    assert result.steps == len(logged)
    two = method == "masc" or bool(NAMED_METHODS[method].kind == "loop" and NAMED_METHODS[method].retain_term.needs)
    for line in logged:
        assert math.isfinite(line["total_loss"])
        assert math.isfinite(line["forget_loss"])
        assert (line["retain_loss"] is not None) == two
        assert line["gradient_norm"] > 0
    before = load_model(families[family]).model.state_dict()
    after = weights(tmp_path / "run")
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert all(bool(weight.isfinite().all()) for weight in after.values())


def make_objective(family, files, method, method_options=None):
    """The objective of a run before its first update."""
    changes = {"method_options": method_options} if method_options else {}
    started = run_module._Run(make(family, files, "unused", method=method, lora=True, **changes).resolved(), None, None)
    started._load()
    started.runner.split.model.eval()
    objective = run_module.make_objective(started.config, started.masc, started.runner, started.data, 0)
    return started, objective


def plain_parts(started, method, forget, retain):
    """Forget and retain term from full logits of one row at a time; model and reference are the same."""
    rows = [*started.data.forget.corpus.rows, *started.data.retain.corpus.rows]
    split, refusals = started.runner.split, started.data.refusals

    def logprobs(row):
        hidden, target = plain(split, row)
        return torch.log_softmax(split.head.logits(hidden), 1), target

    def own(row):
        logp, target = logprobs(row)
        return logp.gather(1, target[:, None])[:, 0]

    ce = -torch.cat([own(rows[i]) for i in retain]).mean() if retain else None
    asked = [own(rows[i]) for i in forget]
    if method == "graddiff":
        return -torch.cat(asked).mean(), ce
    if method == "npo+gd":
        return torch.tensor(2 / 0.1 * math.log(2)), ce
    if method == "simnpo":
        return torch.stack([-(2 / 2.5) * functional.logsigmoid(-2.5 * row.mean()) for row in asked]).mean(), ce
    if method == "idk+gd":
        refused = {row.record: row for row in refusals["forget"].corpus.rows}
        return -torch.cat([own(refused[rows[i].record]) for i in forget]).mean(), ce
    assert method == "me+gd"
    uniform = torch.cat([logprobs(rows[i])[0] for i in forget])
    return (-math.log(uniform.shape[1]) - uniform.mean(1)).mean(), ce


@pytest.mark.parametrize("method", ["graddiff", "npo+gd", "simnpo", "idk+gd", "me+gd"])
def test_the_parts_are_those_of_plain_code_whatever_the_split(families, files, method):
    started, objective = make_objective(families["llama"], files, method)
    forget, retain = [0, 2, 3], [5, 8]
    rows = [*(Example(row, True) for row in forget), *(Example(row, False) for row in retain)]
    counts = objective.counts(rows)
    with torch.no_grad():
        expected = plain_parts(started, method, forget, retain)
        for parts in ([rows], [rows[:1], rows[1:4], rows[4:]], [[row] for row in rows]):
            found = [objective.part(part, counts, "main") for part in parts]
            sums = [sum(each.forget_sum for each in found), sum(each.retain_sum for each in found)]
            values = (sums[0] / counts.forget, sums[1] / counts.retain)
            for value, plainly in zip(values, expected, strict=True):
                assert value == pytest.approx(plainly.item(), rel=1e-5)
            total = sum(loss for each in found for loss in (each.forget, each.retain) if loss is not None)
            spec = started.config.spec
            sign = -1 if spec.forget_term.ascends else 1
            weighted = sign * spec.forget_weight * values[0] + spec.retain_weight * values[1]
            assert float(total) == pytest.approx(weighted, rel=1e-5)


def test_graddiff_logs_both_cross_entropies_and_their_difference(tmp_path, families, files):
    unlearn(make(families["llama"], files, tmp_path / "run", method="graddiff", lora=True))
    for line in steps(tmp_path / "run"):
        assert line["forget_loss"] > 0
        assert line["retain_loss"] > 0
        assert line["total_loss"] == pytest.approx(line["retain_loss"] - line["forget_loss"], rel=1e-5)


def test_reference_ratios_are_those_of_the_model_before(families, files):
    started, objective = make_objective(families["llama"], files, "npo+kl")
    rows = [Example(0, True), Example(5, False)]
    with torch.no_grad():
        first = objective.part(rows, objective.counts(rows), "main")
        for weight in started.trainable.masters.masters:
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        moved = objective.part(rows, objective.counts(rows), "main")
    assert first.forget_sum == pytest.approx(20 * math.log(2), rel=1e-5)
    assert first.retain_sum == pytest.approx(0.0, abs=1e-5)
    assert moved.retain_sum > 1e-3
    assert moved.forget_sum != pytest.approx(first.forget_sum, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"beta": "1.5"}])
def test_an_option_reaches_the_loss(families, files, options):
    _, objective = make_objective(families["llama"], files, "simnpo", options)
    rows = [Example(0, True)]
    value = objective.part(rows, objective.counts(rows), "main").forget_sum
    other = make_objective(families["llama"], files, "simnpo", {"beta": "4.5"})[1]
    assert value != pytest.approx(other.part(rows, other.counts(rows), "main").forget_sum, rel=1e-3)


@pytest.mark.parametrize("method", ["npo+kl", "dpo+gd", "rmu", "idk+ap", "undial", "task-vector"])
@pytest.mark.parametrize("lora", [True, False])
def test_resumed_is_as_if_it_had_not_stopped(tmp_path, families, files, method, lora):
    whole = unlearn(make(families["llama"], files, tmp_path / "whole", method=method, lora=lora))
    polls = iter([False, True])
    with pytest.raises(run_module.InterruptedRun):
        unlearn(
            make(families["llama"], files, tmp_path / "cut", method=method, lora=lora),
            interrupted=lambda: next(polls, False),
        )
    again = resume(tmp_path / "cut")
    assert again.steps == whole.steps
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weight, weights(tmp_path / "cut")[name]), name


@pytest.mark.parametrize("lora", [True, False])
def test_a_task_vector_is_taken_off_the_weights(tmp_path, families, files, lora):
    """At twice the scale the weights move twice as far, in the same direction, away from where tuning went."""
    start = {name: weight.clone() for name, weight in load_model(families["llama"]).model.state_dict().items()}
    moved = {}
    for scale in ("0.5", "1", "2"):
        unlearn(
            make(families["llama"], files, tmp_path / scale, method="task-vector", lora=lora,
                 method_options={"scale": scale})
        )  # fmt: skip
        moved[scale] = {name: weight - start[name] for name, weight in weights(tmp_path / scale).items()}
    changed = [name for name, change in moved["1"].items() if float(change.abs().max()) > 0]
    assert changed
    for name in moved["1"]:
        torch.testing.assert_close(moved["0.5"][name], moved["1"][name] / 2, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(moved["2"][name], 2 * moved["1"][name], rtol=1e-4, atol=1e-6)


def test_dual_ascent_moves_the_weight_and_is_resumed(tmp_path, families, files):
    options = {"method": "graddiff", "lora": True, "weighting": "primal-dual", "retain_limit": 1.0, "dual_step": 0.5}
    unlearn(make(families["llama"], files, tmp_path / "run", **options))
    logged = steps(tmp_path / "run")
    weight = 1.0
    for line in logged:
        assert line["retain_weight"] == pytest.approx(weight, rel=1e-6)
        weight = max(0.0, weight + 0.5 * (line["retain_loss"] - 1.0))
    assert logged[-1]["retain_weight"] != 1.0
    polls = iter([False, True])
    with pytest.raises(run_module.InterruptedRun):
        unlearn(make(families["llama"], files, tmp_path / "cut", **options), interrupted=lambda: next(polls, False))
    resume(tmp_path / "cut")
    assert [line["retain_weight"] for line in steps(tmp_path / "cut")] == [line["retain_weight"] for line in logged]


def test_gradient_norms_apart_change_nothing_else(tmp_path, families, files):
    for name, apart in (("joint", False), ("apart", True)):
        unlearn(
            make(
                families["llama"],
                files,
                tmp_path / name,
                method="graddiff",
                lora=True,
                lora_dropout=0.0,
                lr=1e-3,
                gradient_norms=apart,
            )
        )
    joint, apart = steps(tmp_path / "joint"), steps(tmp_path / "apart")
    assert joint[0]["forget_gradient_norm"] is None
    for one, other in zip(joint, apart, strict=True):
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
        assert other["forget_gradient_norm"] > 0
        assert other["retain_gradient_norm"] > 0
    pairs = zip(weights(tmp_path / "joint").values(), weights(tmp_path / "apart").values(), strict=True)
    assert max(float((one - other).abs().max()) for one, other in pairs) < 1e-3


def test_the_rule_ends_any_method(tmp_path, families, files):
    result = unlearn(
        make(families["llama"], files, tmp_path / "run", method="graddiff", lora=True, stop="rule", tolerance=1.0)
    )
    assert result.stopped_at == 0
    assert result.forgotten


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "npo", "method_options": {"gamma": "1"}}, "gamma: found"),
        ({"method": "npo", "method_options": {"beta": "-1"}}, "beta: found"),
        ({"method": "npo", "weight": 0.5}, "weight: found with method npo"),
        ({"method": "npo", "gate": True}, "gate: found True with method npo"),
        ({"method": "npo", "refusals": "r.txt"}, "refusals: found with method npo"),
        ({"method": "npo+gd", "retain": None}, "retain: found none"),
        ({"method_options": {"beta": "1"}}, "method_options: found 'beta' with masc"),
        ({"method": "forget=npo,retain=sleep"}, "retain: found 'sleep'"),
        ({"method": "graddiff", "weighting": "primal-dual"}, "retain_limit: found None"),
        ({"method": "graddiff", "retain_limit": 1.0}, "retain_limit: found 1.0"),
        ({"method": "npo", "weighting": "primal-dual", "retain_limit": 1.0}, "no retain term"),
        ({"method": "rmu", "method_options": {"layer": "9"}}, "layer: found 9"),
        ({"method": "rmu", "upper": 0.5}, "layer: found 0, accepted is one from 1"),
        ({"stop": "never"}, "stop: found 'never'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, families, files, changes, named):
    changes = {"lora": True} | changes
    data = {name: path for name, path in files.items() if changes.get(name, path) is not None}
    changes = {name: value for name, value in changes.items() if value is not None}
    with pytest.raises(UsageError, match=named):
        unlearn(make(families["llama"], data, tmp_path / "run", **changes))
    assert list(tmp_path.iterdir()) == []


def test_raw_text_cannot_be_refused(tmp_path, families, files):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"w{n} w{n + 1} w{n + 2}"}) + "\n" for n in range(3)))
    with pytest.raises(UsageError, match="is raw text"):
        unlearn(make(families["llama"], files | {"forget": str(text)}, tmp_path / "run", method="idk+gd", lora=True))


def test_refusals_of_a_file_are_used(tmp_path, families, files):
    own = tmp_path / "own.txt"
    own.write_text("w7 w8\n\nw9\n")
    started = run_module._Run(
        make(families["llama"], files, "unused", method="idk+ap", refusals=str(own)).resolved(), None, None
    )
    started._load()
    assert {record.answer for part in started.data.refusals.values() for record in part.records} <= {"w7 w8", "w9"}
    assert set(started.data.refusals) == {"forget", "retain"}
    again = read_data(started.config)
    assert [r.answer for r in again.refusals["forget"].records] == [
        r.answer for r in started.data.refusals["forget"].records
    ]


def test_weights_of_a_spec():
    spec = parse_method("npo+gd", {"retain_weight": 2.0})
    assert make_weights(spec, weighting="fixed", limit=None, step=1.0) == FixedWeights(1.0, 2.0)
    assert make_weights(spec, weighting="primal-dual", limit=0.5, step=1.0).retain == 2.0


def test_other_optimizers_take_turns(tmp_path, families, files):
    """One forget step, then retain steps; each optimizer moves the weights another way, and is resumed bit for bit."""
    kinds = {
        "alternate": {"update": "alternate"},
        "dualoptim": {"optimizer": "dualoptim"},
        "dualoptim+": {"optimizer": "dualoptim+", "base_betas": (0.8, 0.9)},
        "8bit": {"optimizer": "dualoptim+", "optimizer_storage": "8bit"},
        "muon": {"optimizer": "dualoptim+", "optimizer_rule": "muon"},
        "rates": {"optimizer": "dualoptim+", "lr_forget": 2e-3},
    }
    found = {}
    for name, changes in kinds.items():
        options = {"method": "npo+gd", "lora": True, "retain_every": 2, "retain_batch": 1, **changes}
        unlearn(make(families["llama"], files, tmp_path / name, **options))
        found[name] = weights(tmp_path / name)
        logged = steps(tmp_path / name)
        assert all(line["forget_gradient_norm"] > 0 and line["retain_gradient_norm"] > 0 for line in logged)
        if name == "alternate":
            assert logged[0]["cosine"] is None
        elif name == "dualoptim":
            assert -1 <= logged[-1]["cosine"] <= 1
            assert logged[-1]["base_norm"] is None
        else:
            assert set(logged[-1]["delta_norm"]) == {"forget", "retain"}
        polls = iter([False, True])
        with pytest.raises(run_module.InterruptedRun):
            unlearn(
                make(families["llama"], files, tmp_path / f"{name}-cut", **options),
                interrupted=lambda polls=polls: next(polls, False),
            )
        resume(tmp_path / f"{name}-cut")
        for key, weight in weights(tmp_path / f"{name}-cut").items():
            assert torch.equal(weight, found[name][key]), (name, key)
    names = list(found)
    for one, other in itertools.pairwise(names):
        assert any(not torch.equal(found[one][key], found[other][key]) for key in found[one])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": "dualoptim+", "update": "joint"}, "update: found joint with optimizer dualoptim"),
        ({"retain_every": 2}, "retain_every: found 2 with joint"),
        ({"lr_forget": 1e-3}, "lr_forget: found with joint"),
        ({"base_betas": (0.9, 0.9)}, "base_betas: found with optimizer adamw"),
        ({"optimizer": "dualoptim+", "base_betas": (0.9, 1.5)}, "base_betas: found"),
        ({"optimizer": "sofia"}, "optimizer: found 'sofia'"),
        ({"optimizer_rule": "sofia"}, "optimizer_rule: found 'sofia'"),
        ({"optimizer_storage": "2bit"}, "optimizer_storage: found '2bit'"),
    ],
)
def test_optimizer_options_without_effect_are_refused(tmp_path, families, files, changes, named):
    with pytest.raises(UsageError, match=named):
        unlearn(make(families["llama"], files, tmp_path / "run", method="npo+gd", lora=True, **changes))
    assert list(tmp_path.iterdir()) == []


def test_dualoptim_runs_with_masc_and_its_rule(tmp_path, families, files):
    options = {"optimizer": "dualoptim+", "rho": 0.01, "extra_epochs": 0}
    result = unlearn(make(families["llama"], files, tmp_path / "run", **options))
    assert result.steps > 0
    assert steps(tmp_path / "run")[0]["violation"] is not None
