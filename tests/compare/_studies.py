"""A comparison of two methods on the tiny model, as a file."""

import yaml
from tests.train._runs import HOLDOUT, RETAIN, examples, write

QUICK = {"lr": 1e-2, "batch": 2, "retain_batch": 2, "device": "cpu", "threads": 1}
MASC = {"name": "masc", "upper": 1.0, "epochs": 20, "extra_epochs": 20, "probe": 2, "confirm": 4, "weight": 1.0}
GRADDIFF = {"name": "graddiff", "epochs": 1}


def values(**changes):
    """A file's content; `changes` win, and what is None is left away."""
    files = {name: f"${{data}}/{name}.jsonl" for name in ("forget", "retain", "holdout")}
    usual = {
        "suite": "mine",
        "targets": {"tiny": {"model": "${models}/knowing", "retrained": "${models}/knowing", **files}},
        "options": QUICK,
        "methods": [MASC, GRADDIFF],
        "seeds": [0],
        "evaluate": {"device": "cpu", "resamples": 20, "max_new_tokens": 8},
    }
    return {name: value for name, value in (usual | changes).items() if value is not None}


def write_study(path, **changes):
    path.write_text(yaml.safe_dump(values(**changes), sort_keys=False))
    return path


def write_rows(folder):
    """Rows with a holdout and questions asked otherwise."""
    folder.mkdir(exist_ok=True)
    for name, numbers in (("forget", range(4)), ("retain", RETAIN), ("holdout", HOLDOUT)):
        write(folder / f"{name}.jsonl", examples(numbers))
    return folder
