"""The run: configuration, the loop with its stopping rule, checkpoints, resumption, result."""

from expunge.train._card import write_card
from expunge.train._config import RunConfig
from expunge.train._describe import describe
from expunge.train._finetune import finetune
from expunge.train._folder import RunFolder
from expunge.train._log import RunLog
from expunge.train._loop import UnlearningLoop
from expunge.train._options import OPTION_GROUPS, OptionGroup, config_from_options, option_types
from expunge.train._plan import Plan, check_plan, plan_run
from expunge.train._progress import Progress
from expunge.train._recipe import RECIPES, Recipe
from expunge.train._remeasure import Measured, remeasure
from expunge.train._result import Answer, Earlier, Summary, UnlearnResult
from expunge.train._run import InterruptedRun, finished, request_of, resume, unlearn
from expunge.train._state import LoopState, StepReport
from expunge.train._track import TRACKERS

__all__ = [
    "OPTION_GROUPS",
    "RECIPES",
    "TRACKERS",
    "Answer",
    "Earlier",
    "InterruptedRun",
    "LoopState",
    "Measured",
    "OptionGroup",
    "Plan",
    "Progress",
    "Recipe",
    "RunConfig",
    "RunFolder",
    "RunLog",
    "StepReport",
    "Summary",
    "UnlearnResult",
    "UnlearningLoop",
    "check_plan",
    "config_from_options",
    "describe",
    "finetune",
    "finished",
    "option_types",
    "plan_run",
    "remeasure",
    "request_of",
    "resume",
    "unlearn",
    "write_card",
]
