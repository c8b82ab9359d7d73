"""The run: configuration, the loop with its stopping rule, checkpoints, resumption, result."""

from expunge.train._config import RECIPES, Recipe, RunConfig
from expunge.train._folder import RunFolder
from expunge.train._log import RunLog
from expunge.train._loop import LoopState, StepReport, UnlearningLoop
from expunge.train._result import Answer, Summary, UnlearnResult
from expunge.train._run import InterruptedRun, Progress, describe, resume, unlearn

__all__ = [
    "RECIPES",
    "Answer",
    "InterruptedRun",
    "LoopState",
    "Progress",
    "Recipe",
    "RunConfig",
    "RunFolder",
    "RunLog",
    "StepReport",
    "Summary",
    "UnlearnResult",
    "UnlearningLoop",
    "describe",
    "resume",
    "unlearn",
]
