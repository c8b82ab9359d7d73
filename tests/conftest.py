"""What the tests of whole runs share."""

import pytest
import torch
from tests.train import _runs

from expunge.lm import _compute

# Threads that wait for each other on a busy machine take a hundred times as long as these tiny models need.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fast_in_every_type(monkeypatch):
    """Models keep their type, whatever processor the tests run on."""
    monkeypatch.setattr(_compute, "has_instructions", lambda dtype, device: True)


@pytest.fixture(scope="session")
def knowing(tmp_path_factory):
    """Folder of a tiny float32 Llama that knows the rows to forget and to keep."""
    return _runs.make_model(tmp_path_factory.mktemp("models") / "knowing")


@pytest.fixture(scope="session")
def knowing_bf16(tmp_path_factory):
    return _runs.make_model(tmp_path_factory.mktemp("models") / "bf16", dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Paths of the data files, by option name."""
    return _runs.write_data(tmp_path_factory.mktemp("data"))
