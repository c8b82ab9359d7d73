"""Plain supervised fine-tuning with the run's own parts: how the demo's model, and targets to measure on, are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expunge.data import Corpus, EpochSampler
from expunge.errors import RunError
from expunge.lm import LoadedModel, MasterWeights, RowRunner, add_lora, split_model


def finetune(  # noqa: PLR0913 - every number of the recipe is an argument
    loaded: LoadedModel,
    corpus: Corpus,
    *,
    epochs: int,
    steps: int | None = None,
    lr: float,
    batch: int = 8,
    rank: int = 32,
    upper: float = 1.0,
    lora: bool = True,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> torch.nn.Module:
    """Train an adapter on all linear layers, or all weights, by the mean negative log-likelihood of labelled tokens.

    L = −1/N Σ_t log π(y_t), N = labelled tokens of the update; AdamW, the step size falls linearly to 0.

    Args:
        loaded: the model; its layers get adapters, or its weights are changed, in place.
        corpus: rows to learn.
        epochs: passes over them.
        steps: most updates; None: as many as the passes take. The step size falls over the updates there are.
        lr: step size at the start.
        batch: rows per update.
        rank: LoRA rank; alpha is twice the rank.
        upper: share of the decoder layers, from the top, that gets adapters, in (0, 1].
        lora: an adapter; otherwise all weights are trained, and `rank` and `upper` have no say.
        seed: of the adapter and the order.
        progress: called after each update with updates done, updates in all, and the loss in nats a token.

    Returns:
        The trained model, with its adapter where there is one, in evaluation mode.

    Raises:
        RunError: the loss is not finite.
    """
    torch.manual_seed(seed)
    model, first = _trainable(loaded.model, rank, upper) if lora else (loaded.model.requires_grad_(True), 0)
    masters = MasterWeights(model.parameters())
    optimizer = torch.optim.AdamW(masters.masters, lr=lr, weight_decay=0.0, fused=True)
    order = EpochSampler(range(len(corpus.rows)), seed=seed).next(len(corpus.rows))
    groups = [order[start : start + batch] for start in range(0, len(order), batch)]
    runner = RowRunner(split_model(model), corpus.rows, pad_id=loaded.pad_id, groups=groups, first_layer=first)
    sampler = EpochSampler(range(len(corpus.rows)), seed=seed)
    total = epochs * -(-len(corpus.rows) // batch)
    total = total if steps is None else min(total, steps)
    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / total)
        logprob = runner.stats(runner.forward(sampler.next(batch)), logprob=True).logprob
        assert logprob is not None
        loss = -logprob.mean()
        if not torch.isfinite(loss):
            raise RunError(f"finetune: the loss is {loss.item()} at update {step + 1}")
        loss.backward()
        masters.grads_to_masters()
        optimizer.step()
        masters.to_model()
        masters.zero_grad()
        if progress is not None:
            progress(step + 1, total, loss.item())
    return model


def _trainable(model: Any, rank: int, upper: float) -> tuple[torch.nn.Module, int]:
    """Add adapters to the upper layers; the model and the first of these layers."""
    layers = model.config.get_text_config().num_hidden_layers
    first = layers - max(1, round(layers * upper))
    targets = range(first, layers)
    return add_lora(model, rank=rank, alpha=2 * rank, dropout=0.0, targets="all-linear", layers=targets), first
