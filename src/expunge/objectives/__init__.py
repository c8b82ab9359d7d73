"""Pure functions of token statistics, and the settings a method is made of.

Nothing here knows a model or a file. Losses return scalars that are still attached to the graph, also when nothing is
left to average.
"""

from expunge.objectives._aggregate import row_counts, row_sums
from expunge.objectives._distribution import kl, me, me_uniform, undial
from expunge.objectives._likelihood import ce, ce_u, ga, ga_sum, idk, satimp, tnpo, wga
from expunge.objectives._masc import (
    HingeResult,
    SumCount,
    apply_suffix,
    kl_sum,
    masc_hinge,
    mean_kl,
    suffix_start,
    threshold,
)
from expunge.objectives._methods import PRESETS, MascSettings, preset
from expunge.objectives._named import NAMED_METHODS, MethodSpec, Recipe, parse_method
from expunge.objectives._preference import ap, dpo, npo, npo_norm, simnpo
from expunge.objectives._registry import FORGET_TERMS, RETAIN_TERMS
from expunge.objectives._representation import rmu, rmu_direction, rmu_retain
from expunge.objectives._task_vector import task_vector
from expunge.objectives._terms import Option, Term, TermInputs
from expunge.objectives._weights import FixedWeights, PrimalDual

__all__ = [
    "FORGET_TERMS",
    "NAMED_METHODS",
    "PRESETS",
    "RETAIN_TERMS",
    "FixedWeights",
    "HingeResult",
    "MascSettings",
    "MethodSpec",
    "Option",
    "PrimalDual",
    "Recipe",
    "SumCount",
    "Term",
    "TermInputs",
    "ap",
    "apply_suffix",
    "ce",
    "ce_u",
    "dpo",
    "ga",
    "ga_sum",
    "idk",
    "kl",
    "kl_sum",
    "masc_hinge",
    "me",
    "me_uniform",
    "mean_kl",
    "npo",
    "npo_norm",
    "parse_method",
    "preset",
    "rmu",
    "rmu_direction",
    "rmu_retain",
    "row_counts",
    "row_sums",
    "satimp",
    "simnpo",
    "suffix_start",
    "task_vector",
    "threshold",
    "tnpo",
    "undial",
    "wga",
]
