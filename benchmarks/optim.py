"""Step time and state bytes of scheme × rule × storage on SmolLM2-135M's shapes, against PyTorch's AdamW in one run.

    python benchmarks/optim.py                         # the combinations of the docs
    python benchmarks/optim.py --threads 2 --all       # every scheme × rule × storage
    python benchmarks/optim.py --only-bytes            # the memory table alone, without allocating anything
    python benchmarks/optim.py --codes                 # error and speed of 8-bit codes

Objectives take turns, as in unlearning. Counts are set to 1,000 first: that is the steady state, in which 1 − βᵗ is 1.
Both baselines are timed before each combination, and the median of their best times divides all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from expunge.optim import RULES, SCHEMES, ObjectiveOptimizer, Storage, planned_state_bytes, state_bytes
from expunge.optim._storage import BlockCodec, Stored
from expunge.optim._workspace import Workspace

HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY, LAYERS = 576, 1536, 192, 49152, 30
STORAGES = {
    "32bit": Storage(),
    "bf16": Storage("bf16"),
    "bf16, all matrices": Storage("bf16", keep_32bit=()),
    "8bit": Storage("8bit"),
    "8bit, all matrices": Storage("8bit", keep_32bit=()),
    "8bit, all, nearest": Storage("8bit", keep_32bit=(), rounding="nearest"),
    "4bit": Storage("4bit"),
    "4bit, all matrices": Storage("4bit", keep_32bit=()),
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of SmolLM2-135M's parameters; the head is tied to the embedding."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        yield at + "self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield at + "self_attn.k_proj.weight", (KEY_VALUE, HIDDEN)
        yield at + "self_attn.v_proj.weight", (KEY_VALUE, HIDDEN)
        yield at + "self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield at + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield at + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield at + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield at + "input_layernorm.weight", (HIDDEN,)
        yield at + "post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def parameters(device: str = "cpu") -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, shape in shapes():
        values = torch.empty(shape, device=device)
        parameter = torch.nn.Parameter(values if device == "meta" else values.normal_(std=0.02, generator=generator))
        if device != "meta":
            parameter.grad = torch.empty(shape).normal_(std=1e-3, generator=generator)
        found.append((name, parameter))
    return found


def steps_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Steps whose objectives take turns; from the third on in the steady state."""
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        if isinstance(optimizer, ObjectiveOptimizer):
            optimizer.step(objective=("forget", "retain")[calls % 2])
        else:
            optimizer.step()
        if calls == 2:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if key.split("/")[0] == "step":
                        value.fill_(1000)

    return step


def time_table(combinations: list[tuple[str, str, str]], rounds: int) -> None:
    """Best time of each combination; both baselines are timed anew before each, and their medians divide all."""
    named = parameters()
    plain = [parameter for _, parameter in named]
    baselines: dict[str, list[float]] = {"foreach": [], "fused": []}
    found = []
    for scheme, rule, storage in combinations:
        for name, seconds in baselines.items():
            adam = torch.optim.AdamW(plain, lr=1e-5, weight_decay=0.01, **{name: True})
            seconds.append(best_time(adam, rounds))
            del adam
        ours = ObjectiveOptimizer(
            named, lr=1e-5, scheme=scheme, rule=rule, storage=STORAGES[storage], weight_decay=0.01
        )
        found.append((scheme, rule, storage, best_time(ours, rounds)))
        del ours
    foreach, fused = statistics.median(baselines["foreach"]), statistics.median(baselines["fused"])
    print(f"torch.optim.AdamW: foreach {foreach:.3f} s a step, fused {fused:.3f} s")
    print("| scheme | rule | storage | s/step | ÷ foreach | ÷ fused |\n|---|---|---|---|---|---|")
    for scheme, rule, storage, seconds_a_step in found:
        ratios = f"{seconds_a_step / foreach:.2f} | {seconds_a_step / fused:.2f}"
        print(f"| {scheme} | {rule} | {storage} | {seconds_a_step:.3f} | {ratios} |")


def best_time(optimizer: torch.optim.Optimizer, rounds: int) -> float:
    step = steps_of(optimizer)
    for _ in range(3):
        step()
    return min(_timed(step) for _ in range(rounds))


