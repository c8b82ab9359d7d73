"""Terms made of the log-probabilities of whole answers: NPO and its kin, DPO, and answer preservation."""

from torch import Tensor
from torch.nn import functional

from expunge.objectives._aggregate import at_least_float32, row_counts, row_sums, row_total
from expunge.objectives._masc import SumCount


def npo(logprob: Tensor, ref_logprob: Tensor, rows: Tensor, n_rows: int, *, beta: float = 0.1) -> SumCount:
    """Negative preference optimisation, on summed log-probabilities.

    L = −1/R Σ_r (2/β) · log σ(−β·(log π(y_r) − log π₀(y_r))), log π(y_r) = Σ_t log π(y_rt)

    Bounded below by 0; for β → 0 its gradient is that of `ga_sum`.

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        ref_logprob: (N,) log π₀(y_t) ≤ 0 of the model before unlearning; no gradient reaches it.
        rows: (N,) int64, the example of each token.
        n_rows: examples.
        beta: inverse temperature β, above 0.

    Returns:
        Sum and number of rows that have tokens.

    Example:
        >>> import torch
        >>> one = torch.tensor([0])
        >>> round(npo(torch.tensor([-3.0]), torch.tensor([-2.0]), one, 1).mean().item(), 4)
        12.8879

    References:
        Zhang et al., Negative Preference Optimization, 2024, https://arxiv.org/abs/2404.05868, Eq. 3. MUSE's code takes
        the mean over tokens instead of the sum: that is `npo_norm`.
    """
    ratio = row_sums(at_least_float32(logprob) - at_least_float32(ref_logprob).detach(), rows, n_rows)
    return row_total(_preferred(-ratio, beta, 2.0), row_counts(rows, n_rows) > 0)


def npo_norm(logprob: Tensor, ref_logprob: Tensor, rows: Tensor, n_rows: int, *, beta: float = 0.1) -> SumCount:
    """NPO on mean log-probabilities: long and short answers are pushed alike.

    L = −1/R Σ_r (2/β) · log σ(−(β/|y_r|)·(log π(y_r) − log π₀(y_r)))

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        ref_logprob: (N,) log π₀(y_t) ≤ 0 of the model before unlearning; no gradient reaches it.
        rows: (N,) int64, the example of each token.
        n_rows: examples.
        beta: inverse temperature β, above 0.

    Returns:
        Sum and number of rows that have tokens.

    Example:
        >>> import torch
        >>> now, before = torch.tensor([-3.0, -3.0]), torch.tensor([-2.0, -2.0])
        >>> round(npo_norm(now, before, torch.tensor([0, 0]), 1).mean().item(), 4)
        12.8879

    References:
        Shi et al., MUSE, 2024, https://arxiv.org/abs/2407.06460: the paper states Zhang et al.'s formula, its code puts
        the mean loss of the batch into it; here the mean is per row, so that it does not depend on the batch.
    """
    counts = row_counts(rows, n_rows)
    ratio = row_sums(at_least_float32(logprob) - at_least_float32(ref_logprob).detach(), rows, n_rows)
    return row_total(_preferred(-ratio / counts.clamp(min=1), beta, 2.0), counts > 0)


def simnpo(logprob: Tensor, rows: Tensor, n_rows: int, *, beta: float = 2.5, gamma: float = 0.0) -> SumCount:
    """NPO without a reference, on mean log-probabilities with a margin.

    L = −1/R Σ_r (2/β) · log σ(−(β/|y_r|)·log π(y_r) − γ)

    The margin γ stands beside the scaled likelihood, as in the paper. The authors' code and open-unlearning subtract δ
    from the unscaled one, −β·(log π/|y| + δ): γ = β·δ.

    Args:
        logprob: (N,) log π(y_t) ≤ 0.
        rows: (N,) int64, the example of each token.
        n_rows: examples.
        beta: inverse temperature β, above 0.
        gamma: margin γ, any finite number.

    Returns:
        Sum and number of rows that have tokens.

    Example:
        >>> import torch
        >>> answer = torch.full((4,), -0.5)
        >>> rows = torch.zeros(4, dtype=torch.int64)
        >>> round(simnpo(answer, rows, 1, beta=2.5, gamma=0.5).mean().item(), 5)
        0.3095

    References:
        Fan et al., Simplicity Prevails: Rethinking Negative Preference Optimization for LLM Unlearning, 2024,
        https://arxiv.org/abs/2410.07163 (SimNPO loss). Defaults: the authors' TOFU forget05 run (forget10: β = 4.5).
    """
    counts = row_counts(rows, n_rows)
    mean = row_sums(logprob, rows, n_rows) / counts.clamp(min=1)
    return row_total(functional.logsigmoid(-beta * mean - gamma) * (-2.0 / beta), counts > 0)


