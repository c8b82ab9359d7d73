import math

import pytest

from expunge.metrics import (
    EFFICACY_TEXT_PARTS,
    SHARE_UP,
    UTILITY_TEXT_VALUES,
    Bootstrap,
    dualoptim_utility,
    mean_metric,
    overall,
    targeted_forget_efficacy,
    token_entropy,
    untargeted_forget_efficacy,
)

BOOT = Bootstrap(resamples=50)


def metric(name, value):
    return mean_metric(name, [value - 0.1, value + 0.1], SHARE_UP, unit="u", bootstrap=BOOT)


def metrics(values):
    return {name: metric(name, value) for name, value in values.items()}


def test_token_entropy():
    assert token_entropy([1, 1, 2, 2]) == pytest.approx(math.log(2) / math.log(4))
    assert token_entropy([1, 2, 3]) == pytest.approx(1.0)
    assert token_entropy([7] * 50) == 0.0
    assert token_entropy([7]) == token_entropy([]) == 0.0


def test_forget_efficacy_overall_and_utility():
    parts = metrics(
        {"rouge_l": 0.2, "probability": 0.3, "truth_ratio": 0.4, "cosine_similarity": 0.5, "entailment": 0.6}
    )
    untargeted = untargeted_forget_efficacy(parts, bootstrap=BOOT)
    assert untargeted.value == pytest.approx(0.6)
    targeted = targeted_forget_efficacy(metrics({"token_entropy": 0.5, "refusal_entailment": 0.25}), bootstrap=BOOT)
    assert targeted.value == pytest.approx(1 / 3)
    splits = [
        f"{split}_{value}" for split in ("retain", "real_authors", "world_facts") for value in UTILITY_TEXT_VALUES
    ]
    more = [
        f"{split}_{v}"
        for split in ("retain", "real_authors", "world_facts")
        for v in ("cosine_similarity", "entailment")
    ]
    utility = dualoptim_utility(metrics(dict.fromkeys([*splits, *more], 0.5)), bootstrap=BOOT)
    assert utility.value == pytest.approx(0.5)
    found = overall(untargeted, targeted, utility, bootstrap=BOOT)
    assert found.value == pytest.approx(0.25 * (0.6 + 1 / 3) + 0.25)


def test_what_needs_other_models_is_missing_and_the_text_variants_are_named():
    parts = metrics({"rouge_l": 0.2, "probability": 0.3, "truth_ratio": 0.4})
    full = untargeted_forget_efficacy(parts, bootstrap=BOOT)
    assert full.value is None
    assert "sentence encoder" in full.reason
    text = untargeted_forget_efficacy(parts, bootstrap=BOOT, names=EFFICACY_TEXT_PARTS)
    assert (text.name, text.value) == ("untargeted_forget_efficacy_text", pytest.approx(0.7))
    assert overall(full, full, text, bootstrap=BOOT).value is None
