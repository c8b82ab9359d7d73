"""The tests: each turns a model and its data into values per row."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from expunge.metrics import rouge_l_recall
from expunge.stress._bench import Bench
from expunge.stress._quantise import NotMeasuredError, quantised
from expunge.stress._scores import Values, Watched
from expunge.stress._settings import StressSettings
from expunge.suites import Plan
from expunge.train import finetune

PLAIN, REST_ROUGE, REST_EXACT, BEST, MEAN = "plain", "rest_rouge_l", "rest_exact_tokens", "best", "mean"


@dataclass(frozen=True)
class Outcome:
    """What a test gave.

    Attributes:
        values: per row, by metric.
        details: what was done, such as what was quantised or which rows were relearned.
        notes: what a user should know about the rows.
    """

    values: Values
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """A test with its options.

    Attributes:
        test: its name, or "plain" for the model as it is.
        options: what decides its result, beside model and data.
        run: does it; raises `NotMeasuredError` with the reason where it cannot be done.
    """

    test: str
    options: dict[str, Any]
    run: Callable[[Bench], Outcome]

    @property
    def label(self) -> str:
        """For progress."""
        return f"prefix {self.options['share']} %" if self.test == "prefix" else self.test


def jobs_of(settings: StressSettings) -> list[Job]:
    """All that is to be done with a model, the model as it is first."""
    found = [Job(PLAIN, {}, _plain)]
    for test in (name for name in _RUN if name in settings.tests):
        shares = sorted({0, *settings.prefix}) if test == "prefix" else [0]
        for share in shares:
            options = settings.options(test, share)
            found.append(Job(test, options, partial(_RUN[test], options=options)))
    return found


def tables_of(watched: Watched, plan: Plan) -> set[str]:
    """Tables that the tests look at, of those the plan has."""
    scores = (*watched.scores, *watched.paraphrased.values())
    there = {one.name for one in plan.texts} | {one.name for one in plan.questions}
    return {score.table for score in scores} & there


def _plain(bench: Bench) -> Outcome:
    values, notes = bench.score(bench.watched.scores)
    return Outcome(values, notes=notes)


def _quantised(bench: Bench, options: dict[str, Any]) -> Outcome:
    with quantised(bench.loaded.model, options["bits"]) as what:
        values, notes = bench.score(bench.watched.scores)
    return Outcome(values, {"quantised": dataclasses.asdict(what)}, notes)


def _relearned(bench: Bench, options: dict[str, Any]) -> Outcome:
    """Teach a copy in memory some of the rows again; the model itself and its folder stay as they are."""
    ids = list(dict.fromkeys(identity for _, identity, _ in bench.encoded.places.get(bench.watched.texts, [])))
    if not ids:
        raise NotMeasuredError("the data has no texts to forget for this test")
    count = min(options["rows"], len(ids))
    chosen = sorted(random.Random(options["seed"]).sample(range(len(ids)), count))
    taught = [ids[place] for place in chosen]
    details = {"rows": taught, **{name: options[name] for name in ("steps", "lr", "batch", "trained")}}
    if options["steps"] == 0:
        values, notes = bench.score(bench.watched.scores)
        return Outcome(values, details, notes)
    corpus = bench.corpus(taught)
    losses: list[float] = []

    def tell(done: int, total: int, loss: float) -> None:
        losses.append(loss)
        bench.watch("relearn", done, total)

    gc.collect()
    twin = dataclasses.replace(bench.loaded, model=copy.deepcopy(bench.loaded.model))
    model = finetune(
        twin,
        corpus,
        epochs=math.ceil(options["steps"] * options["batch"] / len(corpus.rows)),
        steps=options["steps"],
        lr=options["lr"],
        batch=min(options["batch"], len(corpus.rows)),
        lora=options["trained"] == "adapter",
        seed=options["seed"],
        progress=tell,
    )
    values, notes = bench.score(bench.watched.scores, model)
    return Outcome(values, details | {"loss": [losses[0], losses[-1]]}, notes)


def _paraphrased(bench: Bench, options: dict[str, Any]) -> Outcome:
    there = {one.name for one in bench.plan.texts} | {one.name for one in bench.plan.questions}
    asked = {name: score for name, score in bench.watched.paraphrased.items() if score.table in there}
    if not asked:
        raise NotMeasuredError("the data has no paraphrased questions")
    values, notes = bench.score(tuple(asked.values()))
    return Outcome({name: values[score.name] for name, score in asked.items()}, notes=notes)


def _prefixed(bench: Bench, options: dict[str, Any]) -> Outcome:
    """Give the beginning of each answer and score what the model writes in the place of the rest.

    Of an answer of T tokens, ⌊T · share⌋ are given; what is beyond the longest continuation is not scored.
    """
    prompts, rests, ids = [], [], []
    values: Values = {REST_ROUGE: {}, REST_EXACT: {}}
    for identity, row in bench.rows().items():
        answer = bench.answer_of(row)
        given = len(answer) * options["share"] // 100
        rest = answer[given:][: bench.new_tokens]
        if not rest:
            values[REST_ROUGE][identity] = values[REST_EXACT][identity] = None
            continue
        ids.append(identity)
        prompts.append([*row.input_ids[: row.prompt_length], *answer[:given]])
        rests.append(rest)
    for identity, rest, found in zip(ids, rests, bench.go_on(prompts), strict=True):
        values[REST_ROUGE][identity] = rouge_l_recall(bench.first(found.text), bench.decode(rest))
        same = sum(one == other for one, other in zip(found.tokens, rest, strict=False))
        values[REST_EXACT][identity] = same / len(rest)
    return Outcome(values)


def _sampled(bench: Bench, options: dict[str, Any]) -> Outcome:
    """Draw several answers to each question."""
    rows, count = bench.rows(), options["samples"]
    asked = [one for one in bench.questions.rows if one.id in rows]
    if not asked:
        raise NotMeasuredError("the data has no questions about what is to be forgotten")
    prompts = [rows[one.id].input_ids[: rows[one.id].prompt_length] for one in asked for _ in range(count)]
    found = bench.go_on(prompts, bench.settings.sampling())
    values: Values = {BEST: {}, MEAN: {}}
    for number, question in enumerate(asked):
        texts = [bench.first(one.text) for one in found[number * count :][:count]]
        recalls = [rouge_l_recall(text, question.reference) for text in texts]
        measured = [recall for recall in recalls if recall is not None]
        values[BEST][question.id] = max(measured, default=None)
        values[MEAN][question.id] = sum(measured) / len(measured) if measured else None
    return Outcome(values)


_RUN: dict[str, Callable[..., Outcome]] = {
    "int8": _quantised,
    "int4": _quantised,
    "relearn": _relearned,
    "paraphrase": _paraphrased,
    "prefix": _prefixed,
    "samples": _sampled,
}
