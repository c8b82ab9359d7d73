"""Arguments of the optimizer: names become objects, values are checked."""

from __future__ import annotations

from collections.abc import Mapping

from expunge.errors import UsageError
from expunge.optim._muon import Muon
from expunge.optim._rules import SGD, Adam, AdamW, Lion, RMSprop, Rule, is_number
from expunge.optim._schemes import SCHEMES, BaseDelta, Decoupled, Scheme, Shared
from expunge.optim._storage import KINDS, Storage

RULES: dict[str, type[Rule]] = {
    "adam": Adam,
    "adamw": AdamW,
    "lion": Lion,
    "muon": Muon,
    "rmsprop": RMSprop,
    "sgd": SGD,
}


def as_rule(rule: str | Rule) -> Rule:
    """A rule from its name, or as it is.

    Raises:
        UsageError: an unknown name, or no rule.
    """
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]()
    raise UsageError(f"rule: found {rule!r}, accepted is one of {', '.join(sorted(RULES))}, or a Rule")


def as_scheme(scheme: str | Scheme) -> Scheme:
    """A scheme from its name, or as it is.

    Raises:
        UsageError: an unknown name, or no scheme.
    """
    if isinstance(scheme, Shared | Decoupled | BaseDelta):
        return scheme
    if isinstance(scheme, str) and scheme in SCHEMES:
        return SCHEMES[scheme]()
    accepted = ", ".join(sorted(SCHEMES))
    raise UsageError(f"scheme: found {scheme!r}, accepted is one of {accepted}, or Shared, Decoupled, BaseDelta")


def as_storage(storage: str | Storage) -> Storage:
    """A storage from its name, or as it is.

    Raises:
        UsageError: an unknown name, or no storage.
    """
    if isinstance(storage, Storage):
        return storage
    if isinstance(storage, str) and storage in KINDS:
        return Storage(storage)
    raise UsageError(f"storage: found {storage!r}, accepted is one of {', '.join(KINDS)}, or a Storage")


def learning_rates(lr: object) -> tuple[float, dict[str, float]]:
    """A learning rate and each objective's ratio to it (empty where one number serves all).

    Args:
        lr: a number from 0, or a mapping from objective to a number above 0.

    Returns:
        The number, or the mapping's first value; and the ratios.

    Raises:
        UsageError: anything else.
    """
    if isinstance(lr, Mapping):
        if not lr:
            raise UsageError("lr: found an empty mapping, accepted is a learning rate for each objective")
        for objective, value in lr.items():
            if not isinstance(objective, str) or not objective:
                raise UsageError(f"lr: found the objective {objective!r}, accepted is a name")
            if not is_number(value) or value <= 0:
                raise UsageError(f"lr of {objective!r}: found {value!r}, accepted is a number above 0")
        base = float(next(iter(lr.values())))
        return base, {objective: float(value) / base for objective, value in lr.items()}
    if not is_number(lr) or lr < 0:  # type: ignore[operator]
        raise UsageError(f"lr: found {lr!r}, accepted is a number from 0, or one above 0 for each objective")
    return float(lr), {}  # type: ignore[arg-type]
