"""A comparison's file: placeholders, names and options are checked before anything runs."""

import pytest
from tests.compare._studies import values

from expunge.compare import parse_study, read_study
from expunge.compare._file import fill
from expunge.errors import UsageError


def parsed(**changes):
    given = values(**changes)
    used = {name: name for name in ("data", "models") if f"${{{name}}}" in str(given)}
    return parse_study(fill(given, used), name="s")


def refused(match, **changes):
    with pytest.raises(UsageError, match=match) as found:
        parsed(**changes)
    assert "\n" not in str(found.value)


def target(**changes):
    usual = {"model": "m", "forget": "f.jsonl", "retain": "r.jsonl", "holdout": "h.jsonl"}
    return {"tiny": {name: value for name, value in (usual | changes).items() if value is not None}}


def test_cells_are_all_combinations_with_stable_names():
    optimizers = [{"name": "joint", "update": "joint"}, {"name": "dual", "optimizer": "dualoptim"}]
    methods = [{"name": "npo", "method": "npo+gd"}, {"name": "graddiff"}]
    study = parsed(methods=methods, optimizers=optimizers, seeds=[0, 7])
    names = [cell.name for cell in study.cells()]
    assert len(names) == len(set(names)) == 8
    assert names[:2] == ["tiny/npo/joint/seed-0", "tiny/npo/dual/seed-0"]
    assert names[-1] == "tiny/graddiff/dual/seed-7"


def test_options_of_all_runs_are_overridden_by_method_and_optimizer(tmp_path):
    methods = [{"name": "graddiff", "epochs": 2, "lr": 1e-3}, {"name": "other", "method": "npo+gd"}]
    optimizers = [{"name": "fast", "lr": "1e-1"}, {"name": "slow", "lr_forget": 1e-5, "update": "alternate"}]
    study = parsed(methods=methods, optimizers=optimizers, options={"lr": 1e-2, "batch": 3})
    files = {"forget": "f", "retain": "r", "holdout": "h"}
    recipes = [study.config(cell, files, tmp_path).recipe for cell in study.cells()]
    assert [recipe.lr for recipe in recipes] == [1e-1, 1e-3, 1e-1, 1e-2]
    assert [recipe.lr_forget for recipe in recipes] == [None, 1e-5, None, 1e-5]
    assert [recipe.epochs for recipe in recipes] == [2, 2, 10, 10]
    assert {recipe.batch for recipe in recipes} == {3}


def test_only_runs_that_the_rule_ends_measure_the_holdout(tmp_path):
    methods = [{"name": "masc"}, {"name": "paper", "method": "masc", "preset": "tofu"}]
    methods += [
        {"name": "fixed", "method": "masc", "tolerance": 0.4},
        {"name": "bare", "method": "masc", "holdout": None},
    ]
    methods += [{"name": "graddiff"}, {"name": "ruled", "method": "graddiff", "stop": "rule"}]
    study = parsed(methods=methods, options={})
    files = {"forget": "f", "retain": "r", "holdout": "h"}
    held = {cell.method.name: study.config(cell, files, tmp_path).holdout for cell in study.cells()}
    assert held == {"masc": "h", "paper": None, "fixed": None, "bare": None, "graddiff": None, "ruled": "h"}


def test_evaluation_takes_the_template_of_the_runs():
    study = parsed(
        options={"template": "plain", "device": "cpu"}, evaluate={"rows": {"forget": "0:2"}, "batch_size": 4}
    )
    assert study.evaluate.measure.template == "plain"
    assert (study.evaluate.device, study.evaluate.rows) == ("cpu", {"forget": "0:2"})
    assert parsed(options={"template": "plain"}, evaluate={"template": "chat"}).evaluate.measure.template == "chat"