def dpo(
    logprob: Tensor,
    ref_logprob: Tensor,
    refusal_logprob: Tensor,
    ref_refusal_logprob: Tensor,
    refusal_rows: Tensor,
    rows: Tensor,
    n_rows: int,
    *,
    beta: float = 0.1,
) -> SumCount:
    """Direct preference optimisation with the refusal preferred to the answer to forget.

    L = −1/R Σ_r (2/β) · log σ(β·[log π(y'_r)/π₀(y'_r) − log π(y_r)/π₀(y_r)]), y' = the refusal, y = the answer

    Args:
        logprob: (N,) log π(y_t) ≤ 0 of the answers.
        ref_logprob: (N,) log π₀(y_t) ≤ 0; no gradient reaches it.
        refusal_logprob: (M,) log π(y'_t) ≤ 0 of the refusals.
        ref_refusal_logprob: (M,) log π₀(y'_t) ≤ 0; no gradient reaches it.
        refusal_rows: (M,) int64, the example of each refusal token.
        rows: (N,) int64, the example of each answer token.
        n_rows: examples.
        beta: inverse temperature β, above 0.

    Returns:
        Sum and number of rows that have both answer and refusal tokens; the others take no part.

    Example:
        >>> import torch
        >>> one, zero = torch.tensor([0]), torch.zeros(1)
        >>> round(dpo(zero - 2, zero - 2, zero - 5, zero - 5, one, one, 1).mean().item(), 4)
        13.8629

    References:
        Rafailov et al., Direct Preference Optimization, 2023, https://arxiv.org/abs/2305.18290, Eq. 7, has 1 in place
        of 2/β. The factor 2/β, which makes the scale that of NPO, is in Zhang et al., 2024,
        https://arxiv.org/abs/2404.05868, and in the code of NPO and open-unlearning.
    """
    answer = row_sums(at_least_float32(logprob) - at_least_float32(ref_logprob).detach(), rows, n_rows)
    refusal = row_sums(
        at_least_float32(refusal_logprob) - at_least_float32(ref_refusal_logprob).detach(), refusal_rows, n_rows
    )
    counted = (row_counts(rows, n_rows) > 0) & (row_counts(refusal_rows, n_rows) > 0)
    return row_total(_preferred(refusal - answer, beta, 2.0), counted)


def ap(
    logprob: Tensor,
    refusal_logprob: Tensor,
    refusal_rows: Tensor,
    rows: Tensor,
    n_rows: int,
    *,
    beta: float = 0.1,
) -> SumCount:
    """Answer preservation: on examples to keep, the answer stays more likely than a refusal.

    L = −1/R Σ_r (1/β) · log σ(β·[log π(y_r) − log π(y'_r)]), y = the answer, y' = a refusal

    No reference model, and 1/β where NPO has 2/β.

    Args:
        logprob: (N,) log π(y_t) ≤ 0 of the answers to keep.
        refusal_logprob: (M,) log π(y'_t) ≤ 0 of refusals to the same prompts.
        refusal_rows: (M,) int64, the example of each refusal token.
        rows: (N,) int64, the example of each answer token.
        n_rows: examples.
        beta: inverse temperature β, above 0.

    Returns:
        Sum and number of rows that have both answer and refusal tokens; the others take no part.

    Example:
        >>> import torch
        >>> one, same = torch.tensor([0]), torch.tensor([-2.0])
        >>> round(ap(same, same, one, one, 1).mean().item(), 4)
        6.9315

    References:
        Yuan et al., A Closer Look at Machine Unlearning for Large Language Models, 2024,
        https://arxiv.org/abs/2410.08109 (Answer Preservation).
    """
    gain = row_sums(logprob, rows, n_rows) - row_sums(refusal_logprob, refusal_rows, n_rows)
    counted = (row_counts(rows, n_rows) > 0) & (row_counts(refusal_rows, n_rows) > 0)
    return row_total(_preferred(gain, beta, 1.0), counted)


def _preferred(gain: Tensor, beta: float, scale: float) -> Tensor:
    """−(scale/β) · log σ(β·gain) of each row."""
    return functional.logsigmoid(beta * gain) * (-scale / beta)
