"""The loop: its objective, its gate, its stop, the rest phase, and what happens when something breaks."""

import copy
import json
import math
from functools import partial

import pytest
import torch
from tests.lm._tiny import tiny_model
from tests.lm.test_runner import make_rows, plain

from expunge.errors import RunError
from expunge.lm import MasterWeights, RowRunner, adapter_disabled, add_lora, split_model
from expunge.objectives import MascSettings
from expunge.train import Recipe, RunLog, UnlearningLoop
from expunge.train._objective import Example
from expunge.train._state import StepError

N_FORGET, N_RETAIN = 4, 4


def settings(**changes):
    usual = {"weight": 0.5, "rho": 0.05, "k": 5, "kl_weight": 1.0, "cut": None, "tolerance": 0.0, "probe": 2}
    return MascSettings(**(usual | {"confirm": 4, "every": 2} | changes))


def make_loop(tmp_path, masc=None, recipe=None, *, dtype=torch.float32, sgd=None, lora=True, **options):
    model, rows = tiny_model("llama", dtype=dtype), make_rows(N_FORGET + N_RETAIN)
    recipe = recipe or Recipe(batch=4, retain_batch=2, lora=lora, lora_dropout=0.0)
    without = None
    if lora:
        torch.manual_seed(0)
        model = add_lora(model, rank=4, dropout=recipe.lora_dropout)
        without = partial(adapter_disabled, model)
    masters = MasterWeights(model.parameters())
    optimizer = torch.optim.SGD(masters.masters, lr=sgd) if sgd else torch.optim.AdamW(masters.masters, lr=recipe.lr)
    runner = RowRunner(split_model(model), rows, pad_id=0, without_adapter=without)
    if not lora:
        runner.keep_reference({"states": range(N_FORGET, N_FORGET + N_RETAIN)})
    return UnlearningLoop(
        runner,
        n_forget=N_FORGET,
        n_retain=N_RETAIN,
        ids=[f"row{i}" for i in range(N_FORGET)],
        masc=masc or settings(),
        recipe=recipe,
        masters=masters,
        optimizer=optimizer,
        seed=0,
        log=RunLog(tmp_path / "log.jsonl"),
        **options,
    )


