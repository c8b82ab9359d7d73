"""Time and memory of one training step of several methods, against the plain way, in one run.

    python benchmarks/objectives.py                                     # smollm2-135m, LoRA and all weights
    python benchmarks/objectives.py --model FOLDER --methods npo+kl --train full
    python benchmarks/objectives.py --dtype float32 --repeats 1         # the values, without rounding to bfloat16

"plain" is what ordinary code does: whole padded batches through `model(input_ids, attention_mask)` with the model's own
attention, one forward pass for the forget and one for the retain examples, logits of all positions in float32, masks
afterwards, and a second model in memory that is asked in every step where the method has a reference. "expunge" is
the loop of the package: `Updater` over a `RowRunner`. Rows, model, type, adapter, float32 masters, AdamW and threads
are the same, so that only the losses differ. Before the first step all trained weights are moved by the same seeded
noise: at the reference itself the ratios of NPO and every KL would be constants, and equal values would prove little.

Each measurement has a process of its own, and the two ways alternate. Times are the median of the steps after the first
("with references": and what the package computes once for these rows and then keeps). Memory is the peak resident of
the process; "without imports" is that peak less what was resident before the model was loaded. Values and gradient
are those of the first step; "apart" is the norm of the difference of the gradients over the norm of the plain one, over
every 97th weight.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _measure import in_process, peak_kb, resident_kb
from torch import Tensor, nn
from torch.nn import functional

from expunge.demo import write_people
from expunge.objectives import MascSettings, MethodSpec, rmu_direction
from expunge.train import RunConfig
from expunge.train._objective import Example
from expunge.train._prepare import (
    Data,
    Trainable,
    encode_data,
    load,
    make_objective,
    make_runner,
    make_trainable,
    read_data,
)
from expunge.train._recipe import base_recipe
from expunge.train._update import Updater

METHODS = ("graddiff", "npo+kl", "simnpo", "masc", "rmu")
SAMPLE = 97  # every so many-th weight's gradient is compared


@dataclass(frozen=True)
class Values:
    """What a step reports: mean losses before their weights, their weighted sum, norm of the whole gradient."""

    forget: float
    retain: float
    total: float
    norm: float


Step = Callable[[], Values]


@dataclass
class Case:
    """One method, one way to train, ready to be stepped."""

    config: RunConfig
    data: Data
    trainable: Trainable
    pad_id: int


# -- the plain way -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Whole padded rows."""

    ids: Tensor  # (B, T)
    mask: Tensor
    labels: Tensor

    @property
    def kept(self) -> Tensor:
        """(B, T − 1), True where the next token is labelled."""
        return self.labels[:, 1:] != -100

    @property
    def copied(self) -> Tensor:
        """(B, T − 1), True where the next token is among those before the first labelled one."""
        before = (self.labels != -100).cumsum(1) == 0
        pairs = zip(self.ids, before, strict=True)
        return torch.stack([torch.isin(row[1:], row[prompt]) for row, prompt in pairs])

    def logits(self, model: nn.Module) -> Tensor:
        """(B, T − 1, V) in float32: what predicts the next token."""
        return model(input_ids=self.ids, attention_mask=self.mask).logits[:, :-1].float()

    def own(self, values: Tensor) -> Tensor:
        """(B, T − 1): of (B, T − 1, V), the value of the next token; 0 where that is not labelled."""
        found = values.gather(2, self.labels[:, 1:].clamp(min=0)[..., None]).squeeze(2)
        return found * self.kept

    def logprob(self, model: nn.Module) -> Tensor:
        """(B, T − 1) log-probabilities of the labelled tokens, 0 elsewhere."""
        return self.own(self.logits(model).log_softmax(-1))

    def token_mean(self, values: Tensor) -> Tensor:
        """Mean over the labelled tokens of (B, T − 1)."""
        return (values * self.kept).sum() / self.kept.sum()

    def row_mean(self, values: Tensor) -> Tensor:
        """(B,) mean over the labelled tokens of each row."""
        return (values * self.kept).sum(1) / self.kept.sum(1)


def batch_of(rows: Any, pad_id: int) -> Batch:
    def padded(lists: list[Any], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.tensor(one) for one in lists], batch_first=True, padding_value=value)

    mask = padded([[1] * len(row.input_ids) for row in rows], 0)
    return Batch(padded([row.input_ids for row in rows], pad_id), mask, padded([row.labels for row in rows], -100))


