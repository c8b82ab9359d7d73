"""Pure functions of scores and texts. What was not measured is None (with a reason in summaries), never 0."""

from expunge.metrics._scores import (
    Summary,
    certificate,
    certificate_coarse,
    extraction_strength,
    mean_or_none,
    probability,
    summarise,
)
from expunge.metrics._texts import (
    RougeL,
    degenerate_share,
    exact_match,
    first_answer,
    is_degenerate,
    rouge_l,
    rouge_l_recall,
    words,
)

__all__ = [
    "RougeL",
    "Summary",
    "certificate",
    "certificate_coarse",
    "degenerate_share",
    "exact_match",
    "extraction_strength",
    "first_answer",
    "is_degenerate",
    "mean_or_none",
    "probability",
    "rouge_l",
    "rouge_l_recall",
    "summarise",
    "words",
]