def events(loop, name):
    lines = [json.loads(line) for line in loop.log.path.read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def params(loop):
    return [p.detach().clone() for p in loop.masters.masters]


def plain_loss(split, reference, forget, keep, masc):
    """E_retain[KL] + λ · E_forget[mean_t hinge] from full logits."""
    tau = math.log(masc.rho / (1 - masc.rho))
    hinges = []
    for row in forget:
        hidden, target = plain(split, row)
        logits = split.head.logits(hidden)
        own = logits.gather(1, target[:, None])[:, 0]
        others = logits.scatter(1, target[:, None], -torch.inf).topk(masc.k, dim=1).values
        margin = masc.beta * own - torch.logsumexp(masc.beta * others, dim=1)
        hinges.append((torch.relu(margin - (tau - masc.eta)) / masc.eta).mean())
    kls = []
    for row in keep:
        now, then = (torch.log_softmax(s.head.logits(plain(s, row)[0]), dim=1) for s in (split, reference))
        kls.append((then.exp() * (then - now)).sum(1))
    return torch.stack(hinges).mean() * masc.weight + masc.kl_weight * torch.cat(kls).mean()


@pytest.mark.parametrize("lora", [True, False])
def test_objective_is_the_plain_one(tmp_path, lora):
    recipe = Recipe(batch=4, retain_batch=2, lora=lora, lora_dropout=0.0, lr=0.05)
    loop = make_loop(tmp_path, recipe=recipe, sgd=0.05, lora=lora)
    reference = split_model(tiny_model("llama"))
    loop.start()
    for _ in range(2):  # at the second step the KL is not zero
        rows, keep = list(loop.state.queue[:4]), loop.retain.state_dict()
        loss = plain_loss(
            loop.runner.split,
            reference,
            [make_rows(8)[i] for i in rows],
            [make_rows(8)[i] for i in loop.retain.next(2)],
            loop.masc,
        )
        loop.retain.load_state_dict(keep)
        gradients = torch.autograd.grad(loss, loop.masters.params, allow_unused=True)
        before = params(loop)
        report = loop.advance()
        assert report.total_loss == pytest.approx(loss.item(), rel=1e-5)
        for old, new, gradient in zip(before, params(loop), gradients, strict=True):
            gradient = torch.zeros_like(old) if gradient is None else gradient
            torch.testing.assert_close(new, old - 0.05 * gradient, rtol=1e-5, atol=1e-6)
    assert report.retain_loss > 0


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_update_does_not_depend_on_the_micro_batch(tmp_path, micro_batch):
    found = []
    for name, size in (("whole", None), ("parts", micro_batch)):
        (tmp_path / name).mkdir()
        recipe = Recipe(batch=4, retain_batch=2, lora_dropout=0.0, lr=0.05)
        loop = make_loop(tmp_path / name, recipe=recipe, sgd=0.05, micro_batch=size)
        loop.start()
        before = params(loop)
        report = loop.advance()
        found.append((before, params(loop), report))
    moved = [torch.cat([(b - a).flatten() for a, b in zip(run[0], run[1], strict=True)]) for run in found]
    assert moved[0].norm() > 0
    # One float32 update with the weights' own rounding in it: an ulp of the largest weight against the update's size.
    assert ((moved[0] - moved[1]).norm() / moved[0].norm()).item() < 1e-6
    found = [(run[1], run[2]) for run in found]
    assert found[0][1].total_loss == pytest.approx(found[1][1].total_loss, rel=1e-5)


def test_gate_closes_rows_within_the_tolerance(tmp_path):
    masc = settings(tolerance=1.0, kl_weight=0.0)
    loop = make_loop(tmp_path, masc, Recipe(batch=4, lora_dropout=0.0, gate=True))
    loop._fill(loop.trained)
    before = params(loop)
    report = loop._update(loop.state.queue[:4])
    assert (report.closed, report.updated, report.gradient_norm) == (4, False, None)
    assert all(torch.equal(a, b) for a, b in zip(before, params(loop), strict=True))


def script(loop, monkeypatch, shares):
    """Violations by step, of every row alike."""
    monkeypatch.setattr(loop, "measure", lambda rows, starts=None: [shares(loop.state, row) for row in rows])


def test_stops_at_the_scripted_step(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, settings(tolerance=0.4, every=1), Recipe(batch=1, epochs=9, lora_dropout=0.0))
    script(loop, monkeypatch, lambda state, row: 1.0 if state.step < 7 else 0.2)
    loop.start()
    loop.run(lambda report: None)
    assert (loop.state.step, loop.state.stopped_at, loop.state.phase) == (7, 7, "done")
    looks = events(loop, "look")
    assert [(one["numbers"]["step"], one["numbers"]["stage"]) for one in looks] == [
        *((step, "probe") for step in range(1, 8)),
        (7, "confirm"),
    ]
    assert looks[-1]["stop"] is True
    assert all(len(one["ids"]) == len(one["violations"]) and one["reason"] for one in looks)
    assert len(events(loop, "step")) == 7


def test_rest_phase_trains_on_leftovers_only_and_ends(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, settings(tolerance=0.6, every=1), Recipe(batch=4, extra_epochs=2, lora_dropout=0.0))
    trained = []
    update = loop._update
    monkeypatch.setattr(loop, "_update", lambda rows: trained.append((loop.state.phase, list(rows))) or update(rows))
    script(loop, monkeypatch, lambda state, row: 1.0 if row == 2 or state.step == 0 else 0.0)
    loop.start()
    loop.run(lambda report: None)
    assert [rows for phase, rows in trained if phase == "rest"] == [[2], [2]]
    assert (loop.state.stopped_at, loop.state.rest) == (1, [2])
    assert "1 examples are left" in loop.state.reason


def test_spent_budget_is_not_a_stop(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, settings(tolerance=0.4), Recipe(batch=2, epochs=2, lora_dropout=0.0))
    script(loop, monkeypatch, lambda state, row: 1.0)
    loop.start()
    loop.run(lambda report: None)
    assert (loop.state.step, loop.state.stopped_at, loop.state.phase) == (4, None, "done")
    assert "not stopped within 2 passes" in loop.state.reason


@pytest.mark.parametrize("focus", [False, True])
def test_held_out_rows_are_probed_and_never_trained_on(tmp_path, monkeypatch, focus):
    recipe = Recipe(batch=2, epochs=3, extra_epochs=2, lora_dropout=0.0, focus=focus)
    loop = make_loop(tmp_path, settings(tolerance=0.4, every=1), recipe, held_out=[1, 3])
    trained = []
    update = loop._update
    monkeypatch.setattr(loop, "_update", lambda rows: trained.extend(rows) or update(rows))
    script(loop, monkeypatch, lambda state, row: 1.0 if state.step < 3 or row in (1, 3) else 0.0)
    loop.start()
    loop.run(lambda report: None)
    assert set(trained) == {0, 2}
    assert {name for look in events(loop, "look") if look["numbers"]["stage"] != "full" for name in look["ids"]} <= {
        "row1",
        "row3",
    }
    assert loop.state.phase == "done"
    assert loop.state.stopped_at is None  # the mean of the held-out rows never came down


def test_held_out_leftovers_are_not_trained_on_and_end_the_run(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, settings(tolerance=0.6, every=1), Recipe(batch=2, lora_dropout=0.0), held_out=[1, 3])
    trained = []
    update = loop._update
    monkeypatch.setattr(loop, "_update", lambda rows: trained.append(set(rows)) or update(rows))
    script(
        loop, monkeypatch, lambda state, row: 1.0 if state.step < 1 or row == 1 or (row, state.step) == (2, 1) else 0
    )
    loop.start()
    loop.run(lambda report: None)
    assert trained == [{0, 2}, {2}]
    assert (loop.state.stopped_at, loop.state.rest, loop.state.step) == (1, [1], 2)
    assert "held-out" in loop.state.reason


def test_a_batch_below_the_hinge_does_no_update(tmp_path):
    loop = make_loop(tmp_path, settings(rho=0.9999999, kl_weight=0.0))
    before = params(loop)
    report = loop._update([0, 1, 2, 3])
    assert (report.updated, report.gradient_norm, report.total_loss) == (False, None, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, params(loop), strict=True))
    assert all(p.grad is None for p in loop.masters.params)


