"""Margins and violations of rows under the present model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from expunge.errors import RunError
from expunge.lm import Labelled, Margin, RowRunner
from expunge.objectives import MascSettings, masc_hinge

# Rows in a forward pass without gradient.
_ROWS = 16


def margins_of(
    runner: RowRunner, masc: MascSettings, labelled: Labelled, rows: Sequence[int], starts: Sequence[int] | None
) -> Tensor:
    """Margins of labelled tokens, (N,), against the model's own competitors or those of the model before.

    Args:
        runner: of the model.
        masc: k, β and δ.
        labelled: what the runner gave for `rows` and `starts`.
        rows: indices of the rows.
        starts: for each row, how many of its leading labelled tokens are left out; None: none.
    """
    sets = None
    if masc.teacher_delta is not None:
        sets = runner.competitors(rows, starts, k=masc.k, delta=masc.teacher_delta)
    margin = runner.stats(labelled, margin=Margin(k=masc.k, beta=masc.beta, competitors=sets)).margin
    assert margin is not None
    return margin


@torch.no_grad()
def measure(
    runner: RowRunner, masc: MascSettings, rows: Sequence[int], starts: Sequence[int] | None, *, step: int
) -> list[float]:
    """Violation of rows under the present model: share of tokens with margin above τ_ρ.

    Args:
        runner: of the model, in evaluation mode.
        masc: of the margin and its threshold.
        rows: indices of the rows.
        starts: for each row, how many of its leading labelled tokens are left out; None: none.
        step: for the message of an error.

    Returns:
        One share in [0, 1] for each row, in the order of `rows`; NaN for a row without a token.

    Raises:
        RunError: a margin is not a number.
    """
    found = [math.nan] * len(rows)
    places = sorted(range(len(rows)), key=lambda place: runner.tokens(rows[place]))
    for first in range(0, len(places), _ROWS):
        part = places[first : first + _ROWS]
        cuts = None if starts is None else [starts[place] for place in part]
        chosen = [rows[place] for place in part]
        labelled = runner.forward(chosen, cuts)
        margins = margins_of(runner, masc, labelled, chosen, cuts)
        # NOTE: no comparison with NaN is true, so a broken model would count as one that has forgotten.
        if bool(margins.isnan().any()):
            raise RunError(f"step {step}: the model's outputs are not numbers")
        shares = masc_hinge(margins, labelled.row, len(part), rho=masc.rho, eta=masc.eta).violation
        for place, share in zip(part, shares.tolist(), strict=True):
            found[place] = share
    return found
