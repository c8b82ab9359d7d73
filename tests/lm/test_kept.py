"""Tensors kept by row: the budget, the mapped file, a full disk."""

import os

import pytest
import torch

from expunge.errors import RunError
from expunge.lm import _kept as module
from expunge.lm._kept import Budget, KeptRows


def test_what_fits_is_kept_and_the_rest_is_dropped():
    budget = Budget(40)
    kept, other = KeptRows(budget), KeptRows(budget)
    kept.keep({0: torch.ones(5), 1: torch.ones(3)})
    other.keep({0: torch.ones(3)})
    assert (0 in kept, 1 in kept, 0 in other, budget.used) == (True, True, False, 32)
    other.keep({0: torch.ones(2)})
    assert (0 in other, budget.used) == (True, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_must_stay_goes_to_a_file_without_a_name(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    states = {3: torch.randn(4, 2, dtype=dtype), 7: torch.randn(1, 2, dtype=dtype), 9: torch.zeros(0, 2, dtype=dtype)}
    kept, budget = KeptRows(budget := Budget(0)), budget
    kept.keep(states, must=True)
    assert budget.used == 0
    assert os.listdir(tmp_path) == []
    for row, state in states.items():
        assert kept[row].dtype == dtype
        assert torch.equal(kept[row], state)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module.os, "fdopen", full)
    with pytest.raises(RunError, match=r"reference: cannot keep 0 MB in .*: No space left on device"):
        KeptRows(Budget(0)).keep({0: torch.ones(2)}, must=True)
    assert os.listdir(tmp_path) == []