def test_a_tofu_split_names_its_files(tmp_path):
    (tmp_path / "forget05.jsonl").write_text("x")
    given = {"one": {"model": "m", "split": "forget05"}}
    study = parsed(suite="tofu", data=str(tmp_path), targets=given)
    assert study.targets[0].parts["retain"].source == f"{tmp_path}/retain95.jsonl"
    study = parsed(suite="tofu", data="owner/TOFU", targets=given)
    sources = {name: part.source for name, part in study.targets[0].parts.items()}
    assert sources == {
        "forget": "owner/TOFU:forget05",
        "retain": "owner/TOFU:retain95",
        "holdout": "owner/TOFU:holdout05",
    }


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"suit": "mine"}, "file: found 'suit', closest is 'suite'"),
        ({"suite": "tufo"}, "suite: found 'tufo', closest is 'tofu'"),
        ({"suite": None}, "suite: found none, accepted is one of tofu, muse, mine"),
        ({"targets": {}}, "targets: found none"),
        ({"targets": {"a b": {}}}, "targets: found 'a b', accepted is a name of letters"),
        ({"targets": {"../x": {}}}, "targets: found '../x'"),
        ({"targets": target(retraind="m")}, "targets: tiny: found 'retraind', closest is 'retrained'"),
        ({"targets": target(model=None)}, "targets: tiny: model: found none"),
        ({"targets": target(forget=None)}, "targets: tiny: forget: found none"),
        ({"targets": target(forget={"file": "f", "row": "0:1"})}, "tiny: forget: found 'row', closest is 'rows'"),
        ({"targets": target(forget={"file": "f", "rows": "1-2"})}, "rows: found '1-2', accepted is START:END"),
        ({"targets": target(split="forget10")}, "split: found 'forget10' with mine"),
        ({"targets": target(data="d", paraphrase="p")}, "paraphrase: found with data"),
        ({"suite": "tofu"}, "targets: tiny: data: found none"),
        ({"methods": []}, "methods: found \\[\\], accepted is a list"),
        ({"methods": [{"epochs": 1}]}, "methods: name: found None"),
        ({"methods": [{"name": "ours"}]}, "methods: ours: no method is given"),
        ({"methods": [{"name": "x", "method": "npo+k"}]}, "methods: x: method: found 'npo\\+k', closest is 'npo\\+kl'"),
        ({"methods": [{"name": "npo", "epoch": 1}]}, "methods: npo: option: found 'epoch', closest is 'epochs'"),
        ({"methods": [{"name": "masc", "preset": "tofo"}]}, "preset: found 'tofo', closest is 'tofu'"),
        ({"methods": [{"name": "npo"}, {"name": "npo"}]}, "methods: found npo twice"),
        ({"methods": [{"name": "npo", "seed": 1}]}, "methods: npo: found seed, which the comparison's"),
        ({"methods": [{"name": "npo", "lr": -1}]}, "tiny/npo: lr: found -1"),
        ({"methods": [{"name": "npo", "rho": 0.5, "weight": 1.0}]}, "tiny/npo: weight: found with method npo"),
        ({"methods": [{"name": "npo", "holdout": "h"}]}, "holdout: found 'h', accepted is none"),
        ({"options": {"devise": "cpu"}}, "options: option: found 'devise', closest is 'device'"),
        ({"optimizers": [{"name": "dual", "optimizer": "dualoptim", "update": "joint"}]}, "masc/dual: update: found"),
        ({"seeds": [0, 0]}, "seeds: found 0"),
        ({"seeds": [True]}, "seeds: found True"),
        ({"seeds": 3}, "seeds: found 3, accepted is a list"),
        ({"evaluate": {"max_new_token": 3}}, "evaluate: found 'max_new_token', closest is 'max_new_tokens'"),
        ({"evaluate": {"batch_size": "big"}}, "evaluate: batch_size: found 'big', accepted is a whole number"),
        ({"evaluate": {"rows": {"forget": 3}}}, "evaluate: rows: forget: found 3"),
        ({"evaluate": {"tasks": "arc"}}, "evaluate: tasks: found 'arc', accepted is a list"),
        ({"axes": {"forgot": "x"}}, "axes: found 'forgot', closest is 'forget'"),
        ({"axes": {"utility": "retain_prob"}}, "axes: utility: found 'retain_prob', closest is 'retain_probability'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(changes, match):
    refused(match, **changes)


def test_placeholders():
    assert fill({"a": ["${x}/b", 1, None]}, {"x": "y"}) == {"a": ["y/b", 1, None]}
    with pytest.raises(UsageError, match=r"set: \$\{x\} has no value, accepted is --set x=VALUE"):
        fill({"a": "${x}"}, {})
    with pytest.raises(UsageError, match="set: found 'dat', closest is 'data'"):
        fill({"a": "${data}"}, {"data": "1", "dat": "2"})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="file: cannot read"):
        read_study(tmp_path / "none.yaml")
    file = tmp_path / "s.yaml"
    for text, match in (("a: [", "no YAML .line"), ("- 1", "holds a list"), ("", "holds a NoneType")):
        file.write_text(text)
        with pytest.raises(UsageError, match=match):
            read_study(file)
