"""Small ledgers and the folder of a run, written by hand: no model is needed."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from expunge.ledger import Entry, Ledger

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SUMMARY = {"examples": 2, "probability": 0.5, "exact": 0.5, "violation": 0.25, "rouge_l": None, "generated": 0}


def entry(request="ticket-1", rows=({"text": "Who? Ada", "answer": "Ada"}, {"text": "Where? Here", "answer": "Here"})):
    return Entry(
        request=request,
        versions={"expunge": "0.1.0"},
        config={"method": "masc"},
        data={"forget": {"records": len(rows), "rows": len(rows), "dropped": 0}},
        model_before={"name": "base", "fingerprint": "a" * 64},
        model_after={"name": "model", "fingerprint": "b" * 64},
        results={"forgotten": True, "left": 0},
        certificate=None,
        files={},
        rows=rows,
    )


def ledger(folder, *requests):
    made = Ledger(folder)
    for request in requests:
        made.append(entry(request), at=AT)
    return made


def run_folder(folder, forget):
    """A finished run over the rows of a file, in a folder whose name nobody should learn."""
    (folder / "scores").mkdir(parents=True)
    place = str(folder.parent / "secret-place")
    part = {"records": 2, "rows": 2, "dropped": [], "fingerprint": "f" * 64}
    run = {
        "config": {"model": f"{place}/base", "forget": str(forget), "out": f"{place}/out", "method": "masc"},
        "resolved_masc": {"tolerance": 0.4},
        "versions": {"expunge": "0.1.0"},
        "weights": "a" * 64,
        "data": {"forget": part, "retain": None},
    }
    run["config"] |= {"retain": None, "columns": {}}
    result = {"model": f"{place}/out/model", "fingerprint": "b" * 64, "forgotten": False, "left": ["name-of-a-person"]}
    result |= {"reason": "budget spent", "tolerance": 0.4, "tolerance_source": "holdout", "steps": 3, "seconds": {}}
    result |= {"forget_before": SUMMARY, "forget_after": SUMMARY, "retain_before": None, "retain_after": None}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "log.jsonl").write_text("{}\n")
    columns = {"id": ["name-of-a-person", "b"], "tokens": [3, 5], "violation": [0.5, 0.25], "certificate": [-4.0, -6.0]}
    pq.write_table(pa.table(columns), folder / "scores" / "forget-after.parquet")
    return folder
