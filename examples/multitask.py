"""Three tasks with different gradients on one small transformer, under every scheme: who wins, and what the states say.

    python examples/multitask.py                       # prints a table, writes multitask.svg; about half a minute
    python examples/multitask.py --steps 100 --out FILE

A row is a task token and eight digits; the model gives eight digits back. "copy" wants them as they are, "sort" in
rising order, "opposite" each as 9 − digit. The tasks share inputs and vocabulary and pull the same weights in different
directions; they take turns, as forget and retain do in unlearning. Each scheme runs with each of three learning rates
and is shown with the one whose final loss, the mean over the tasks, is lowest.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from expunge.optim import AdamW, BaseDelta, Decoupled, Diagnostics, ObjectiveOptimizer, Shared

DIGITS, LENGTH, WIDTH, BATCH = 10, 8, 64, 64
TASKS = ("copy", "sort", "opposite")
SCHEMES = {
    "Joint": Shared(),
    "Alternate": Shared(),
    "DualOptim": Decoupled(),
    "DualOptim+": BaseDelta(),
    "DualOptim+, floor 0.1": BaseDelta(floor=0.1),
}
RATES = (1e-3, 2e-3, 4e-3)
COLOURS = ("#888888", "#4477aa", "#ee6677", "#228833", "#aa3377")


class Model(nn.Module):
    """One token embedding, two transformer layers, one head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS + len(TASKS), WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH + 1, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, task: int, digits: Tensor) -> Tensor:
        """Logits (B, 8, 10) for digits (B, 8)."""
        tokens = torch.cat([torch.full((len(digits), 1), DIGITS + task), digits], dim=1)
        logits: Tensor = self.head(self.body(self.embed(tokens) + self.place)[:, 1:])
        return logits


def batch(task: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Digits (B, 8) and what the task makes of them."""
    digits = torch.randint(DIGITS, (BATCH, LENGTH), generator=generator)
    return digits, (digits, digits.sort(dim=1).values, DIGITS - 1 - digits)[task]


def train(name: str, lr: float, steps: int) -> tuple[list[float], dict[str, float], Diagnostics]:
    """Mean loss of all tasks every ten steps, accuracy of each task, and the diagnostics at the end."""
    torch.manual_seed(0)
    model, generator = Model(), torch.Generator().manual_seed(1)
    optimizer = ObjectiveOptimizer(model.named_parameters(), lr=lr, scheme=SCHEMES[name], rule=AdamW(betas=(0.9, 0.95)))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)

    def loss_of(task: int) -> Tensor:
        digits, wanted = batch(task, generator)
        return nn.functional.cross_entropy(model(task, digits).flatten(0, 1), wanted.flatten())

    curve: list[float] = []
    recent: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        if name == "Joint":
            # One update for all three, at the same number of forward passes: every third step.
            if step % 3 == 0:
                losses = torch.stack([loss_of(task) for task in range(3)])
                losses.mean().backward()
                optimizer.step()
                recent.append(losses.mean().item())
        else:
            loss = loss_of(step % 3)
            loss.backward()
            optimizer.step(objective=TASKS[step % 3])
            recent.append(loss.item())
        schedule.step()
        if step % 30 == 29:
            curve.append(sum(recent) / len(recent))
            recent = []
    right = {}
    with torch.no_grad():
        for task, label in enumerate(TASKS):
            digits, wanted = batch(task, generator)
            right[label] = float((model(task, digits).argmax(-1) == wanted).float().mean())
    return curve, right, optimizer.diagnostics()


def draw(curves: dict[str, list[float]]) -> str:
    """An SVG with one line a scheme."""
    width, height, left, bottom = 720, 400, 60, 50
    top = max(max(curve) for curve in curves.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in range(5):
        value, y = top * tick / 4, height - bottom - (height - bottom - 20) * tick / 4
        parts.append(f'<line x1="{left}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for place, (name, curve) in enumerate(curves.items()):
        points = " ".join(
            f"{left + (width - left - 10) * i / max(len(curve) - 1, 1):.1f},"
            f"{height - bottom - (height - bottom - 20) * value / top:.1f}"
            for i, value in enumerate(curve)
        )
        colour = COLOURS[place]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 200}" y="{40 + 18 * place}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 15}" text-anchor="middle">steps, from first to last</text>')
    parts.append('<text x="12" y="14">mean cross-entropy of the three tasks, nats</text></svg>')
    return "".join(parts)


def main() -> None:
    """Run every scheme with every learning rate, print the table, write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=240, help="forward passes of a run, a multiple of 30 (default 240)"
    )
    parser.add_argument("--out", type=Path, default=Path("multitask.svg"), help="the plot (default multitask.svg)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, curves = time.perf_counter(), {}
    print("| scheme | lr | final loss | " + " | ".join(f"{task} right" for task in TASKS) + " | cosines |")
    print("|---|---|---|" + "---|" * (len(TASKS) + 1))
    for name in SCHEMES:
        runs = {lr: train(name, lr, arguments.steps) for lr in RATES}
        lr = min(runs, key=lambda rate: runs[rate][0][-1])
        curve, right, found = runs[lr]
        curves[name] = curve
        cosines = ", ".join(f"{value:+.2f}" for value in found.cosine.values() if value is not None) or "not tracked"
        scores = " | ".join(f"{right[task]:.3f}" for task in TASKS)
        print(f"| {name} | {lr:g} | {curve[-1]:.3f} | {scores} | {cosines} |", flush=True)
    arguments.out.write_text(draw(curves), encoding="utf-8")
    print(f"{time.perf_counter() - start:.0f} s; plot: {arguments.out}")


if __name__ == "__main__":
    main()
