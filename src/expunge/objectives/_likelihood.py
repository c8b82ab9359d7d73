"""Terms made of the log-probabilities of the labelled tokens, one by one: ascent, descent and their weighted kin."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from expunge.objectives._aggregate import at_least_float32, row_counts, row_sums, row_total, token_total
from expunge.objectives._masc import SumCount


def ga(logprob: Tensor, rows: Tensor, n_rows: int) -> SumCount:
    """Gradient ascent: the mean log-probability of the tokens to forget, minimised.

    L = 1/N Σ_t log π(y_t)

    The value is the negative of the usual cross-entropy and has no lower bound.

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.

    Returns:
        Sum and number of tokens.

    Example:
        >>> ga(torch.tensor([-1.0, -3.0]), torch.tensor([0, 1]), 2).mean().item()
        -2.0

    References:
        Jang et al., Knowledge Unlearning for Mitigating Privacy Risks in Language Models, 2022,
        https://arxiv.org/abs/2210.01504, sums over the tokens of a row: that is `ga_sum`. The mean over tokens
        is what TOFU's code minimises (Maini et al., 2024, https://arxiv.org/abs/2401.06121, Gradient Ascent).
    """
    return token_total(at_least_float32(logprob))


def ga_sum(logprob: Tensor, rows: Tensor, n_rows: int) -> SumCount:
    """Gradient ascent on whole answers: the mean over rows of the summed log-probability.

    L = 1/R Σ_r Σ_t log π(y_rt)

    Differs from `ga` in scale (by the mean length) and in that long answers weigh no less than their length.

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        rows: (N,) int64, the example of each token.
        n_rows: examples.

    Returns:
        Sum and number of rows that have tokens.

    Example:
        >>> ga_sum(torch.tensor([-1.0, -3.0, -1.0]), torch.tensor([0, 0, 1]), 2).mean().item()
        -2.5

    References:
        Jang et al., 2022, https://arxiv.org/abs/2210.01504, Eq. 1; Zhang et al. (NPO), 2024,
        https://arxiv.org/abs/2404.05868 (gradient ascent).
    """
    return row_total(row_sums(logprob, rows, n_rows), row_counts(rows, n_rows) > 0)


def ce(logprob: Tensor, rows: Tensor, n_rows: int) -> SumCount:
    """Cross-entropy ("GD", gradient descent): the retain term of GradDiff.

    L = −1/N Σ_t log π(y_t)

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.

    Returns:
        Sum and number of tokens.

    Example:
        >>> ce(torch.tensor([-1.0, -3.0]), torch.tensor([0, 1]), 2).mean().item()
        2.0

    References:
        Maini et al., TOFU, 2024, https://arxiv.org/abs/2401.06121, Gradient Difference.
    """
    return token_total(-at_least_float32(logprob))


def idk(refusal_logprob: Tensor, refusal_rows: Tensor, rows: Tensor, n_rows: int) -> SumCount:
    """Likelihood of refusals: learn to answer "I don't know" to the prompts to forget.

    L = −1/M Σ_t log π(y'_t), y' = the refusal

    Plain negative log-likelihood. The method that prefers the refusal to the answer is another one: `dpo`.

    Args:
        refusal_logprob: (M,) log π(y'_t) ≤ 0 of the refusals' tokens.
        refusal_rows: (M,) int64, the example of each refusal token.
        rows: (N,) int64 of the answers; not read.
        n_rows: examples.

    Returns:
        Sum and number of refusal tokens.

    Example:
        >>> nothing = torch.empty(0, dtype=torch.int64)
        >>> idk(torch.tensor([-1.0, -3.0]), torch.tensor([0, 0]), nothing, 1).mean().item()
        2.0

    References:
        Maini et al., TOFU, 2024, https://arxiv.org/abs/2401.06121, "Preference Optimization" (`idk` in the
        code). That code takes one mean over refusal and retain tokens together; here, as in Yuan et al.,
        2024, https://arxiv.org/abs/2410.08109, each set has its own mean and weight.
    """
    if refusal_rows.shape != refusal_logprob.shape:
        raise ValueError(
            f"refusal_rows: found shape {tuple(refusal_rows.shape)}, accepted is {tuple(refusal_logprob.shape)}"
        )
    return token_total(-at_least_float32(refusal_logprob))


def wga(logprob: Tensor, rows: Tensor, n_rows: int, *, beta: float = 1.0) -> SumCount:
    """Weighted gradient ascent: tokens that are unlikely already are left alone.

    L = 1/N Σ_t w_t · log π(y_t), w_t = π(y_t)^β without gradient

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.
        beta: exponent β (α in the paper) of the weight, 0 or more; 0 is `ga`.

    Returns:
        Sum and number of tokens (not the sum of the weights).

    Example:
        >>> round(wga(torch.tensor([0.5]).log(), torch.tensor([0]), 1).mean().item(), 4)
        -0.3466

    References:
        Wang et al., Rethinking LLM Unlearning Objectives: A Gradient Perspective and Go Beyond, 2025,
        https://arxiv.org/abs/2502.19301 (WGA). The paper sums over the tokens of a row; its code, as here, takes the
        mean over tokens.
    """
    logprob = at_least_float32(logprob)
    return token_total((beta * logprob.detach()).exp() * logprob)


def satimp(logprob: Tensor, rows: Tensor, n_rows: int, *, beta1: float = 5.0, beta2: float = 1.0) -> SumCount:
    """Gradient ascent weighted by saturation and importance.

    L = 1/N Σ_t w_t · log π(y_t), w_t = π(y_t)^β₁ · (1 − π(y_t))^β₂ without gradient

    Tokens that are forgotten already (π small) and tokens that any text would have (π near 1) weigh little.

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.
        beta1: exponent β₁ of the saturation weight, 0 or more.
        beta2: exponent β₂ of the importance weight, 0 or more; 0 is `wga` with β = β₁.

    Returns:
        Sum and number of tokens (not the sum of the weights).

    Example:
        >>> p = torch.tensor([0.5])
        >>> round(satimp(p.log(), torch.tensor([0]), 1, beta1=1.0).mean().item(), 4)
        -0.1733

    References:
        Yang et al., Exploring Criteria of Loss Reweighting to Enhance LLM Unlearning, 2025,
        https://arxiv.org/abs/2505.11953 (SatImp).
    """
    logprob = at_least_float32(logprob)
    held = logprob.detach().clamp(max=0.0)
    return token_total((beta1 * held).exp() * (-torch.expm1(held)) ** beta2 * logprob)


def tnpo(logprob: Tensor, ref_logprob: Tensor, rows: Tensor, n_rows: int, *, beta: float = 4.0) -> SumCount:
    """Token-wise NPO: the preference is taken token by token instead of answer by answer.

    L = −1/N Σ_t (2/β) · log σ(−β·(log π(y_t) − log π₀(y_t)))

    Its slope in log π(y_t) is the weight 2·π^β / (π^β + π₀^β) of the paper.

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        ref_logprob: (N,) log π₀(y_t) ≤ 0.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.
        beta: β, above 0.

    Returns:
        Sum and number of tokens.

    Example:
        >>> same = torch.tensor([-1.0])
        >>> round(tnpo(same, same, torch.tensor([0]), 1, beta=2.0).mean().item(), 4)
        0.6931

    References:
        Wang et al., 2025, https://arxiv.org/abs/2502.19301 (TNPO): the paper gives the weight, which is applied
        without gradient to log π; value differs, gradient is the same up to the code's 1e-5 in the denominator.
    """
    ratio = at_least_float32(logprob) - at_least_float32(ref_logprob).detach()
    return token_total(functional.logsigmoid(-beta * ratio) * (-2.0 / beta))


def ce_u(logprob: Tensor, rows: Tensor, n_rows: int, *, entropy: Tensor | None = None) -> SumCount:
    """Cross-entropy to the model's own distribution with the target taken out (CE-U).

    L = −1/N Σ_t Σ_{v≠y_t} q_v · log π(v), q_v = π(v) / (1 − π(y_t)) without gradient

    The slope in the logits is π − q: π(y) for the target, π(v) − q_v for the others. The slope of −log(1 − π(y)) is
    π(y)·(1[v = y] − π(v)) / (1 − π(y)): again π(y) for the target, and −π(v)·π(y)/(1 − π(y)) = π(v) − q_v for the
    others. So the term needs log π(y) only, and is computed as −log(1 − π(y)); the paper's value is larger by the
    entropy of q, H(q) = (H(π) + π(y)·log π(y)) / (1 − π(y)) + log(1 − π(y)), a constant for the gradient, which is
    added where `entropy` is given.

    1 − π(y) is computed as −expm1(log π(y)), which loses no digits where π(y) is near 1. In float32, log π(y) may round
    to 0: it is then taken as −ε (ε = 1.2e-7, or 2.2e-16 in float64) without stopping the gradient, so that a token's
    value is at most 15.9 and its slope in log π(y) at most 1/ε; the head's slope 1[v = y] − π(v) is of order ε there,
    and the product of both stays of order 1.

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.
        entropy: (N,) H(π_t), for the paper's value; no gradient is taken of it.

    Returns:
        Sum and number of tokens.

    Example:
        >>> round(ce_u(torch.tensor([0.75]).log(), torch.tensor([0]), 1).mean().item(), 4)
        1.3863

    References:
        Yang, CE-U: Cross Entropy Unlearning, 2025, https://arxiv.org/abs/2503.01224 (CE-U loss). The paper leaves the
        first token of each answer out: that is a matter of labels (`apply_suffix(labels, 1)`), not of this function.
    """
    logprob = at_least_float32(logprob)
    limit = -torch.finfo(logprob.dtype).eps
    held = logprob + (logprob.detach().clamp(max=limit) - logprob.detach())
    rest = _log1mexp(held)
    values = -rest
    if entropy is not None:
        p, log_rest = held.detach().exp(), rest.detach()
        spread = (at_least_float32(entropy).detach() + p * held.detach()) / log_rest.exp() + log_rest
        values = values + spread.clamp(min=0.0)
    return token_total(values)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 − eˣ) for x < 0 without cancellation on either side of −ln 2."""
    return torch.where(x > -math.log(2.0), (-torch.expm1(x)).log(), torch.log1p(-x.exp()))
