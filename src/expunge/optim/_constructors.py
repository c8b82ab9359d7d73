"""Short constructors: the optimizers by the names they are known under."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from expunge.errors import UsageError
from expunge.optim._muon import Muon
from expunge.optim._optimizer import ObjectiveOptimizer
from expunge.optim._rules import SGD, Adam, AdamW, Lion, RMSprop, Rule
from expunge.optim._schemes import BaseDelta, Decoupled, Shared
from expunge.optim._settings import as_rule
from expunge.optim._storage import Storage

_BETAS = (0.9, 0.95)
_EPS = 1e-8
LearningRate = float | Mapping[str, float]


def DualOptimPlus(
    params: Iterable[Any],
    lr: LearningRate,
    betas: tuple[float, float] = _BETAS,
    base_betas: tuple[float, float] = _BETAS,
    eps: float = _EPS,
    weight_decay: float = 0.0,
    rule: str | Rule = "adamw",
    storage: str | Storage = "32bit",
) -> ObjectiveOptimizer:
    """Base + delta: one base average for all objectives and a delta for each (`BaseDelta`).

    Args:
        params: parameters, groups or named parameters.
        lr: learning rate, or one for each objective.
        betas: decays of the objectives' first and second moment, each in [0, 1). What a named rule takes of them:
            adam, adamw, lion both (for Lion its own two); sgd and muon the first as momentum (muon both for the rest);
            rmsprop the second.
        base_betas: decays of the base's first and second moment.
        eps: ε of adam, adamw, rmsprop and of muon's companion.
        weight_decay: λ, 0 or more.
        rule: name, or a `Rule`, which brings its own betas and eps.
        storage: name, or a `Storage`.

    Returns:
        The optimizer; `step(objective=...)` says whose gradient it is.

    Raises:
        UsageError: a value is out of range, or has no effect with the rule.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = DualOptimPlus([weight], lr=0.1)
        >>> weight.grad = torch.ones(3)
        >>> optimizer.step(objective="forget")
        >>> [round(value, 4) for value in weight.tolist()]
        [0.9, 0.9, 0.9]

    References:
        Zhong, Li, Guo, Liu, "DualOptim+: Bridging Shared and Decoupled Optimizer States for Better Machine Unlearning
        in Large Language Models", ICML 2026, arXiv 2605.21539.
    """
    built = _rule(rule, betas, eps)
    moments = {statistic.moment for member in built.members for statistic in member.statistics}
    for moment in (1, 2):
        if moment not in moments and tuple(base_betas)[moment - 1 :][:1] != (_BETAS[moment - 1],):
            raise UsageError(f"base_betas: found {base_betas!r}, but rule {built.name!r} has no moment {moment}")
    return ObjectiveOptimizer(
        params, lr, scheme=BaseDelta(base_betas=base_betas), rule=built, storage=storage, weight_decay=weight_decay
    )


def DualOptim(
    params: Iterable[Any],
    lr: LearningRate,
    betas: tuple[float, float] = _BETAS,
    eps: float = _EPS,
    weight_decay: float = 0.0,
    rule: str | Rule = "adamw",
    storage: str | Storage = "32bit",
) -> ObjectiveOptimizer:
    """A state for every objective (`Decoupled`). Arguments as of `DualOptimPlus`.

    References:
        Zhong et al., "DualOptim", 2025, arXiv 2504.15827.
    """
    built = _rule(rule, betas, eps)
    return ObjectiveOptimizer(params, lr, scheme=Decoupled(), rule=built, storage=storage, weight_decay=weight_decay)


def Alternate(
    params: Iterable[Any],
    lr: LearningRate,
    betas: tuple[float, float] = _BETAS,
    eps: float = _EPS,
    weight_decay: float = 0.0,
    rule: str | Rule = "adamw",
    storage: str | Storage = "32bit",
) -> ObjectiveOptimizer:
    """One state for all objectives, which take turns (`Shared`). Arguments as of `DualOptimPlus`."""
    built = _rule(rule, betas, eps)
    return ObjectiveOptimizer(params, lr, scheme=Shared(), rule=built, storage=storage, weight_decay=weight_decay)


#: One state and one objective: the gradient of the summed losses. The same optimizer as `Alternate`; what differs is
#: that `step()` is called once, without a name, on the sum.
Joint = Alternate


def _rule(rule: str | Rule, betas: tuple[float, float], eps: float) -> Rule:
    """A named rule with what it takes of betas and eps; UsageError where a changed one has no effect."""
    built = as_rule(rule)
    if isinstance(rule, Rule):
        _refuse_changed(rule, betas, eps, (0, 1), True)
        return built
    if rule == "adam":
        return Adam(betas, eps)
    if rule == "adamw":
        return AdamW(betas, eps)
    if rule == "muon":
        companion = AdamW(betas, eps)
        return Muon(momentum=companion.betas[0], other=companion)
    if rule == "lion":
        _refuse_changed(rule, betas, eps, (), True)
        return Lion(betas)
    if rule == "sgd":
        _refuse_changed(rule, betas, eps, (1,), True)
        return SGD(momentum=betas[0])
    _refuse_changed(rule, betas, eps, (0,), False)
    return RMSprop(alpha=betas[1], eps=eps)


def _refuse_changed(
    rule: str | Rule, betas: tuple[float, float], eps: float, unused: tuple[int, ...], eps_unused: bool
) -> None:
    name = rule if isinstance(rule, str) else rule.name
    for place in unused:
        if betas[place] != _BETAS[place]:
            raise UsageError(f"betas: found {betas!r}, but rule {name!r} has no use for its number {place + 1}")
    if eps_unused and eps != _EPS:
        raise UsageError(f"eps: found {eps!r}, but rule {name!r} has no use for it")