def test_already_forgotten_needs_no_step(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, settings(tolerance=0.4))
    script(loop, monkeypatch, lambda state, row: 0.1)
    loop.start()
    assert (loop.state.phase, loop.state.stopped_at, loop.advance()) == ("done", 0, None)
    assert [look["numbers"]["stage"] for look in events(loop, "look")] == ["full"]


def test_mean_above_the_tolerance_is_trained_though_chance_may_explain_each_row(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, settings(tolerance=0.4))
    script(loop, monkeypatch, lambda state, row: 0.45)
    loop.start()
    assert (loop.state.rest, loop.state.phase) == ([], "main")
    assert loop.state.queue


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_loss_keeps_the_weights_and_goes_back(tmp_path, value):
    loop = make_loop(tmp_path, settings(cut=(0.2, 0.6), min_prefix=1, min_suffix=1))
    loop.start()
    loop.advance()
    before = copy.deepcopy(loop.state_dict())
    head = loop.runner.split.head.weight
    saved = head.detach().clone()
    with torch.no_grad():
        head[:, 0] = value
    with pytest.raises(StepError, match=r"^step 2: "):
        loop.advance()
    with torch.no_grad():
        head.copy_(saved)
    after = loop.state_dict()
    assert after["loop"] == before["loop"]
    assert after["positions"]["retain"] == before["positions"]["retain"]
    assert torch.equal(after["positions"]["masks"], before["positions"]["masks"])
    assert all(
        torch.equal(a, b) for a, b in zip(after["masters"]["masters"], before["masters"]["masters"], strict=True)
    )
    assert loop.advance().step == 2


