"""Pure functions of token statistics, and the settings a method is made of.

Nothing here knows a model or a file. Losses return scalars that are still attached to the graph, also when nothing is
left to average.
"""

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
from expunge.objectives._methods import METHODS, PRESETS, MascSettings, Method, preset

__all__ = [
    "METHODS",
    "PRESETS",
    "HingeResult",
    "MascSettings",
    "Method",
    "SumCount",
    "apply_suffix",
    "kl_sum",
    "masc_hinge",
    "mean_kl",
    "preset",
    "suffix_start",
    "threshold",
]
