"""Saved results written by hand: no model is needed."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq

from expunge.report import read_run

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&</td>\u2028"
IDS = ["row-0", "row-1", EVIL, "row-3"]
ALPHA = 0.4


def _summary(probability, violation, **changes):
    usual = {"examples": 4, "probability": probability, "exact": 0.5, "violation": violation, "rouge_l": None}
    return usual | {"generated": 0} | changes


def _log():
    events = [{"event": "start", "tolerance": ALPHA}, {"event": "measure", "step": 0, "mean": 0.95, "above": 4}]
    for step in range(1, 7):
        event = {"event": "step", "step": step, "forget_loss": 9.0 / step, "retain_loss": 0.01 * step, "updated": True}
        event |= {"violation": 1 - step / 8, "gradient_norm": 0.5, "cosine": -0.1 * step, "phase": "main"}
        events.append(event | {"delta_norm": {"forget": 0.1 * step, "retain": 0.2}})
        if step in (4, 6):
            for stage in ("probe", "confirm") if step == 6 else ("probe",):
                numbers = {
                    "step": step,
                    "stage": stage,
                    "mean": 0.45 - 0.02 * step,
                    "standard_error": 0.05,
                    "examples": 2,
                }
                stop = stage == "confirm"
                events.append(
                    {"event": "look", "stop": stop, "stage": "done" if stop else "confirm", "numbers": numbers}
                )
    return [*events, {"event": "measure", "step": 6, "mean": 0.33, "above": 1, "above_ids": [EVIL]}]


def _scores(folder, when, violations, logprobs, ids):
    columns = {"id": ids, "record": list(range(len(ids))), "tokens": [3] * len(ids), "violation": violations}
    columns |= {"logprob_mean": logprobs, "exact": violations, "certificate": [3 * value for value in logprobs]}
    pq.write_table(pa.table(columns), folder / "scores" / f"forget-{when}.parquet")
    margins = [[4.0, -1.0, 2.0 + index] if when == "before" else [0.5, -2.0, 1.5] for index in range(len(ids))]
    tokens = {"id": ids, "record": columns["record"], "margin": pa.array(margins, pa.list_(pa.float64()))}
    pq.write_table(pa.table(tokens), folder / "scores" / f"forget-{when}-tokens.parquet")


def write_run(folder, *, tokens=True, finished=True, ids=None, log=True, **changes):
    """A run of four examples; the third, whose id is markup, is left."""
    ids = IDS if ids is None else ids
    (folder / "scores").mkdir(parents=True)
    size = len(ids)
    part = {"records": size, "rows": size, "dropped": [], "fingerprint": "f" * 64}
    config = {"model": "/secret-place/base", "forget": "/secret-place/forget.jsonl", "out": "/secret-place/out"}
    config |= {"method": "masc", "preset": "default", "masc": {}, "recipe": {"lr": 1e-3}, "seed": 0}
    run = {"config": config, "resolved_masc": {"rho": 0.7, "tolerance": ALPHA}, "tolerance_source": "holdout"}
    run |= {"versions": {"expunge": "0.1.0"}, "weights": "a" * 64, "data": {"forget": part, "retain": None}}
    run |= {"device": "cpu", "dtype": "float32", "threads": 1, "notes": []}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (_log() if log else [])))
    low, high = [1.0, 0.9, 1.0, None], [0.2, 0.5, 1.0, 0.3]
    before, after = (low * size)[:size], (high * size)[:size]
    _scores(folder, "before", before, [-0.02] * size, ids)
    if finished:
        _scores(folder, "after", after, [-1.0 - index % 7 for index in range(size)], ids)
        result = {"forgotten": False, "reason": "budget spent", "tolerance": ALPHA, "steps": 6, "stopped_at": 6}
        result |= {"seconds": {"train": 3.0, "load": 1.0}, "left": [EVIL], "max_logit_error": 0.0, "notes": [EVIL]}
        result |= {"forget_before": _summary(0.98, 0.95), "forget_after": _summary(0.3, 0.33)}
        result |= {"retain_before": _summary(0.9, 0.9), "retain_after": _summary(0.81, 0.9), "fingerprint": "b" * 64}
        (folder / "result.json").write_text(json.dumps(result | changes))
    if not tokens:
        for file in (folder / "scores").glob("*-tokens.parquet"):
            file.unlink()
    return folder


def run(folder, **options):
    reading = {name: options.pop(name) for name in ("name", "hashes", "evaluation", "stress") if name in options}
    return read_run(write_run(folder, **options), **reading)


def write_evaluation(folder):
    """Tables and metrics as `expunge evaluate` leaves them."""
    (folder / "scores").mkdir(parents=True)
    for part, value in (("forget", 0.2), ("retain", 0.9)):
        table = pa.table({"id": ["a", "b"], "logprob_mean": [math.log(value)] * 2})
        pq.write_table(table, folder / "scores" / f"{part}.parquet")
    metric = {
        "name": "forget_rouge_l",
        "value": 0.25,
        "unit": "share",
        "better": "lower",
        "interval": [0.2, 0.3],
        "n": 4,
    }
    missing = {"name": "privleak", "value": None, "unit": "%", "better": "reference", "interval": None, "n": 0}
    metrics = [metric | {"reference": 0.22, "reason": None, "note": None}]
    metrics += [missing | {"reference": None, "reason": f"no holdout {EVIL}", "note": None}]
    (folder / "evaluation.json").write_text(json.dumps({"suite": "mine", "metrics": metrics, "flags": [], "notes": []}))
    return folder


def write_stress(folder, fingerprint="b" * 64):
    """Rows as `expunge stress` leaves them."""
    folder.mkdir(parents=True)
    row = {"test": "relearn", "setting": "4 rows, 10 steps: others", "metric": "forget_rouge_l", "before": 0.2}
    row |= {"after": 0.45, "change": 0.25, "interval": [0.15, 0.35], "n": 4, "retrained": 0.3, "original": 0.98}
    row |= {"recovered": 0.25 / 0.78, "better": "reference", "reason": None, "recovered_reason": None}
    less = row | {"test": "int4", "setting": "", "after": 0.18, "change": -0.02, "recovered": -0.02 / 0.78}
    missing = row | dict.fromkeys(("before", "after", "change", "interval", "retrained", "original", "recovered"))
    missing |= {"test": "int8", "setting": "", "reason": f"no library {EVIL}"}
    values = {"suite": "mine", "rows": [less, missing, row], "stamp": {"fingerprint": fingerprint}}
    (folder / "stress.json").write_text(json.dumps(values))
    return folder
