"""Methods by name: pairs of a forget and a retain term with the settings of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from expunge.errors import UsageError
from expunge.objectives._methods import PRESETS
from expunge.objectives._registry import FORGET_TERMS, RETAIN_TERMS
from expunge.objectives._terms import Option, Term, from_zero

Number = float | int | None
_WEIGHT = from_zero(1.0)
# Options of the methods that are no training loop.
_ARITHMETIC: Mapping[str, Mapping[str, Option]] = MappingProxyType({"task-vector": {"scale": from_zero(1.0)}})


@dataclass(frozen=True)
class Recipe:
    """How a paper trains, as plain data; None where it does not say, or no single value holds.

    Attributes:
        epochs: passes over the forget set.
        lr: learning rate.
        batch: forget examples per update, over all devices and accumulation steps.
        weight_decay: of AdamW.
        skip_first: labelled tokens at the start of each answer that the paper leaves out of the forget loss.
        source: where the numbers stand.
    """

    epochs: int | None = None
    lr: float | None = None
    batch: int | None = None
    weight_decay: float | None = None
    skip_first: int = 0
    source: str = ""


@dataclass(frozen=True)
class MethodSpec:
    """A method: what is minimised, and with which settings.

    L = forget_weight · L_forget + retain_weight · L_retain

    Attributes:
        name: exact name, or "forget=NAME,retain=NAME".
        forget: name of the forget term; of the arithmetic for methods of kind "weights".
        retain: name of the retain term.
        forget_weight: weight of the forget term, 0 or more.
        retain_weight: weight of the retain term, 0 or more.
        forget_options: all options of the forget term, checked.
        retain_options: all options of the retain term, checked.
        reference: paper.
        recipe: how the paper trains.
        kind: "loop" for training, "weights" for arithmetic on weights.
    """

    name: str
    forget: str
    retain: str = "none"
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    forget_options: Mapping[str, Number] = field(default_factory=dict, hash=False)
    retain_options: Mapping[str, Number] = field(default_factory=dict, hash=False)
    reference: str = ""
    recipe: Recipe = Recipe()
    kind: Literal["loop", "weights"] = "loop"

    def __post_init__(self) -> None:
        """Check names, weights and options, and fill in the defaults."""
        for name in ("forget_weight", "retain_weight"):
            object.__setattr__(self, name, _WEIGHT.parse(name, getattr(self, name)))
        forget, retain = _options_of(self.kind, self.forget, self.retain)
        for side, known in (("forget", forget), ("retain", retain)):
            given = getattr(self, f"{side}_options")
            for name in given:
                if name not in known:
                    raise UsageError(f"{side}.{name}: found an unknown option, accepted is {_listed(known)}")
            values = {name: option.parse(name, given.get(name, option.default)) for name, option in known.items()}
            object.__setattr__(self, f"{side}_options", MappingProxyType(values))

    @property
    def forget_term(self) -> Term:
        """The forget term.

        Raises:
            ValueError: the method is no training loop.
        """
        if self.kind != "loop":
            raise ValueError(f"{self.name}: found arithmetic on weights, accepted is a method with a training loop")
        return FORGET_TERMS[self.forget]

    @property
    def retain_term(self) -> Term:
        """The retain term; `none` where the method has none."""
        return RETAIN_TERMS[self.retain]

    @property
    def formula(self) -> str:
        """What is minimised, in one line, with weights and options as they are."""
        if self.kind != "loop":
            return f"θ − s · (θ_tuned − θ), s = {self.forget_options['scale']:g}"
        parts = [(self.forget_weight, self.forget_term)]
        if self.retain_term.needs:
            parts.append((self.retain_weight, self.retain_term))
        text = " + ".join(f"{'' if weight == 1 else f'{weight:g} · '}[{term.formula}]" for weight, term in parts)
        values = {f"forget.{name}": value for name, value in self.forget_options.items()}
        values |= {f"retain.{name}": value for name, value in self.retain_options.items()}
        told = ", ".join(f"{name} = {'none' if value is None else f'{value:g}'}" for name, value in values.items())
        return f"{text}; {told}" if told else text

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, for the record of a run."""
        plain = replace(self, forget_options={}, retain_options={})
        for side in ("forget_options", "retain_options"):
            object.__setattr__(plain, side, dict(getattr(self, side)))
        return asdict(plain) | {"formula": self.formula}


