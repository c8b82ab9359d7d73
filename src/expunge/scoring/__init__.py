"""One pass over a corpus to a table of per-row scores, and batched greedy generation."""

from expunge.scoring._generate import Generation, end_ids, generate
from expunge.scoring._mode import evaluating
from expunge.scoring._score import score
from expunge.scoring._table import ScoreTable

__all__ = ["Generation", "ScoreTable", "end_ids", "evaluating", "generate", "score"]
