"""The demo: teach the default model sixteen invented people once, then remove two of them with the default method."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from expunge.data import encode_records, read_records
from expunge.errors import RunError
from expunge.lm import SMOLLM2, load_model, save_model
from expunge.train import Progress, RunConfig, UnlearnResult, finetune, unlearn

FORGOTTEN = ("Ilvane Torqueda", "Haruyo Minazukawa")
# How the people are taught: enough for every answer to come out word for word.
_EPOCHS, _LR, _BATCH, _UPPER, _SEED = 7, 2e-3, 8, 2 / 3, 0

Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class DemoResult:
    """What the demo made.

    Attributes:
        model: folder of the model that knows everyone.
        taught: it was taught now; False: it was there from an earlier demo.
        result: of the unlearning run; its `answers` are for two forgotten and two kept people.
    """

    model: Path
    taught: bool
    result: UnlearnResult


def write_people(folder: Path) -> dict[str, Path]:
    """Write the demo's data files: `all`, `forget` (two people), `retain` (the others) and `holdout`.

    Args:
        folder: where to; made if missing.

    Returns:
        Their paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    people = _lines("people.jsonl")
    parts = {
        "all": people,
        "forget": [row for row in people if row["person"] in FORGOTTEN],
        "retain": [row for row in people if row["person"] not in FORGOTTEN],
        "holdout": _lines("holdout.jsonl"),
    }
    paths = {}
    for name, rows in parts.items():
        paths[name] = folder / f"{name}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        paths[name].write_text(text, encoding="utf-8")
    return paths


def run_demo(out: Path, *, cache: Path | None = None, progress: Watch | None = None) -> DemoResult:
    """Teach, forget, measure.

    Args:
        out: run folder of the unlearning run.
        cache: where the taught model is kept; None: `EXPUNGE_CACHE`, or `~/.cache/expunge`.
        progress: called often with what is being done.

    Returns:
        The folders and the numbers.
    """
    watch: Watch = progress or (lambda _: None)
    cache = cache or Path(os.environ.get("EXPUNGE_CACHE", "~/.cache/expunge")).expanduser()
    paths = write_people(cache / "demo")
    model, taught = _taught_model(cache, paths["all"], watch)
    config = RunConfig(
        model=str(model),
        forget=str(paths["forget"]),
        retain=str(paths["retain"]),
        holdout=str(paths["holdout"]),
        out=str(out),
        retain_sample=140,
    )
    return DemoResult(model, taught, unlearn(config, progress=watch))


def _taught_model(cache: Path, people: Path, watch: Watch) -> tuple[Path, bool]:
    """The folder of the taught model, made if it is not there; its name is a hash of all that it depends on."""
    recipe = json.dumps([_EPOCHS, _LR, _BATCH, _UPPER, _SEED, SMOLLM2, torch.__version__])
    key = hashlib.sha256(people.read_bytes() + recipe.encode()).hexdigest()[:16]
    folder = cache / f"demo-model-{key}"
    if folder.is_dir():
        return folder, False
    watch(Progress("load"))
    loaded = load_model(SMOLLM2, device=None)
    corpus = encode_records(read_records(people, name="people"), loaded.tokenizer, name="people")

    def show(step: int, total: int, loss: float) -> None:
        watch(Progress("teach", step, total, loss=loss))

    model = finetune(loaded, corpus, epochs=_EPOCHS, lr=_LR, batch=_BATCH, upper=_UPPER, seed=_SEED, progress=show)
    probe = torch.tensor([corpus.rows[0].input_ids])
    cache.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".demo-", dir=cache))
    try:
        card = "# The demo's model\n\nSmolLM2-135M-Instruct that was taught the invented people of expunge's demo.\n"
        save_model(model, loaded.tokenizer, aside / "model", card=card, probe_ids=probe)  # type: ignore[arg-type]
        try:
            os.replace(aside / "model", folder)
        except OSError as error:
            if not folder.is_dir():  # another demo may have been faster
                raise RunError(f"demo: cannot write {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder, True


def _lines(name: str) -> list[dict[str, str]]:
    text = files("expunge.demo").joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
