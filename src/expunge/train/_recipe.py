"""How the weights are changed: the recipe of a run, the presets' and the papers'."""

from __future__ import annotations

from dataclasses import dataclass

from expunge.errors import UsageError
from expunge.objectives import parse_method
from expunge.optim import RULES
from expunge.train._checks import flag, number, one_of, whole


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
        update: joint (one step along the gradient of the weighted sum) or alternate (a step along the forget term's
            gradient, then steps along the retain term's); None: alternate for the optimizers that need it.
        retain_every: retain steps after each forget step, where they alternate; each takes `retain_batch` examples.
        optimizer: adamw (one state), dualoptim (a state per objective) or dualoptim+ (a base shared by both, and a
            delta for each); the last two need alternate steps.
        optimizer_rule: how averages become a step: adamw, adam, sgd, muon, lion or rmsprop.
        optimizer_storage: how the averages are kept: 32bit, bf16, 8bit or 4bit.
        base_betas: decay of dualoptim+'s base, first and second moment, in [0, 1); None: (0.9, 0.95).
        lr_forget: step size of the forget steps, where they alternate; None: lr.
        gradient_norms: log the gradient norms of both terms apart also for joint steps.
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
    update: str | None = None
    retain_every: int = 1
    optimizer: str = "adamw"
    optimizer_rule: str = "adamw"
    optimizer_storage: str = "32bit"
    base_betas: tuple[float, float] | None = None
    lr_forget: float | None = None
    gradient_norms: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        if self.targets is not None:
            names = (self.targets,) if isinstance(self.targets, str) else self.targets
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise UsageError(f"targets: found {self.targets!r}, accepted are names of layers, or none")
            names = tuple(names)
            object.__setattr__(self, "targets", names)
        for option in ("rank", "batch", "retain_batch", "epochs", "retain_every"):
            whole(option, getattr(self, option), 1)
        for option in ("warmup", "extra_epochs"):
            whole(option, getattr(self, option), 0)
        number("lora_alpha", self.lora_alpha, lambda v: v > 0, "a number above 0")
        number("lora_dropout", self.lora_dropout, lambda v: 0 <= v < 1, "a number from 0 to below 1")
        number("upper", self.upper, lambda v: 0 < v <= 1, "a share above 0 and at most 1")
        number("lr", self.lr, lambda v: v > 0, "a number above 0")
        if self.taper is not None:
            number("taper", self.taper, lambda v: 0 < v <= 1, "a share above 0 and at most 1, or none")
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise UsageError(f"betas: found {self.betas!r}, accepted are two numbers from 0 to below 1")
        object.__setattr__(self, "betas", tuple(self.betas))
        for beta in self.betas:
            number("betas", beta, lambda v: 0 <= v < 1, "two numbers from 0 to below 1")
        for option in ("lora", "gate", "focus", "gradient_norms"):
            flag(option, getattr(self, option))
        self._check_optimizer()
        number("weight_decay", self.weight_decay, lambda v: v >= 0, "a number from 0")
        if self.max_grad_norm is not None:
            number("max_grad_norm", self.max_grad_norm, lambda v: v > 0, "a number above 0, or none")

    @property
    def alternates(self) -> bool:
        """Whether forget and retain steps alternate."""
        return (self.update or ("joint" if self.optimizer == "adamw" else "alternate")) == "alternate"

    def _check_optimizer(self) -> None:
        if self.update is not None:
            one_of("update", self.update, ("joint", "alternate"))
        for option, accepted in (
            ("optimizer", ("adamw", "dualoptim", "dualoptim+")),
            ("optimizer_rule", tuple(RULES)),
            ("optimizer_storage", ("32bit", "bf16", "8bit", "4bit")),
        ):
            one_of(option, getattr(self, option), accepted)
        if self.base_betas is not None:
            self._check_base_betas()
        if self.lr_forget is not None:
            number("lr_forget", self.lr_forget, lambda v: v > 0, "a number above 0, or none")
        if not self.alternates:
            # What has no effect is refused: a comparison would show nothing and look as if it did.
            if self.optimizer != "adamw":
                raise UsageError(f"update: found joint with optimizer {self.optimizer}, accepted with it is alternate")
            if self.retain_every != 1:
                raise UsageError(f"retain_every: found {self.retain_every} with joint updates, accepted with them is 1")
            if self.lr_forget is not None:
                raise UsageError("lr_forget: found with joint updates, accepted with them is none")

    def _check_base_betas(self) -> None:
        pair = self.base_betas if isinstance(self.base_betas, list | tuple) else ()
        if len(pair) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in pair):
            raise UsageError(f"base_betas: found {self.base_betas!r}, accepted are two numbers from 0 to below 1")
        object.__setattr__(self, "base_betas", tuple(pair))
        if self.optimizer != "dualoptim+":
            raise UsageError(f"base_betas: found with optimizer {self.optimizer}, accepted with it is none")


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


def base_recipe(method: str, preset_name: str, *, lora: bool | None = None) -> Recipe:
    """The recipe that a run's options change: the preset's for MASC, the paper's for the other methods.

    The papers train all weights. Where theirs gives no number, that of TOFU's baselines stands (arXiv 2401.06121): five
    passes, batch 32, step size 1e-5, weight decay 0.01. An adapter needs a larger step: 1e-4, with which MASC's paper
    trains the baselines it compares with.

    Args:
        method: name of the method.
        preset_name: name of the preset.
        lora: whether an adapter is asked for; None: the recipe's choice.
    """
    if method == "masc":
        return RECIPES[preset_name]
    paper = parse_method(method).recipe
    batch = paper.batch or 32
    return Recipe(
        lora=bool(lora),
        lr=1e-4 if lora else paper.lr or 1e-5,
        batch=batch,
        retain_batch=batch,
        epochs=paper.epochs or 5,
        weight_decay=0.01 if paper.weight_decay is None else paper.weight_decay,
    )
