"""The forget and retain terms by exact name."""

import torch
from torch import Tensor

from expunge.objectives import _distribution, _likelihood, _preference, _representation
from expunge.objectives._masc import SumCount, masc_hinge
from expunge.objectives._terms import Option, Term, any_number, from_zero, positive, whole


def masc(margin: Tensor, rows: Tensor, n_rows: int, *, rho: float = 0.7, eta: float = 0.25) -> SumCount:
    """Hinge of the token margins above a safe level, mean over rows: `masc_hinge` without a gate, as a term.

    L = 1/R Σ_r 1/T_r Σ_t max(0, m_rt − (τ_ρ − η)) / η, τ_ρ = log(ρ / (1 − ρ))

    Args:
        margin: (N,) margins of the labelled tokens.
        rows: (N,) int64, the example of each token.
        n_rows: examples.
        rho: allowed token probability ρ, in (0, 1).
        eta: width η of the hinge below τ_ρ, in logits, above 0.

    Returns:
        Sum and number of rows that have tokens.

    References:
        MASC, arXiv 2606.02920. https://arxiv.org/abs/2606.02920
    """
    found = masc_hinge(margin, rows, n_rows, rho=rho, eta=eta)
    return SumCount(found.total, found.count)


def none(rows: Tensor, n_rows: int) -> SumCount:
    """No retain term: 0 over 0.

    Args:
        rows: (N,) int64; not read.
        n_rows: examples; not read.

    Returns:
        A zero without gradient, for there is nothing it could be attached to, and 0 terms.
    """
    return SumCount(torch.zeros((), device=rows.device), 0)


_BETWEEN = "a number between 0 and 1, both excluded"
_ROWS = "mean over rows of "
_TOKENS = "mean over tokens of "

_MASC_OPTIONS = {
    "rho": Option(0.7, _BETWEEN, lambda x: 0 < x < 1),
    "eta": positive(0.25),
    "k": whole(10, 1, of="input"),
    "beta": positive(1.0, of="input"),
    "teacher_delta": Option(None, "a number from 0, or none", lambda x: x >= 0, optional=True, of="input"),
}
_LAYER = whole(7, None, of="input", shared=True)

