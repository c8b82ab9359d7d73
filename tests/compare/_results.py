"""`comparison.json` written by hand: no model is needed."""


def spread(mean, sd=None, n=1):
    return {"mean": mean, "sd": sd, "n": n}


def results(*, name="masc", error="out of memory", workers=1):
    """Two methods, one of which failed with one of its two seeds."""
    metrics = {
        "forget_probability": spread(0.2, 0.01, 2),
        "retain_probability": spread(0.85),
        "model_utility": spread(None, n=0),
    }
    base = {"target": "t", "optimizer": None, "seeds": [0, 1], "failed": 0, "flags": [], "stress": []}
    masc = base | {"method": name, "name": name, "baseline": False, "best_baseline": False, "ratio": 0.5}
    masc |= {"seconds": spread(20.0, 1.0, 2), "distance": spread(0.1, 0.02, 2), "metrics": metrics}
    npo = base | {"method": "npo", "name": "npo", "baseline": True, "best_baseline": True, "ratio": 1.0, "failed": 1}
    npo |= {"seconds": spread(40.0), "distance": spread(0.3), "flags": ["over-forgetting: blank"], "seeds": [0]}
    npo |= {
        "metrics": {"forget_probability": spread(0.05), "retain_probability": spread(0.5), "model_utility": spread(0.4)}
    }
    cells = [
        {"name": f"t/{method}/seed-{seed}", "seed": seed, "state": "complete", "error": None, "resumed": False}
        for method in (name, "npo")
        for seed in (0, 1)
    ]
    cells[-1] |= {"state": "failed", "error": error}
    target = {"metrics": {"forget_probability": 0.98, "retain_probability": 0.97}, "distance": 0.7, "stress": None}
    retrained = {"metrics": {"forget_probability": 0.09, "retain_probability": 0.9}, "distance": 0.0, "stress": None}
    return {
        "name": "study",
        "suite": "tofu",
        "axes": ["forget_probability", "retain_probability"],
        "table": ["forget_probability", "retain_probability", "model_utility", "forget_quality_log10"],
        "distance": ["forget_probability", "retain_probability"],
        "counted": "seconds of training",
        "workers": workers,
        "machine": {"device": "cpu", "threads": 1, "dtype": "bfloat16", "versions": {}},
        "rows": {"forget": "0:10"},
        "file": {},
        "references": {"t": {"target": target, "retrained": retrained}},
        "cells": cells,
        "summary": [masc, npo],
    }
