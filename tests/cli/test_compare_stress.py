"""Stress tests as a part of a comparison."""

import pytest
from tests.compare._studies import GRADDIFF, make_place, refused, results, run, words, write_study


def test_stressed_and_its_model_kept(tmp_path, knowing, capsys):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    place = make_place(tmp_path, knowing)
    options = {"methods": [GRADDIFF], "stress": ["int8"]}
    file = write_study(place / "s.yaml", **options)
    code, _, errors = run(capsys, *words(place, file, "--keep-models", "--json"))
    assert code == 0
    assert "int8" in errors
    found = results(place)
    tests = {row["test"] for row in found["cells"][0]["stress"]}
    assert tests == {"int8"}
    assert {row["test"] for row in found["references"]["tiny"]["retrained"]["stress"]} == tests
    assert found["summary"][0]["stress"][0]["after"]["n"] == 1
    assert "under stress" in (place / "out" / "comparison.md").read_text()
    assert (place / "out" / "cells" / "tiny" / "graddiff" / "seed-0" / "run" / "model" / "model.safetensors").is_file()

    # The saved model is there, so it can be stressed in another way.
    write_study(file, **options | {"stress": ["paraphrase"]})
    assert run(capsys, *words(place, file))[0] == 0
    assert {row["test"] for row in results(place)["cells"][0]["stress"]} == {"paraphrase"}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (["int5"], "stress: tests: found 'int5', closest is 'int"),
        ({"test": []}, "stress: found 'test', closest is 'tests'"),
    ],
)
def test_wrong_tests_are_refused(tmp_path, knowing, capsys, value, told):
    place = make_place(tmp_path, knowing)
    file = write_study(place / "s.yaml", stress=value)
    assert told in refused(capsys, *words(place, file))
    assert not (place / "out").exists()