def parse_method(text: str, options: Mapping[str, object] | None = None) -> MethodSpec:
    """Read a method from its name, or from the names of its two terms, and change its settings.

    Args:
        text: an exact name of `NAMED_METHODS`, or "forget=NAME,retain=NAME" with names of `FORGET_TERMS` and
            `RETAIN_TERMS`, in any order.
        options: values by name: `forget_weight`, `retain_weight`, or an option of one of the terms. Where both terms
            have an option of that name, "forget.NAME" or "retain.NAME"; options that both share go to both.

    Returns:
        The method, checked, with all options filled in.

    Raises:
        UsageError: a name is unknown (the line lists the known ones), ambiguous, or a value out of range.

    Example:
        >>> parse_method("npo+kl", {"beta": 0.2}).forget_options["beta"]
        0.2
        >>> parse_method("forget=npo,retain=ap", {"retain.beta": "0.5"}).retain_options["beta"]
        0.5
    """
    spec = _spec_of(text)
    known = dict(zip(("forget", "retain"), _options_of(spec.kind, spec.forget, spec.retain), strict=True))
    weights: dict[str, Any] = {}
    changed: dict[str, dict[str, Any]] = {"forget": dict(spec.forget_options), "retain": dict(spec.retain_options)}
    for key, value in (options or {}).items():
        if key in ("forget_weight", "retain_weight") and spec.kind == "loop":
            weights[key] = _WEIGHT.parse(key, value)
            continue
        for side, name in _owners(key, known, spec.name):
            changed[side][name] = known[side][name].parse(key, value)
    return replace(spec, forget_options=changed["forget"], retain_options=changed["retain"], **weights)


def _spec_of(text: str) -> MethodSpec:
    if text in NAMED_METHODS:
        return NAMED_METHODS[text]
    pairs = [part.partition("=") for part in text.split(",")]
    names = {side.strip(): name.strip() for side, _, name in pairs}
    if len(pairs) != 2 or set(names) != {"forget", "retain"}:
        raise UsageError(
            f"method: found {text!r}, accepted is forget=NAME,retain=NAME or one of {_listed(NAMED_METHODS)}"
        )
    spec = MethodSpec(f"forget={names['forget']},retain={names['retain']}", names["forget"], names["retain"])
    references = dict.fromkeys((spec.forget_term.reference, spec.retain_term.reference))
    return replace(spec, reference="; ".join(filter(None, references)))


def _options_of(kind: str, forget: str, retain: str) -> tuple[Mapping[str, Option], Mapping[str, Option]]:
    known: Mapping[str, Any] = _ARITHMETIC if kind == "weights" else FORGET_TERMS
    for side, name, names in (("forget", forget, known), ("retain", retain, RETAIN_TERMS)):
        if name not in names:
            raise UsageError(f"{side}: found {name!r}, accepted is one of {_listed(names)}")
    if kind == "weights":
        return _ARITHMETIC[forget], {}
    return FORGET_TERMS[forget].options, RETAIN_TERMS[retain].options


def _owners(key: str, known: Mapping[str, Mapping[str, Option]], method: str) -> list[tuple[str, str]]:
    """The terms an option goes to, and its name there."""
    side, dot, name = key.partition(".")
    if dot:
        owners = [(side, name)] if name in known.get(side, {}) else []
    else:
        owners = [(side, key) for side in known if key in known[side]]
    if not owners:
        settings = [f"{side}.{name}" for side, options in known.items() for name in options]
        accepted = _listed([*(() if method in _ARITHMETIC else ("forget_weight", "retain_weight")), *settings])
        raise UsageError(f"{key}: found an option that {method} does not have, accepted is one of {accepted}")
    if len(owners) > 1 and not all(known[side][name].shared for side, name in owners):
        raise UsageError(f"{key}: found it in both terms of {method}, accepted is forget.{key} or retain.{key}")
    return owners


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


_TOFU = "https://arxiv.org/abs/2401.06121"
_TOFU_RECIPE = Recipe(epochs=5, lr=1e-5, batch=32, weight_decay=0.01, source=f"{_TOFU}, Sec. 4")
_NPO = "https://arxiv.org/abs/2404.05868"
_NPO_RECIPE = Recipe(
    epochs=10, lr=1e-5, batch=32, weight_decay=0.01,
    source="https://github.com/licong-lin/negative-preference-optimization (1207bbe), TOFU/config/forget.yaml, 2 GPUs",
)  # fmt: skip
_CLOSER = "https://arxiv.org/abs/2410.08109"
_CLOSER_RECIPE = Recipe(
    epochs=5, lr=1e-5, batch=32, weight_decay=0.01,
    source="https://github.com/sail-sg/closer-look-LLM-unlearning (b622294), config/tofu.yaml, 2 GPUs",
)  # fmt: skip
_G_EFFECT_RECIPE = Recipe(
    epochs=5, lr=1e-5, batch=16, weight_decay=0.0,
    source="https://github.com/tmlr-group/G-effect (ef368ee), config/forget.yaml; Phi-1.5: lr 2e-5",
)  # fmt: skip