_FORGET = (
    Term(
        name="ga",
        formula=_TOKENS + "log π(y)",
        loss=_likelihood.ga,
        needs=("logprob",),
        per="token",
        reference="https://arxiv.org/abs/2401.06121, Gradient Ascent, as its code averages it",
        ascends=True,
    ),
    Term(
        name="ga-sum",
        formula=_ROWS + "Σ log π(y)",
        loss=_likelihood.ga_sum,
        needs=("logprob",),
        per="row",
        reference="https://arxiv.org/abs/2210.01504, Eq. 1",
        ascends=True,
    ),
    Term(
        name="wga",
        formula=_TOKENS + "π(y)^β · log π(y), the weight without gradient",
        loss=_likelihood.wga,
        needs=("logprob",),
        per="token",
        options={"beta": from_zero(1.0)},
        reference="https://arxiv.org/abs/2502.19301, WGA",
        ascends=True,
    ),
    Term(
        name="satimp",
        formula=_TOKENS + "π(y)^β₁ · (1 − π(y))^β₂ · log π(y), the weight without gradient",
        loss=_likelihood.satimp,
        needs=("logprob",),
        per="token",
        options={"beta1": from_zero(5.0), "beta2": from_zero(1.0)},
        reference="https://arxiv.org/abs/2505.11953, SatImp",
        ascends=True,
    ),
    Term(
        name="ce-u",
        formula=_TOKENS + "−log(1 − π(y)), the gradient of −Σ_{v≠y} q_v · log π(v), q = π without y",
        loss=_likelihood.ce_u,
        needs=("logprob",),
        per="token",
        reference="https://arxiv.org/abs/2503.01224, CE-U loss",
    ),
    Term(
        name="npo",
        formula=_ROWS + "−(2/β) · log σ(−β · Σ (log π(y) − log π₀(y)))",
        loss=_preference.npo,
        needs=("logprob", "ref_logprob"),
        per="row",
        options={"beta": positive(0.1)},
        reference="https://arxiv.org/abs/2404.05868, Eq. 3",
    ),
    Term(
        name="npo-norm",
        formula=_ROWS + "−(2/β) · log σ(−(β/|y|) · Σ (log π(y) − log π₀(y)))",
        loss=_preference.npo_norm,
        needs=("logprob", "ref_logprob"),
        per="row",
        options={"beta": positive(0.1)},
        reference="https://arxiv.org/abs/2407.06460, NPO as its code normalises it",
    ),
    Term(
        name="tnpo",
        formula=_TOKENS + "−(2/β) · log σ(−β · (log π(y) − log π₀(y)))",
        loss=_likelihood.tnpo,
        needs=("logprob", "ref_logprob"),
        per="token",
        options={"beta": positive(4.0)},
        reference="https://arxiv.org/abs/2502.19301, TNPO",
    ),
    Term(
        name="simnpo",
        formula=_ROWS + "−(2/β) · log σ(−(β/|y|) · Σ log π(y) − γ)",
        loss=_preference.simnpo,
        needs=("logprob",),
        per="row",
        options={"beta": positive(2.5), "gamma": any_number(0.0)},
        reference="https://arxiv.org/abs/2410.07163, SimNPO",
    ),
    Term(
        name="dpo",
        formula=_ROWS + "−(2/β) · log σ(β · (Σ log π(y')/π₀(y') − Σ log π(y)/π₀(y))), y' = refusal",
        loss=_preference.dpo,
        needs=("logprob", "ref_logprob", "refusal_logprob", "ref_refusal_logprob", "refusal_rows"),
        per="row",
        options={"beta": positive(0.1)},
        reference="https://arxiv.org/abs/2305.18290, Eq. 7, times 2/β as in https://arxiv.org/abs/2404.05868",
    ),
    Term(
        name="idk",
        formula="mean over refusal tokens of −log π(y'), y' = refusal",
        loss=_likelihood.idk,
        needs=("refusal_logprob", "refusal_rows"),
        per="refusal_token",
        reference="https://arxiv.org/abs/2401.06121, Preference Optimization (idk)",
    ),
    Term(
        name="me",
        formula=_TOKENS + "KL(π ‖ U) = log V − H(π)",
        loss=_distribution.me,
        needs=("entropy", "vocabulary"),
        per="token",
        reference="https://arxiv.org/abs/2410.08109, Maximizing Entropy, as in its text",
    ),
    Term(
        name="me-uniform",
        formula=_TOKENS + "KL(U ‖ π) = −log V − 1/V Σ_v log π(v)",
        loss=_distribution.me_uniform,
        needs=("uniform", "vocabulary"),
        per="token",
        reference="https://arxiv.org/abs/2410.08109, Maximizing Entropy, as in its code",
    ),
    Term(
        name="undial",
        formula=_TOKENS + "KL(softmax(z₀ − γ·onehot(y)) ‖ π)",
        loss=_distribution.undial,
        needs=("shifted",),
        per="token",
        options={"gamma": from_zero(10.0, of="input")},
        reference="https://arxiv.org/abs/2402.10052, UNDIAL",
    ),
    Term(
        name="rmu",
        formula=_TOKENS + "‖h − c·u‖² / d, h = output of one layer, u = a random unit vector",
        loss=_representation.rmu,
        needs=("activation", "direction"),
        per="token",
        options={"c": any_number(6.5), "layer": _LAYER, "seed": whole(0, 0, of="input")},
        reference="https://arxiv.org/abs/2403.03218, RMU forget loss",
    ),
    Term(
        name="masc",
        formula=_ROWS + "mean of max(0, m − (τ_ρ − η)) / η",
        loss=masc,
        needs=("margin",),
        per="row",
        options=_MASC_OPTIONS,
        reference="https://arxiv.org/abs/2606.02920",
    ),
)

_RETAIN = (
    Term(
        name="none",
        formula="0",
        loss=none,
        needs=(),
        per="token",
        reference="https://arxiv.org/abs/2401.06121, Gradient Ascent has no retain term",
    ),
    Term(
        name="ce",
        formula=_TOKENS + "−log π(y)",
        loss=_likelihood.ce,
        needs=("logprob",),
        per="token",
        reference="https://arxiv.org/abs/2401.06121, Gradient Difference",
    ),
    Term(
        name="kl",
        formula=_TOKENS + "KL(π₀ ‖ π)",
        loss=_distribution.kl,
        needs=("kl",),
        per="token",
        reference="https://arxiv.org/abs/2401.06121, KL Minimization",
    ),
    Term(
        name="ap",
        formula=_ROWS + "−(1/β) · log σ(β · (Σ log π(y) − Σ log π(y'))), y' = refusal",
        loss=_preference.ap,
        needs=("logprob", "refusal_logprob", "refusal_rows"),
        per="row",
        options={"beta": positive(0.1)},
        reference="https://arxiv.org/abs/2410.08109, Answer Preservation",
    ),
    Term(
        name="rmu-retain",
        formula=_TOKENS + "‖h − h₀‖² / d, h = output of one layer",
        loss=_representation.rmu_retain,
        needs=("activation", "ref_activation"),
        per="token",
        options={"layer": _LAYER},
        reference="https://arxiv.org/abs/2403.03218, RMU retain loss",
    ),
)

# Plain dictionaries: a user adds a term of their own by its name.
FORGET_TERMS: dict[str, Term] = {term.name: term for term in _FORGET}
RETAIN_TERMS: dict[str, Term] = {term.name: term for term in _RETAIN}
