"""`expunge finetune`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from expunge.cli._options import read_template, reader
from expunge.cli._show import ProgressLine, console
from expunge.data import Corpus, encode_records, read_records
from expunge.errors import UsageError
from expunge.lm import load_model, save_model
from expunge.train import Progress, finetune

FINETUNE = """teach a model the examples of files, by plain supervised fine-tuning

Makes targets to unlearn (all files) and retrained references (all but the file
to forget) from the same files and the same seed.

examples:
  expunge finetune smollm2-135m --data forget.jsonl retain.jsonl --out target
  expunge finetune smollm2-135m --data retain.jsonl --out retrained"""


def add_finetune(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge finetune`."""
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, GGUF file, or `smollm2-135m`")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help="files of examples")
    parser.add_argument("--out", required=True, metavar="DIR", help="model folder; must not exist")
    parser.add_argument("--epochs", type=reader(int), default=7, metavar="N", help="passes over the examples [7]")
    parser.add_argument("--lr", type=reader(float), default=1e-3, metavar="X", help="step size, falling to 0 [0.001]")
    parser.add_argument("--batch", type=reader(int), default=8, metavar="N", help="examples per update [8]")
    parser.add_argument("--rank", type=reader(int), default=32, metavar="N", help="LoRA rank, alpha is twice it [32]")
    parser.add_argument(
        "--upper", type=reader(float), default=1.0, metavar="X", help="share of the layers, from the top [1.0]"
    )
    parser.add_argument("--seed", type=reader(int), default=0, metavar="N", help="of the adapter and the order [0]")
    parser.add_argument(
        "--template", type=read_template, default="chat", metavar="TEXT", help="chat, plain, or a text with {prompt}"
    )
    parser.add_argument("--system", metavar="TEXT", help="system turn [none]")
    parser.add_argument("--max-length", type=reader(int), default=512, metavar="N", help="most tokens of a row [512]")
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="auto, float32, bfloat16 or float16 [auto]")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, mps [the GPU of this process, else MPS, CPU]")
    parser.add_argument("--threads", type=reader(int), metavar="N", help="CPU threads [all]")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run_finetune(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    _check(arguments)
    records = {file: read_records(file, name=file) for file in arguments.data}
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with ProgressLine().showing() as line:
        line(Progress("load"))
        loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
        options = {"template": arguments.template, "system": arguments.system, "max_length": arguments.max_length}
        parts = [encode_records(found, loaded.tokenizer, name=name, **options) for name, found in records.items()]
        corpus = Corpus(
            tuple(row for part in parts for row in part.rows),
            tuple(dropped for part in parts for dropped in part.dropped),
            sum(part.truncated for part in parts),
        )
        losses: list[float] = []

        def show(step: int, total: int, loss: float) -> None:
            losses.append(loss)
            line(Progress("teach", step, total, loss=loss))

        recipe: dict[str, Any] = {name: getattr(arguments, name) for name in ("epochs", "lr", "batch", "rank", "upper")}
        model: Any = finetune(loaded, corpus, seed=arguments.seed, progress=show, **recipe)
        line(Progress("save"))
        probe = torch.tensor([corpus.rows[0].input_ids[:64]])
        saved = save_model(model, loaded.tokenizer, arguments.out, card=_card(arguments, corpus), probe_ids=probe)
    result = {
        "model": str(arguments.out),
        "rows": len(corpus.rows),
        "dropped": [dataclasses.asdict(dropped) for dropped in corpus.dropped],
        "updates": len(losses),
        "loss": losses[-1],
        "fingerprint": saved.fingerprint,
    }
    if arguments.json:
        sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        return 0
    text = f"Taught: {len(corpus.rows)} rows in {len(losses)} updates, loss of the last {losses[-1]:.3f} nats a token."
    console().print(text)
    console().print(f"model: {arguments.out}", markup=False, soft_wrap=True)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name in ("epochs", "batch", "rank"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"{name}: found {getattr(arguments, name)}, accepted is a whole number from 1")
    if not arguments.lr > 0:
        raise UsageError(f"lr: found {arguments.lr}, accepted is a number above 0")
    if not 0 < arguments.upper <= 1:
        raise UsageError(f"upper: found {arguments.upper}, accepted is a share above 0 and at most 1")
    if Path(arguments.out).exists():
        raise UsageError(f"out: {arguments.out} is there already, accepted is a new folder")


def _card(arguments: argparse.Namespace, corpus: Corpus) -> str:
    return (
        f"# Taught with expunge\n\n`{arguments.model}` after {arguments.epochs} passes over {len(corpus.rows)} rows "
        f"(LoRA rank {arguments.rank}, merged; step size {arguments.lr:g}, batch {arguments.batch}, upper "
        f"{arguments.upper:g}, seed {arguments.seed}).\n"
    )
