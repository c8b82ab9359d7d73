"""Comparisons: targets × methods × optimizers × seeds, each unlearned and evaluated, in one table and one plot."""

from expunge.compare._result import Comparison
from expunge.compare._run import Step, compare, dry_run
from expunge.compare._study import Cell, Entry, Part, Study, Target, parse_study, read_study
from expunge.compare._summary import Distance, Spread, distance, spread

__all__ = [
    "Cell",
    "Comparison",
    "Distance",
    "Entry",
    "Part",
    "Spread",
    "Step",
    "Study",
    "Target",
    "compare",
    "distance",
    "dry_run",
    "parse_study",
    "read_study",
    "spread",
]
