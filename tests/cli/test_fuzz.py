"""Configuration files of any content: a run is described, or one line says what is wrong; no traceback, no hang."""

import contextlib
import io
import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expunge.cli import main
from expunge.compare import read_study
from expunge.errors import UsageError
from expunge.train import OPTION_GROUPS

OPTIONS = [name for group in OPTION_GROUPS for name in group.names]
NAMES = st.sampled_from([*OPTIONS, "lerning_rate", "masc", "recipe", "", "forget "]) | st.text(max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["npo+kl", "masc", "1e-3", "auto", "tofu", "forget=npo,retain=kl", "rule", "cpu", "8bit", "{prompt}"]
    )
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("forget", "retain"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "completion": "x"}) + "\n")
    return tmp_path


def described(path):
    """Exit code and what was said of a dry run."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["unlearn", "./no-model", "--config", str(path), "--dry-run"])
    return code, out.getvalue(), err.getvalue()


def check(files, code, out, err):
    assert code in (0, 2)
    if code == 0:
        json.loads(out)
    else:
        assert out == ""
        assert len(err.splitlines()) == 1
        assert err.startswith("expunge: ")
        assert len(err) < 3000
    assert sorted(file.name for file in files.iterdir()) == ["forget.jsonl", "retain.jsonl", "run.yaml"]


@FUZZ
@given(values=st.dictionaries(NAMES, VALUES, max_size=5))
def test_a_run_of_any_options(files, values):
    usual = {"forget": "forget.jsonl", "retain": "retain.jsonl", "out": "run"}
    (files / "run.yaml").write_text(yaml.safe_dump({**usual, **values}), encoding="utf-8", errors="surrogatepass")
    check(files, *described(files / "run.yaml"))


@FUZZ
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_a_run_of_any_bytes(files, content):
    (files / "run.yaml").write_bytes(content)
    check(files, *described(files / "run.yaml"))


STUDY = st.fixed_dictionaries(
    {},
    optional={
        "suite": st.sampled_from(["tofu", "muse", "mine"]) | VALUES,
        "data": st.just(".") | VALUES,
        "targets": st.dictionaries(
            st.text(min_size=1, max_size=4),
            st.fixed_dictionaries(
                {}, optional={name: VALUES for name in ("model", "forget", "retain", "holdout", "retrained", "odd")}
            ),
            max_size=2,
        )
        | VALUES,
        "methods": st.lists(st.dictionaries(NAMES | st.just("name"), VALUES, max_size=3) | VALUES, max_size=3) | VALUES,
        "seeds": st.lists(st.integers(0, 3), max_size=3) | VALUES,
        "evaluate": VALUES,
        "stress": VALUES,
        "axes": VALUES,
        "odd": VALUES,
    },
)


@FUZZ
@given(values=STUDY)
def test_a_comparison_of_any_content(files, values):
    (files / "study.yaml").write_text(yaml.safe_dump(values), encoding="utf-8", errors="surrogatepass")
    try:
        read_study(files / "study.yaml", {})
    except UsageError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message


def test_aliases_that_grow_are_no_bomb(files):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    ]
    (files / "run.yaml").write_text("\n".join(lines))
    check(files, *described(files / "run.yaml"))
