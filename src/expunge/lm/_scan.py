"""One pass over the labelled tokens that sees all logits, a chunk of tokens at a time, and keeps none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expunge.errors import UsageError
from expunge.lm._head import Head, accumulation_dtype
from expunge.lm._margin import largest

# All buffers of a chunk together. Larger chunks gain little: the product reads the head's weights once per chunk, and
# at V = 152,000, d = 896 the time per token falls by 10 to 20 % from 110 to 440 rows.
BUFFER_BYTES = 128 * 2**20
MIN_ROWS, _MAX_ROWS = 32, 2048
DIFFERENTIABLE = ("logprob", "kl", "entropy", "uniform")


def check_shift(shift: float) -> None:
    """Raise UsageError unless the shift is a finite number from 0."""
    if not 0.0 <= shift < float("inf"):
        raise UsageError(f"target_shift must be a finite number from 0, found {shift}")


@dataclass(frozen=True)
class Reference:
    """The frozen model π₀ of KL(π₀ ‖ π_θ), as hidden states and a head; no gradient reaches either.

    Attributes:
        hidden: (N, d₀) hidden states of the reference at the same tokens.
        head: the reference's head, with the same vocabulary.
        without_target: take the target out of both distributions and renormalise them: the KL then says nothing of
            how likely the target is, and compares what the models would say otherwise.
        target_shift: γ ≥ 0 by which the reference's logit of the target is lowered: KL(π₀' ‖ π_θ) with π₀' = softmax(z₀
            − γ·onehot(y)). UNDIAL (arXiv 2402.10052) minimises the cross-entropy −Σ_v π₀'(v)·log π_θ(v) instead, which
            is larger by the entropy of π₀', a constant: the gradient is the same.

    Raises:
        UsageError: if target_shift is negative or not finite, or given together with without_target.
    """

    hidden: Tensor
    head: Head
    without_target: bool = False
    target_shift: float = 0.0

    def __post_init__(self) -> None:
        check_shift(self.target_shift)
        if self.without_target and self.target_shift:
            raise UsageError("target_shift: without_target leaves no target whose logit could be lowered")


@dataclass(frozen=True)
class Plan:
    """What one pass computes; `search` is the number of competitors to find (0: none)."""

    head: Head
    targets: Tensor
    reference: Reference | None = None
    logprob: bool = False
    entropy: bool = False
    moments: bool = False
    hit: bool = False
    rank: bool = False
    search: int = 0
    chunk: int | None = None
    grad: bool = True
    uniform: bool = False

    @property
    def softmax(self) -> bool:
        """Whether a normalised distribution is needed, or only the order of the logits."""
        return self.logprob or self.entropy or self.moments or self.uniform or self.reference is not None

    @property
    def empty(self) -> bool:
        """Whether nothing needs the full logits."""
        return not (self.softmax or self.hit or self.rank or self.search)

    def rows(self, tokens: int, dtype: torch.dtype) -> int:
        """Tokens per chunk, all chunks about equal."""
        if self.chunk is not None:
            return self.chunk
        full = accumulation_dtype(dtype).itemsize
        per_token = dtype.itemsize * (dtype.itemsize != full) if self.softmax else dtype.itemsize
        per_token += full * ((2 + (self.reference is not None or self.entropy or self.moments)) if self.softmax else 0)
        limit = BUFFER_BYTES // (per_token * self.head.weight.shape[0])
        limit = max(MIN_ROWS, min(_MAX_ROWS, limit))
        return -(-tokens // -(-tokens // limit)) if tokens else 1


class _Pass:
    """The buffers of a pass, reused by all chunks (fresh ones cost more in page faults than the arithmetic in them)."""

    def __init__(self, hidden: Tensor, plan: Plan) -> None:
        self.plan = plan
        self.dtype = plan.head.compute_dtype(hidden)
        self.full = accumulation_dtype(self.dtype)
        self.hidden = hidden.detach().to(self.dtype)
        self.weight = plan.head.weight.detach().to(self.dtype)
        self.rows = plan.rows(hidden.shape[0], self.dtype)
        self.parts = [slice(i, min(i + self.rows, len(hidden))) for i in range(0, len(hidden), self.rows)]
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """A (rows, V) buffer, contents undefined."""
        if name not in self._buffers:
            shape = (min(self.rows, len(self.hidden)), self.weight.shape[0])
            self._buffers[name] = torch.empty(shape, dtype=dtype or self.full, device=self.weight.device)
        return self._buffers[name][:rows]

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """H Wᵀ in the dtype of the product."""
        name = "logits" if self.dtype == self.full else "raw"
        return torch.mm(hidden, weight.t(), out=self.buffer(name, len(hidden), self.dtype))

    def finished(self, head: Head, raw: Tensor) -> Tensor:
        """The logits in float32; `raw` stays as it is unless it already is the float32 buffer."""
        logits = raw if self.dtype == self.full else self.buffer("logits", len(raw)).copy_(raw)
        return head.finish_(logits)

    def log_reference(self, part: slice) -> Tensor | None:
        """Log π₀ of the chunk."""
        reference = self.plan.reference
        if reference is None:
            return None
        weight = reference.head.weight.detach().to(self.dtype)
        logits = self.finished(reference.head, self.product(reference.hidden[part].detach().to(self.dtype), weight))
        self.take_out(logits, part)
        if reference.target_shift:
            logits[torch.arange(len(logits), device=logits.device), self.plan.targets[part]] -= reference.target_shift
        return torch.log_softmax(logits, 1, out=self.buffer("reference", len(logits)))

    def take_out(self, logits: Tensor, part: slice) -> None:
        """Give the targets no probability, where the KL leaves them out; not −∞, whose differences are NaN."""
        if self.plan.reference is not None and self.plan.reference.without_target:
            logits[torch.arange(len(logits), device=logits.device), self.plan.targets[part]] = -1e4

    def forward(self, part: slice) -> tuple[dict[str, Tensor], _Chunk | None]:
        """The statistics of one chunk, and what its slopes need."""
        plan = self.plan
        log_reference = self.log_reference(part)
        targets = plan.targets[part, None]
        raw = self.product(self.hidden[part], self.weight)
        finish = plan.softmax or plan.head.bias is not None
        logits = self.finished(plan.head, raw) if finish else raw
        ordered = logits if plan.head.bias is not None else raw
        out = _order_statistics(ordered, targets, plan) if plan.hit or plan.rank or plan.search else {}
        if not plan.softmax:
            return out, None
        self.take_out(logits, part)
        first = logits[:, :1].clone()
        logp = torch.log_softmax(logits, 1, out=self.buffer("logp", len(logits)))
        normaliser = first.sub_(logp[:, :1])
        if plan.logprob:
            out["logprob"] = logp.gather(1, targets).squeeze(1)
        chunk = _Chunk(self, targets, logp, normaliser, log_reference)
        out.update(chunk.statistics())
        return out, chunk


@dataclass
class _Chunk:
    """One chunk between its statistics and its slopes; the buffers "logits" and "work" are free in between."""

    owner: _Pass
    targets: Tensor
    logp: Tensor
    normaliser: Tensor
    log_reference: Tensor | None
    entropy: Tensor | None = None

    def statistics(self) -> dict[str, Tensor]:
        """Everything that sums over the vocabulary."""
        plan, out = self.owner.plan, {}
        rows = len(self.logp)
        if plan.entropy or plan.moments:
            probs = torch.exp(self.logp, out=self.owner.buffer("logits", rows))
            mean = torch.mul(probs, self.logp, out=self.owner.buffer("work", rows)).sum(1)
            self.entropy = -mean
            if plan.entropy:
                out["entropy"] = self.entropy
            if plan.moments:
                out["mean"] = mean
                deviation = torch.sub(self.logp, mean[:, None], out=self.owner.buffer("work", rows))
                out["variance"] = deviation.square_().mul_(probs).sum(1)
        if plan.uniform:
            out["uniform"] = self.logp.mean(1)
        if self.log_reference is not None:
            probs = torch.exp(self.log_reference, out=self.owner.buffer("logits", rows))
            ratio = torch.sub(self.log_reference, self.logp, out=self.owner.buffer("work", rows))
            out["kl"] = ratio.mul_(probs).sum(1)
        return out

    def slope(self, name: str) -> Tensor:
        """∂ statistic / ∂ logits of each row, (rows, V), in the buffer "logits".

        logprob: 1[v = y] − π_v; kl: π_v − π₀_v; entropy: −π_v (log π_v + H); uniform: 1/V − π_v.
        """
        rows = len(self.logp)
        slope = torch.exp(self.logp, out=self.owner.buffer("logits", rows))
        if name == "logprob":
            slope.neg_()[torch.arange(rows, device=slope.device), self.targets.squeeze(1)] += 1.0
            return slope
        if name == "uniform":
            return slope.neg_().add_(1.0 / slope.shape[1])
        if name == "kl":
            assert self.log_reference is not None
            return slope.sub_(torch.exp(self.log_reference, out=self.owner.buffer("work", rows)))
        assert self.entropy is not None
        factor = torch.add(self.logp, self.entropy[:, None], out=self.owner.buffer("work", rows))
        return slope.mul_(factor).neg_()

    def to_product(self, slope: Tensor) -> Tensor:
        """From ∂/∂ logits to ∂/∂ (h Wᵀ + b), in place: times scale and the softcap's derivative 1 − (z / cap)²."""
        head = self.owner.plan.head
        if head.scale != 1.0:
            slope.mul_(head.scale)
        if head.softcap is not None:
            share = torch.add(self.logp, self.normaliser, out=self.owner.buffer("work", len(slope)))
            slope.addcmul_(slope, share.div_(head.softcap).square_(), value=-1.0)
        return slope

    def rounded(self, slope: Tensor) -> Tensor:
        """The slope in the dtype of the product."""
        if self.owner.dtype == self.owner.full:
            return slope
        return self.owner.buffer("raw", len(slope), self.owner.dtype).copy_(slope)


