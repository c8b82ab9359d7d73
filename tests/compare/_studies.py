"""A comparison of two methods on the tiny model, as a file."""

import json

import yaml
from tests.train._runs import HOLDOUT, RETAIN, examples, write

from expunge.cli import main

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


def make_place(folder, model):
    """Rows and model in a folder, as `words` sets the file's placeholders."""
    write_rows(folder / "data")
    (folder / "models").mkdir()
    (folder / "models" / "knowing").symlink_to(model)
    return folder


def words(place, file, *more, out="out"):
    """The command line."""
    found = ["compare", file, "--set", f"data={place / 'data'}", f"models={place / 'models'}"]
    return [str(word) for word in (*found, *(() if out is None else ("--out", place / out)), *more)]


def run(capsys, *arguments):
    capsys.readouterr()
    code = main(list(arguments))
    output, errors = capsys.readouterr()
    return code, output, errors


def refused(capsys, *arguments):
    code, output, errors = run(capsys, *arguments)
    assert (code, output) == (2, "")
    assert len(errors.splitlines()) == 1, errors
    return errors


def results(place, out="out"):
    return json.loads((place / out / "comparison.json").read_text())
