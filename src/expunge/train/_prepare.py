"""From a configuration to everything a run works on: all that can be refused is refused here, before work starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel

from expunge.data import (
    Corpus,
    DataReport,
    EpochSampler,
    Record,
    Row,
    check_pair,
    encode_records,
    read_records,
    read_refusals,
    refuse,
)
from expunge.errors import UsageError
from expunge.lm import (
    LoadedModel,
    MasterWeights,
    RowRunner,
    Split,
    adapter_disabled,
    add_lora,
    default_targets,
    is_widened,
    load_model,
    split_model,
)
from expunge.objectives import MascSettings, parse_method
from expunge.train._config import RunConfig
from expunge.train._objective import MascObjective, Objective, TermObjective, make_weights
from expunge.train._optimizer import make_optimizer
from expunge.train._recipe import Recipe

# Rows that are computed together for the runner's cache.
_GROUP = 16


@dataclass(frozen=True)
class Part:
    """One of the files: what was read and what became of it."""

    name: str
    records: list[Record]
    corpus: Corpus

    @property
    def fingerprint(self) -> str:
        """Hash of the token rows and labels: changes with the data, the tokenizer, the template and the length."""
        text = json.dumps([[row.id, row.input_ids, row.labels] for row in self.corpus.rows])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def row_ids(self) -> list[str]:
        """Ids of rows: those of the records, with the number of the window where a record has several."""
        counts: dict[int, int] = {}
        for row in self.corpus.rows:
            counts[row.record] = counts.get(row.record, 0) + 1
        seen: dict[int, int] = {}
        names = []
        for row in self.corpus.rows:
            seen[row.record] = seen.get(row.record, 0) + 1
            names.append(row.id if counts[row.record] == 1 else f"{row.id}#{seen[row.record]}")
        return names


@dataclass(frozen=True)
class Data:
    """The files of a run.

    Attributes:
        forget: to be forgotten.
        retain: to be kept.
        holdout: comparable, and never trained on.
        earlier: forgotten before; measured only.
        report: duplicates and overlap of the first two.
        refusals: by name of the file, the same questions with refusals as answers; where a term of the method asks.
    """

    forget: Part
    retain: Part | None
    holdout: Part | None
    report: DataReport | None
    refusals: dict[str, Part] = dataclasses.field(default_factory=dict)
    earlier: Part | None = None

    def run(self) -> list[Part]:
        """The parts whose rows are run in training, in the order of the runner's rows."""
        return [self.forget, *([] if self.retain is None else [self.retain]), *self.refusals.values()]

    def counts(self) -> dict[str, Any]:
        """What was read, dropped and cut, for the log and the terminal."""
        found: dict[str, Any] = {}
        for part in (self.forget, self.retain, self.holdout, self.earlier, *self.refusals.values()):
            if part is not None:
                found[part.name] = {
                    "records": len(part.records),
                    "rows": len(part.corpus.rows),
                    "dropped": [dataclasses.asdict(dropped) for dropped in part.corpus.dropped],
                    "prompts_cut": part.corpus.truncated,
                    "fingerprint": part.fingerprint,
                }
        if self.report is not None:
            found["duplicates"] = {"forget": self.report.duplicate_forget, "retain": self.report.duplicate_retain}
            found["overlap"] = list(self.report.overlap_ids)
        return found


@dataclass
class Trainable:
    """The model made trainable.

    Attributes:
        model: with its adapter, or as it is for full fine-tuning.
        split: of `model`.
        masters: float32 weights the optimizer updates.
        optimizer: over them.
        first_layer: first trained decoder layer.
        names: of the trainable weights, in the order of the masters.
    """

    model: Any
    split: Split
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    first_layer: int
    names: list[str]


def read_data(config: RunConfig) -> Data:
    """Read and check the records; the tokenizer is not needed yet, so bad files fail before weights are loaded.

    Raises:
        UsageError: a file is missing or malformed, or the sets overlap.
    """
    forget = _read(config, config.forget, "forget")
    retain = None if config.retain is None else _read(config, config.retain, "retain")
    holdout = None if config.holdout is None else _read(config, config.holdout, "holdout")
    report = None
    if retain is not None:
        report = check_pair(forget.records, retain.records, allow_overlap=config.allow_overlap)
    if holdout is not None:
        # NOTE: a holdout that is also forgotten or kept would set the tolerance to the violation of known text.
        check_pair(forget.records, holdout.records, names=("forget", "holdout"))
        if retain is not None:
            check_pair(retain.records, holdout.records, names=("retain", "holdout"))
    refusals = _refusals(config, forget, retain)
    return Data(forget, retain, holdout, report, refusals, _earlier(config, forget, retain))