def _order_statistics(scores: Tensor, targets: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Competitors, hit and rank from scores in the order of the logits; the scores are restored afterwards."""
    out = {}
    own = scores.gather(1, targets)
    # NOTE not `scatter_`: on a CPU it copies the whole tensor back and forth, which costs as much as the product.
    cells = (torch.arange(len(scores), device=scores.device), targets.squeeze(1))
    scores[cells] = -torch.inf
    if plan.search:
        out["competitors"] = largest(scores, plan.search)
    if plan.rank:
        out["rank"] = (scores > own).sum(1)
    if plan.hit:
        best = scores.gather(1, out["competitors"]).amax(1) if plan.search else scores.amax(1)
        hit = own.squeeze(1) > best
        # `argmax` takes the first of equal logits, and these are common in bfloat16. It is slow: only for ties.
        ties = (own.squeeze(1) == best).nonzero().squeeze(1)
        if len(ties):
            hit[ties] = targets[ties, 0] < scores[ties].argmax(1)
        out["hit"] = hit
    scores[cells] = own.squeeze(1)
    return out


class _Scan(torch.autograd.Function):
    """All statistics of one pass. Only `DIFFERENTIABLE` ones carry a gradient.

    If only the hidden states need a gradient, the forward pass keeps ∂ statistic / ∂ h, (N, d) per statistic, and the
    backward pass is a product with the incoming (N,) gradient. If the head needs one too, the backward pass recomputes
    the chunks: the slopes must be weighted by the incoming gradient before they are summed over tokens.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        needs = [plan.grad and need for need in ctx.needs_input_grad[:3]]
        ctx.recompute = needs[1] or needs[2]
        out, directions = _run(hidden, plan, directions=needs[0] and not ctx.recompute)
        ctx.names = tuple(directions)
        ctx.dtype = hidden.dtype
        if ctx.recompute:
            ctx.save_for_backward(hidden, weight, bias)
        else:
            ctx.save_for_backward(*directions.values())
        results = [out.get(name) for name in _OUTPUTS]
        ctx.mark_non_differentiable(*[value for name, value in out.items() if name not in DIFFERENTIABLE])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        incoming = {name: grad for name, grad in zip(_OUTPUTS, grads, strict=True) if grad is not None}
        if ctx.recompute:
            return (*_recomputed(ctx, incoming), None)
        total: Tensor | None = None
        for name, direction in zip(ctx.names, ctx.saved_tensors, strict=True):
            if name in incoming:
                term = incoming[name][:, None] * direction
                total = term if total is None else total.add_(term)
        return None if total is None else total.to(ctx.dtype), None, None, None


_OUTPUTS = (*DIFFERENTIABLE, "mean", "variance", "hit", "rank", "competitors")


def _run(hidden: Tensor, plan: Plan, *, directions: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values of all chunks by name, (N,) each, and, if asked, ∂ statistic / ∂ hidden, (N, d) each."""
    task = _Pass(hidden, plan)
    values: dict[str, Tensor] = {}
    slopes: dict[str, Tensor] = {}
    for part in task.parts or [slice(0, 0)]:
        out, chunk = task.forward(part)
        for name, value in out.items():
            if name not in values:
                dtype = value.dtype if name == "competitors" else task.full
                values[name] = torch.empty((len(hidden), *value.shape[1:]), dtype=dtype, device=value.device)
            values[name][part] = value
        for name in DIFFERENTIABLE if directions and chunk is not None else ():
            if name in out and chunk is not None:
                if name not in slopes:
                    slopes[name] = torch.empty(hidden.shape, dtype=task.dtype, device=hidden.device)
                slope = chunk.rounded(chunk.to_product(chunk.slope(name)))
                torch.mm(slope, task.weight, out=slopes[name][part])
    return values, slopes


def _recomputed(ctx: Any, incoming: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, chunk by chunk; the head's are accumulated in float32."""
    hidden, weight, bias = ctx.saved_tensors
    task = _Pass(hidden, ctx.plan)
    needs = ctx.needs_input_grad
    grad_hidden = torch.zeros_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight, dtype=task.full) if needs[1] else None
    grad_bias = torch.zeros_like(bias, dtype=task.full) if needs[2] else None
    for part in task.parts:
        _, chunk = task.forward(part)
        for name, grad in incoming.items():
            assert chunk is not None
            slope = chunk.to_product(chunk.slope(name)).mul_(grad[part, None])
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = chunk.rounded(slope)
            if grad_hidden is not None:
                grad_hidden[part] += torch.mm(slope, task.weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += torch.mm(slope.t(), task.hidden[part])
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(bias.dtype),
    )


def scan(hidden: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Run a plan: names of `_OUTPUTS` → (N,) tensors, `competitors` → (N, k) int64."""
    results = _Scan.apply(hidden, plan.head.weight, plan.head.bias, plan)
    return {name: value for name, value in zip(_OUTPUTS, results, strict=True) if value is not None}
