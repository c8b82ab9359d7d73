"""The model card of an unlearned model."""

from __future__ import annotations

from expunge.objectives import MascSettings
from expunge.train._config import RunConfig
from expunge.train._recipe import Recipe
from expunge.train._state import LoopState


def model_card(config: RunConfig, masc: MascSettings, recipe: Recipe, state: LoopState, violation: float | None) -> str:
    """Markdown with the method, its settings and what was measured; nothing of the examples but their number."""
    examples = len(state.violations or [])
    kind = f"LoRA rank {recipe.rank}, merged" if recipe.lora and not config.adapter_only else "all weights"
    kind = f"LoRA rank {recipe.rank}, adapter" if config.adapter_only else kind
    measured = "not measured" if violation is None else f"{violation:.3f}"
    if config.method == "masc":
        method = (
            "MASC (margin self-correction,\n[arXiv 2606.02920](https://arxiv.org/abs/2606.02920)), "
            f"preset `{config.preset}`"
        )
        settings = (
            f"| λ, ρ, η, k, β | {masc.weight:g}, {masc.rho:g}, {masc.eta:g}, {masc.k}, {masc.beta:g} |\n"
            f"| retain KL weight | {masc.kl_weight:g} |"
        )
    else:
        method = f"`{config.method}` ({config.spec.reference})"
        settings = f"| minimised | {config.spec.formula.replace('|', chr(92) + '|')} |"
    optimizer = f"{recipe.optimizer} ({recipe.optimizer_rule}, {recipe.optimizer_storage}), "
    optimizer += f"alternate, {recipe.retain_every} retain steps each" if recipe.alternates else "joint"
    return f"""---
base_model: {config.model}
tags:
- unlearning
- expunge
---

# Unlearned with expunge

{examples} examples were removed from `{config.model}` by {method}.

| | |
|---|---|
| trained | {kind} |
| updates | {state.step} |
| ended | {state.reason} |
| mean violation of the forget examples | {measured} (tolerance {masc.tolerance:.3f}) |
| examples left above the tolerance | {len(state.rest)} |
{settings}
| optimizer, steps | {optimizer} |
| step size, forget and retain examples per update | {recipe.lr:g}, {recipe.batch}, {recipe.retain_batch} |
| seed | {config.seed} |

The violation of an example is the share of its answer's tokens whose margin over the {masc.k} strongest alternatives
is above log(ρ/(1−ρ)).
"""
