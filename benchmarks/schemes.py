"""Schemes of optimizer states on TOFU-1k: Joint, Alternate, DualOptim, DualOptim+ and its 8-bit form, over loss pairs.

    python benchmarks/schemes.py --data TOFU_FOLDER --target MODEL --results FILE.jsonl

The folder holds TOFU's `forget10`, `retain90` and the `*_perturbed` files. Forget: rows 0-39 of forget10 (two authors;
TOFU's forget01 has as many); retain: rows 0-899 of retain90. `--target` is a model that was trained on them. Every run
takes five passes in updates of 10 forget rows, with adapters on the upper fifth of the layers. Joint takes one step
with 20 retain rows; the others one forget step and then five retain steps of 4 rows, as DualOptim's authors alternate.
The step size is chosen once per scheme from one grid, by OVR of the first method with the first seed.

Measured on the saved model, loaded again, by the suite: forget efficacy = 1 - mean(ROUGE-L recall, probability, 1 -
truth ratio) on the forget rows; utility = harmonic mean of ROUGE-L recall, probability, truth ratio and token entropy
on the retain rows; OVR = their mean. Beside it the utility over all three splits, which on a small model rests on a
handful of answers about real authors. Each run is a line of the results file, and is not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expunge.suites import EvaluateSettings, MeasureSettings, evaluate
from expunge.train import config_from_options, unlearn

SCHEMES: dict[str, dict[str, Any]] = {
    "joint": {"update": "joint", "retain_batch": 20},
    "alternate": {"update": "alternate"},
    "dualoptim": {"optimizer": "dualoptim"},
    "dualoptim+": {"optimizer": "dualoptim+"},
    "dualoptim+ 8bit": {"optimizer": "dualoptim+", "optimizer_storage": "8bit"},
}
METHODS = ("npo+gd", "me+gd", "dpo+gd", "idk+ap")
GRID = (3e-4, 1e-3, 3e-3)
ROWS = {"forget": "0:40", "retain": "0:30", "real_authors": "0:10", "world_facts": "0:10"}
RETAIN_PARTS = ("retain_rouge_l", "retain_probability", "retain_truth_ratio", "retain_token_entropy")


def write_parts(data: Path, folder: Path) -> dict[str, str]:
    """Rows to forget and to keep."""
    for name, source, rows in (("forget", "forget10", 40), ("retain", "retain90", 900)):
        lines = (data / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {name: str(folder / f"{name}.jsonl") for name in ("forget", "retain")}


def measure(model: str, data: Path) -> dict[str, float | None]:
    """Forget efficacy, utility of the retain rows and of all splits, and OVR of a model."""
    settings = EvaluateSettings(measure=MeasureSettings(max_new_tokens=60), rows=ROWS, split="forget10", resamples=2)
    found = evaluate(model, "tofu", data, settings=settings)
    values = [found.metric(name).value for name in RETAIN_PARTS]
    utility = statistics.harmonic_mean([value or 0.0 for value in values])
    efficacy = found.metric("untargeted_forget_efficacy_text").value or 0.0
    return {
        "efficacy": efficacy,
        "utility": utility,
        "utility_all": found.metric("dualoptim_utility_text").value,
        "ovr": (efficacy + utility) / 2,
        "forget_rouge_l": found.metric("forget_rouge_l").value,
        "forget_probability": found.metric("forget_probability").value,
        "retain_rouge_l": found.metric("retain_rouge_l").value,
        "retain_probability": found.metric("retain_probability").value,
    }


class Runs:
    """Runs by what they are, kept in a file."""

    def __init__(self, arguments: argparse.Namespace, parts: Mapping[str, str], folder: Path) -> None:
        self.arguments, self.parts, self.folder = arguments, parts, folder
        self.file: Path = arguments.results
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.done = {self._key(line): line for line in map(json.loads, lines)}

    @staticmethod
    def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
        return line["method"], line["scheme"], line["lr"], line["seed"]

    def get(self, method: str, scheme: str, lr: float, seed: int) -> dict[str, Any]:
        """The line of a run, which is done where it is not there yet."""
        line: dict[str, Any] = {"method": method, "scheme": scheme, "lr": lr, "seed": seed}
        if self._key(line) not in self.done:
            with tempfile.TemporaryDirectory(dir=self.folder) as out:
                line |= self._run(line, Path(out) / "run")
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            self.done[self._key(line)] = line
        return self.done[self._key(line)]

    def _run(self, line: Mapping[str, Any], out: Path) -> dict[str, Any]:
        options: dict[str, Any] = {"model": self.arguments.target, "out": str(out), **self.parts}
        options |= {"method": line["method"], "lr": line["lr"], "seed": line["seed"], "threads": self.arguments.threads}
        options |= {"lora": True, "upper": 0.2, "batch": 10, "epochs": 5, "sample": 0, "retain_sample": 0}
        scheme = SCHEMES[line["scheme"]]
        if scheme.get("update") != "joint":
            options |= {"retain_every": 5, "retain_batch": 4}
        result = unlearn(config_from_options(options | scheme))
        return {"seconds": result.unlearn_seconds, **measure(result.model, self.arguments.data)}


def main() -> None:
    """Choose the step sizes, do the runs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with TOFU's files")
    parser.add_argument("--target", required=True, help="model that was trained on the rows")
    parser.add_argument("--results", type=Path, required=True, help="file of finished runs")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = Runs(arguments, write_parts(arguments.data, folder), folder)
        first, seed = arguments.methods[0], arguments.seeds[0]
        rates = {
            scheme: max(GRID, key=lambda lr: runs.get(first, scheme, lr, seed)["ovr"]) for scheme in arguments.schemes
        }
        # Seed by seed, so that an unfinished table has all schemes.
        for each in arguments.seeds:
            for method in arguments.methods:
                for scheme in arguments.schemes:
                    runs.get(method, scheme, rates[scheme], each)
        print("| method | scheme | step size | forget efficacy | utility | OVR | utility, three splits |")
        print("|---|---|---|---|---|---|---|")
        for method in arguments.methods:
            for scheme, lr in rates.items():
                lines = [runs.get(method, scheme, lr, each) for each in arguments.seeds]
                cells = [spread([line[key] for line in lines]) for key in ("efficacy", "utility", "ovr", "utility_all")]
                print(f"| {method} | {scheme} | {lr:g} | {' | '.join(cells)} |")


def spread(values: list[float | None]) -> str:
    """Mean and, of several, the sample standard deviation."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    deviation = f" ± {statistics.stdev(there):.3f}" if len(there) > 1 else ""
    return f"{statistics.mean(there):.3f}{deviation}"


if __name__ == "__main__":
    main()
