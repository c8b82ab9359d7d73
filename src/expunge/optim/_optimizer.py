"""The optimizer: arguments, parameter groups, states and saving. The equations are in `_schemes` and `_rules`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expunge.errors import UsageError
from expunge.optim import _sharding
from expunge.optim._diagnostics import Diagnostics, diagnostics
from expunge.optim._rules import Rule, is_number
from expunge.optim._schemes import Layout, Scheme, check_fit, count_keys, layouts, term
from expunge.optim._settings import as_rule, as_scheme, as_storage, learning_rates
from expunge.optim._storage import Codec, FloatCodec, Storage, stored
from expunge.optim._update import CUDA_PIECE, PIECE_PER_THREAD, Item, Kept, can_join, join_key, update, update_together
from expunge.optim._workspace import Workspace

DEFAULT_OBJECTIVE = "default"
_GROUP_OPTIONS = {"lr", "weight_decay", "lr_scale"}
_OPTIMIZER_OPTIONS = {
    "alpha", "base_betas", "betas", "eps", "foreach", "maximize", "momentum", "nesterov", "rule", "scheme", "storage"
}  # fmt: skip


class Plan(NamedTuple):
    """What is decided about a parameter once: by its name, its full shape and its dtype.

    Attributes:
        rule: the rule that updates it.
        codec: how its averages are kept.
        lr_factor: factor on its learning rate.
        place: its place among the parameters; it selects random numbers.
    """

    rule: Rule
    codec: Codec
    lr_factor: float
    place: int


class ObjectiveOptimizer(torch.optim.Optimizer):
    """An optimizer for several named objectives that take turns: scheme × rule × storage.

    The *scheme* says how the running averages of the gradient are shared between objectives, the *rule* which averages
    there are and how they become a direction, the *storage* in how many bits they are kept. Otherwise an ordinary
    `torch.optim.Optimizer`: parameter groups, schedulers, closures, clipping, `state_dict`, sharded parameters.

    w ← (1 − lr·λ)·w − lr·d; d is the rule's direction for the objective that `step` is told. Updates are computed in
    float32, or float64 for float64 weights. A bfloat16 weight loses steps below 1/256 of its value: train a float32
    master copy, or set `param_rounding="stochastic"`.

    Args:
        params: parameters, groups, or named parameters (`model.named_parameters()`). Names let patterns choose; without
            them the shape decides. A tied parameter is updated once.
        lr: learning rate, 0 or more; or one for each objective, `{"forget": 1e-5, "retain": 2e-5}`, all above 0. A
            group's "lr" is then the first of them and "lr_scale" holds each one's ratio to it, so that a scheduler
            moves all in proportion. Objectives without a learning rate are refused.
        scheme: "shared", "decoupled", "base_delta", or `Shared`, `Decoupled`, `BaseDelta` with options.
        rule: "adamw", "adam", "sgd", "muon", "lion", "rmsprop", or a `Rule` with options, also one of your own.
        storage: "32bit", "bf16", "8bit", "4bit", or a `Storage` with options.
        weight_decay: λ, 0 or more; decoupled, once an update (`Adam`, and `l2=True` elsewhere: added to the gradient).
        foreach: None for the fastest way: cache-sized pieces on CPUs, `torch._foreach` on CUDA where it can. False:
            one tensor at a time. True: `torch._foreach` for all, refused where it cannot be.
        param_rounding: "nearest" or "stochastic", how bfloat16 weights are written.

    Raises:
        UsageError: (a `ValueError`) an argument is out of range, unknown, or without effect.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = ObjectiveOptimizer([weight], lr=0.1, scheme="decoupled")
        >>> for objective, sign in (("forget", 1.0), ("retain", -1.0)):
        ...     weight.grad = torch.full((2,), sign)
        ...     optimizer.step(objective=objective)
        >>> sorted(optimizer.state[weight])[:2], optimizer.state[weight]["exp_avg/forget"].tolist()
        (['exp_avg/forget', 'exp_avg/retain'], [0.10000000149011612, 0.10000000149011612])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Mapping[str, float],
        *,
        scheme: str | Scheme = "base_delta",
        rule: str | Rule = "adamw",
        storage: str | Storage = "32bit",
        weight_decay: float = 0.0,
        foreach: bool | None = None,
        param_rounding: str = "nearest",
    ) -> None:
        self.scheme, self.rule, self.storage = as_scheme(scheme), as_rule(rule), as_storage(storage)
        check_fit(self.scheme, self.rule)
        if foreach not in (None, True, False):
            raise UsageError(f"foreach: found {foreach!r}, accepted is True, False or None")
        if param_rounding not in ("nearest", "stochastic"):
            raise UsageError(f"param_rounding: found {param_rounding!r}, accepted is 'nearest' or 'stochastic'")
        self.foreach, self.param_rounding = foreach, param_rounding
        self.objective = DEFAULT_OBJECTIVE
        self._plans: dict[Tensor, Plan] = {}
        self._rooms: dict[tuple[torch.device, torch.dtype], Workspace] = {}
        base, scale = learning_rates(lr)
        layout = f"{self.scheme.name}/{self.scheme.split} {self.rule.name} {self.storage.kind}/{self.storage.block}"
        defaults = {"lr": base, "lr_scale": scale, "weight_decay": weight_decay, "layout": layout}
        super().__init__(params, defaults)
        self._check_effects()

    # -- groups --------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with a learning rate or weight decay of their own.

        Args:
            param_group: "params" and, where they differ from the optimizer's, "lr" (a number or one for each
                objective), "lr_scale", "weight_decay".

        Raises:
            UsageError: a value is out of range, or an option is one of the whole optimizer.
        """
        group = dict(param_group)
        misplaced = sorted(_OPTIMIZER_OPTIONS & set(group))
        if misplaced:
            accepted = ", ".join(sorted(_GROUP_OPTIONS))
            raise UsageError(f"{misplaced[0]}: found in a parameter group, where accepted is {accepted}")
        if isinstance(group.get("lr"), Mapping):
            group["lr"], group["lr_scale"] = learning_rates(group["lr"])
        for option in ("lr", "weight_decay"):
            value = group.get(option, self.defaults[option])
            if not is_number(value) or value < 0:
                raise UsageError(f"{option}: found {value!r}, accepted is a number from 0")
        group["lr_scale"] = dict(group.get("lr_scale", self.defaults["lr_scale"]))
        for objective, value in group["lr_scale"].items():
            if not is_number(value) or value <= 0:
                raise UsageError(f"lr_scale of {objective!r}: found {value!r}, accepted is a number above 0")
        params = group.get("params", [])
        group["params"] = params if isinstance(params, Tensor) else _once(params)
        super().add_param_group(group)
        try:
            for name, param in _named(self.param_groups[-1]):
                self._check_parameter(name, param)
        except UsageError:
            self.param_groups.pop()
            raise

    def _check_parameter(self, name: str | None, param: Tensor) -> None:
        if not param.is_floating_point():
            raise UsageError(f"parameter {name or tuple(param.shape)}: found {param.dtype}, accepted is floating")
        plan = self._plan_for(name, param, 0)
        quantised = not isinstance(plan.codec, FloatCodec)
        if param.dtype == torch.float64 and quantised:
            raise UsageError(f"storage: found {self.storage.kind!r} with a float64 parameter, accepted is '32bit'")
        if self.foreach and (quantised or not plan.rule.foreach):
            what = f"storage {self.storage.kind!r}" if quantised else f"rule {plan.rule.name!r}"
            raise UsageError(f"foreach: found True with {what}, which is updated one by one; accepted is None")

    def _check_effects(self) -> None:
        named = [(name, param) for group in self.param_groups for name, param in _named(group)]
        self.storage.check_patterns(name for name, _ in named)
        if self.param_rounding == "stochastic" and not any(param.dtype == torch.bfloat16 for _, param in named):
            raise UsageError("param_rounding: found 'stochastic' without a bfloat16 parameter, where it has no effect")

    def _plan_for(self, name: str | None, param: Tensor, place: int) -> Plan:
        rule = self.rule.select(name, param.shape)
        return Plan(rule, self.storage.codec(name, param.shape), self.rule.lr_factor(rule), place)

    def plan(self, param: Tensor) -> Plan:
        """What is decided about one parameter of the optimizer."""
        if param not in self._plans:
            named = [pair for group in self.param_groups for pair in _named(group)]
            self._plans = {each: self._plan_for(name, each, place) for place, (name, each) in enumerate(named)}
        return self._plans[param]

    # -- update --------------------------------------------------------------------------------------------------------

    def use(self, objective: str) -> None:
        """Name the objective of the steps that follow without naming one.

        For wrappers whose `step` takes no further argument (accelerate): `optimizer.optimizer.use("forget")`.
        """
        self.objective = _check_objective(objective)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, objective: str | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients; called once, with gradients enabled.
            objective: whose gradient it is; None for the one of `use`, "default" where that was not called either.

        Returns:
            What the closure returned, else None.

        Raises:
            UsageError: the objective has no learning rate, or a gradient is sparse or complex. Nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        name = self.objective if objective is None else _check_objective(objective)
        rates = [_rate(group, name) for group in self.param_groups]
        for group in self.param_groups:
            for param in group["params"]:
                _check_gradient(param)
        items: list[Item] = []
        for group, rate in zip(self.param_groups, rates, strict=True):
            for param in group["params"]:
                if param.grad is not None:
                    items.append(self._item(param, name, rate, float(group["weight_decay"])))
        self._run(items)
        return loss

    def _item(self, param: Tensor, objective: str, rate: float, weight_decay: float) -> Item:
        plan, state = self.plan(param), self.state[param]
        found = layouts(self.scheme, plan.rule, objective)
        self._make_states(param, plan, found)
        kept = []
        for layout in found:
            base_count = 0 if layout.base is None else int(state["step"].item())
            own_count = int(state[layout.count_key].item())
            numbers = term(self.scheme, layout, own_count, base_count, plan.codec.resolution)
            base = None if layout.base is None else stored(state, layout.base.key, layout.base.signed)
            kept.append(Kept(layout.statistic, numbers, stored(state, layout.own.key, layout.own.signed), base))
        updates = 0
        for key in count_keys(found):
            updates = updates * 1_000_003 + int(state[key].add_(1).item())
        grad = param.grad
        assert grad is not None

        def finish(direction: Tensor) -> Tensor:
            return _sharding.cut(plan.rule.finish(_sharding.gather(direction, param)), param)

        return Item(
            param=_sharding.local(param),
            grad=_sharding.local(grad),
            rule=plan.rule,
            codec=plan.codec,
            kept=tuple(kept),
            lr=rate * plan.lr_factor,
            weight_decay=weight_decay,
            draw=hash((plan.place, updates)),
            round_param=self.param_rounding == "stochastic",
            finish=finish if plan.rule.matrix else None,
        )

    def _make_states(self, param: Tensor, plan: Plan, found: tuple[Layout, ...]) -> None:
        state = self.state[param]
        for key in count_keys(found):
            if key not in state:
                state[key] = torch.tensor(0.0)
        for layout in found:
            for cell in (layout.own, layout.base):
                if cell is None or cell.key in state:
                    continue
                own = _sharding.local(param)
                for suffix, (shape, dtype) in plan.codec.shapes(own.shape, param.dtype).items():
                    zeros = torch.zeros(shape, dtype=dtype, device=own.device)
                    # Codes need no particular start: a block whose scale is zero holds zeros.
                    like_param = suffix == "" and zeros.is_floating_point()
                    state[cell.key + suffix] = _sharding.beside(zeros, param) if like_param else zeros

    def _run(self, items: list[Item]) -> None:
        together: dict[tuple[object, ...], list[Item]] = {}
        for item in items:
            wanted = self.foreach is True or (self.foreach is None and item.param.device.type == "cuda")
            if wanted and can_join(item):
                together.setdefault(join_key(item), []).append(item)
                continue
            key = (item.param.device, item.dtype)
            room = self._rooms.setdefault(key, Workspace(*key))
            piece = None if self.foreach is False else _piece(item.param.device)
            update(item, room, piece)
        for joined in together.values():
            update_together(joined)

    def diagnostics(self) -> Diagnostics:
        """How the objectives' averaged gradients lie to each other, from the states; see `Diagnostics`.

        Where parameters are sharded every process must call this.
        """
        return diagnostics(self)

    # -- saving --------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, every tensor in its own dtype, byte for byte.

        Args:
            state_dict: from `state_dict()` of an optimizer with the same scheme, rule and storage.

        Raises:
            UsageError: it was saved by another scheme, rule or storage.
            ValueError: the parameter groups do not fit.
        """
        # PyTorch casts every state to its parameter's dtype. Wrapped ones pass through as they are; the hook runs after
        # the user's hooks, and `__setstate__`, which unwraps, before them.
        handle = self.register_load_state_dict_pre_hook(_wrap_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _OWN_ATTRIBUTES}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._rooms = {}, {}
        for param, saved in self.state.items():
            for key, value in saved.items():
                if isinstance(value, _AsSaved):
                    # Counts stay on the CPU, where they are read in every update.
                    device = torch.device("cpu") if value.tensor.dim() == 0 else param.device
                    saved[key] = value.tensor.detach().to(device, copy=True)