def byte_table() -> None:
    """Bytes from shapes; a test proves that they are the counted ones."""
    named = parameters("meta")
    total = sum(parameter.numel() for _, parameter in named)
    reference = 8 * total + 4 * len(named)
    print(f"{total:,} parameters, torch.optim.AdamW: {reference:,} bytes of state")
    print("| storage | Alternate | DualOptim | DualOptim+ |\n|---|---|---|---|")
    for storage in STORAGES:
        if "nearest" in storage:
            continue
        cells = []
        for scheme in ("shared", "decoupled", "base_delta"):
            optimizer = ObjectiveOptimizer(named, lr=1e-5, scheme=scheme, storage=STORAGES[storage])
            planned = planned_state_bytes(optimizer)
            cells.append(f"{planned / 1e6:,.1f} MB ({planned / reference:.3f})")
        print(f"| {storage} | {' | '.join(cells)} |")


def count_states() -> None:
    """The planned bytes against the counted ones, on the real sizes."""
    named = parameters()
    adam = torch.optim.AdamW([parameter for _, parameter in named], lr=1e-5)
    adam.step()
    print(f"counted: AdamW {state_bytes(adam):,}")
    del adam
    for name in ("8bit, all matrices", "4bit, all matrices", "8bit"):
        optimizer = ObjectiveOptimizer(named, lr=1e-5, storage=STORAGES[name])
        planned = planned_state_bytes(optimizer)
        for objective in ("forget", "retain"):
            optimizer.step(objective=objective)
        print(f"counted: base_delta {name} {state_bytes(optimizer):,} (planned {planned:,})")


def code_table(size: int = 1 << 22) -> None:
    """Relative error (of the mean magnitude) and speed of 8-bit codes on normal values, blocks of 256."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    room = Workspace(torch.device("cpu"), torch.float32)
    piece = 65536
    kept = Stored(torch.empty(size, dtype=torch.uint8), torch.empty(size // 256, 1), True)

    def table_codes(stochastic: bool) -> torch.Tensor:
        codec, got = BlockCodec(8, 256, stochastic), torch.empty(size)
        for start in range(0, size, piece):
            span = slice(start, start + piece)
            codec.save(kept, span, values[span], room, start)
            got[span] = codec.load(kept, span, room, "values")
        return got

    def floats(dtype: torch.dtype, largest: float) -> torch.Tensor:
        got = torch.empty(size)
        for start in range(0, size, piece):
            part = values[start : start + piece].view(-1, 256)
            scale = part.abs().amax(1, keepdim=True) / largest
            got[start : start + piece] = ((part / scale).to(dtype).float() * scale).view(-1)
        return got

    candidates: dict[str, Callable[[], torch.Tensor]] = {
        "dynamic code by table, nearest": lambda: table_codes(False),
        "dynamic code by table, stochastic": lambda: table_codes(True),
        "float8_e4m3fn": lambda: floats(torch.float8_e4m3fn, 448.0),
        "float8_e5m2": lambda: floats(torch.float8_e5m2, 57344.0),
    }
    try:
        from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise
    except ImportError:
        print("bitsandbytes is not installed: not compared")
    else:
        candidates["bitsandbytes"] = lambda: dequantize_blockwise(*quantize_blockwise(values, blocksize=256))
    print("| code | error | round trip, GB/s of float32 |\n|---|---|---|")
    for name, run in candidates.items():
        error = float((run() - values).abs().mean() / values.abs().mean())
        seconds = min(_timed(run) for _ in range(5))
        print(f"| {name} | {error:.4f} | {4 * size / seconds / 1e9:.2f} |", flush=True)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each optimizer (default 3)")
    parser.add_argument("--all", action="store_true", help="every scheme × rule × storage")
    parser.add_argument("--only-bytes", action="store_true", help="only the memory table, from shapes")
    parser.add_argument("--count", action="store_true", help="also count the bytes of real states")
    parser.add_argument("--codes", action="store_true", help="only error and speed of 8-bit codes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.codes:
        code_table()
        return
    byte_table()
    if arguments.count:
        count_states()
    if arguments.only_bytes:
        return
    print(f"\n{arguments.threads} thread(s), best of {arguments.rounds}, torch {torch.__version__}")
    if arguments.all:
        combinations = [
            (scheme, rule, storage) for scheme in sorted(SCHEMES) for rule in sorted(RULES) for storage in STORAGES
        ]
    else:
        combinations = [("base_delta", "adamw", storage) for storage in STORAGES]
        combinations += [("shared", "adamw", "32bit"), ("decoupled", "adamw", "32bit"), ("shared", "adamw", "8bit")]
        combinations += [("base_delta", rule, "32bit") for rule in ("sgd", "lion", "rmsprop")]
    time_table(combinations, arguments.rounds)


if __name__ == "__main__":
    main()
