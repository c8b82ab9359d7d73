"""Token statistics: what training, the stopping rule and evaluation want to know about the labelled tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.errors import UsageError
from expunge.lm._head import Head, accumulation_dtype
from expunge.lm._margin import Margin, check_k, gathered_logits, largest, margin_of, valid_competitors
from expunge.lm._margin import margin as _margin
from expunge.lm._scan import Plan, Reference, check_shift, scan

IGNORE_INDEX = -100


@dataclass(frozen=True)
class TokenStats:
    """Statistics of N labelled tokens, (N,) float32 each (float64 for float64 inputs); None = not asked for.

    Attributes:
        logprob: log π(y), ≤ 0. Gradient.
        margin: β·z_y − log Σ_{v ∈ S} exp(β·z_v), any sign; positive = the target wins. Gradient.
        kl: KL(π₀ ‖ π_θ) = Σ_v π₀(v)·(log π₀(v) − log π_θ(v)), ≥ 0 up to rounding. Gradient in π_θ only.
        entropy: H(π) = −Σ_v π(v)·log π(v), in [0, log V]. Gradient.
        uniform: 1/V Σ_v log π(v), ≤ −log V; KL(U ‖ π) = −log V − uniform. Gradient.
        mean: E_{v ~ π}[log π(v)] = −H(π). No gradient.
        variance: Var_{v ~ π}[log π(v)]. No gradient.
        hit: 1.0 if the argmax of the logits (first of equals) is the target, else 0.0. No gradient.
        rank: how many logits are strictly greater than the target's; 0 = best. No gradient.
    """

    logprob: Tensor | None = None
    margin: Tensor | None = None
    kl: Tensor | None = None
    entropy: Tensor | None = None
    uniform: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    hit: Tensor | None = None
    rank: Tensor | None = None


def token_stats(  # noqa: PLR0913 - each statistic is one argument, so that a call says what it gets
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    logprob: bool = False,
    margin: Margin | None = None,
    kl: Reference | None = None,
    entropy: bool = False,
    uniform: bool = False,
    moments: bool = False,
    hit: bool = False,
    rank: bool = False,
    chunk: int | None = None,
) -> TokenStats:
    """Statistics of labelled tokens from hidden states; logits exist for one chunk of tokens at a time only.

    With logits z = head(h), π = softmax(z) and target y, for each token:

    - logprob = z_y − log Σ_v exp(z_v)
    - margin = β·z_y − log Σ_{v ∈ S_k} exp(β·z_v), S_k = the k largest logits other than the target. For β = 1,
      log σ(margin) ≥ logprob for any S, since the softmax sums over S ∪ {y} and more: Σ_t log σ(m_t) certifies an upper
      bound of the answer's log-probability.
    - kl = Σ_v π₀(v)·(log π₀(v) − log π_θ(v)) (forward KL; the reference is the first argument), where π₀ may have the
      target taken out or its logit lowered (see `Reference`)
    - uniform = 1/V Σ_v log π(v)
    - entropy, mean and variance of log π under π, argmax hit, rank

    The margin's search needs no gradient and its backward pass touches the k + 1 chosen columns only. Given competitors
    and nothing else, no full logits are computed at all. The chosen logits are summed in float32 even for bf16 weights,
    where the others carry the rounding of the bf16 product; in bf16 the bound above thus holds up to that rounding. The
    other gradients cost one product per statistic in the forward pass, so ask under `torch.no_grad()` for
    what is only logged. If the head's weight or bias requires a gradient, the backward pass recomputes the chunks.

    Args:
        hidden: (N, d) hidden states after the final norm that predict the targets. N = 0 gives (0,) tensors that
            are still attached to the graph.
        head: from `split_model`.
        targets: (N,) int64 in [0, V).
        logprob: ask for logprob.
        margin: k, β and, optionally, teacher-anchored competitors.
        kl: the reference's hidden states at the same tokens and its head.
        entropy: ask for entropy.
        uniform: ask for uniform.
        moments: ask for mean and variance.
        hit: ask for hit.
        rank: ask for rank.
        chunk: tokens per chunk; None: about 128 MB of buffers.

    Returns:
        The statistics asked for, (N,) float32 each (float64 if hidden or weights are); the others None.

    Raises:
        UsageError: if shapes do not match, a target is outside the vocabulary, k is not below the vocabulary size, or a
            row of competitors names no token other than its target.

    Example:
        >>> import torch
        >>> head = Head(torch.zeros(128_000, 4, dtype=torch.bfloat16))
        >>> stats = token_stats(torch.ones(1, 4, dtype=torch.bfloat16), head, torch.tensor([7]), logprob=True)
        >>> round(stats.logprob.item(), 5)
        -11.75979

    References:
        MASC (margin, certificate), arXiv 2606.02920. Where the paper differentiates all logits, only S_k ∪ {y} is
        differentiated here; the gradient is the same, since the others have none.
    """
    _check(hidden, head, targets)
    search = 0
    if margin is not None and margin.competitors is None:
        check_k(margin.k, head.weight.shape[0])
        search = margin.k
    if kl is not None and (kl.hidden.shape[0] != hidden.shape[0] or kl.head.weight.shape[0] != head.weight.shape[0]):
        raise UsageError(
            f"kl: the reference has {kl.hidden.shape[0]} tokens and {kl.head.weight.shape[0]} logits, "
            f"the model {hidden.shape[0]} and {head.weight.shape[0]}"
        )
    if kl is not None and kl.without_target and (logprob or entropy or uniform or moments):
        raise UsageError("kl: with without_target the other statistics of the distribution need a call of their own")
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk must be at least 1, found {chunk}")
    grad = torch.is_grad_enabled()
    plan = Plan(head, targets, kl, logprob, entropy, moments, hit, rank, search, chunk, grad, uniform)
    found = {} if plan.empty else scan(hidden, plan)
    competitors = found.pop("competitors", None)
    if margin is not None:
        found["margin"] = _margin(hidden, head, targets, margin, competitors)
    return TokenStats(**found)


def token_stats_from_logits(  # noqa: PLR0913 - mirrors token_stats
    logits: Tensor,
    targets: Tensor,
    *,
    logprob: bool = False,
    margin: Margin | None = None,
    kl: Tensor | None = None,
    target_shift: float = 0.0,
    entropy: bool = False,
    uniform: bool = False,
    moments: bool = False,
    hit: bool = False,
    rank: bool = False,
) -> TokenStats:
    """The same statistics from the model's own logits, for models without a recognised head.

    Args:
        logits: (N, V), any floating dtype; half precision is upcast to float32 before any sum.
        targets: (N,) int64 in [0, V).
        logprob: ask for logprob.
        margin: k, β and, optionally, competitors.
        kl: (N, V) logits of the reference; no gradient reaches them.
        target_shift: γ ≥ 0 by which the reference's logit of the target is lowered.
        entropy: ask for entropy.
        uniform: ask for uniform.
        moments: ask for mean and variance.
        hit: ask for hit.
        rank: ask for rank.

    Returns:
        As `token_stats`.

    Raises:
        UsageError: as `token_stats`.
    """
    _check_targets(targets, *logits.shape)
    check_shift(target_shift)
    z = logits.to(accumulation_dtype(logits.dtype))
    logp = torch.log_softmax(z, dim=1)
    own = z.gather(1, targets[:, None])
    found: dict[str, Tensor] = {}
    if logprob:
        found["logprob"] = logp.gather(1, targets[:, None]).squeeze(1)
    if margin is not None:
        found["margin"] = _margin_from_logits(z, targets, margin)
    if kl is not None:
        z0 = kl.detach().to(z.dtype)
        if target_shift:
            z0 = z0.scatter_add(1, targets[:, None], torch.full_like(own, -target_shift))
        reference = torch.log_softmax(z0, dim=1)
        found["kl"] = torch.nn.functional.kl_div(logp, reference, reduction="none", log_target=True).sum(1)
    if entropy:
        found["entropy"] = torch.special.entr(logp.exp()).sum(1)
    if uniform:
        found["uniform"] = logp.mean(1)
    if moments:
        probs = logp.detach().exp()
        found["mean"] = -torch.special.entr(probs).sum(1)
        deviation = torch.where(probs > 0, logp.detach() - found["mean"][:, None], 0.0)
        found["variance"] = (probs * deviation.square()).sum(1)
    if hit:
        found["hit"] = (z.argmax(1) == targets).to(z.dtype)
    if rank:
        found["rank"] = (z > own).sum(1).to(z.dtype)
    return TokenStats(**found)


def _margin_from_logits(z: Tensor, targets: Tensor, spec: Margin) -> Tensor:
    if spec.competitors is None:
        check_k(spec.k, z.shape[1])
        valid, found = None, largest(z.detach().scatter(1, targets[:, None], -torch.inf), spec.k)
    else:
        valid = valid_competitors(spec.competitors, targets)
        found = torch.where(valid, spec.competitors, targets[:, None])
    return margin_of(z.gather(1, torch.cat([targets[:, None], found], dim=1)), valid, spec.beta)


@torch.no_grad()
def competitor_ids(hidden: Tensor, head: Head, targets: Tensor, *, k: int | None, delta: float | None) -> Tensor:
    """Teacher-anchored competitor sets: ids to give to `Margin(competitors=...)`.

    S = {v ≠ y among the k largest logits: z_v ≥ max_{u ≠ y} z_u − δ}. The best id other than the target is always in S.

    Args:
        hidden: (N, d) hidden states of the teacher (the model before unlearning).
        head: the teacher's head.
        targets: (N,) int64 in [0, V).
        k: size of the set, or None: as many as lie within delta.
        delta: width δ ≥ 0 in logits below the best competitor, or None: all k. MASC's News preset is k=2, delta=0.5.

    Returns:
        (N, K) int64, best first, -1 where the set is smaller than K; at least one id per row.

    Raises:
        UsageError: if both are None, delta is negative, or k is not in [1, V).

    References:
        MASC, arXiv 2606.02920 (teacher-anchored competitors).
    """
    _check(hidden, head, targets)
    vocabulary = head.weight.shape[0]
    if k is None and delta is None:
        raise UsageError("competitor_ids needs k, delta or both")
    if delta is not None and not delta >= 0:
        raise UsageError(f"delta must be at least 0, found {delta}")
    if k is not None:
        if k < 1:
            raise UsageError(f"k must be at least 1, found {k}")
        check_k(k, vocabulary)
    else:
        assert delta is not None
        k = _most_within(hidden, head, targets, delta)
    ids = scan(hidden, Plan(head, targets, search=k, grad=False))["competitors"]
    logits = gathered_logits(hidden, head, ids)
    logits, order = logits.sort(dim=1, descending=True)
    ids = ids.gather(1, order)
    return ids if delta is None else ids.masked_fill(logits < logits[:, :1] - delta, -1)


def _most_within(hidden: Tensor, head: Head, targets: Tensor, delta: float) -> int:
    """The largest number, over rows, of non-target logits within delta of the best of them."""
    most = 1
    rows = Plan(head, targets, logprob=True).rows(hidden.shape[0], head.compute_dtype(hidden))
    for start in range(0, hidden.shape[0], rows):
        logits = head.logits(hidden[start : start + rows])
        logits.scatter_(1, targets[start : start + rows, None], -torch.inf)
        most = max(most, int((logits >= logits.amax(1, keepdim=True) - delta).sum(1).max()))
    return most


def labelled_positions(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the labelled tokens are, and which hidden state predicts each.

    The hidden state at t − 1 predicts the token at t. A label at t = 0 is left out: nothing predicts it.

    Args:
        labels: (B, T) int64, -100 = not labelled.

    Returns:
        (row, position, target), (N,) int64 each, in order of row and position: `body(...)[row, position]` are the
        hidden states and `target` the tokens for `token_stats`.

    Example:
        >>> import torch
        >>> labelled_positions(torch.tensor([[-100, -100, 7, 2], [9, -100, 8, -100]]))
        (tensor([0, 0, 1]), tensor([1, 2, 1]), tensor([7, 2, 8]))
    """
    row, position = (labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    return row, position, labels[row, position + 1]


def _check(hidden: Tensor, head: Head, targets: Tensor) -> None:
    if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise UsageError(f"hidden must have shape (N, {head.weight.shape[1]}), found {tuple(hidden.shape)}")
    _check_targets(targets, hidden.shape[0], head.weight.shape[0])


def _check_targets(targets: Tensor, tokens: int, vocabulary: int) -> None:
    if targets.shape != (tokens,):
        raise UsageError(f"targets must have shape ({tokens},), found {tuple(targets.shape)}")
    outside = (targets < 0) | (targets >= vocabulary)
    if bool(outside.any()):
        raise UsageError(f"targets must be in [0, {vocabulary}), found {int(targets[outside][0])}")
