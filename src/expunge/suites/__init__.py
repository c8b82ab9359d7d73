"""Benchmarks as data and metric lists: TOFU, MUSE, and the user's own files."""

from expunge.suites._encode import MeasureSettings
from expunge.suites._evaluate import SUITES, EvaluateSettings, Evaluation, evaluate
from expunge.suites._lm_eval import run_tasks
from expunge.suites._measure import Measured, measure
from expunge.suites._plan import Plan, Question, QuestionTable, Text, TextTable
from expunge.suites._source import Source

__all__ = [
    "SUITES",
    "EvaluateSettings",
    "Evaluation",
    "MeasureSettings",
    "Measured",
    "Plan",
    "Question",
    "QuestionTable",
    "Source",
    "Text",
    "TextTable",
    "evaluate",
    "measure",
    "run_tasks",
]
