"""What a term is: a pure function of token statistics, its options, and what it asks for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from expunge.errors import UsageError
from expunge.objectives._aggregate import row_counts
from expunge.objectives._masc import SumCount


@dataclass(frozen=True)
class TermInputs:
    """What the labelled tokens of one micro-batch are known by; only what a term `needs` has to be there.

    N labelled tokens of `n_rows` examples; M labelled tokens of the refusals given to the same examples.

    Attributes:
        rows: (N,) int64, the example each token belongs to, in [0, n_rows).
        n_rows: examples, with or without tokens.
        logprob: (N,) log π(y). Gradient.
        ref_logprob: (N,) log π₀(y) of the reference model for the same tokens.
        entropy: (N,) H(π). Gradient.
        uniform: (N,) mean over the vocabulary of log π(v), 1/V Σ_v log π(v). Gradient.
        kl: (N,) KL(π₀ ‖ π). Gradient in π.
        shifted: (N,) KL(π₀' ‖ π), π₀' = softmax(z₀ − γ·onehot(y)). Gradient in π.
        margin: (N,) margin of the target over its competitors, in logits. Gradient.
        activation: (N, d) output of one decoder layer. Gradient.
        ref_activation: (N, d) the same of the reference model.
        direction: (d,) unit vector (see `rmu_direction`).
        refusal_rows: (M,) int64, the example each refusal token belongs to, numbered as `rows`.
        refusal_logprob: (M,) log π of the refusal tokens. Gradient.
        ref_refusal_logprob: (M,) log π₀ of the refusal tokens.
        vocabulary: V, number of logits.
    """

    rows: Tensor
    n_rows: int
    logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    entropy: Tensor | None = None
    uniform: Tensor | None = None
    kl: Tensor | None = None
    shifted: Tensor | None = None
    margin: Tensor | None = None
    activation: Tensor | None = None
    ref_activation: Tensor | None = None
    direction: Tensor | None = None
    refusal_rows: Tensor | None = None
    refusal_logprob: Tensor | None = None
    ref_refusal_logprob: Tensor | None = None
    vocabulary: int | None = None


INPUTS = tuple(entry.name for entry in fields(TermInputs) if entry.name not in ("rows", "n_rows"))


@dataclass(frozen=True)
class Option:
    """One hyper-parameter of a term.

    Attributes:
        default: the paper's value.
        accepted: the accepted range, as users read it.
        check: whether a number is in that range.
        whole: only whole numbers.
        optional: None is accepted, too.
        of: "loss": an argument of the function; "input": says how an input is made (which layer, how far a reference
            logit is lowered), read by whoever makes the inputs.
        shared: the forget and the retain term of a method take this one value, both.
    """

    default: float | int | None
    accepted: str
    check: Callable[[float], bool]
    whole: bool = False
    optional: bool = False
    of: Literal["loss", "input"] = "loss"
    shared: bool = False

    def parse(self, name: str, value: object) -> float | int | None:
        """Return the value as a checked number.

        Args:
            name: name of the option, for the message.
            value: a number, its text (as from a command line), or None.

        Returns:
            An int for whole options, otherwise a float; None where that is accepted.

        Raises:
            UsageError: it is no such number.
        """
        found = value
        if isinstance(found, str):
            try:
                found = None if found.strip().lower() == "none" else float(found)
            except ValueError:
                found = math.nan
        if found is None and self.optional:
            return None
        ok = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
        if not ok or (self.whole and found != int(found)) or not self.check(found):  # type: ignore[call-overload,arg-type]
            raise UsageError(f"{name}: found {value!r}, accepted is {self.accepted}")
        return int(found) if self.whole else float(found)  # type: ignore[call-overload,arg-type]


def positive(default: float, **kind: Any) -> Option:
    """Return an option that takes a number above 0."""
    return Option(default, "a number above 0", lambda x: x > 0, **kind)


def from_zero(default: float, **kind: Any) -> Option:
    """Return an option that takes a number from 0."""
    return Option(default, "a number from 0", lambda x: x >= 0, **kind)


def any_number(default: float, **kind: Any) -> Option:
    """Return an option that takes any finite number."""
    return Option(default, "a finite number", lambda x: True, **kind)


def whole(default: int, least: int | None, **kind: Any) -> Option:
    """Return an option that takes a whole number, from `least` where given."""
    accepted = "a whole number" if least is None else f"a whole number from {least}"
    return Option(default, accepted, lambda x: least is None or x >= least, whole=True, **kind)


@dataclass(frozen=True)
class Term:
    """A forget or retain term.

    A term is called with the inputs of one micro-batch and its options, and gives a sum and what it is to be divided
    by. One update adds both over its micro-batches and divides once.

    Attributes:
        name: exact name.
        formula: the term in one line, as shown to users.
        loss: the function: called with `rows`, `n_rows`, the inputs in `needs` and the options by keyword; returns a
            `SumCount`.
        needs: names of the `TermInputs` it reads beside `rows` and `n_rows`.
        per: what is counted: "token" (labelled tokens), "row" (examples that have all the tokens the term compares) or
            "refusal_token" (labelled tokens of the refusals).
        options: hyper-parameters by name.
        reference: paper and equation.
        ascends: the term is a cross-entropy with its sign turned, so that minimising it raises the cross-entropy. Logs
            show the cross-entropy itself.

    Raises:
        ValueError: `needs` has a name that `TermInputs` does not have, or `per` is none of the three.

    Example:
        >>> import torch
        >>> from expunge.objectives import FORGET_TERMS, TermInputs
        >>> inputs = TermInputs(torch.tensor([0, 0]), 1, logprob=torch.tensor([-1.0, -3.0]))
        >>> FORGET_TERMS["ga"](inputs).mean().item()
        -2.0
    """

    name: str
    formula: str
    loss: Callable[..., SumCount]
    needs: tuple[str, ...]
    per: Literal["token", "row", "refusal_token"]
    options: Mapping[str, Option] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    reference: str = ""
    ascends: bool = False

    def __post_init__(self) -> None:
        """Refuse a term that could not be called."""
        for name in self.needs:
            if name not in INPUTS:
                raise ValueError(f"{self.name}: found {name!r} in needs, accepted is one of {', '.join(INPUTS)}")
        if self.per not in ("token", "row", "refusal_token"):
            raise ValueError(f"{self.name}: found per={self.per!r}, accepted is token, row or refusal_token")

    def __call__(self, inputs: TermInputs, **options: object) -> SumCount:
        """Compute the term.

        Args:
            inputs: the micro-batch.
            options: hyper-parameters; those left out have their defaults.

        Returns:
            Sum and count. Where nothing is counted, a zero attached to the graph of the inputs.

        Raises:
            UsageError: an option is unknown or out of range.
            ValueError: an input the term needs is missing, or tensors do not fit each other.
        """
        settings = self.resolve(options)
        arguments = {name: getattr(inputs, name) for name in self.needs}
        for name, value in arguments.items():
            if value is None:
                raise ValueError(f"{self.name}: found no {name} in the inputs, accepted is one with {self._needed()}")
        settings = {name: value for name, value in settings.items() if self.options[name].of == "loss"}
        return self.loss(rows=inputs.rows, n_rows=inputs.n_rows, **arguments, **settings)

    def resolve(self, options: Mapping[str, object]) -> dict[str, float | int | None]:
        """Return all options of the term, checked, with defaults where not given.

        Args:
            options: values by name.

        Returns:
            One value for each option of the term, in the order of `options`.

        Raises:
            UsageError: a name is unknown or a value out of range.
        """
        for name in options:
            if name not in self.options:
                known = ", ".join(self.options) or "none"
                raise UsageError(f"{name}: found an option that {self.name} does not have, accepted is {known}")
        return {name: o.parse(name, options.get(name, o.default)) for name, o in self.options.items()}

    def count(self, rows: Tensor, n_rows: int, refusal_rows: Tensor | None = None) -> int:
        """Return what `terms` will be, before any statistic is known: the divisor of an update is the sum of these.

        Args:
            rows: (N,) int64, the example of each labelled token.
            n_rows: examples, with or without tokens.
            refusal_rows: (M,) int64, the example of each refusal token, for the terms that need it.

        Returns:
            Tokens, examples or refusal tokens, as `per` says; 0 for a term that needs nothing (`none`).

        Raises:
            ValueError: `refusal_rows` is needed and missing, or rows are out of range.
        """
        if not self.needs:
            return 0
        refused = None
        if "refusal_rows" in self.needs:
            if refusal_rows is None:
                raise ValueError(f"{self.name}: found no refusal_rows, accepted is an (M,) int64 tensor")
            refused = row_counts(refusal_rows, n_rows)
        found = row_counts(rows, n_rows)
        if self.per == "token":
            return int(found.sum())
        if self.per == "refusal_token":
            return 0 if refused is None else int(refused.sum())
        counted = found > 0
        return int((counted if refused is None else counted & (refused > 0)).sum())

    def _needed(self) -> str:
        return ", ".join(self.needs)