_METHODS = (
    MethodSpec("ga", "ga", reference=_TOFU, recipe=_TOFU_RECIPE),
    MethodSpec("graddiff", "ga", "ce", reference=_TOFU, recipe=_TOFU_RECIPE),
    MethodSpec("ga+kl", "ga", "kl", reference=_TOFU, recipe=_TOFU_RECIPE),
    MethodSpec("npo", "npo", reference=_NPO, recipe=_NPO_RECIPE),
    MethodSpec("npo+gd", "npo", "ce", reference=_NPO, recipe=_NPO_RECIPE),
    MethodSpec("npo+kl", "npo", "kl", reference=_NPO, recipe=_NPO_RECIPE),
    MethodSpec(
        "simnpo",
        "simnpo",
        "ce",
        forget_weight=0.1375,
        reference="https://arxiv.org/abs/2410.07163",
        recipe=Recipe(
            epochs=10,
            lr=1e-5,
            batch=32,
            weight_decay=0.01,
            source="https://github.com/OPTML-Group/Unlearn-Simple (f1a355d), TOFU, forget05, 8 GPUs; forget10: "
            "forget_weight 0.125, beta 4.5",
        ),
    ),
    MethodSpec(
        "rmu",
        "rmu",
        "rmu-retain",
        retain_weight=1200.0,
        reference="https://arxiv.org/abs/2403.03218",
        recipe=Recipe(lr=5e-5, batch=4, source="Zephyr-7B on WMDP; trains the MLP outputs of layers 5 to 7 only"),
    ),
    MethodSpec("dpo+gd", "dpo", "ce", reference=_NPO, recipe=_NPO_RECIPE),
    MethodSpec("dpo+kl", "dpo", "kl", reference=_NPO, recipe=_NPO_RECIPE),
    MethodSpec("idk", "idk", reference=_TOFU, recipe=_TOFU_RECIPE),
    MethodSpec("idk+gd", "idk", "ce", reference=_TOFU, recipe=_TOFU_RECIPE),
    MethodSpec("idk+ap", "idk", "ap", reference=_CLOSER, recipe=_CLOSER_RECIPE),
    MethodSpec("me+gd", "me-uniform", "ce", forget_weight=0.1, reference=_CLOSER, recipe=_CLOSER_RECIPE),
    MethodSpec(
        "undial",
        "undial",
        reference="https://arxiv.org/abs/2402.10052",
        recipe=Recipe(
            epochs=10,
            lr=1e-4,
            batch=32,
            weight_decay=0.0,
            source="https://github.com/locuslab/open-unlearning (d3d7cf9), community/methods/UNDIAL; LoRA of rank 8",
        ),
    ),
    MethodSpec("wga+gd", "wga", "ce", reference="https://arxiv.org/abs/2502.19301", recipe=_G_EFFECT_RECIPE),
    MethodSpec(
        "satimp+gd",
        "satimp",
        "ce",
        retain_weight=0.1,
        reference="https://arxiv.org/abs/2505.11953",
        recipe=replace(
            _G_EFFECT_RECIPE, source="https://github.com/tmlr-group/SatImp (35ecbe2), config/forget_sat.yaml and README"
        ),
    ),
    MethodSpec(
        "ce-u+gd",
        "ce-u",
        "ce",
        reference="https://arxiv.org/abs/2503.01224",
        recipe=Recipe(skip_first=1, source="the paper trains without a retain term"),
    ),
    MethodSpec("task-vector", "task-vector", reference="https://arxiv.org/abs/2212.04089", kind="weights"),
    MethodSpec(
        "masc",
        "masc",
        "kl",
        forget_weight=PRESETS["default"].weight,
        retain_weight=PRESETS["default"].kl_weight,
        forget_options={name: getattr(PRESETS["default"], name) for name in FORGET_TERMS["masc"].options},
        reference="https://arxiv.org/abs/2606.02920",
        recipe=Recipe(source="the two main terms of preset `default`; all presets: MascSettings"),
    ),
)

NAMED_METHODS: Mapping[str, MethodSpec] = MappingProxyType({spec.name: spec for spec in _METHODS})
