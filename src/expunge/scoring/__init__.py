"""One pass over a corpus to tables of per-row and per-token scores, and batched generation."""

from expunge.scoring._answers import AnswerTable
from expunge.scoring._generate import Generation, Sampling, end_ids, generate
from expunge.scoring._mode import evaluating
from expunge.scoring._score import Scores, ScoreSettings, score, score_rows
from expunge.scoring._table import ScoreTable
from expunge.scoring._tokens import TokenTable

__all__ = [
    "AnswerTable",
    "Generation",
    "Sampling",
    "ScoreSettings",
    "ScoreTable",
    "Scores",
    "TokenTable",
    "end_ids",
    "evaluating",
    "generate",
    "score",
    "score_rows",
]
