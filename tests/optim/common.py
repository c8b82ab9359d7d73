"""What the tests of the optimizers share: every rule and storage, small parameters, seeded gradients."""

import torch

from expunge.optim import SGD, Adam, AdamW, Lion, Muon, ObjectiveOptimizer, RMSprop, Rule, Statistic, Storage

RULES = {
    "adam": Adam(),
    "adamw": AdamW(),
    "lion": Lion(),
    "muon": Muon(dtype=torch.float32),
    "nesterov": SGD(nesterov=True),
    "rmsprop": RMSprop(),
    "sgd": SGD(),
}


STORAGES = {
    "32bit": Storage(),
    "bf16": Storage("bf16", min_size=0),
    "8bit": Storage("8bit", min_size=0),
    "4bit": Storage("4bit", min_size=0),
}


def make(scheme="base_delta", rule="adamw", storage="32bit", dtype=torch.float32, lr=0.01, **options):
    torch.manual_seed(0)
    named = [
        ("layer.weight", torch.nn.Parameter(torch.randn(24, 20).to(dtype))),
        ("layer.bias", torch.nn.Parameter(torch.randn(24).to(dtype))),
        ("scale", torch.nn.Parameter(torch.randn(()).to(dtype))),
    ]
    optimizer = ObjectiveOptimizer(named, lr=lr, scheme=scheme, rule=RULES[rule], storage=STORAGES[storage], **options)
    return optimizer, [param for _, param in named]


def run(optimizer, params, steps, first=0, objectives=("forget", "retain", "retain")):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step(objective=objectives[step % len(objectives)])


def assert_same_state(left, right):
    assert left.keys() == right.keys()
    for place, saved in left.items():
        assert saved.keys() == right[place].keys()
        for key, value in saved.items():
            other = right[place][key]
            assert value.dtype == other.dtype, key
            assert value.contiguous().view(-1).view(torch.uint8).tolist() == (
                other.contiguous().view(-1).view(torch.uint8).tolist()
            ), key


class Halved(Rule):
    """A rule as a user writes one: plain tensor functions, not for many tensors at once."""

    @property
    def statistics(self):
        return (Statistic("magnitude", 0.9, moment=2, of=torch.abs),)

    def direction(self, grad, averages):
        return grad / (averages[0].abs() + 1e-8) / 2
