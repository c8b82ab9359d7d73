"""Benchmarks as data and metric lists: TOFU, MUSE, and the user's own files."""

from expunge.suites._encode import Encoded, MeasureSettings, encode_plan, end_of, fitting
from expunge.suites._evaluate import SUITES, EvaluateSettings, Evaluation, check_spec, evaluate, metric_names
from expunge.suites._lm_eval import run_tasks
from expunge.suites._measure import Measured, Watch, measure
from expunge.suites._plan import Plan, Question, QuestionTable, Text, TextTable
from expunge.suites._source import Source
from expunge.suites._store import Stamp, check_comparable, hash_of, make_stamp, write_json, writing

__all__ = [
    "SUITES",
    "Encoded",
    "EvaluateSettings",
    "Evaluation",
    "MeasureSettings",
    "Measured",
    "Plan",
    "Question",
    "QuestionTable",
    "Source",
    "Stamp",
    "Text",
    "TextTable",
    "Watch",
    "check_comparable",
    "check_spec",
    "encode_plan",
    "end_of",
    "evaluate",
    "fitting",
    "hash_of",
    "make_stamp",
    "measure",
    "metric_names",
    "run_tasks",
    "write_json",
    "writing",
]
