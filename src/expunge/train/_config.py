"""What a run does, as one frozen value: every option of the command line, checked when it is made."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from expunge.errors import UsageError
from expunge.objectives import MascSettings, MethodSpec, parse_method, preset
from expunge.train._checks import flag, number, one_of, text, whole
from expunge.train._recipe import RECIPES, Recipe, base_recipe
from expunge.train._track import TRACKERS


@dataclass(frozen=True)
class RunConfig:
    """One unlearning run.

    Attributes:
        model: hub id, folder, GGUF file, or `smollm2-135m`.
        forget: file of examples to forget.
        out: run folder; must not exist or be empty.
        retain: file of examples to keep; None only where the retain term has no weight.
        holdout: file of comparable examples never trained on; sets the tolerance.
        earlier: files of examples that earlier requests made this model forget; measured, and named where they are
            known again.
        method: masc, another method by name (`docs/methods.md`), or forget=TERM,retain=TERM.
        method_options: settings of a method other than masc: forget_weight, retain_weight, beta, …
        stop: rule (MASC's online rule ends training) or budget (a fixed number of passes); None: the rule for masc, the
            budget for the others.
        weighting: fixed, or primal-dual: the retain term's weight rises while its loss is above `retain_limit`.
        retain_limit: largest retain loss wanted, for primal-dual.
        dual_step: step size of the weight, for primal-dual.
        refusals: file of refusal sentences, one a line, for the methods that train on them; None: those that come with
            the package.
        preset: named settings that the options below change.
        masc: settings of the method; None in a user's config until `resolved` fills it.
        recipe: how the weights are changed; as `masc`.
        tolerance: α, violation share at which training stops; None: the preset's, or from the holdout.
        holdout_probe: take this many forget examples out of training and probe on them, as the paper writes; 0: probe
            on examples that are trained on.
        dtype: auto (the checkpoint's, or float32 where the processor is slow in that), float32, bfloat16 or float16.
        device: cpu, cuda, mps; None: the GPU of this process, else MPS, else the CPU.
        threads: CPU threads; None: all cores this process may use.
        seed: of sampling, masks, adapters and probes.
        template: chat, plain, or a text with {prompt} and {completion}.
        system: system turn; None: none.
        max_length: most tokens of a row.
        columns: our column names → the file's.
        micro_batch: most rows in one forward and backward pass; None: 8 on a CPU, a whole update elsewhere. The update
            does not depend on it.
        allow_overlap: accept examples that are in both files.
        adapter_only: save the adapter instead of the merged model.
        trust_remote_code: run code that comes with a model.
        sample: examples of each file whose answers are generated before and after.
        retain_sample: retain examples scored before and after.
        checkpoint_every: updates between checkpoints.
        show_text: write texts to forget into the results (never otherwise).
        plan_check: refuse a run that needs more memory or disk than there is, before work starts.
        track: tensorboard, wandb, trackio or mlflow: send the log's numbers there, too; None: nowhere.
    """

    model: str
    forget: str
    out: str
    retain: str | None = None
    holdout: str | None = None
    earlier: tuple[str, ...] = ()
    method: str = "masc"
    method_options: dict[str, str] = field(default_factory=dict)
    stop: str | None = None
    weighting: str = "fixed"
    retain_limit: float | None = None
    dual_step: float = 1.0
    refusals: str | None = None
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
    plan_check: bool = True
    track: str | None = None

    def __post_init__(self) -> None:
        """Check every value that can be checked without the files."""
        self._check_types()
        self._check_method()
        one_of("preset", self.preset, tuple(RECIPES))
        one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.tolerance is not None:
            number("tolerance", self.tolerance, lambda v: 0 <= v <= 1, "a number from 0 to 1, or none")
        for option in ("max_length", "checkpoint_every"):
            whole(option, getattr(self, option), 2 if option == "max_length" else 1)
        for option in ("holdout_probe", "sample", "retain_sample", "seed"):
            whole(option, getattr(self, option), 0)
        for option in ("threads", "micro_batch"):
            if getattr(self, option) is not None:
                whole(option, getattr(self, option), 1)

    def _check_method(self) -> None:
        text("method", self.method)
        if self.method == "masc" and self.method_options:
            name = next(iter(self.method_options))
            raise UsageError(f"method_options: found {name!r} with masc, whose settings are options of their own")
        _ = self.spec
        if self.stop is not None:
            one_of("stop", self.stop, ("rule", "budget"))
        if self.track is not None:
            one_of("track", self.track, TRACKERS)
        one_of("weighting", self.weighting, ("fixed", "primal-dual"))
        number("dual_step", self.dual_step, lambda v: v > 0, "a number above 0")
        if self.retain_limit is not None:
            number("retain_limit", self.retain_limit, lambda v: True, "a number, or none")
        if self.weighting == "primal-dual" and self.method == "masc":
            raise UsageError("weighting: found primal-dual with masc, accepted with it is fixed")
        if (self.weighting == "primal-dual") != (self.retain_limit is not None):
            raise UsageError(
                f"retain_limit: found {self.retain_limit} with weighting {self.weighting}; primal-dual needs a number, "
                "fixed takes none"
            )

    @property
    def spec(self) -> MethodSpec:
        """The method with its terms and settings.

        Raises:
            UsageError: a name is unknown, or a setting out of range.
        """
        return parse_method(self.method, self.method_options)

    @property
    def budget(self) -> bool:
        """Whether training is a fixed number of passes."""
        return (self.stop or ("rule" if self.method == "masc" else "budget")) == "budget"

    def _check_types(self) -> None:
        for option in ("model", "forget", "out", "retain", "holdout", "refusals"):
            if isinstance(getattr(self, option), os.PathLike):  # a run is recorded as JSON
                object.__setattr__(self, option, os.fspath(getattr(self, option)))
        if isinstance(self.earlier, str | os.PathLike):
            raise UsageError(f"earlier: found {str(self.earlier)!r}, accepted is a list of files")
        object.__setattr__(self, "earlier", tuple(map(_path, self.earlier or ())))
        for option in ("model", "forget", "out", "preset", "template"):
            text(option, getattr(self, option))
        for option in ("retain", "holdout", "device", "refusals"):
            if getattr(self, option) is not None:
                text(option, getattr(self, option))
        for option in ("allow_overlap", "adapter_only", "trust_remote_code", "show_text", "plan_check"):
            flag(option, getattr(self, option))

    def resolved(self) -> RunConfig:
        """Fill in the preset, so that every number of the run is in the value.

        Raises:
            UsageError: what the filled-in settings need is missing.
        """
        masc = self.masc or preset(self.preset)
        if self.tolerance is not None:
            masc = dataclasses.replace(masc, tolerance=self.tolerance)
        recipe = self.recipe or base_recipe(self.method, self.preset)
        config = dataclasses.replace(self, masc=masc, recipe=recipe)
        if config.adapter_only and not recipe.lora:
            raise UsageError("adapter_only: found full fine-tuning, accepted with it is lora")
        if self.method == "masc":
            if masc.kl_weight > 0 and config.retain is None:
                raise UsageError(
                    f"retain: found none, accepted is a file of examples to keep (the retain term of preset "
                    f"{self.preset} has weight {masc.kl_weight:g}; --kl-weight 0 goes without)"
                )
        else:
            self._check_terms(recipe)
        if masc.tolerance is None and config.holdout is None:
            raise UsageError(
                "tolerance: found none, accepted is a number from 0 to 1, or a holdout file to measure it on"
            )
        return config

    def _check_terms(self, recipe: Recipe) -> None:
        """What only MASC knows has no effect with another method."""
        for option, value in (("gate", recipe.gate), ("taper", recipe.taper), ("focus", recipe.focus)):
            if value:
                raise UsageError(f"{option}: found {value} with method {self.method}, accepted is it with masc only")
        if self.retain is None and (self.spec.kind == "loop" and self.spec.retain_term.needs):
            raise UsageError(
                f"retain: found none, accepted is a file of examples to keep (method {self.method} has the retain term "
                f"{self.spec.retain})"
            )
        if self.spec.kind == "weights" and recipe.alternates:
            raise UsageError(f"update: found alternate with method {self.method}, accepted with it is joint")

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


def _path(value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"earlier: found {value!r}, accepted is a list of files")
    return os.fspath(value)


def _known(kind: type, where: str, values: dict[str, Any]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            raise UsageError(f"{where}: found unknown name {name!r}, accepted are {', '.join(names)}")
    return values
