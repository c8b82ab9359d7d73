"""The package itself: a light import, the public names, `unlearn` with a configuration and with plain options."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest

import expunge
from expunge import _api, train
from expunge.data import read_records
from expunge.errors import UsageError
from expunge.train import RunConfig, config_from_options

PUBLIC = {
    "ExpungeError",
    "RunConfig",
    "RunError",
    "UnlearnResult",
    "UsageError",
    "__version__",
    "evaluate",
    "generate",
    "load_model",
    "read_records",
    "resume",
    "score",
    "unlearn",
}
NEEDED = {"model": "m", "forget": "f.jsonl", "out": "run"}

# What an import may change, before and after, in a process of its own.
PROBE = """
import json, logging, os, sys, warnings
def state():
    root = logging.getLogger()
    return [dict(os.environ), root.level, len(root.handlers), len(warnings.filters), os.getcwd()]
before = state()
import expunge
heavy = [m for m in ("torch", "transformers", "datasets", "peft", "numpy", "pyarrow", "rich") if m in sys.modules]
listed = dir(expunge)
print(json.dumps({"same": state() == before, "heavy": heavy, "listed": listed, "version": expunge.__version__}))
"""

# A command's help by the command line, which also keeps what other libraries say at their import off the screen.
HELPED = """
import contextlib, io, json, sys
from expunge.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(["unlearn", "--help"])
print(json.dumps([code, [name for name in ("expunge.cli._unlearn", "datasets") if name in sys.modules]]))
"""


def probe(code, cwd):
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=True)
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def test_import_has_no_side_effects_and_lists_the_public_names(tmp_path):
    found = probe(PROBE, tmp_path)
    assert found["same"]
    assert found["heavy"] == []
    assert set(found["listed"]) >= PUBLIC
    assert found["version"] == expunge.__version__
    assert list(tmp_path.iterdir()) == []


def test_public_names_are_those_of_the_rooms():
    assert set(expunge.__all__) == PUBLIC
    assert expunge.read_records is read_records
    assert expunge.RunConfig is RunConfig
    assert expunge.unlearn is _api.unlearn
    assert all(getattr(expunge, name) is not None for name in PUBLIC)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'expunge' has no attribute 'forget_everything'"):
        _ = expunge.forget_everything


def test_data_sets_are_imported_only_when_read():
    assert probe(HELPED, Path.cwd()) == [0, ["expunge.cli._unlearn"]]


def test_package_data():
    package = files("expunge")
    assert package.joinpath("py.typed").is_file()
    assert package.joinpath("demo/people.jsonl").is_file()


@pytest.fixture
def started(monkeypatch):
    """Configurations that would have been run."""
    configs = []
    monkeypatch.setattr(train, "unlearn", lambda config, **_: configs.append(config) or SimpleNamespace(out="run"))
    monkeypatch.setattr(_api, "write_report", lambda _: None)
    return configs


def test_options_and_configuration_start_the_same_run(started):
    options = NEEDED | {"retain": "r.jsonl", "lr": 1e-3, "rho": 0.6}
    expunge.unlearn(**options)
    expunge.unlearn(config_from_options(options))
    assert started[0] == started[1]
    assert (started[0].recipe.lr, started[0].masc.rho, started[0].retain) == (1e-3, 0.6, "r.jsonl")


def test_a_configuration_goes_without_options(started):
    with pytest.raises(UsageError, match="options: found lr, rho beside a RunConfig"):
        expunge.unlearn(RunConfig(**NEEDED), rho=0.7, lr=1)
    with pytest.raises(UsageError, match="config: found a dict, accepted is a RunConfig"):
        expunge.unlearn(NEEDED)
    assert started == []
