"""Mistakes that people make: each ends in one line with what was found and what is accepted; nothing is written."""

import json

import pytest

from expunge.cli import main

ROWS = [{"prompt": "Who?", "completion": "Ada"}, {"prompt": "Where?", "completion": "Here"}]


@pytest.fixture
def place(tmp_path, knowing, data, monkeypatch):
    """A folder with files of all kinds, which is also the current one."""
    files = {
        "good.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
        "prose.docx": "Dear all,\nplease forget Ada.\n",
        "half.jsonl": json.dumps(ROWS[0]) + '\n{"prompt": "Wh',
        "empty.jsonl": "",
        "names.csv": "Frage,Antwort\nWer?,Ada\n",
        "table.csv": "prompt,completion\nWho?,Ada\n",
        "list.yaml": "- masc\n",
        "typo.yaml": "lerning_rate: 0.1\n",
        "study.yaml": "suite: tofu\n",
        "model.bin": "0",
        "key.pem": "no key",
    }
    work = tmp_path / "work"
    work.mkdir()
    for name, text in files.items():
        (work / name).write_text(text)
    (work / "latin.jsonl").write_bytes('{"prompt": "Who?", "completion": "Zoë"}\n'.encode("latin-1"))
    (work / "full").mkdir()
    (work / "full" / "thesis.txt").write_text("three years of work")
    monkeypatch.chdir(work)
    return {"MODEL": knowing, "FORGET": data["forget"], "RETAIN": data["retain"]}


def unlearn(*more, forget="FORGET", retain="RETAIN", model="MODEL", out="out"):
    return ["unlearn", model, "--forget", forget, "--retain", retain, "--out", out, *more]


MISTAKES = [
    # the command
    (["unlern", "MODEL"], ["unlearn"]),
    (unlearn("--learning-rate", "1e-4"), ["--learning-rate"]),
    (unlearn("--epoch", "3"), ["--epoch", "--epochs"]),
    (["unlearn", "--forget", "FORGET", "--out", "out"], ["model", "smollm2-135m"]),
    (["unlearn", "MODEL", "--forget", "FORGET", "--out", "out"], ["retain", "--kl-weight 0"]),
    # numbers
    (unlearn("--lr", "fast"), ["--lr", "'fast'", "number"]),
    (unlearn("--tolerance", "40"), ["tolerance", "40", "0 to 1"]),
    (unlearn("--rho", "1"), ["rho", "1"]),
    (unlearn("--batch", "0"), ["batch", "0"]),
    (unlearn("--epochs", "2.5"), ["--epochs", "2.5", "whole number"]),
    # names
    (unlearn("--method", "nppo"), ["method", "nppo", "npo"]),
    (unlearn("--preset", "muse"), ["preset", "muse", "muse-news"]),
    (unlearn("--dtype", "fp16"), ["dtype", "fp16", "float16"]),
    (unlearn("--device", "gpu"), ["device", "gpu", "cuda"]),
    (unlearn("--targets", "q_proj,v_prj"), ["v_prj", "q_proj"]),
    (unlearn("--optimizer", "dualoptim++"), ["optimizer", "dualoptim++", "dualoptim+"]),
    # files
    (unlearn(forget="forgot.jsonl"), ["forget", "forgot.jsonl"]),
    (unlearn(forget="prose.docx"), ["forget", "prose.docx", "JSON lines"]),
    (unlearn(forget="half.jsonl"), ["forget", "half.jsonl", "2"]),
    (unlearn(forget="empty.jsonl"), ["forget", "empty.jsonl"]),
    (unlearn(forget="latin.jsonl"), ["forget", "latin.jsonl", "UTF-8"]),
    (unlearn(forget="names.csv"), ["forget", "names.csv", "Frage", "columns"]),
    (unlearn("--columns", "prompt"), ["--columns", "'prompt'", "prompt=Question"]),
    (unlearn(retain="FORGET"), ["retain", "overlap"]),
    (unlearn("--config", "list.yaml"), ["config", "list.yaml", "mapping"]),
    (unlearn("--config", "typo.yaml"), ["typo.yaml", "lerning_rate"]),
    # models and folders
    (unlearn(model="./no-model"), ["./no-model", "no such file or folder"]),
    (unlearn(model="model.bin"), ["model.bin", "gguf"]),
    (unlearn(model="full"), ["full", "config.json"]),
    (unlearn(out="full"), ["out", "full", "not empty"]),
    (unlearn(out="."), ["out", "not empty"]),
    (["resume", "full"], ["full", "run.json"]),
    (["report", "full"], ["full", "run.json"]),
    (["card", "full"], ["full", "run.json"]),
    # the other commands
    (["evaluate", "MODEL", "--suite", "toufu", "--data", "full"], ["suite", "toufu", "tofu"]),
    (["evaluate", "MODEL", "--suite", "tofu", "--data", "full"], ["full", "forget"]),
    (["stress", "MODEL", "--suite", "tofu", "--data", "full", "--out", "out"], ["full", "forget"]),
    (["compare", "study.yaml", "--out", "out"], ["study.yaml", "targets"]),
    (["compare", "nothing.yaml", "--out", "out"], ["nothing.yaml"]),
    (["finetune", "MODEL", "--data", "prose.docx", "--out", "out"], ["prose.docx"]),
    (["ledger", "show", "full"], ["ledger", "full"]),
    (["ledger", "verify", "prose.md"], ["ledger", "prose.md"]),
    (["completion", "tcsh"], ["tcsh", "bash"]),
]


@pytest.mark.parametrize(("words", "named"), MISTAKES, ids=[" ".join(words)[:60] for words, _ in MISTAKES])
def test_a_mistake_is_one_line(place, tmp_path, words, named, capsys):
    before = sorted(tmp_path.rglob("*"))
    code = main([place.get(word, word) for word in words])
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if not line.startswith(("loading", "weights: ", "memory: "))]
    lines = [line for line in lines if not line.startswith(("peak: ", "disk: "))]
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("expunge: ")
    for name in named:
        assert name in lines[0]
    assert sorted(tmp_path.rglob("*")) == before
