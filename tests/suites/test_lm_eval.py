import sys
import types

import pytest

from expunge.errors import RunError, UsageError
from expunge.suites import EvaluateSettings, evaluate, run_tasks
from expunge.suites import _lm_eval as module


@pytest.fixture
def harness(monkeypatch):
    """A stand-in for the package, with the parts that are called."""
    calls = {}

    def simple_evaluate(**options):
        calls.update(options)
        if "broken" in options["tasks"]:
            raise ValueError("no such file\nsecond line")
        results = {"toy": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "toy", "word_perplexity,none": 9.0}}
        return {"results": results, "n-samples": {"toy": {"effective": 4}}}

    class Manager:
        def __init__(self, include_path=None):
            self.all_tasks = ["toy", "broken"]

    package = types.ModuleType("lm_eval")
    package.simple_evaluate = simple_evaluate
    package.__spec__ = types.SimpleNamespace(name="lm_eval")
    models, tasks = types.ModuleType("lm_eval.models.huggingface"), types.ModuleType("lm_eval.tasks")
    models.HFLM, tasks.TaskManager = lambda **options: options, Manager
    for name, one in (("lm_eval", package), ("lm_eval.models.huggingface", models), ("lm_eval.tasks", tasks)):
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setitem(sys.modules, "lm_eval.models", types.ModuleType("lm_eval.models"))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: package)
    return calls


def test_numbers_become_metrics(harness):
    loaded = types.SimpleNamespace(model="m", tokenizer="t")
    found = {metric.name: metric for metric in run_tasks(loaded, ["toy"], seed=3)}
    accuracy = found["lm_eval/toy/acc"]
    assert (accuracy.value, accuracy.n, accuracy.scale.better) == (0.5, 4, "higher")
    assert accuracy.interval == pytest.approx((0.304, 0.696))
    assert found["lm_eval/toy/word_perplexity"].scale.better == "lower"
    assert harness["torch_random_seed"] == 3
    with pytest.raises(UsageError, match="tasks: found 'unknown'"):
        run_tasks(loaded, ["unknown"])
    with pytest.raises(RunError, match=r"lm-eval failed: no such file$"):
        run_tasks(loaded, ["broken"])


def test_without_the_package_tasks_are_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install .expunge\[lm-eval\]"):
        evaluate("nowhere", "tofu", "nowhere", settings=EvaluateSettings(tasks=("arc_easy",)))
