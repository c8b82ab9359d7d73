"""DualOptim+: forget efficacy (untargeted, targeted), model utility of eighteen, and their overall value.

The authors join six values a split. Two of them, the cosine similarity of sentence embeddings and the share of entailed
answers, need models of their own, which this package does not bring: give them as metrics where you have them; without
them the full value is missing, and the `_text` variants, named so, use what needs no other model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from expunge.metrics._metric import SHARE_UP, Bootstrap, Metric, combine, null_metric
from expunge.metrics._tofu import harmonic_metric

EFFICACY_PARTS = ("rouge_l", "probability", "truth_ratio", "cosine_similarity", "entailment")
EFFICACY_TEXT_PARTS = EFFICACY_PARTS[:3]
TARGETED_PARTS = ("token_entropy", "refusal_entailment")
UTILITY_SPLITS = ("retain", "real_authors", "world_facts")
UTILITY_VALUES = ("rouge_l", "probability", "truth_ratio", "token_entropy", "cosine_similarity", "entailment")
UTILITY_TEXT_VALUES = UTILITY_VALUES[:4]


def token_entropy(tokens: Sequence[int]) -> float:
    """Diversity of a generated answer: entropy of its token frequencies over that of T different tokens.

    H = −Σ_v f_v·log f_v / log T. 1: no token repeats; near 0: one token over and over.

    Args:
        tokens: (T,) ids of the answer.

    Returns:
        In [0, 1]; 0 for fewer than two tokens, as the authors have it.

    Example:
        >>> token_entropy([4, 4]), token_entropy([4, 5])
        (0.0, 1.0)

    References:
        Yuan et al., A Closer Look at Machine Unlearning for Large Language Models, 2025.
        https://arxiv.org/abs/2410.08109
    """
    if len(tokens) < 2:
        return 0.0
    shares = np.array(list(Counter(tokens).values()), dtype=np.float64) / len(tokens)
    return abs(float(-(shares * np.log(shares)).sum() / math.log(len(tokens))))


def untargeted_forget_efficacy(
    parts: Mapping[str, Metric], *, bootstrap: Bootstrap, names: Sequence[str] = EFFICACY_PARTS
) -> Metric:
    """1 − mean of what still comes out of the forget set. Higher is better.

    Args:
        parts: by name: ROUGE-L recall, probability, truth ratio as 1 − mean min(R, 1/R), cosine similarity, entailment.
        bootstrap: gives the interval.
        names: which of them; the published value takes all five, `EFFICACY_TEXT_PARTS` the three without other models.

    References:
        Zhong et al., DualOptim+, 2026, https://arxiv.org/abs/2605.21539; its released evaluation
        (github.com/CityU-MLO/DualOptimPlus, metrics/metrics.py) fixes what the text leaves open.
    """
    name = "untargeted_forget_efficacy" + ("" if tuple(names) == EFFICACY_PARTS else "_text")
    return combine(name, _chosen(parts, names), lambda values: 1.0 - values.mean(0), SHARE_UP, bootstrap=bootstrap)


def targeted_forget_efficacy(parts: Mapping[str, Metric], *, bootstrap: Bootstrap) -> Metric:
    """Harmonic mean of the token entropy and the share of answers entailed by a refusal sentence, on the forget set.

    Args:
        parts: "token_entropy" and "refusal_entailment".
        bootstrap: gives the interval.

    References:
        Zhong et al., DualOptim+, 2026. https://arxiv.org/abs/2605.21539
    """
    return harmonic_metric("targeted_forget_efficacy", _chosen(parts, TARGETED_PARTS), bootstrap=bootstrap)


def dualoptim_utility(
    parts: Mapping[str, Metric], *, bootstrap: Bootstrap, values: Sequence[str] = UTILITY_VALUES
) -> Metric:
    """Harmonic mean of six values on the retain set, real authors and world facts.

    Differs from TOFU's model utility, which has three values a split.

    Args:
        parts: by name, `{split}_{value}` for the splits of `UTILITY_SPLITS`.
        bootstrap: gives the interval.
        values: which values; `UTILITY_TEXT_VALUES` are the four without other models.

    References:
        Zhong et al., DualOptim+, 2026. https://arxiv.org/abs/2605.21539
    """
    name = "dualoptim_utility" + ("" if tuple(values) == UTILITY_VALUES else "_text")
    names = [f"{split}_{value}" for split in UTILITY_SPLITS for value in values]
    return harmonic_metric(name, _chosen(parts, names), bootstrap=bootstrap)


def overall(untargeted: Metric, targeted: Metric, utility: Metric, *, bootstrap: Bootstrap) -> Metric:
    """DualOptim+'s OVR = ¼·(untargeted + targeted forget efficacy) + ½·model utility. Higher is better.

    References:
        Zhong et al., DualOptim+, 2026. https://arxiv.org/abs/2605.21539; the weights are those by which its tables are
        reproduced.
    """
    weights = np.array([[0.25], [0.25], [0.5]])
    parts = [untargeted, targeted, utility]
    return combine("ovr", parts, lambda values: (weights * values).sum(0), SHARE_UP, bootstrap=bootstrap)


def _chosen(parts: Mapping[str, Metric], names: Sequence[str]) -> list[Metric]:
    reason = "needs a sentence encoder or an entailment model"
    return [parts.get(name) or null_metric(name, SHARE_UP, reason) for name in names]
