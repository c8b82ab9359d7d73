"""One of two processes that train the same small model sharded (FSDP2) and whole; run by test_sharded.py."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from expunge.optim import Muon, ObjectiveOptimizer, Storage, planned_state_bytes, state_bytes

CASES = [
    ("shared", "adamw", Storage(), None),
    ("decoupled", "lion", Storage(), False),
    ("base_delta", "adamw", Storage(), None),
    ("base_delta", "adamw", Storage(), True),
    ("base_delta", Muon(dtype=torch.float32), Storage(), None),
    ("base_delta", "adamw", Storage("8bit", min_size=480), None),
]


def build():
    torch.manual_seed(0)
    # 5 rows on 2 processes: shards of different size. 24 x 20 = 480 values, 240 on each process.
    return torch.nn.Sequential(torch.nn.Linear(20, 24), torch.nn.Tanh(), torch.nn.Linear(24, 5))


def train(model, case, steps=6):
    scheme, rule, storage, foreach = case
    optimizer = ObjectiveOptimizer(
        model.named_parameters(), lr=0.02, scheme=scheme, rule=rule, storage=storage, foreach=foreach, weight_decay=0.1
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(objective=("forget", "retain")[step % 2])
    return optimizer


def main(rank, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for case in CASES:
        whole, sharded = build(), build()
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        one, two = train(whole, case), train(sharded, case)
        quantised = case[2].kind != "32bit"
        for left, right in zip(whole.parameters(), sharded.parameters(), strict=True):
            assert isinstance(right, DTensor)
            got, wanted = right.full_tensor(), left.detach()
            if quantised:
                # The blocks of a shard are other blocks, so 8 bits agree as well as they are exact: after 6 steps of
                # 0.02 with few values where base and delta cancel.
                assert (got - wanted).abs().mean() < 5e-3
            else:
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
            assert one.plan(left).codec == two.plan(right).codec
            for key, value in two.state[right].items():
                if value.dim() and not quantised:
                    assert isinstance(value, DTensor)
                    torch.testing.assert_close(value.full_tensor(), one.state[left][key], rtol=1e-4, atol=1e-6)
        assert planned_state_bytes(two) == state_bytes(two)
        first, second = one.diagnostics(), two.diagnostics()
        for pair, cosine in first.cosine.items():
            assert abs(second.cosine[pair] - cosine) < (1e-2 if quantised else 1e-5)
        if quantised:
            assert {two.plan(param).codec.block for param in sharded.parameters()} == {1, 256}
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