def _earlier(config: RunConfig, forget: Part, retain: Part | None) -> Part | None:
    """What was forgotten before, in one part; ids begin with the number of the file where there are several."""
    if not config.earlier:
        return None
    records: list[Record] = []
    for number, source in enumerate(config.earlier, start=1):
        found = _read(config, source, "earlier").records
        several = len(config.earlier) > 1
        records += [dataclasses.replace(one, id=f"{number}/{one.id}") if several else one for one in found]
    check_pair(forget.records, records, names=("forget", "earlier"))
    if retain is not None:
        # NOTE: a retain file that still has them would teach them again.
        check_pair(retain.records, records, names=("retain", "earlier"), allow_overlap=config.allow_overlap)
    return Part("earlier", records, Corpus((), (), 0))


def _refusals(config: RunConfig, forget: Part, retain: Part | None) -> dict[str, Part]:
    """Refusals to the questions of the files whose term asks for them."""
    found = {}
    for part, wanted in zip((forget, retain), wants_refusals(config), strict=True):
        if wanted and part is not None:
            records = refuse(part.records, read_refusals(config.refusals), seed=config.seed, name=part.name)
            found[part.name] = Part(f"{part.name} refusals", records, Corpus((), (), 0))
    if config.refusals is not None and not found:
        raise UsageError(f"refusals: found with method {config.method}, which trains on none")
    return found


def wants_refusals(config: RunConfig) -> tuple[bool, bool]:
    """Whether the forget and the retain term train on refusals."""
    spec = config.spec
    if spec.kind != "loop":
        return False, False
    return "refusal_rows" in spec.forget_term.needs, "refusal_rows" in spec.retain_term.needs


def _read(config: RunConfig, source: str, name: str) -> Part:
    records = read_records(source, columns=config.columns or None, name=name)
    return Part(name, records, Corpus((), (), 0))


def encode_data(data: Data, tokenizer: Any, config: RunConfig) -> Data:
    """Turn the records into token rows.

    Raises:
        UsageError: an answer does not fit, or nothing is left to label.
    """

    def encoded(part: Part | None) -> Part | None:
        if part is None:
            return None
        corpus = encode_records(
            part.records,
            tokenizer,
            template=config.template,
            system=config.system,
            max_length=config.max_length,
            name=part.name,
        )
        return dataclasses.replace(part, corpus=corpus)

    forget = encoded(data.forget)
    assert forget is not None
    if config.holdout_probe >= len(forget.corpus.rows):
        raise UsageError(
            f"holdout_probe: found {config.holdout_probe}, accepted is less than the number of forget rows, "
            f"{len(forget.corpus.rows)}"
        )
    refusals = {name: refused for name, part in data.refusals.items() if (refused := encoded(part)) is not None}
    for name, part in refusals.items():
        if len(part.corpus.rows) != len(part.records):
            raise UsageError(f"refusals: {len(part.records) - len(part.corpus.rows)} to {name} have no labelled token")
    return dataclasses.replace(
        data,
        forget=forget,
        retain=encoded(data.retain),
        holdout=encoded(data.holdout),
        refusals=refusals,
        earlier=encoded(data.earlier),
    )


def load(config: RunConfig) -> LoadedModel:
    """Load the model and check what depends on it.

    Raises:
        UsageError: it cannot be loaded, or k is not below its vocabulary.
    """
    loaded = load_model(
        config.model, dtype=config.dtype, device=config.device, trust_remote_code=config.trust_remote_code
    )
    check_vocabulary(loaded.model, config)
    return loaded


def check_vocabulary(model: Any, config: RunConfig) -> None:
    """Compare k with the vocabulary of the model.

    Raises:
        UsageError: k is not below it.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    assert config.masc is not None
    if config.masc.k >= vocabulary:
        raise UsageError(f"k: found {config.masc.k}, accepted is a whole number below the vocabulary size {vocabulary}")


def check_lengths(model: Any, data: Data) -> None:
    """Compare the longest row with the positions of the model.

    Raises:
        UsageError: a row is longer.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for part in (data.forget, data.retain, data.holdout, data.earlier):
        longest = 0 if part is None else max(len(row.input_ids) for row in part.corpus.rows)
        if part is not None and limit is not None and longest > limit:
            raise UsageError(
                f"max_length: {part.name} has a row of {longest} tokens, accepted are at most the model's {limit}"
            )


