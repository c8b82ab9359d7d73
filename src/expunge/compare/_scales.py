"""Which of a suite's metrics a comparison shows, and which of them make the distance to the retrained model."""

from __future__ import annotations

# Shares all of them, so that their differences can be joined.
_DISTANCE = {
    "tofu": (
        "forget_probability",
        "forget_rouge_l",
        "forget_truth_ratio",
        "forget_exact_memorisation",
        "retain_probability",
        "retain_rouge_l",
        "retain_truth_ratio",
        "retain_exact_memorisation",
    ),
    "mine": (
        "forget_probability",
        "forget_rouge_l",
        "forget_exact_memorisation",
        "retain_probability",
        "retain_rouge_l",
        "retain_exact_memorisation",
    ),
    "muse": ("verbmem", "verbmem_exact_memorisation", "knowmem", "utility"),
}
_MORE = {
    "tofu": ("forget_quality_log10", "model_utility", "forget_degenerate"),
    "mine": ("forget_degenerate",),
    "muse": ("privleak", "verbmem_degenerate"),
}
_AXES = {
    "tofu": ("forget_probability", "model_utility"),
    "mine": ("forget_probability", "retain_probability"),
    "muse": ("verbmem", "utility"),
}


def distance_metrics(suite: str) -> tuple[str, ...]:
    """Metrics that make the distance to the retrained model; all are shares in [0, 1]."""
    return _DISTANCE[suite]


def table_metrics(suite: str) -> tuple[str, ...]:
    """Metrics of the table, in its order."""
    return (*_DISTANCE[suite], *_MORE[suite])


def axes_of(suite: str) -> tuple[str, str]:
    """Metrics of the plot where a file names no others: what is forgotten, what is kept."""
    return _AXES[suite]