def kl_of(batch: Batch, logits: Tensor, reference: Tensor) -> Tensor:
    """KL(π₀ ‖ π), mean over the labelled tokens."""
    own, other = logits.log_softmax(-1), reference.log_softmax(-1)
    return batch.token_mean(functional.kl_div(own, other, reduction="none", log_target=True).sum(-1))


class Plain:
    """The methods as they stand in ordinary code: each gives the two mean losses, and what is added to their sum.

    Args:
        model: that is trained.
        reference: the second model; None where the method has none.
        forget: batch to forget.
        retain: batch to keep.
        spec: terms and options.
        masc: of masc.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None,
        forget: Batch,
        retain: Batch,
        spec: MethodSpec,
        masc: MascSettings,
    ) -> None:
        self.model, self.forget, self.retain, self.spec, self.masc = model, forget, retain, spec, masc
        self._reference = reference
        self.losses = {
            "graddiff": self.graddiff,
            "npo+kl": self.npo_kl,
            "simnpo": self.simnpo,
            "masc": self.masc_losses,
            "rmu": self.rmu,
        }[spec.name]

    @property
    def reference(self) -> nn.Module:
        """The second model."""
        assert self._reference is not None
        return self._reference

    def graddiff(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """Gradient ascent, and cross-entropy."""
        forget = self.forget.token_mean(self.forget.logprob(self.model))
        return forget, -self.retain.token_mean(self.retain.logprob(self.model)), 0.0

    def npo_kl(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """NPO over sums of rows, and KL."""
        beta = float(self.spec.forget_options["beta"] or 0)
        own = self.forget.logprob(self.model).sum(1)
        with torch.no_grad():
            other = self.forget.logprob(self.reference).sum(1)
            reference = self.retain.logits(self.reference)
        forget = -2 / beta * functional.logsigmoid(-beta * (own - other)).mean()
        return forget, kl_of(self.retain, self.retain.logits(self.model), reference), 0.0

    def simnpo(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """SimNPO over means of rows, and cross-entropy."""
        beta, gamma = (float(self.spec.forget_options[name] or 0) for name in ("beta", "gamma"))
        mean = self.forget.row_mean(self.forget.logprob(self.model))
        forget = -2 / beta * functional.logsigmoid(-beta * mean - gamma).mean()
        return forget, -self.retain.token_mean(self.retain.logprob(self.model)), 0.0

    def masc_losses(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """Hinge of the margins, KL, and the anchor: KL without the targets."""
        masc, batch = self.masc, self.forget
        logits = batch.logits(self.model)
        targets = batch.labels[:, 1:].clamp(min=0)[..., None]
        without = logits.scatter(2, targets, -1e4)
        with torch.no_grad():
            best = without.topk(masc.k, dim=2).indices
            other = batch.logits(self.reference).scatter(2, targets, -1e4)
            kept = self.retain.logits(self.reference)
        margin = masc.beta * batch.own(logits) - torch.logsumexp(masc.beta * logits.gather(2, best), 2)
        floor = math.log(masc.rho / (1 - masc.rho)) - masc.eta
        hinge = (margin - floor).clamp(min=0) / masc.eta
        forget = batch.row_mean(hinge.masked_fill(batch.copied, 0.0) if masc.spare_copies else hinge).mean()
        retain = kl_of(self.retain, self.retain.logits(self.model), kept)
        return forget, retain, masc.anchor * kl_of(batch, without, other)

    def rmu(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """Squared distance to a direction, and to the reference, of one layer's output."""
        options = self.spec.forget_options
        layer = int(options["layer"] or 0)
        forget, retain = self._output(self.model, self.forget, layer), self._output(self.model, self.retain, layer)
        with torch.no_grad():
            kept = self._output(self.reference, self.retain, layer)
        wanted = float(options["c"] or 0) * rmu_direction(forget.shape[2], seed=int(options["seed"] or 0))
        moved = self.forget.token_mean((forget - wanted).square().mean(2))
        return moved, self.retain.token_mean((retain - kept).square().mean(2)), 0.0

    @staticmethod
    def _output(model: nn.Module, batch: Batch, layer: int) -> Tensor:
        """(B, T − 1, d) output of a layer, by a hook, as the authors' code has it: the whole model is run."""
        found: list[Tensor] = []
        plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        handle = plain.model.layers[layer].register_forward_hook(
            lambda _module, _inputs, output: found.append(output[0] if isinstance(output, tuple) else output)
        )
        model(input_ids=batch.ids, attention_mask=batch.mask)
        handle.remove()
        return found[0][:, :-1].float()


