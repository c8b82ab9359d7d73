"""A tiny Llama that has learned a handful of rows, and runs on it."""

import json
from pathlib import Path

import torch
from tests.lm._tokenizer import tiny, tiny_tokenizer

from expunge.data import Record, encode_records, read_records
from expunge.train import config_from_options

FORGET, RETAIN, HOLDOUT = range(0, 4), range(4, 10), range(10, 14)


def examples(numbers):
    """Distinct questions of three words with answers of eight."""
    found = []
    for number in numbers:
        words = torch.randperm(56, generator=torch.Generator().manual_seed(number))[:11] + 3
        text = [f"w{word}" for word in words.tolist()]
        found.append({"id": f"row-{number}", "prompt": " ".join(text[:3]), "completion": " ".join(text[3:])})
    return found


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_data(folder):
    """Files to forget, to keep and never seen."""
    return {
        name: str(write(folder / f"{name}.jsonl", examples(numbers)))
        for name, numbers in (("forget", FORGET), ("retain", RETAIN), ("holdout", HOLDOUT))
    }


def make_model(folder, *, dtype=torch.float32, steps=30, numbers=(*FORGET, *RETAIN)):
    """Train a tiny Llama on rows, those to forget and to keep, until it knows them, and save it."""
    torch.manual_seed(0)
    model, tokenizer = tiny("llama", max_position_embeddings=128), tiny_tokenizer()
    data = folder.parent / f"{folder.name}.jsonl"
    records: list[Record] = read_records(write(data, examples(numbers)))
    rows = encode_records(records, tokenizer).rows
    ids = torch.tensor([row.input_ids for row in rows])
    labels = torch.tensor([row.labels for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def options(model, data, out, **changes):
    """Options of a quick run that stops by itself; `changes` win."""
    usual = {"batch": 2, "retain_batch": 2, "lr": 1e-2, "upper": 1.0, "epochs": 20, "extra_epochs": 20, "every": 2}
    usual |= {"probe": 2, "confirm": 4, "weight": 1.0, "sample": 2, "device": "cpu", "threads": 1}
    return {"model": model, "out": str(out), **data, **usual, **changes}


def config(model, data, out, **changes):
    return config_from_options(options(model, data, out, **changes))


def weights(run):
    from safetensors.torch import load_file

    return load_file(Path(run) / "model" / "model.safetensors")
