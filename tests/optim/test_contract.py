"""One contract for all combinations: what every optimizer of the room must do."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from tests.optim.common import RULES, STORAGES, Halved, assert_same_state, make, run

from expunge.errors import UsageError
from expunge.optim import SCHEMES, SGD, Alternate, DualOptimPlus, Joint, ObjectiveOptimizer, Storage

MATRIX = list(itertools.product(sorted(SCHEMES), sorted(RULES), STORAGES))


matrix = pytest.mark.parametrize(("scheme", "rule", "storage"), MATRIX)


@matrix
def test_saved_through_disk_and_resumed_is_never_stopped(scheme, rule, storage):
    for dtype in (torch.float32, torch.bfloat16):
        straight, params = make(scheme, rule, storage, dtype)
        run(straight, params, 6)
        half, half_params = make(scheme, rule, storage, dtype)
        run(half, half_params, 3)
        disk = io.BytesIO()
        torch.save({"optimizer": half.state_dict(), "params": [param.detach() for param in half_params]}, disk)
        disk.seek(0)
        loaded = torch.load(disk, weights_only=True)
        other, other_params = make(scheme, rule, storage, dtype)
        with torch.no_grad():
            for param, value in zip(other_params, loaded["params"], strict=True):
                param.copy_(value)
        other.load_state_dict(loaded["optimizer"])
        assert_same_state(half.state_dict()["state"], other.state_dict()["state"])
        run(other, other_params, 3, first=3)
        assert_same_state(straight.state_dict()["state"], other.state_dict()["state"])
        for left, right in zip(params, other_params, strict=True):
            assert torch.equal(left, right)


@matrix
def test_zero_gradients_give_finite_updates_and_no_movement(scheme, rule, storage):
    optimizer, params = make(scheme, rule, storage)
    before = [param.detach().clone() for param in params]
    for objective in ("forget", "retain", "forget"):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step(objective=objective)
    for param, start in zip(params, before, strict=True):
        assert torch.equal(param, start)


@matrix
def test_a_parameter_that_one_objective_does_not_use_is_left_alone(scheme, rule, storage):
    optimizer, params = make(scheme, rule, storage)
    run(optimizer, params, 2)
    before, state = params[0].detach().clone(), copy.deepcopy(optimizer.state[params[0]])
    params[0].grad = None
    params[1].grad = torch.ones_like(params[1])
    optimizer.step(objective="forget")
    assert torch.equal(params[0], before)
    assert_same_state({0: state}, {0: optimizer.state[params[0]]})
    assert params[0].grad is None


@matrix
def test_a_convex_problem_with_a_known_pareto_point(scheme, rule, storage):
    # forget: |w − a|²/2, retain: |w − b|²/2. All points between a and b are Pareto-optimal; turns of equal length end
    # near the middle, where the gradients oppose with equal size.
    torch.manual_seed(1)
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    weight = torch.nn.Parameter(torch.full((16, 16), 3.0))
    optimizer = ObjectiveOptimizer([("w", weight)], lr=0.1, scheme=scheme, rule=RULES[rule], storage=STORAGES[storage])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    # SGD's direction has ten times the gradient's length; Muon's moves every singular value by 0.8, the largest is 48.
    rate = {"sgd": 0.02, "nesterov": 0.02, "muon": 2.0}.get(rule, 0.1)
    optimizer.param_groups[0]["lr"] = schedule.base_lrs[0] = rate
    middle = (a + b) / 2
    start = (weight - middle).norm().item()
    for step in range(300):
        objective, goal = (("forget", a), ("retain", b))[step % 2]
        weight.grad = weight.detach() - goal
        optimizer.step(objective=objective)
        schedule.step()
    # Sign-like steps of different size for the two objectives leave a distance along a–b; none leaves the segment far.
    assert (weight - middle).norm().item() < 0.2 * start


@matrix
def test_the_gradient_is_not_touched_and_runs_repeat(scheme, rule, storage):
    ends = []
    for _ in range(2):
        optimizer, params = make(scheme, rule, storage, weight_decay=0.1)
        run(optimizer, params, 3)
        grads = [param.grad.clone() for param in params]
        optimizer.step(objective="forget")
        assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))
        ends.append([param.detach().clone() for param in params])
    assert all(torch.equal(left, right) for left, right in zip(*ends, strict=True))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_all_ways_of_computing_agree(scheme, rule, monkeypatch):
    ends = {}
    for foreach in (None, False, True):
        # Small pieces: several a tensor, the last one shorter.
        monkeypatch.setattr("expunge.optim._optimizer.PIECE_PER_THREAD", 100)
        optimizer, params = make(scheme, rule, weight_decay=0.1, foreach=foreach)
        run(optimizer, params, 12)
        ends[foreach] = params, optimizer.state_dict()["state"]
    for foreach in (False, True):
        for left, right in zip(ends[None][0], ends[foreach][0], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
        for place, saved in ends[None][1].items():
            for key, value in saved.items():
                torch.testing.assert_close(value, ends[foreach][1][place][key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("storage", ["bf16", "8bit", "4bit"])
def test_pieces_do_not_change_quantised_states(storage, monkeypatch):
    ends = []
    for piece in (256, 1 << 16):
        monkeypatch.setattr("expunge.optim._optimizer.PIECE_PER_THREAD", piece)
        made = Storage(storage, min_size=0, rounding="nearest")
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 30 * 40).view(30, 40))
        optimizer = DualOptimPlus([("w", weight)], lr=0.01, storage=made)
        run(optimizer, [weight], 5)
        ends.append((weight, optimizer.state_dict()["state"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert_same_state(ends[0][1], ends[1][1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_states_have_their_own_dtype(dtype):
    optimizer, params = make(dtype=dtype)
    run(optimizer, params, 4)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert {value.dtype for value in optimizer.state[params[0]].values() if value.dim()} == {expected}
    assert all(param.isfinite().all() for param in params)


def test_groups_have_a_learning_rate_and_decay_of_their_own():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = ObjectiveOptimizer(
        [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.2, "weight_decay": 0.5}],
        lr=0.1,
        rule=SGD(momentum=0.0),
        scheme="shared",
    )
    optimizer.add_param_group({"params": weights[2], "lr": 0.3})
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [weight[0].item() for weight in weights] == pytest.approx([0.9, 0.9 - 0.2, 0.7])


def test_each_objective_can_have_its_own_learning_rate_and_a_scheduler_moves_both():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = ObjectiveOptimizer([weight], lr={"forget": 0.1, "retain": 0.4}, rule=SGD(momentum=0.0), scheme="shared")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    for objective in ("forget", "retain"):
        before = weight.item()
        weight.grad = torch.ones(1)
        optimizer.step(objective=objective)
        seen.append(before - weight.item())
        schedule.step()
    assert seen == pytest.approx([0.1, 0.4 * 0.5])
    with pytest.raises(UsageError, match="found 'other', accepted is one with a learning rate: forget, retain"):
        optimizer.step(objective="other")


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
    ],
)
def test_schedulers(schedule):
    optimizer, params = make()
    moves = schedule(optimizer)
    before = optimizer.param_groups[0]["lr"]
    for step in range(3):
        run(optimizer, params, 1, first=step)
        moves.step()
    assert optimizer.param_groups[0]["lr"] != before


def test_closures_and_clipping():
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = Joint([weight], lr=0.1, rule=SGD(momentum=0.0))

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert weight.item() == pytest.approx(2.9)
    assert optimizer.step() is None


def test_the_objective_is_named_once_for_wrappers():
    optimizer, params = make()
    optimizer.use("retain")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step(objective="forget")
    assert {"step/forget", "step/retain"} <= set(optimizer.state[params[0]])
    plain, plain_params = make()
    for param in plain_params:
        param.grad = torch.ones_like(param)
    plain.step()
    assert "step/default" in plain.state[plain_params[0]]


def test_a_tied_parameter_is_updated_once():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Alternate([("embed", weight), ("head", weight)], lr=0.1, rule=SGD(momentum=0.0))
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(-0.1)
    assert optimizer.param_groups[0]["param_names"] == ["embed"]


def test_weights_that_are_not_contiguous():
    torch.manual_seed(0)
    values = torch.randn(6, 5)
    ends = []
    for weight in (torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.T.contiguous().T)):
        optimizer = DualOptimPlus([weight], lr=0.1)
        run(optimizer, [weight], 4)
        ends.append(weight.detach())
    assert not ends[1].is_contiguous()
    assert torch.equal(*ends)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_and_pickles_go_on_alike(clone):
    optimizer, params = make(storage="8bit")
    run(optimizer, params, 3)
    other = clone(optimizer)
    other_params = other.param_groups[0]["params"]
    run(optimizer, params, 2, first=3)
    run(other, other_params, 2, first=3)
    assert all(torch.equal(left, right) for left, right in zip(params, other_params, strict=True))


def test_hooks_of_the_user_see_states_as_they_are():
    optimizer, params = make()
    run(optimizer, params, 2)
    saved = optimizer.state_dict()
    seen = []
    other, _ = make()
    other.register_load_state_dict_pre_hook(
        lambda _, state_dict: seen.append(type(state_dict["state"][0]["step"]).__name__)
    )
    other.register_load_state_dict_post_hook(
        lambda loaded: seen.append(type(loaded.state_dict()["state"][0]["step"]).__name__)
    )
    other.load_state_dict(saved)
    assert seen == ["Tensor", "Tensor"]
    saved["state"][0]["exp_avg"].fill_(7.0)
    assert other.state_dict()["state"][0]["exp_avg"].max() < 7.0


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_users_rule_with_every_scheme_and_storage(scheme, storage):
    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = ObjectiveOptimizer([("w", weight)], lr=0.1, scheme=scheme, rule=Halved(), storage=STORAGES[storage])
    for objective in ("a", "b"):
        weight.grad = torch.full((8, 8), 2.0)
        optimizer.step(objective=objective)
    assert torch.allclose(weight, torch.full((8, 8), 0.9), atol=1e-2)


@pytest.mark.parametrize("storage", list(STORAGES))
def test_states_survive_safetensors(storage, tmp_path):
    files = pytest.importorskip("safetensors.torch")
    optimizer, params = make(storage=storage, dtype=torch.bfloat16)
    run(optimizer, params, 3)
    saved = optimizer.state_dict()
    flat = {f"{place}|{key}": value for place, state in saved["state"].items() for key, value in state.items()}
    files.save_file(flat, tmp_path / "state.safetensors")
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in files.load_file(tmp_path / "state.safetensors").items():
        place, key = name.split("|")
        state.setdefault(int(place), {})[key] = value
    other, _ = make(storage=storage, dtype=torch.bfloat16)
    other.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    assert_same_state(saved["state"], {place: other.state_dict()["state"][place] for place in saved["state"]})


def test_accelerate_steps_the_named_objective():
    accelerate = pytest.importorskip("accelerate")
    weight = torch.nn.Linear(2, 2)
    wrapped = accelerate.Accelerator(cpu=True).prepare(DualOptimPlus(weight.parameters(), lr=0.1))
    for objective in ("forget", "retain"):
        wrapped.optimizer.use(objective)
        weight(torch.ones(1, 2)).sum().backward()
        wrapped.step()
        wrapped.zero_grad()
    assert {"step/forget", "step/retain"} <= set(wrapped.optimizer.state[weight.weight])