def test_non_finite_gradient_keeps_the_weights_and_goes_back(tmp_path, monkeypatch):
    loop = make_loop(tmp_path)
    loop.start()
    before = copy.deepcopy(loop.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
        with pytest.raises(StepError, match=r"^step 1: the gradient norm is inf"):
            loop.advance()
    after = loop.state_dict()
    assert after["loop"] == before["loop"]
    assert all(
        torch.equal(a, b) for a, b in zip(after["masters"]["masters"], before["masters"]["masters"], strict=True)
    )
    assert all(p.grad is None for p in [*loop.masters.params, *loop.masters.masters])


def test_a_model_of_nan_has_not_forgotten(tmp_path):
    loop = make_loop(tmp_path)
    with torch.no_grad():
        loop.runner.split.head.weight.fill_(math.nan)
    with pytest.raises(RunError, match=r"^step 0: the model's outputs are not numbers"):
        loop.start()


def test_bfloat16_moves_by_small_updates(tmp_path):
    recipe = Recipe(batch=4, retain_batch=2, lora=False, lr=1e-6)
    loop = make_loop(tmp_path, recipe=recipe, dtype=torch.bfloat16, lora=False)
    before = params(loop)
    assert before[0].dtype == torch.float32
    loop.start()
    for _ in range(3):
        loop.advance()
    moved = sum((a != b).sum().item() for a, b in zip(before, params(loop), strict=True))
    kept = sum(torch.equal(p, b.bfloat16()) for p, b in zip(loop.masters.params, before, strict=True))
    assert moved > 1000
    assert kept > 0


def test_only_the_adapters_drop(tmp_path):
    """The model's own dropout would give a KL above zero before the first update."""
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model = add_lora(model, rank=2, dropout=0.5)
    masters = MasterWeights(model.parameters())
    rows = make_rows(4)
    loop = UnlearningLoop(
        RowRunner(split_model(model), rows, pad_id=0, without_adapter=partial(adapter_disabled, model)),
        n_forget=2,
        n_retain=2,
        ids=["a", "b"],
        masc=settings(),
        recipe=Recipe(batch=2, retain_batch=2, targets=None),
        masters=masters,
        optimizer=torch.optim.SGD(masters.masters, lr=0.1),
        seed=0,
        log=RunLog(tmp_path / "log.jsonl"),
    )
    assert loop._update([0, 1]).retain_loss == pytest.approx(0.0, abs=1e-6)
    loop.updater._drop(False)
    assert not any(module.training for module in model.modules())
    loop.updater._drop(True)
    seen = [type(module).__name__ for module in model.modules() if module.training]
    assert set(seen) == {"Dropout"}
    assert len(seen) == len(loop.updater._dropouts) > 0


def test_copies_are_spared_until_the_rule_has_stopped(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, settings(spare_copies=True), Recipe(batch=4, retain_batch=2, lora_dropout=0.0))
    monkeypatch.setattr(loop.runner, "copied", lambda rows, starts: torch.ones(count(rows), dtype=torch.bool))

    def count(rows):
        return sum(loop.runner.tokens(row) for row in rows)

    examples = [Example(row, True) for row in range(N_FORGET)]
    counts = loop.objective.counts(examples)
    assert loop.objective.part(examples, counts, "main").forget_sum == 0.0
    assert loop.objective.part(examples, counts, "main").violation_sum > 0.0
    assert loop.objective.part(examples, counts, "rest").forget_sum > 0.0
