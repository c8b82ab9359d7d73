"""Time and peak memory of the head's margin (MASC, k = 10, β = 1), forward and backward, against plain full logits.

    python benchmarks/head.py                                # the head alone: 152,000 x 896, 2,048 labelled tokens
    python benchmarks/head.py --model FOLDER_OR_SPEC         # and one whole step: body, head, LoRA
    python benchmarks/head.py --only-model --model FOLDER_OR_SPEC

Both variants have the same dtype, threads, inputs and loss, and each runs in a process of its own, so that a peak
belongs to one variant. Processes alternate; the best time and the smallest peak of each variant are shown. CPU seconds
(all threads) say more on a busy machine. "plain" is what a careful user writes: logits of the labelled tokens only for
the head alone, `model(...).logits` in the whole step, float32 before the margin, ordinary autograd, the search without
gradient.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from _measure import in_process, peak_kb, reset_peak
from torch import Tensor

from expunge.lm import Head, Margin, labelled_positions, split_model, token_stats

K = 10
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Step = Callable[[], tuple[Tensor, Tensor]]


def plain_margin(logits: Tensor, targets: Tensor) -> Tensor:
    """The margin from all logits (N, V), by definition."""
    z = logits.float()
    with torch.no_grad():
        competitors = z.scatter(1, targets[:, None], -torch.inf).topk(K, dim=1).indices
    return z.gather(1, targets[:, None]).squeeze(1) - torch.logsumexp(z.gather(1, competitors), dim=1)


def loss_of(margin: Tensor) -> Tensor:
    """A smooth hinge that pushes every margin down."""
    return torch.nn.functional.softplus(margin).mean()


def head_step(variant: str, arguments: argparse.Namespace) -> Step:
    """One forward and backward through a random head; gives margins and the gradient of the hidden states."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[arguments.dtype]
    weight = torch.empty(arguments.vocabulary, arguments.width, dtype=dtype).normal_(std=0.1, generator=generator)
    hidden = torch.empty(arguments.tokens, arguments.width, dtype=dtype).normal_(generator=generator).requires_grad_()
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,), generator=generator)
    head = Head(weight)

    def step() -> tuple[Tensor, Tensor]:
        hidden.grad = None
        if variant == "expunge":
            margin = token_stats(hidden, head, targets, margin=Margin(K)).margin
            assert margin is not None
        else:
            margin = plain_margin(torch.nn.functional.linear(hidden, weight), targets)
        loss_of(margin).backward()
        assert hidden.grad is not None
        return margin.detach(), hidden.grad

    return step


def model_step(variant: str, arguments: argparse.Namespace) -> Step:
    """One MASC step on a model with LoRA; gives margins and the gradients of all adapters in one vector."""
    from expunge.lm import add_lora, load_model

    torch.manual_seed(0)
    model = add_lora(load_model(arguments.model).model, dropout=0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at the start, which would make every gradient of lora_A zero
                parameter.normal_(std=0.01)
    split = split_model(model)
    assert split.head is not None, "the model's head was not recognised"
    ids = torch.randint(split.head.weight.shape[0], (arguments.batch, arguments.length))
    labels = ids.clone()
    labels[:, : arguments.length - arguments.answer] = -100
    mask = torch.ones_like(ids)
    row, position, targets = labelled_positions(labels)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad(set_to_none=True)
        if variant == "expunge":
            margin = token_stats(split.body(ids, mask)[row, position], split.head, targets, margin=Margin(K)).margin
            assert margin is not None
        else:
            margin = plain_margin(split.logits(ids, mask)[row, position], targets)
        loss_of(margin).backward()
        return margin.detach(), torch.cat([parameter.grad.flatten().float() for parameter in trained])

    return step


def measure(arguments: argparse.Namespace) -> None:
    """The child: run one variant of one case, save values and gradient, print the numbers as JSON."""
    torch.set_num_threads(arguments.threads)
    step = {"head": head_step, "model": model_step}[arguments.case](arguments.variant, arguments)
    before = reset_peak()
    values, gradient = step()  # the first call also compiles the primitives of these shapes
    torch.save({"values": values.clone(), "gradient": gradient.clone()}, arguments.save)
    seconds, cpu = [], []
    for _ in range(arguments.repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    memory = {"step_mb": (peak_kb() - before) / 1024, "peak_mb": peak_kb() / 1024}
    print(json.dumps({"seconds": min(seconds), "cpu": min(cpu)} | memory))


def compare(case: str, label: str, arguments: argparse.Namespace, rest: list[str]) -> None:
    """Run both variants in alternation and print their rows, the ratio and the largest differences."""
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for variant in ("expunge", "plain"):
                save = f"{folder}/{variant}.pt"
                wanted = [*rest, "--case", case, "--variant", variant, "--save", save]
                found = in_process(__file__, wanted, arguments.threads)
                old = best.get(variant, found)
                best[variant] = {key: min(value, old[key]) for key, value in found.items()}
        saved = {variant: torch.load(f"{folder}/{variant}.pt") for variant in best}
    print(f"\n{label}")
    print(f"{'':10}{'time, s':>10}{'CPU, s':>10}{'step adds, MB':>16}{'peak, MB':>12}")
    for variant, row in best.items():
        print(f"{variant:10}{row['seconds']:10.3f}{row['cpu']:10.3f}{row['step_mb']:16.0f}{row['peak_mb']:12.0f}")
    ratios = {key: best["plain"][key] / max(best["expunge"][key], 1e-9) for key in best["plain"]}
    print(
        f"{'ratio':10}{ratios['seconds']:10.1f}{ratios['cpu']:10.1f}{ratios['step_mb']:16.1f}{ratios['peak_mb']:12.1f}"
    )
    for key in ("values", "gradient"):
        a, b = saved["expunge"][key].float(), saved["plain"][key].float()
        relative = ((a - b).norm() / b.norm()).item()
        print(f"{key}: largest difference {(a - b).abs().max().item():.2e}, relative (norm) {relative:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or spec for expunge.lm.load_model; adds the whole-step case")
    parser.add_argument("--only-model", action="store_true", help="leave out the head alone")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the random head (default bf16)")
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--tokens", type=int, default=2048, help="labelled tokens for the head alone")
    parser.add_argument("--batch", type=int, default=8, help="rows of the whole step")
    parser.add_argument("--length", type=int, default=64, help="tokens per row of the whole step")
    parser.add_argument("--answer", type=int, default=38, help="labelled tokens per row of the whole step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps per process, after one that is not timed")
    parser.add_argument("--rounds", type=int, default=2, help="processes per variant")
    parser.add_argument("--case", choices=["head", "model"], help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=["expunge", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        measure(arguments)
        return
    print(f"torch {torch.__version__}, {arguments.threads} threads, k = {K}, beta = 1")
    if not arguments.only_model:
        shape = f"{arguments.vocabulary:,} x {arguments.width} {arguments.dtype}, {arguments.tokens:,} labelled tokens"
        compare("head", f"head alone: {shape}", arguments, sys.argv[1:])
    if arguments.model:
        labelled = arguments.batch * arguments.answer
        shape = f"{arguments.batch} x {arguments.length} tokens, {labelled} labelled"
        compare("model", f"whole step: {arguments.model}, LoRA, {shape}", arguments, sys.argv[1:])


if __name__ == "__main__":
    main()