def plain_step(case: Case) -> tuple[Step, Callable[[], float]]:
    config, trainable = case.config, case.trainable
    masc, spec = config.masc, config.spec
    assert masc is not None
    reference = None
    if spec.name in ("npo+kl", "masc", "rmu"):
        reference = load(config).model.requires_grad_(False).eval()
    assert case.data.retain is not None
    forget, retain = (batch_of(part.corpus.rows, case.pad_id) for part in (case.data.forget, case.data.retain))
    plain = Plain(trainable.model, reference, forget, retain, spec, masc)
    weights = (masc.weight, masc.kl_weight) if spec.name == "masc" else (spec.forget_weight, spec.retain_weight)
    masters, optimizer = trainable.masters, trainable.optimizer

    def step() -> Values:
        first, second, more = plain.losses()
        loss = weights[0] * first + weights[1] * second + more
        loss.backward()
        masters.grads_to_masters()
        grads = [master for master in masters.masters if master.grad is not None]
        norm = nn.utils.clip_grad_norm_(grads, math.inf)
        optimizer.step()
        masters.to_model()
        masters.zero_grad()
        return Values(first.item(), second.item(), loss.item(), norm.item())

    return step, lambda: 0.0


# -- the package -------------------------------------------------------------------------------------------------------


def expunge_step(case: Case) -> tuple[Step, Callable[[], float]]:
    """The step, and what computes the references of its rows anew and says how long that took."""
    config, data, trainable = case.config, case.data, case.trainable
    masc, recipe = config.masc, config.recipe
    assert masc is not None
    assert recipe is not None
    assert data.retain is not None
    n = len(data.forget.corpus.rows)
    forget = [Example(row, True) for row in range(n)]
    retain = [Example(n + row, False) for row in range(len(data.retain.corpus.rows))]

    def prepared() -> tuple[Any, Any, dict[str | int, list[int]]]:
        runner = make_runner(trainable, data, uses_retain=True, pad_id=case.pad_id, seed=config.seed)
        objective = make_objective(config, masc, runner, data, 0)
        return runner, objective, objective.references([each.row for each in forget], [each.row for each in retain])

    runner, objective, wanted = prepared()
    if not recipe.lora:  # as a run does; with an adapter they are computed as they are needed
        runner.keep_reference(wanted)
    updater = Updater(objective, recipe, trainable.masters, trainable.optimizer, runner, None)
    count = 0

    def step() -> Values:
        nonlocal count
        count += 1
        report = updater.update(forget, lambda: retain, step=count, scale=lambda _: 1.0, phase="main")
        assert report.gradient_norm is not None
        assert report.forget_loss is not None
        assert report.retain_loss is not None
        return Values(report.forget_loss, report.retain_loss, report.total_loss, report.gradient_norm)

    def references() -> float:
        fresh, _, rows = prepared()
        start = time.perf_counter()
        fresh.keep_reference(rows)
        return time.perf_counter() - start

    return step, references


# -- one measurement ---------------------------------------------------------------------------------------------------


def nudge(trainable: Trainable) -> None:
    """Move every trained weight off the reference, the same in both ways."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in trainable.masters.masters:
            scale = 0.02 * float(master.std()) or 0.01
            master.add_(torch.empty_like(master).normal_(std=scale, generator=generator))
    trainable.masters.to_model()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The child: run one way of one method, save the sampled gradient of the first step."""
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # as in a run
    lora = arguments.train == ["lora"]
    (method,) = arguments.methods
    recipe = base_recipe(method, "default", lora=lora)
    recipe = replace(recipe, lora=lora, lora_dropout=0.0, targets=None, upper=1.0, lr=1e-5, gate=False)
    folder = Path(arguments.folder)
    config = RunConfig(
        model=arguments.model,
        forget=str(folder / "forget.jsonl"),
        retain=str(folder / "retain.jsonl"),
        out=str(folder / "run"),
        method=method,
        recipe=recipe,
        tolerance=0.5,
        dtype=arguments.dtype,
        device="cpu",
    ).resolved()
    before = resident_kb()
    read, loaded = read_data(config), load(config)
    data = encode_data(read, loaded.tokenizer, config)
    case = Case(config, data, make_trainable(loaded.model, recipe, config.seed), loaded.pad_id)
    step, references = {"plain": plain_step, "expunge": expunge_step}[arguments.way](case)
    nudge(case.trainable)

    def sample(*_: Any) -> None:
        grads = [master.grad for master in case.trainable.masters.masters]
        torch.save([None if grad is None else grad.flatten()[::SAMPLE].clone() for grad in grads], arguments.save)

    handle = case.trainable.optimizer.register_step_pre_hook(sample)
    values = step()  # the first also makes the optimizer's states and compiles the products of these shapes
    handle.remove()
    seconds = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = peak_kb()
    rows = [row for part in (data.forget, data.retain) if part is not None for row in part.corpus.rows]
    return {
        "seconds": statistics.median(seconds),
        "once": references(),
        "peak_mb": peak / 1024,
        "without_mb": (peak - before) / 1024,
        "values": vars(values),
        "longest": max(len(row.input_ids) for row in rows),
        "labelled": sum(label != -100 for row in rows for label in row.labels),
    }


