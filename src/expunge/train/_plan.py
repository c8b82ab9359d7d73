"""What a run will take, before it starts: memory by part and by stage, and disk."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from expunge.data import Corpus, Row
from expunge.errors import UsageError
from expunge.lm import (
    CACHE_BYTES,
    PAD_TO,
    PLAIN_LENGTH,
    ROWS_AT_ONCE,
    ModelShape,
    RowRunner,
    assumed_split,
    head_bytes,
    pass_bytes,
    pick_device,
    read_shape,
    rounded_up,
)
from expunge.optim import ObjectiveOptimizer, planned_state_bytes
from expunge.train._checkpoints import KEPT
from expunge.train._config import RunConfig
from expunge.train._prepare import (
    Data,
    Part,
    Trainable,
    check_vocabulary,
    encode_data,
    make_objective,
    make_trainable,
    read_data,
    wants_refusals,
)
from expunge.train._room import free_disk, free_memory, resident_bytes, same_disk

# Rows that are scored at once.
_SCORED = 16
# Configuration, tokenizer, tables and the report.
_SMALL_FILES = 32 << 20


@dataclass(frozen=True)
class Plan:
    """Bytes that a run takes, from shapes alone.

    Attributes:
        parameters: weights of the model and its adapters; tied ones count once.
        trainable: those of them that are trained.
        device: where the model is to be.
        dtype: of the weights.
        rows: rows of the largest forward pass with gradient.
        length: its padded length, tokens.
        parts: bytes by what they are for: process (on a CPU: what it takes already), weights, masters (float32 copies
            of low-precision trainable weights), gradients, optimizer (its states, exact), activations (the largest
            forward and backward pass, its head included) and cache (lower hidden states and what is kept of the
            reference).
        stages: most bytes in each stage: load, train, save, evaluate.
        disk: bytes by where they are needed: the run's folder, and the folder for temporary files.
        memory_free: bytes that the process can take of the device's memory, those it has already included.
        disk_free: bytes free, by place as `disk`.
    """

    parameters: int
    trainable: int
    device: str
    dtype: str
    rows: int
    length: int
    parts: dict[str, int]
    stages: dict[str, int]
    disk: dict[str, int]
    memory_free: int
    disk_free: dict[str, int]

    @property
    def peak(self) -> int:
        """Most bytes at one time."""
        return max(self.stages.values())

    @property
    def fits_memory(self) -> bool:
        """Whether the peak is within what is free."""
        return self.peak <= self.memory_free

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self) | {"peak": self.peak}

    def lines(self) -> list[str]:
        """What a person reads: weights, parts, and what is needed of what is there."""
        names = {"masters": "master copies", "optimizer": "optimizer states", "process": "this process"}
        parts = ", ".join(f"{names.get(name, name)} {_size(size)}" for name, size in self.parts.items() if size)
        stage = max(self.stages, key=self.stages.__getitem__)
        disk = ", ".join(
            f"{_size(size)} of {_size(self.disk_free[place])} free in {place}" for place, size in self.disk.items()
        )
        share = 100 * self.trainable / max(self.parameters, 1)
        return [
            f"weights: {_count(self.parameters)}, {_count(self.trainable)} trained ({share:.3g} %); {self.dtype} on "
            f"{self.device}, up to {self.rows} rows of {self.length} tokens at once",
            f"memory: {parts}",
            f"peak: {_size(self.peak)} of {_size(self.memory_free)} (stage {stage})",
            f"disk: {disk}",
        ]


def plan_run(config: RunConfig, *, assumed: bool = False) -> tuple[Plan, ModelShape, Data]:
    """Count what a run takes; its data files and the small files of its model are read.

    Args:
        config: resolved.
        assumed: there are no files yet: `assumed_data` stands for them.

    Raises:
        UsageError: what `unlearn` would refuse so far.
    """
    read = None if assumed else read_data(config)
    shape = read_shape(
        config.model, dtype=config.dtype, device=config.device, trust_remote_code=config.trust_remote_code
    )
    check_vocabulary(shape.model, config)
    data = assumed_data(config) if read is None else encode_data(read, shape.tokenizer, config)
    return make_plan(config, shape, data), shape, data


def make_plan(config: RunConfig, shape: ModelShape, data: Data) -> Plan:
    """Count what a run takes.

    Args:
        config: resolved.
        shape: of its model; not changed.
        data: encoded.

    Raises:
        UsageError: LoRA targets match nothing, or the device is not there.
    """
    assert config.recipe is not None
    device = pick_device(config.device)
    held = resident_bytes() if device.type == "cpu" else 0
    with torch.random.fork_rng(devices=[]):
        trainable = make_trainable(copy.deepcopy(shape.model), config.recipe, config.seed)
    sums = _Sums(config, shape, data, trainable, device)
    out = Path(config.out)
    disk = sums.disk(out)
    parameters = sum(weight.numel() for weight in trainable.model.parameters())
    return Plan(
        parameters=parameters,
        trainable=sum(weight.numel() for weight in trainable.masters.params),
        device=str(device),
        dtype=str(shape.model.dtype).removeprefix("torch."),
        rows=sums.rows,
        length=sums.length,
        parts={"process": held, **sums.parts()},
        stages={name: held + size for name, size in sums.stages().items()},
        disk=disk,
        memory_free=held + free_memory(device),
        disk_free={place: free_disk(Path(place)) for place in disk},
    )


def check_plan(plan: Plan, config: RunConfig, shape: ModelShape, data: Data) -> None:
    """Refuse a run that cannot fit, and name the option with which it would.

    Args:
        plan: of the run.
        config: resolved.
        shape: of its model.
        data: encoded.

    Raises:
        UsageError: more memory or disk is needed than there is; what is needed, what there is, and what helps.
    """
    for place, size in plan.disk.items():
        if size > plan.disk_free[place]:
            raise UsageError(
                f"disk: {_size(size)} are needed in {place}, {_size(plan.disk_free[place])} are free; accepted is "
                f"{_disk_advice(config, place)} (--no-plan-check starts all the same)"
            )
    if plan.fits_memory:
        return
    raise UsageError(
        f"memory: {_size(plan.peak)} are needed on {plan.device}, {_size(plan.memory_free)} are there; "
        f"{_memory_advice(plan, config, shape, data)} (--no-plan-check starts all the same)"
    )


def assumed_data(config: RunConfig) -> Data:
    """Data in place of files that are not there yet: as many rows as an update takes, as long as rows may be."""
    assert config.recipe is not None
    ids = (0,) * config.max_length

    def part(name: str, count: int) -> Part:
        rows = tuple(Row(str(number), number, ids, (-100, *ids[1:]), 1) for number in range(count))
        return Part(name, [], Corpus(rows, (), 0))

    parts = part("forget", config.recipe.batch), part("retain", config.recipe.retain_batch) if config.retain else None
    wanted = zip(parts, wants_refusals(config), strict=True)
    refusals = {one.name: one for one, needed in wanted if needed and one is not None}
    return Data(parts[0], parts[1], None, None, refusals)


def _disk_advice(config: RunConfig, place: str) -> str:
    assert config.recipe is not None
    if place != config.out:
        return "a TMPDIR with room, or --lora"
    return "an --out with room" if config.recipe.lora else "an --out with room, or --lora"


def _memory_advice(plan: Plan, config: RunConfig, shape: ModelShape, data: Data) -> str:
    """The first change that makes it fit, the mildest first."""
    recipe = config.recipe
    assert recipe is not None
    changes: list[tuple[str, RunConfig]] = []

    def add(text: str, *, micro: bool = False, **change: Any) -> None:
        try:
            changed = dataclasses.replace(recipe, **change) if change else recipe
            size = 1 if micro else config.micro_batch
            changes.append((text, dataclasses.replace(config, recipe=changed, micro_batch=size)))
        except UsageError:  # options that do not go together
            pass

    add("--micro-batch 1", micro=True)
    if not recipe.lora:
        if recipe.optimizer_storage == "32bit" and recipe.optimizer_rule != "sgd":
            add("--optimizer-storage 8bit", optimizer_storage="8bit")
            add("--optimizer-storage 8bit --micro-batch 1", micro=True, optimizer_storage="8bit")
        add("--lora", lora=True)
        add("--lora --micro-batch 1", micro=True, lora=True)
    least = plan.peak
    for text, changed in changes:
        found = make_plan(changed, shape, data).peak
        if found <= plan.memory_free:
            return f"with {text} {_size(found)} would be"
        least = min(least, found)
    return f"no option brings it below {_size(least)}: accepted is a smaller model, or more memory"


class _Sums:
    """The sums behind a plan; every method's bytes are those of the device."""

    def __init__(
        self, config: RunConfig, shape: ModelShape, data: Data, trainable: Trainable, device: torch.device
    ) -> None:
        assert config.recipe is not None
        assert config.masc is not None
        self.config, self.recipe, self.masc = config, config.recipe, config.masc
        self.shape, self.data, self.trainable, self.device = shape, data, trainable, device
        self.split = assumed_split(trainable.model)
        self.width = cast(Any, trainable.model).get_input_embeddings().weight.shape[1]
        self.dtype = shape.model.dtype
        rows = [_sizes(part.corpus.rows) for part in data.run()]
        every = sorted((size for part in rows for size in part), reverse=True)
        update = self.recipe.batch + (0 if self.recipe.alternates else self.recipe.retain_batch)
        update = max(update, self.recipe.retain_batch)
        most = config.micro_batch or (ROWS_AT_ONCE if device.type == "cpu" else update)
        self.rows = min(most, update, len(every))
        self.turns = math.ceil(update / self.rows)
        self.length = rounded_up(every[0][0], PAD_TO)
        self.tokens = sum(sorted((labelled for _, labelled in every), reverse=True)[: self.rows])
        self.every = every
        params = trainable.masters.params
        self.low = sum(p.numel() * p.element_size() for p in params if p.element_size() < 4)
        self.masters = sum(4 * p.numel() for p in params if p.element_size() < 4)
        self.gradients = sum(m.numel() * m.element_size() for m in trainable.masters.masters)
        self.optimizer = self._states()
        self.cache, self.spilled = self._caches()
        self.step = self._step()

    def parts(self) -> dict[str, int]:
        """What memory is for."""
        return {
            "weights": self._weights(),
            "masters": self.masters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.step,
            "cache": self.cache,
        }

    def stages(self) -> dict[str, int]:
        """Most bytes of each stage."""
        held = self._weights() + self.masters + self.optimizer + self.cache
        if self.config.spec.kind == "weights" and not self.recipe.lora:
            held += sum(p.numel() * p.element_size() for p in self.trainable.masters.params)  # the weights before
        model = self.shape.bytes
        # On a CPU the pages of a file that is read count beside the weights that come of it.
        read = model + (self.shape.stored if self.device.type == "cpu" else 0)
        widest = max(read, model + self.shape.widest) if self.device.type == "cpu" else read
        return {
            "load": widest,
            "train": held + self.gradients + self.step,
            "save": held + read + self._merging() + self._narrowing(),
            "evaluate": max(read, model + self._looking()),
        }

    def disk(self, out: Path) -> dict[str, int]:
        """What is written where: the checkpoints, one of them being written, and the model beside the last."""
        state = self.masters or sum(m.numel() * m.element_size() for m in self.trainable.masters.masters)
        state += self.optimizer
        model = self.gradients if self.config.adapter_only else self.shape.stored
        needed = {str(out): max((KEPT + 1) * state, KEPT * state + model) + _SMALL_FILES}
        if self.spilled:
            folder = tempfile.gettempdir()
            if same_disk(out, Path(folder)):
                needed[str(out)] += self.spilled
            else:
                needed[folder] = self.spilled
        return needed

    def _weights(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.trainable.model.parameters())

    def _states(self) -> int:
        optimizer = self.trainable.optimizer
        if isinstance(optimizer, ObjectiveOptimizer):
            names = ("forget", "retain") if self.recipe.alternates else ("default",)
            return planned_state_bytes(optimizer, names)
        # torch's AdamW: two averages and a count for each weight.
        return sum(2 * m.numel() * m.element_size() + 4 for m in self.trainable.masters.masters)

    def _caches(self) -> tuple[int, int]:
        """Bytes kept in memory, and those that go to a mapped file."""
        wanted = self._references()
        states = self.width if self.split.head is not None else self._vocabulary()
        found = 0
        for kind, labelled in wanted.items():
            each = 4 if kind == "logprob" else (states if kind == "states" else self.width) * self.dtype.itemsize
            found += each * labelled
        spilled = 0 if self.recipe.lora else max(0, found - CACHE_BYTES)
        if self.trainable.first_layer:
            found += sum(length for length, _ in self.every) * self.width * self.dtype.itemsize
        kept = min(found, CACHE_BYTES)
        if not self.recipe.lora and "states" in wanted and self.split.head is not None:
            kept += self._vocabulary() * self.width * self.dtype.itemsize  # the head before
        return kept, spilled

    def _references(self) -> Mapping[str | int, int]:
        """Labelled tokens whose reference is kept, by kind."""
        rows = [labelled for part in self.data.run() for _, labelled in _sizes(part.corpus.rows)]
        forget = len(self.data.forget.corpus.rows)
        retain = 0 if self.data.retain is None else len(self.data.retain.corpus.rows)
        # NOTE: what a method asks of the reference depends on its terms alone, so no runner is needed.
        objective = make_objective(self.config, self.masc, cast(RowRunner, None), self.data, 0)
        asked = objective.references(range(forget), range(forget, forget + retain))
        return {kind: sum(rows[index] for index in set(found)) for kind, found in asked.items() if found}

    def _step(self) -> int:
        """Most bytes of a forward and backward pass, its head included, beyond the gradients of the masters."""
        head = self.split.head
        passed = pass_bytes(
            self.split,
            self.rows * self._passes(),
            self.length,
            first_layer=self.trainable.first_layer,
            plain=self.device.type == "cpu" and self.length <= PLAIN_LENGTH,
        )
        # At the start of the backward pass all activations are there, and the head works.
        peak = max(passed.peak, passed.held + (0 if head is None else head_bytes(self.tokens, head)))
        # Gradients of float32 weights are counted already; those of others are beside their masters' from the second
        # part of an update on.
        own = sum(p.numel() * p.element_size() for p in self.trainable.masters.params if p.element_size() >= 4)
        peak = max(0, peak - own)
        if self.low and self.turns == 1 and not self.recipe.gradient_norms:
            # The only part: its gradients move to the masters one by one, after the activations are gone.
            return max(self.low, peak - self.gradients)
        return peak + (self.gradients if self.recipe.gradient_norms else 0)

    def _passes(self) -> int:
        """How often the rows of a part are run with gradient: answers and refusals."""
        spec = self.config.spec
        if self.config.method == "masc" or spec.kind != "loop":
            return 1
        return max(1, *(1 + ("refusal_rows" in term.needs) for term in (spec.forget_term, spec.retain_term)))

    def _merging(self) -> int:
        """The adapted weights, twice, in float32 one at a time."""
        if not self.recipe.lora:
            return 0
        largest, adapted = 0, 0
        for module in self.trainable.model.modules():
            if hasattr(module, "lora_A") and hasattr(module, "get_base_layer"):
                weight = module.get_base_layer().weight
                adapted += 0 if self.config.adapter_only else weight.numel() * weight.element_size()
                largest = max(largest, 12 * weight.numel())
        return adapted + largest

    def _narrowing(self) -> int:
        """What is saved, where it is of a narrower type than the model, and beside all weights their rounded values."""
        if self.config.adapter_only or self.shape.stored == self.shape.bytes:
            return 0
        return self.shape.stored + (0 if self.recipe.lora else self.shape.bytes)

    def _looking(self) -> int:
        """Scoring and generating without gradient."""
        rows = min(_SCORED, len(self.every))
        scored = pass_bytes(self.split, rows, rounded_up(self.every[0][0], 32), grad=False).peak
        tokens = sum(sorted((labelled for _, labelled in self.every), reverse=True)[:rows])
        return scored + (0 if self.split.head is None else head_bytes(tokens, self.split.head))

    def _vocabulary(self) -> int:
        return cast(Any, self.trainable.model).get_input_embeddings().weight.shape[0]


def _sizes(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Tokens that are fed of each row, and how many are labelled."""
    return [(len(row.input_ids) - 1, sum(label != -100 for label in row.labels)) for row in rows]


def _size(number: int) -> str:
    """Bytes for a person: MB below a gigabyte."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"
