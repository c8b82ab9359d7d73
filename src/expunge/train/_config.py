"""What a run does, as one frozen value: every option of the command line, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any

from expunge.errors import UsageError
from expunge.objectives import MascSettings, preset


def _whole(option: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{option}: found {value!r}, accepted is a whole number from {least}")


def _flag(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{option}: found {value!r}, accepted is true or false")


def _text(option: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{option}: found {value!r}, accepted is a text")


def _number(option: str, value: object, fits: Any, accepted: str) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not fits(value):
        raise UsageError(f"{option}: found {value!r}, accepted is {accepted}")


@dataclass(frozen=True)
class Recipe:
    """How the weights are changed; a preset is a recipe and the settings of its method.

    Attributes:
        lora: train a LoRA adapter that is merged at the end; False: all weights.
        rank: LoRA rank.
        lora_alpha: LoRA alpha; the update is scaled by alpha / rank.
        lora_dropout: dropout of the adapter's input, in [0, 1).
        targets: names of the layers that get an adapter; None: the attention projections of the architecture.
        upper: share of the decoder layers, from the top, that is trained with LoRA, in (0, 1]. Below them nothing
            changes, so their output is computed once per row and kept.
        lr: step size of AdamW.
        betas: decay of AdamW's first and second moment, in [0, 1).
        taper: from which violation on the step size shrinks, as a share of the way from the tolerance to 1, in (0, 1]:
            in proportion to what is left of that way, to half at the tolerance and for the examples left after the
            stop. None: constant.
        warmup: updates over which the step size rises linearly from lr / warmup to lr.
        weight_decay: decoupled weight decay, applied once per update.
        max_grad_norm: largest gradient norm of an update; None: not clipped.
        batch: forget examples per update.
        retain_batch: retain examples per update; only used where the retain term has a weight.
        epochs: most passes over the forget examples before the run gives up.
        extra_epochs: most passes over what is left above the tolerance after the stop.
        gate: an example whose violation is within the tolerance gets no gradient until it rises again.
        focus: measure every example after each pass, and pass only over those above the tolerance.
    """

    lora: bool = True
    rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.05
    targets: tuple[str, ...] | None = ("q_proj", "k_proj", "v_proj", "o_proj")
    upper: float = 1.0
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    taper: float | None = None
    warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    batch: int = 2
    retain_batch: int = 2
    epochs: int = 3
    extra_epochs: int = 3
    gate: bool = False
    focus: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        if self.targets is not None:
            names = (self.targets,) if isinstance(self.targets, str) else self.targets
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise UsageError(f"targets: found {self.targets!r}, accepted are names of layers, or none")
            names = tuple(names)
            object.__setattr__(self, "targets", names)
        for option in ("rank", "batch", "retain_batch", "epochs"):
            _whole(option, getattr(self, option), 1)
        for option in ("warmup", "extra_epochs"):
            _whole(option, getattr(self, option), 0)
        _number("lora_alpha", self.lora_alpha, lambda v: v > 0, "a number above 0")
        _number("lora_dropout", self.lora_dropout, lambda v: 0 <= v < 1, "a number from 0 to below 1")
        _number("upper", self.upper, lambda v: 0 < v <= 1, "a share above 0 and at most 1")
        _number("lr", self.lr, lambda v: v > 0, "a number above 0")
        if self.taper is not None:
            _number("taper", self.taper, lambda v: 0 < v <= 1, "a share above 0 and at most 1, or none")
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise UsageError(f"betas: found {self.betas!r}, accepted are two numbers from 0 to below 1")
        object.__setattr__(self, "betas", tuple(self.betas))
        for beta in self.betas:
            _number("betas", beta, lambda v: 0 <= v < 1, "two numbers from 0 to below 1")
        for option in ("lora", "gate", "focus"):
            _flag(option, getattr(self, option))
        _number("weight_decay", self.weight_decay, lambda v: v >= 0, "a number from 0")
        if self.max_grad_norm is not None:
            _number("max_grad_norm", self.max_grad_norm, lambda v: v > 0, "a number above 0, or none")


# The authors' recipe (arXiv 2606.02920): AdamW 1e-4, batch 2, LoRA r 16 α 32 dropout .05 on q,k,v,o, at most 3 epochs.
RECIPES: dict[str, Recipe] = {
    # The project's own. How it was found: docs/log.md.
    "default": Recipe(
        lora_dropout=0.0,
        targets=None,
        upper=0.2,
        lr=3e-3,
        betas=(0.8, 0.99),
        taper=0.5,
        batch=8,
        retain_batch=4,
        epochs=12,
        extra_epochs=12,
        gate=True,
        focus=True,
    ),
    "tofu": Recipe(),
    "muse-news": Recipe(),
    "qwen2.5-tofu": Recipe(),
}


@dataclass(frozen=True)
class RunConfig:
    """One unlearning run.

    Attributes:
        model: hub id, folder, GGUF file, or `smollm2-135m`.
        forget: file of examples to forget.
        out: run folder; must not exist or be empty.
        retain: file of examples to keep; None only where the retain term has no weight.
        holdout: file of comparable examples never trained on; sets the tolerance.
        method: unlearning method.
        preset: named settings that the options below change.
        masc: settings of the method; None in a user's config until `resolved` fills it.
        recipe: how the weights are changed; as `masc`.
        tolerance: α, violation share at which training stops; None: the preset's, or from the holdout.
        holdout_probe: take this many forget examples out of training and probe on them, as the paper writes; 0: probe
            on examples that are trained on.
        dtype: auto, float32, bfloat16 or float16.
        device: cpu, cuda, mps; None: what accelerate finds.
        threads: CPU threads; None: all cores this process may use.
        seed: of sampling, masks, adapters and probes.
        template: chat, plain, or a text with {prompt} and {completion}.
        system: system turn; None: none.
        max_length: most tokens of a row.
        columns: our column names → the file's.
        micro_batch: most rows in one forward pass; None: a whole update. The update does not depend on it.
        allow_overlap: accept examples that are in both files.
        adapter_only: save the adapter instead of the merged model.
        trust_remote_code: run code that comes with a model.
        sample: examples of each file whose answers are generated before and after.
        retain_sample: retain examples scored before and after.
        checkpoint_every: updates between checkpoints.
        show_text: write texts to forget into the results (never otherwise).
    """

    model: str
    forget: str
    out: str
    retain: str | None = None
    holdout: str | None = None
    method: str = "masc"
    preset: str = "default"
    masc: MascSettings | None = None
    recipe: Recipe | None = None
    tolerance: float | None = None
    holdout_probe: int = 0
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    seed: int = 0
    template: str = "chat"
    system: str | None = None
    max_length: int = 512
    columns: dict[str, str] = field(default_factory=dict)
    micro_batch: int | None = None
    allow_overlap: bool = False
    adapter_only: bool = False
    trust_remote_code: bool = False
    sample: int = 20
    retain_sample: int = 100
    checkpoint_every: int = 50
    show_text: bool = False

    def __post_init__(self) -> None:
        """Check every value that can be checked without the files."""
        self._check_types()
        if self.method != "masc":
            raise UsageError(f"method: found {self.method!r}, accepted is one of masc")
        if self.preset not in RECIPES:
            raise UsageError(f"preset: found {self.preset!r}, accepted is one of {', '.join(RECIPES)}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise UsageError(f"dtype: found {self.dtype!r}, accepted is one of auto, float32, bfloat16, float16")
        if self.tolerance is not None:
            _number("tolerance", self.tolerance, lambda v: 0 <= v <= 1, "a number from 0 to 1, or none")
        for option in ("max_length", "checkpoint_every"):
            _whole(option, getattr(self, option), 2 if option == "max_length" else 1)
        for option in ("holdout_probe", "sample", "retain_sample", "seed"):
            _whole(option, getattr(self, option), 0)
        for option in ("threads", "micro_batch"):
            if getattr(self, option) is not None:
                _whole(option, getattr(self, option), 1)

    def _check_types(self) -> None:
        for option in ("model", "forget", "out", "retain", "holdout"):
            if isinstance(getattr(self, option), os.PathLike):  # a run is recorded as JSON
                object.__setattr__(self, option, os.fspath(getattr(self, option)))
        for option in ("model", "forget", "out", "preset", "template"):
            _text(option, getattr(self, option))
        for option in ("retain", "holdout", "device"):
            if getattr(self, option) is not None:
                _text(option, getattr(self, option))
        for option in ("allow_overlap", "adapter_only", "trust_remote_code", "show_text"):
            _flag(option, getattr(self, option))

    def resolved(self) -> RunConfig:
        """Fill in the preset, so that every number of the run is in the value.

        Raises:
            UsageError: what the filled-in settings need is missing.
        """
        masc = self.masc or preset(self.preset)
        if self.tolerance is not None:
            masc = dataclasses.replace(masc, tolerance=self.tolerance)
        config = dataclasses.replace(self, masc=masc, recipe=self.recipe or RECIPES[self.preset])
        if config.adapter_only and config.recipe is not None and not config.recipe.lora:
            raise UsageError("adapter_only: found full fine-tuning, accepted with it is lora")
        if masc.kl_weight > 0 and config.retain is None:
            raise UsageError(
                f"retain: found none, accepted is a file of examples to keep (the retain term of preset "
                f"{self.preset} has weight {masc.kl_weight:g}; --kl-weight 0 goes without)"
            )
        if masc.tolerance is None and config.holdout is None:
            raise UsageError(
                "tolerance: found none, accepted is a number from 0 to 1, or a holdout file to measure it on"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Build and check a config from plain values.

        Raises:
            UsageError: a name is unknown or a value is out of range.
        """
        values = dict(values)
        for name, kind in (("masc", MascSettings), ("recipe", Recipe)):
            if values.get(name) is not None:
                values[name] = kind(**_known(kind, name, values[name]))
        return cls(**_known(cls, "config", values))


def _known(kind: type, where: str, values: dict[str, Any]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            raise UsageError(f"{where}: found unknown name {name!r}, accepted are {', '.join(names)}")
    return values