_OWN_ATTRIBUTES = ("scheme", "rule", "storage", "foreach", "param_rounding", "objective")


class _AsSaved:
    """A tensor that PyTorch's casting does not see."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _wrap_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        if saved.get("layout") != own["layout"]:
            raise UsageError(
                f"state_dict: found one saved with {saved.get('layout')!r}, accepted is one with {own['layout']!r}"
            )
    wrapped = {
        place: {key: _AsSaved(value) if isinstance(value, Tensor) else value for key, value in saved.items()}
        for place, saved in state_dict["state"].items()
    }
    return {**state_dict, "state": wrapped}


def _once(params: Iterable[Any]) -> list[Any]:
    """The parameters without repetitions; a tied one keeps its first name."""
    if isinstance(params, set):
        raise UsageError("params: found a set, accepted is an iterable with a fixed order")
    seen: set[int] = set()
    kept = []
    for entry in params:
        param = entry[1] if isinstance(entry, tuple) else entry
        if id(param) not in seen:
            seen.add(id(param))
            kept.append(entry)
    return kept


def _named(group: Mapping[str, Any]) -> list[tuple[str | None, Tensor]]:
    names = group.get("param_names") or [None] * len(group["params"])
    return list(zip(names, group["params"], strict=True))


def _check_objective(objective: object) -> str:
    if not isinstance(objective, str) or not objective:
        raise UsageError(f"objective: found {objective!r}, accepted is a name")
    return objective


def _rate(group: Mapping[str, Any], objective: str) -> float:
    scale = group["lr_scale"]
    if scale and objective not in scale:
        raise UsageError(f"objective: found {objective!r}, accepted is one with a learning rate: {', '.join(scale)}")
    return float(group["lr"]) * scale.get(objective, 1.0)


def _check_gradient(param: Tensor) -> None:
    grad = param.grad
    if grad is None:
        return
    if grad.layout != torch.strided:
        raise UsageError(f"gradient of a parameter {tuple(param.shape)}: found {grad.layout}, accepted is dense")
    if not _sharding.same_placement(grad, param):
        raise UsageError(f"gradient of a parameter {tuple(param.shape)}: sharded otherwise than its parameter")


def _piece(device: torch.device) -> int:
    return PIECE_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else CUDA_PIECE
