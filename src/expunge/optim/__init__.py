"""Optimizers for several objectives that take turns, as forgetting and retaining do: scheme × rule × storage.

Needs torch alone. `DualOptimPlus(model.named_parameters(), lr=1e-5)`, then `optimizer.step(objective="forget")`.
"""

from expunge.optim._codebooks import dynamic_code_book
from expunge.optim._constructors import Alternate, DualOptim, DualOptimPlus, Joint
from expunge.optim._diagnostics import Diagnostics
from expunge.optim._memory import planned_state_bytes, state_bytes
from expunge.optim._muon import Muon, orthogonalise
from expunge.optim._optimizer import DEFAULT_OBJECTIVE, ObjectiveOptimizer
from expunge.optim._rules import SGD, Adam, AdamW, Lion, RMSprop, Rule, Statistic
from expunge.optim._schemes import SCHEMES, BaseDelta, Decoupled, Scheme, Shared
from expunge.optim._settings import RULES
from expunge.optim._storage import KEEP_32BIT, Storage

__all__ = [
    "DEFAULT_OBJECTIVE",
    "KEEP_32BIT",
    "RULES",
    "SCHEMES",
    "SGD",
    "Adam",
    "AdamW",
    "Alternate",
    "BaseDelta",
    "Decoupled",
    "Diagnostics",
    "DualOptim",
    "DualOptimPlus",
    "Joint",
    "Lion",
    "Muon",
    "ObjectiveOptimizer",
    "RMSprop",
    "Rule",
    "Scheme",
    "Shared",
    "Statistic",
    "Storage",
    "dynamic_code_book",
    "orthogonalise",
    "planned_state_bytes",
    "state_bytes",
]
