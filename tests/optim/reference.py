"""The equations of schemes and rules on plain numbers, written from the papers, independent of the implementation."""

import math
from dataclasses import dataclass, field

B1, B2, EPS = 0.9, 0.95, 1e-8


@dataclass
class Average:
    """m ← βm + (1 − β)s; `mean` divides by 1 − β^t where the rule does."""

    beta: float
    debias: bool
    m: float = 0.0
    t: int = 0

    def mean(self):
        return self.m / (1 - self.beta**self.t) if self.debias and self.t else self.m

    def add(self, s):
        self.t += 1
        self.m = self.beta * self.m + (1 - self.beta) * s


@dataclass
class BaseDeltas:
    """One base B, a delta D[o] for every objective o."""

    beta: float
    base_beta: float
    coefficient: float = 1.0
    base_first: bool = False
    floor: float = 0.0
    B: float = 0.0
    n: int = 0
    D: dict = field(default_factory=dict)
    t: dict = field(default_factory=dict)

    def base_hat(self):
        return self.B / (1 - self.base_beta**self.n) if self.n else 0.0

    def _add_base(self, s):
        self.B = self.base_beta * self.B + (1 - self.base_beta) * s
        self.n += 1

    def mean(self, o):
        t = self.t.get(o, 0)
        found = self.coefficient * self.base_hat() + (self.D[o] / (1 - self.beta**t) if t else 0.0)
        return max(abs(found), self.floor * self.coefficient * self.base_hat()) if self.floor else found

    def update(self, o, s):
        """Give (mean before, mean after) of objective o."""
        before = self.mean(o)
        if self.base_first:
            self._add_base(s)
        hat = self.base_hat()
        self.D[o] = self.beta * self.D.get(o, 0.0) + (1 - self.beta) * (s - hat)
        self.t[o] = self.t.get(o, 0) + 1
        after = self.mean(o)
        if not self.base_first:
            self._add_base(s)
        return before, after


class Statistic:
    """A statistic under a scheme: `update(objective, s)` gives the means before and after s."""

    def __init__(self, scheme, beta, base_beta, debias, **options):
        self.scheme = scheme
        if scheme == "base_delta":
            self.both = BaseDeltas(beta, base_beta, **options)
        else:
            self.new = lambda: Average(beta, debias)
            self.averages = {}

    def update(self, o, s):
        if self.scheme == "base_delta":
            return self.both.update(o, s)
        average = self.averages.setdefault(o if self.scheme == "decoupled" else None, self.new())
        before = average.mean()
        average.add(s)
        return before, average.mean()

    def states(self, name):
        """The implementation's keys with the values they should have."""
        if self.scheme == "base_delta":
            return {name: self.both.B, **{f"{name}/{o}": value for o, value in self.both.D.items()}}
        return {name if o is None else f"{name}/{o}": average.m for o, average in self.averages.items()}


class Scalar:
    """One weight under a rule and a scheme."""

    def __init__(self, rule, scheme, w, lr, wd, split="both", **options):
        self.rule, self.w, self.lr, self.wd = rule, w, lr, wd
        first = scheme if split in ("both", "first") else "shared"
        second = scheme if split in ("both", "second") else "shared"
        # The floor is for second moments.
        plain = {key: value for key, value in options.items() if key != "floor"}
        make = {
            "adamw": lambda: {
                "exp_avg": Statistic(first, B1, 0.9, True, **plain if first == scheme else {}),
                "exp_avg_sq": Statistic(second, B2, 0.95, True, **options if second == scheme else {}),
            },
            "sgd": lambda: {"exp_avg": Statistic(scheme, 0.9, 0.9, False, **options)},
            "lion": lambda: {"exp_avg": Statistic(scheme, 0.99, 0.9, False, **options)},
            "rmsprop": lambda: {"square_avg": Statistic(scheme, 0.99, 0.95, False, **options)},
        }
        make["adam"], make["nesterov"] = make["adamw"], make["sgd"]
        self.statistics = make[rule]()

    def step(self, o, g):
        if self.rule == "adam":
            g = g + self.wd * self.w
        else:
            self.w *= 1 - self.lr * self.wd
        d = getattr(self, "_" + self.rule)(o, g)
        self.w -= self.lr * d

    def _adamw(self, o, g):
        _, m = self.statistics["exp_avg"].update(o, g)
        _, v = self.statistics["exp_avg_sq"].update(o, g * g)
        return m / (math.sqrt(abs(v)) + EPS)

    _adam = _adamw

    def _sgd(self, o, g):
        _, m = self.statistics["exp_avg"].update(o, g)
        return m / (1 - 0.9)

    def _nesterov(self, o, g):
        _, m = self.statistics["exp_avg"].update(o, g)
        return g + 0.9 * m / (1 - 0.9)

    def _lion(self, o, g):
        before, _ = self.statistics["exp_avg"].update(o, g)
        c = 0.9 * before + (1 - 0.9) * g
        return float(c > 0) - float(c < 0)

    def _rmsprop(self, o, g):
        _, v = self.statistics["square_avg"].update(o, g * g)
        return g / (math.sqrt(abs(v)) + EPS)

    def states(self):
        found = {}
        for name, statistic in self.statistics.items():
            found.update(statistic.states(name))
        return found
