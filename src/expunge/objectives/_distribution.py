"""Terms that compare whole next-token distributions: with the reference, with a changed reference, with the uniform."""

import math

from torch import Tensor

from expunge.objectives._aggregate import at_least_float32, token_total
from expunge.objectives._masc import SumCount


def kl(kl: Tensor, rows: Tensor, n_rows: int) -> SumCount:
    """Forward KL to the model before unlearning, averaged over the labelled tokens.

    L = 1/N Σ_t KL(π₀ ‖ π)_t, KL(π₀ ‖ π) = Σ_v π₀(v)·(log π₀(v) − log π(v))

    Args:
        kl: (N,) KL of each labelled token, in nats.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.

    Returns:
        Sum and number of tokens.

    Example:
        >>> import torch
        >>> round(kl(torch.tensor([0.2, 0.4]), torch.tensor([0, 0]), 1).mean().item(), 4)
        0.3

    References:
        Maini et al., TOFU, 2024, https://arxiv.org/abs/2401.06121 (KL Minimization; the text writes KL(π₀ ‖ π), as the
        code computes). The codes of TOFU, NPO and open-unlearning average over prompt and padding, too; here, as
        everywhere in this package, over labelled tokens only.
    """
    return token_total(at_least_float32(kl))


def me(entropy: Tensor, vocabulary: int, rows: Tensor, n_rows: int) -> SumCount:
    """Maximum entropy, as in the text of the paper: KL from the model to the uniform distribution.

    L = 1/N Σ_t KL(π_t ‖ U) = 1/N Σ_t (log V − H(π_t))

    Its slope in the logits vanishes where π is near one token, so a memorised answer moves slowly; see `me_uniform`.

    Args:
        entropy: (N,) H(π_t) in nats.
        vocabulary: V, number of logits, 1 or more.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.

    Returns:
        Sum and number of tokens.

    Example:
        >>> import torch
        >>> round(me(torch.tensor([0.0]), 4, torch.tensor([0]), 1).mean().item(), 4)
        1.3863

    References:
        Yuan et al., A Closer Look at Machine Unlearning for Large Language Models, 2024,
        https://arxiv.org/abs/2410.08109 (Maximizing Entropy). Their code has the other direction: `me_uniform`.
    """
    return token_total(_log_size(vocabulary) - at_least_float32(entropy))


def me_uniform(uniform: Tensor, vocabulary: int, rows: Tensor, n_rows: int) -> SumCount:
    """Maximum entropy, as in the authors' code: KL from the uniform distribution to the model.

    L = 1/N Σ_t KL(U ‖ π_t) = 1/N Σ_t (−log V − 1/V Σ_v log π_t(v))

    Its slope in the logits, π − 1/V, is largest where π is near one token.

    Args:
        uniform: (N,) 1/V Σ_v log π_t(v), in nats.
        vocabulary: V, number of logits, 1 or more.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.

    Returns:
        Sum and number of tokens.

    Example:
        >>> import torch
        >>> p = torch.tensor([0.7, 0.1, 0.1, 0.1])
        >>> round(me_uniform(p.log().mean()[None], 4, torch.tensor([0]), 1).mean().item(), 4)
        0.4298

    References:
        Yuan et al., 2024, https://arxiv.org/abs/2410.08109, code: https://github.com/sail-sg/closer-look-LLM-unlearning
        (b622294, trainer/losses.py). It adds 1e-12 to π and, in the ME+GD runs, labels the question, too.
    """
    return token_total(-at_least_float32(uniform) - _log_size(vocabulary))


def undial(shifted: Tensor, rows: Tensor, n_rows: int) -> SumCount:
    """Self-distillation from the model before unlearning with the target's logit lowered by γ.

    L = 1/N Σ_t KL(π₀' ‖ π)_t, π₀' = softmax(z₀ − γ·onehot(y_t))

    The paper minimises the cross-entropy −Σ_v π₀'(v)·log π(v), which is larger by the entropy of π₀', a constant: same
    gradient. γ acts where the statistic is made (`Reference(..., target_shift=γ)`), as does the option `gamma`.

    Args:
        shifted: (N,) KL(π₀' ‖ π) of each labelled token, in nats.
        rows: (N,) int64; the mean is over tokens, so the rows do not matter.
        n_rows: examples.

    Returns:
        Sum and number of tokens.

    Example:
        >>> import torch
        >>> round(undial(torch.tensor([0.2, 0.4]), torch.tensor([0, 0]), 1).mean().item(), 4)
        0.3

    References:
        Dong et al., UNDIAL: Self-Distillation with Adjusted Logits for Robust Unlearning in Large Language Models,
        2024, https://arxiv.org/abs/2402.10052. Their code and open-unlearning's average over prompt and padding, too,
        and the latter uses the label −100 of unlabelled places as an index of a logit.
    """
    return token_total(at_least_float32(shifted))


def _log_size(vocabulary: int) -> float:
    if vocabulary < 1:
        raise ValueError(f"vocabulary: found {vocabulary}, accepted is a whole number from 1")
    return math.log(vocabulary)