def make_trainable(model: Any, recipe: Recipe, seed: int) -> Trainable:
    """Attach the adapter (or free all weights) and make masters and optimizer.

    Raises:
        UsageError: LoRA targets match nothing.
    """
    first = 0
    if recipe.lora:
        layers = model.config.get_text_config().num_hidden_layers
        first = layers - max(1, round(layers * recipe.upper))
        torch.manual_seed(seed)
        model = add_lora(
            model,
            rank=recipe.rank,
            alpha=recipe.lora_alpha,
            dropout=recipe.lora_dropout,
            targets=recipe.targets or default_targets(model),
            layers=None if first == 0 else range(first, layers),
        )
    else:
        model.requires_grad_(True)
        torch.manual_seed(seed)
    masters = MasterWeights(model.parameters(), widened=is_widened(model))
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    optimizer = make_optimizer(recipe, zip(names, masters.masters, strict=True))
    return Trainable(model, split_model(model), masters, optimizer, first, names)


def make_runner(trainable: Trainable, data: Data, *, pad_id: int, seed: int) -> RowRunner:
    """Rows of the run with the cache groups that belong to the seed: forget, retain, and the refusals to both."""
    forget, retain = data.forget.corpus.rows, () if data.retain is None else data.retain.corpus.rows
    # Every forget row is measured before the first update. Retain rows are computed when the first of their group comes
    # up: a group is made of rows that the first pass draws one after another.
    groups = _by_length(range(len(forget)), forget)
    if retain:
        order = EpochSampler(range(len(forget), len(forget) + len(retain)), seed=seed + 2).next(len(retain))
        for start in range(0, len(order), 2 * _GROUP):
            groups += _by_length(order[start : start + 2 * _GROUP], [*forget, *retain])
    rows = [*forget, *retain]
    for part in data.refusals.values():
        groups += [
            [len(rows) + item for item in group] for group in _by_length(range(len(part.corpus.rows)), part.corpus.rows)
        ]
        rows += part.corpus.rows
    without = partial(adapter_disabled, trainable.model) if isinstance(trainable.model, PeftModel) else None
    return RowRunner(
        trainable.split,
        rows,
        pad_id=pad_id,
        groups=groups,
        first_layer=trainable.first_layer,
        without_adapter=without,
    )


def refusal_rows(data: Data) -> dict[int, int]:
    """Row of an answer in the runner → row of the refusal to the same question."""
    found: dict[int, int] = {}
    answers = {"forget": data.forget, "retain": data.retain}
    firsts = {"forget": 0, "retain": len(data.forget.corpus.rows)}
    place = sum(len(part.corpus.rows) for part in answers.values() if part is not None)
    for name, refusals in data.refusals.items():
        of_record = {row.record: place + number for number, row in enumerate(refusals.corpus.rows)}
        part = answers[name]
        assert part is not None
        found |= {firsts[name] + number: of_record[row.record] for number, row in enumerate(part.corpus.rows)}
        place += len(refusals.corpus.rows)
    return found


def make_objective(config: RunConfig, masc: MascSettings, runner: RowRunner, data: Data, slack: int) -> Objective:
    """The objective of a run's method.

    Args:
        config: resolved.
        masc: with the tolerance.
        runner: of the model.
        data: encoded.
        slack: tokens more that have to be within the tolerance (see `gates`).
    """
    assert config.recipe is not None
    if config.method == "masc":
        return MascObjective(runner, masc, gate=config.recipe.gate, slack=slack)
    spec, sign = config.spec, 1.0
    if spec.kind == "weights":
        # Tuned on the examples to forget; what that changes is taken off the weights afterwards.
        spec, sign = parse_method("forget=ga,retain=none"), -1.0
    weights = make_weights(spec, weighting=config.weighting, limit=config.retain_limit, step=config.dual_step)
    return TermObjective(runner, spec, weights, refusal_rows(data), sign=sign)


def _by_length(items: Sequence[int], rows: Sequence[Row]) -> list[list[int]]:
    """Groups of rows of similar length: little padding, and products large enough for a CPU."""
    order = sorted(items, key=lambda item: (len(rows[item].input_ids), item))
    return [order[first : first + _GROUP] for first in range(0, len(order), _GROUP)]


def held_out(config: RunConfig, n_forget: int) -> list[int]:
    """Forget rows that are probed and not trained on."""
    return sorted(random.Random(config.seed).sample(range(n_forget), config.holdout_probe))
