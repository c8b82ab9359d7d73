"""Which scores are watched, and their values per row: those of the suite's own evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from expunge.metrics import SHARE_AS_RETRAINED, SHARE_UP, Scale
from expunge.suites import Measured, Plan

# Values per row by metric; None: not measured.
Values = dict[str, dict[str, float | None]]
PROBABILITY = "probability"


@dataclass(frozen=True)
class Score:
    """A mean over rows.

    Attributes:
        name: as in the suite's evaluation.
        table: of scores or answers.
        column: of the table; "probability" is exp of the mean log-probability.
        forget: the rows are those to forget; False: to be kept.
    """

    name: str
    table: str
    column: str
    forget: bool = True

    @property
    def scale(self) -> Scale:
        """How to read it."""
        return SHARE_AS_RETRAINED if self.forget else SHARE_UP

    @property
    def unit(self) -> str:
        """What the rows are."""
        return self.table.partition(".")[0]


@dataclass(frozen=True)
class Watched:
    """What is watched in a suite.

    Attributes:
        scores: of the model as it is, quantised or relearned.
        paraphrased: of paraphrased questions: for a name of `scores`, the same of the question in other words.
        texts: table of the texts to forget.
        answers: table of the questions about them.
    """

    scores: tuple[Score, ...]
    paraphrased: Mapping[str, Score]
    texts: str
    answers: str

    @property
    def recall(self) -> Score:
        """ROUGE-L recall of the greedy answers."""
        return next(one for one in self.scores if one.table == self.answers and one.column == "rouge_l")


def _memorisation(texts: str) -> tuple[Score, ...]:
    return (
        Score(f"{texts}_exact_memorisation", texts, "exact"),
        Score(f"{texts}_extraction_strength", texts, "suffix_exact"),
        Score(f"{texts}_violation", texts, "violation"),
    )


_QUESTIONS = Watched(
    (
        Score("forget_probability", "forget", PROBABILITY),
        Score("forget_rouge_l", "forget.answers", "rouge_l"),
        *_memorisation("forget"),
        Score("retain_probability", "retain", PROBABILITY, forget=False),
        Score("retain_rouge_l", "retain.answers", "rouge_l", forget=False),
    ),
    {
        "forget_probability": Score("forget_probability_otherwise", "forget.asked_otherwise", PROBABILITY),
        "forget_rouge_l": Score("forget_rouge_l_otherwise", "forget.answers_otherwise", "rouge_l"),
        "forget_exact_memorisation": Score("forget_exact_otherwise", "forget.asked_otherwise", "exact"),
        "forget_violation": Score("forget_violation_otherwise", "forget.asked_otherwise", "violation"),
    },
    "forget",
    "forget.answers",
)
WATCHED = {
    "tofu": _QUESTIONS,
    "mine": _QUESTIONS,
    "muse": Watched(
        (
            Score("verbmem", "verbmem.answers", "rouge_l_f1"),
            Score("verbmem_rouge_l", "verbmem.answers", "rouge_l"),
            Score("knowmem", "knowmem_forget", "rouge_l_f1"),
            *_memorisation("verbmem"),
            Score("utility", "knowmem_retain", "rouge_l_f1", forget=False),
        ),
        {},
        "verbmem",
        "verbmem.answers",
    ),
}


def reduced(plan: Plan, tables: set[str]) -> Plan:
    """The named tables of a plan; texts are scored with the violation, and without what is kept per token."""
    texts = tuple(dataclasses.replace(one, level="margin") for one in plan.texts if one.name in tables)
    return Plan(plan.suite, texts, tuple(one for one in plan.questions if one.name in tables))


def values_of(measured: Measured, scores: tuple[Score, ...]) -> Values:
    """Values per row of every score whose table was measured."""
    found: Values = {}
    for score in scores:
        if score.table in measured.answers:
            answers = measured.answers[score.table]
            found[score.name] = dict(zip(answers.id, answers.values(score.column), strict=True))
        elif score.table in measured.scores:
            column = "logprob_mean" if score.column == PROBABILITY else score.column
            values = measured.column(score.table, column)
            if score.column == PROBABILITY:
                values = [None if value is None else math.exp(value) for value in values]
            found[score.name] = dict(zip(measured.plan.ids(score.table), values, strict=True))
    return found
