"""The definitions of the token statistics, written independently of `expunge.lm`, and random inputs for them."""

import torch
from torch import Tensor

NAMES = ("logprob", "margin", "kl", "entropy", "mean", "variance", "hit", "rank")


def plain(logits: Tensor, targets: Tensor, k: int, beta: float, reference: Tensor | None = None) -> dict[str, Tensor]:
    """The definitions, one token after the other."""
    rows: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    for n, y in enumerate(targets.tolist()):
        z = logits[n]
        p = torch.exp(z - z.max()) / torch.exp(z - z.max()).sum()
        others = torch.cat([z[:y], z[y + 1 :]]).sort(descending=True).values[:k]
        mean = (p * p.log()).sum()
        rows["logprob"].append(p[y].log())
        rows["margin"].append(beta * z[y] - torch.exp(beta * (others - others[0])).sum().log() - beta * others[0])
        rows["entropy"].append(-mean)
        rows["mean"].append(mean)
        rows["variance"].append((p * (p.log() - mean) ** 2).sum())
        rows["hit"].append((z[y] >= z.max()).to(z.dtype))
        rows["rank"].append((z > z[y]).sum().to(z.dtype))
        if reference is not None:
            q = torch.softmax(reference[n], 0)
            rows["kl"].append((q * (q.log() - p.log())).sum())
    return {name: torch.stack(values) for name, values in rows.items() if values}


def random_case(seed=0, *, n=5, v=40, d=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(v, d, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(v, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, bias, torch.randint(v, (n,), generator=generator)
