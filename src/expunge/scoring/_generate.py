"""Batched decoding, greedy or sampled: the same tokens as one prompt at a time."""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from expunge.errors import UsageError
from expunge.scoring._mode import evaluating

_PAD_TO = 32


@dataclass(frozen=True)
class Generation:
    """A continuation.

    Attributes:
        text: decoded tokens without special tokens; nothing is stripped.
        tokens: generated ids without the end token.
        finished: True where the model ended by itself, False at the length limit.
    """

    text: str
    tokens: tuple[int, ...]
    finished: bool


@dataclass(frozen=True)
class Sampling:
    """Draw tokens from the model's distribution instead of taking the likeliest.

    Row i of the prompts has draws of its own, from the seed and i: they do not depend on the batch. For n samples of a
    prompt, give it n times.

    Attributes:
        temperature: logits are divided by it, above 0.
        seed: of the draws.
        top_p: draw from the fewest likeliest tokens that together have this probability (nucleus sampling, arXiv
            1904.09751), in (0, 1]; 1: from all.

    Raises:
        UsageError: the temperature is not above 0, or top_p out of range.
    """

    temperature: float = 1.0
    seed: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature < float("inf"):
            raise UsageError(f"temperature: found {self.temperature!r}, accepted is a number above 0")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p: found {self.top_p!r}, accepted is a number above 0 and at most 1")

    def draws(self, row: int, count: int) -> Tensor:
        """Uniform numbers in [0, 1) for the tokens of a row, (count,) float64."""
        digest = hashlib.sha256(f"{self.seed}:{row}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.rand(count, generator=generator, dtype=torch.float64)


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    *,
    pad_id: int,
    max_new_tokens: int = 80,
    batch_size: int = 32,
    sampling: Sampling | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Continue prompts greedily, y_t = argmax_v z_v(prompt, y_<t), or by sampling, y_t ~ softmax(z / temperature).

    Prompts are padded on the left, positions are counted from the mask, so a prompt gives the same tokens in any batch
    (exactly in float32; half precision may round ties differently). Only the model's forward is used: sampling,
    penalties and forced tokens of its generation settings have no effect. Rows that have ended leave the batch, which
    shrinks to powers of two; prompts are padded to multiples of 32: few shapes, since each new one costs preparation.

    Args:
        model: a causal language model of transformers; its modes are restored, also after an error.
        tokenizer: decodes the ids; its end token ends a row, as does every end id in the model's settings.
        prompts: token ids of each prompt, at least one each.
        pad_id: any valid id; it is masked and never read.
        max_new_tokens: length limit, 1 or more.
        batch_size: prompts decoded together, 1 or more.
        sampling: temperature, nucleus and seed; None: greedy.
        progress: called with (prompts done, prompts in all) after each batch.

    Returns:
        One `Generation` for each prompt, in the order of the prompts.

    Raises:
        UsageError: an option is out of range, a prompt is empty, or a prompt and its answer exceed the model's length.
    """
    _check(model, prompts, max_new_tokens, batch_size)
    ends = end_ids(model, tokenizer)
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    found: dict[int, tuple[list[int], bool]] = {}
    with evaluating(model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            draws = None
            if sampling is not None:
                draws = torch.stack([sampling.draws(index, max_new_tokens) for index in chosen])
            choose = _Choice(draws) if sampling is None else _Choice(draws, sampling.temperature, sampling.top_p)
            decoded = _decode(model, [prompts[index] for index in chosen], pad_id, ends, max_new_tokens, choose)
            found.update(zip(chosen, decoded, strict=True))
            if progress is not None:
                progress(len(found), len(prompts))
    results = (found[index] for index in range(len(prompts)))
    return [
        Generation(tokenizer.decode(tokens, skip_special_tokens=True), tuple(tokens), finished)
        for tokens, finished in results
    ]


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every id that ends an answer: those of the generation settings (one or a list) and the tokenizer's own.

    Args:
        model: a model with or without `generation_config`.
        tokenizer: a tokenizer with or without an end token.

    Returns:
        The ids; empty where none is known, so that every answer runs to the length limit.
    """
    sources = (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer)
    ends: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ends.update([value] if isinstance(value, int) else value)
    return frozenset(ends)


class _Choice:
    """Chooses the next ids from logits.

    Args:
        draws: (rows, steps) uniform numbers; None: the likeliest.
        temperature: of the softmax.
        top_p: see `Sampling`.
    """

    def __init__(self, draws: Tensor | None, temperature: float = 1.0, top_p: float = 1.0) -> None:
        self.draws, self.temperature, self.top_p = draws, temperature, top_p

    def __call__(self, logits: Tensor, slots: Sequence[int], step: int) -> Tensor:
        """Ids (B,) from logits (B, V); `slots` are the rows of the draws."""
        if self.draws is None:
            return logits.argmax(-1)
        # Inverse distribution function: one number a token, whatever the vocabulary. In float64, so that the sum of
        # many small probabilities keeps its digits; on the CPU, since not every device has that type.
        shares = torch.softmax(logits.cpu().double() / self.temperature, dim=-1)
        sums = (shares if self.top_p == 1.0 else _nucleus(shares, self.top_p)).cumsum(-1)
        wanted = self.draws[list(slots), step][:, None] * sums[:, -1:]
        found = torch.searchsorted(sums, wanted, right=True).clamp(max=logits.shape[-1] - 1)[:, 0]
        return found.to(logits.device)


def _nucleus(shares: Tensor, top_p: float) -> Tensor:
    """Probabilities (B, V) with 0 for every token that the likelier ones make unnecessary to reach `top_p`."""
    ordered, places = shares.sort(dim=-1, descending=True, stable=True)
    likelier = ordered.cumsum(-1) - ordered
    return torch.zeros_like(shares).scatter(-1, places, ordered * (likelier < top_p))


class _Forward:
    """The model's forward with the cache under the name its version of transformers uses."""

    def __init__(self, model: Any) -> None:
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        names = inspect.signature(plain.forward).parameters
        self.model = model
        self.cache = DynamicCache(config=plain.config)
        self.arguments: dict[str, Any] = {
            "use_cache": True,
            "cache" if "cache" in names else "past_key_values": self.cache,
        }
        if "logits_to_keep" in names:
            self.arguments["logits_to_keep"] = 1
        self.with_positions = "position_ids" in names

    def __call__(self, input_ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of the next id of each row, (B, V)."""
        arguments = self.arguments | ({"position_ids": positions} if self.with_positions else {})
        return self.model(input_ids=input_ids, attention_mask=mask, **arguments).logits[:, -1]


def _decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    pad_id: int,
    ends: frozenset[int],
    max_new_tokens: int,
    choose: _Choice,
) -> list[tuple[list[int], bool]]:
    """Decode one batch; returns (tokens without the end, finished) for each prompt."""
    forward = _Forward(model)
    ids, mask = _pad_left(prompts, pad_id, next(model.parameters()).device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    tokens: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    slots = list(range(len(prompts)))
    for step in range(max_new_tokens):
        following = choose(forward(ids, mask, positions), slots, step)
        for slot, token in zip(slots, following.tolist(), strict=True):
            if not finished[slot]:
                finished[slot] = token in ends
                if not finished[slot]:
                    tokens[slot].append(token)
        if all(finished) or step + 1 == max_new_tokens:
            break
        ids, positions = following[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(slots), 1)], dim=1)
        kept = _kept(slots, finished)
        if len(kept) < len(slots):
            index = torch.tensor(kept, device=ids.device)
            forward.cache.batch_select_indices(index)
            ids, mask, positions = ids[index], mask[index], positions[index]
            slots = [slots[place] for place in kept]
    return list(zip(tokens, finished, strict=True))


def _kept(slots: list[int], finished: list[bool]) -> list[int]:
    """Choose the places that stay in the batch.

    Batches shrink to powers of two only: each new size costs the preparation of its matrix products, and dropping
    a single row costs a copy of the whole cache.
    """
    active = [place for place, slot in enumerate(slots) if not finished[slot]]
    size = 1 << (len(active) - 1).bit_length()
    if size >= len(slots):
        return list(range(len(slots)))
    ended = [place for place, slot in enumerate(slots) if finished[slot]]
    return sorted(active + ended[: size - len(active)])


def _pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = -(-max(map(len, prompts)) // _PAD_TO) * _PAD_TO
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)


def _check(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int) -> None:
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise UsageError(f"{name}: found {value!r}, accepted is a whole number from 1")
    limit = getattr(model.config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UsageError(f"prompt {index}: found no token, accepted is at least one")
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise UsageError(
                f"prompt {index}: found {len(prompt)} tokens, accepted is at most {limit - max_new_tokens} "
                f"({limit} positions of the model, {max_new_tokens} of them for the answer)"
            )