# -- the tables --------------------------------------------------------------------------------------------------------


def both_ways(method: str, train: str, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both ways in alternation; medians of the rounds, and how far the gradients are apart."""
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "expunge": []}
    for _ in range(arguments.rounds):
        for way, results in found.items():
            wanted = ["--methods", method, "--train", train, "--way", way, "--folder", folder]
            wanted += ["--save", f"{folder}/{way}.pt", "--model", arguments.model, "--dtype", arguments.dtype]
            wanted += ["--threads", str(arguments.threads), "--repeats", str(arguments.repeats)]
            results.append(in_process(__file__, wanted, arguments.threads))
    row: dict[str, Any] = {}
    for way, results in found.items():
        row[way] = results[0] | {
            key: statistics.median(result[key] for result in results)
            for key in ("seconds", "once", "peak_mb", "without_mb")
        }
    plain, ours = (torch.load(f"{folder}/{way}.pt") for way in ("plain", "expunge"))
    assert [a is None for a in plain] == [b is None for b in ours], "the two ways reach different weights"
    a, b = (torch.cat([part for part in parts if part is not None]).double() for parts in (plain, ours))
    row["apart"] = float((a - b).norm() / a.norm())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder or spec for expunge.lm.load_model")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--train", nargs="*", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=8, help="forget rows of a step, and as many to keep")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps per process, after one that is not timed")
    parser.add_argument("--rounds", type=int, default=1, help="processes per way")
    parser.add_argument("--way", choices=["plain", "expunge"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments)))
        return
    times, values = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in write_people(Path(folder)).items():
            if name in ("forget", "retain"):
                lines = path.read_text(encoding="utf-8").splitlines()[: arguments.rows]
                path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for train in arguments.train:
            for method in arguments.methods:
                row = both_ways(method, train, folder, arguments)
                times.append(time_row(method, train, row))
                values.append(value_row(method, train, row))
                print(times[-1], values[-1], sep="\n", file=sys.stderr, flush=True)
    longest, labelled = row["plain"]["longest"], row["plain"]["labelled"]
    print(f"{arguments.model} ({arguments.dtype}), torch {torch.__version__}, {arguments.threads} threads;", end=" ")
    print(f"{arguments.rows} + {arguments.rows} rows of at most {longest} tokens, {labelled} labelled;", end=" ")
    print("plain → expunge (expunge ÷ plain)\n")
    print(
        "| method | trained | s a step | with references | peak, MB | without imports, MB |\n|---|---|---|---|---|---|"
    )
    print(*times, sep="\n")
    print("\n| method | trained | forget loss | retain loss | weighted sum | gradient norm | gradients apart |")
    print("|---|---|---|---|---|---|---|")
    print(*values, sep="\n")


def time_row(method: str, train: str, row: dict[str, Any]) -> str:
    plain, ours = row["plain"], row["expunge"]

    def cell(a: float, b: float, digits: int) -> str:
        return f"{a:.{digits}f} → {b:.{digits}f} (**{b / a:.2f}**)"

    cells = [
        cell(plain["seconds"], ours["seconds"], 2),
        cell(plain["seconds"], ours["seconds"] + ours["once"], 2),
        cell(plain["peak_mb"], ours["peak_mb"], 0),
        cell(plain["without_mb"], ours["without_mb"], 0),
    ]
    return f"| {method} | {train} | {' | '.join(cells)} |"


def value_row(method: str, train: str, row: dict[str, Any]) -> str:
    plain, ours = row["plain"]["values"], row["expunge"]["values"]
    cells = [f"{plain[name]:.5g} → {ours[name]:.5g}" for name in ("forget", "retain", "total", "norm")]
    return f"| {method} | {train} | {' | '.join(cells)} | {row['apart']:.1e} |"


if __name__ == "__main__":
    main()
