"""The model card: a section of the saved model's README that says what was done and what it did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expunge._files import is_hub_id, shown_model, write_whole
from expunge.errors import RunError, UsageError
from expunge.objectives import MascSettings
from expunge.train._config import RunConfig
from expunge.train._folder import MODEL, RESULT, RunFolder
from expunge.train._recipe import Recipe

CARD = "README.md"
_BEGIN, _END = "<!-- expunge: made by `expunge card`, replaced when it runs again -->", "<!-- /expunge -->"
_MEANS = {"probability": "probability", "exact": "exact match", "violation": "violation", "rouge_l": "ROUGE-L recall"}
_PARTS = ("forget_before", "forget_after", "retain_before", "retain_after", "earlier_before", "earlier_after")


def new_card(model: str) -> str:
    """The README of a model that has just been saved, without its section.

    Args:
        model: name of the model before: a hub id or a folder, whose last part is kept.
    """
    name = shown_model(model)
    base = f"base_model: {name}\n" if is_hub_id(model) else ""
    return f"---\n{base}tags:\n- unlearning\n- expunge\n---\n\n# {Path(name).name}, unlearned\n"


def write_card(
    folder: str | Path, *, entry: Mapping[str, Any] | None = None, result: Mapping[str, Any] | None = None
) -> Path:
    """Write the section on a run into the README of its model; what else is in the README stays.

    Nothing of the examples but their number is in it.

    Args:
        folder: of the run.
        entry: line of the run in a ledger; None: a line that the section named before stays away.
        result: `result.json`; None: read from the folder.

    Returns:
        The file.

    Raises:
        UsageError: the folder is not that of a finished run, or its model is not there.
        RunError: the file cannot be written.
    """
    run = RunFolder(folder)
    values = run.read_run()
    found = result or run.read_json(RESULT)
    if found is None:
        raise UsageError(f"{run.path}: found a run that has not ended, accepted is the folder of a finished run")
    model = run.path / MODEL
    if not model.is_dir():
        raise UsageError(f"{model}: found no model, accepted is the folder of a run with its model")
    file = model / CARD
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else new_card(str(values["config"]["model"]))
        text = _placed(text, card_section(values, found, entry))
        write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"{file}: found no UTF-8, accepted is a text file") from None
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror}") from None
    return file


def card_section(run: Mapping[str, Any], result: Mapping[str, Any], entry: Mapping[str, Any] | None = None) -> str:
    """Markdown with the method, its settings, what was measured and the entry in a ledger.

    Args:
        run: `run.json`.
        result: `result.json`.
        entry: line of the run in a ledger.

    Raises:
        UsageError: the run's configuration is one of another version.
    """
    config = RunConfig.from_dict(dict(run["config"]))
    masc, recipe = MascSettings(**run["resolved_masc"]), config.recipe
    assert recipe is not None
    examples, left = result["forget_before"]["examples"], len(result["left"])
    outcome = "all are forgotten" if result["forgotten"] else f"{left} are left above the tolerance"
    lines = [
        "## Unlearning",
        "",
        f"{examples} examples were to be removed from `{shown_model(config.model)}`; {outcome}. Done by "
        f"{_method(config)} with expunge {run['versions'].get('expunge')}.",
        "",
        *_measured(result),
        "",
        "Means over examples. *Violation*: the share of an answer's tokens whose margin over the model's own "
        f"{masc.k} strongest alternatives is above log(ρ/(1−ρ)), ρ = {masc.rho:g}.",
        "",
        *_settings(config, masc, recipe, result),
    ]
    if entry is not None:
        lines += ["", *_signed(entry)]
    return "\n".join([_BEGIN, *lines, _END])


def _placed(text: str, section: str) -> str:
    """The text with the section in the place of the former one, or at its end."""
    pattern = re.escape(_BEGIN) + ".*?" + re.escape(_END)
    if re.search(pattern, text, flags=re.DOTALL):
        return re.sub(pattern, lambda _: section, text, count=1, flags=re.DOTALL)
    return f"{text.rstrip()}\n\n{section}\n"


def _method(config: RunConfig) -> str:
    if config.method == "masc":
        paper = "[arXiv 2606.02920](https://arxiv.org/abs/2606.02920)"
        return f"MASC (margin self-correction, {paper}), preset `{config.preset}`,"
    return f"`{config.method}` ({config.spec.reference})"


def _measured(result: Mapping[str, Any]) -> list[str]:
    earlier = result.get("earlier") or {}
    found = {**result, **{f"earlier_{when}": earlier.get(when) for when in ("before", "after")}}
    parts = [(part, found[part]) for part in _PARTS if found.get(part) is not None]
    names = [f"{part.replace('_', ', ')} ({values['examples']})" for part, values in parts]
    rows = [
        [shown, *("–" if values[name] is None else f"{values[name]:.3f}" for _, values in parts)]
        for name, shown in _MEANS.items()
    ]
    return [
        f"| | {' | '.join(names)} |",
        "|---" + "|---:" * len(parts) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _settings(config: RunConfig, masc: MascSettings, recipe: Recipe, result: Mapping[str, Any]) -> list[str]:
    kind = (
        f"LoRA rank {recipe.rank}, {'adapter' if config.adapter_only else 'merged'}" if recipe.lora else "all weights"
    )
    steps = f"alternate, {recipe.retain_every} retain steps each" if recipe.alternates else "joint"
    rows = {
        "trained": kind,
        "updates": f"{result['steps']}; {result['reason']}",
        "tolerance of the violation": f"{result['tolerance']:.3f}, from the {result['tolerance_source']}",
    }
    if config.method == "masc":
        rows["λ, ρ, η, k, β"] = f"{masc.weight:g}, {masc.rho:g}, {masc.eta:g}, {masc.k}, {masc.beta:g}"
        rows["retain KL weight"] = f"{masc.kl_weight:g}"
    else:
        rows["minimised"] = config.spec.formula
    rows |= {
        "optimizer": f"{recipe.optimizer} ({recipe.optimizer_rule}, {recipe.optimizer_storage}), {steps}",
        "step size": f"{recipe.lr:g}",
        "forget and retain examples per update": f"{recipe.batch}, {recipe.retain_batch}",
        "seed": str(config.seed),
        "weights after (fingerprint)": f"`{result['fingerprint']}`",
    }
    escaped = {name: value.replace("|", "\\|") for name, value in rows.items()}
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in escaped.items())]


def _signed(entry: Mapping[str, Any]) -> list[str]:
    fields = entry["fields"]
    name = str(fields["request"]).replace("`", "'")
    return [
        f"Signed at {fields['at']} as entry {fields['number']}, request `{name}`, of a ledger of deletion requests: "
        f"hash `{entry['hash']}`. `expunge ledger verify LEDGER --model DIR` checks it."
    ]
