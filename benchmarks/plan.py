"""The memory that `expunge plan` predicts against the peak of the run itself, each run a process of its own.

    python benchmarks/plan.py                          # SmolLM2-135M: LoRA, all weights, all weights with 8-bit states
    python benchmarks/plan.py --model ./my-model --rows 64

Data: the demo's people, `--rows` of them to forget and twice as many to keep, one pass. Measured: the most memory that
the process held in memory at one time (its maximum resident set), imports included, as the plan counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from expunge.demo import write_people

VARIANTS = {
    "LoRA (default)": [],
    "LoRA, all layers, npo+kl": ["--method", "npo+kl", "--lora", "--upper", "1"],
    "all weights, AdamW": ["--full", "--upper", "1"],
    "all weights, AdamW, bfloat16": ["--full", "--upper", "1", "--dtype", "bfloat16"],
    "all weights, DualOptim+ 8-bit": ["--full", "--optimizer", "dualoptim+", "--optimizer-storage", "8bit"],
}


def measured(words: list[str]) -> int:
    """Peak of a process, bytes."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 3):
        raise SystemExit(f"plan: a run failed: {said.strip().splitlines()[-1]}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Run the variants, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    arguments = parser.parse_args()
    print("| run | predicted, GB | measured, GB | predicted / measured | largest stage |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_people(folder / "people")
        for part, count in (("forget", arguments.rows), ("retain", 2 * arguments.rows)):
            lines = files[part].read_text(encoding="utf-8").splitlines()[:count]
            files[part].write_text("\n".join(lines) + "\n", encoding="utf-8")
        for number, variant in enumerate(arguments.variants):
            out = folder / f"run-{number}"
            words = [sys.executable, "-m", "expunge", "unlearn", arguments.model, "--out", str(out), "--seed", "0"]
            words += ["--forget", str(files["forget"]), "--retain", str(files["retain"]), "--tolerance", "0.4"]
            words += ["--epochs", "1", "--extra-epochs", "0", "--sample", "0", "--retain-sample", "16"]
            peak = measured([*words, *VARIANTS[variant]])
            plan = json.loads((out / "log.jsonl").read_text(encoding="utf-8").splitlines()[0])
            stage = max(plan["stages"], key=plan["stages"].__getitem__)
            print(
                f"| {variant} | {plan['peak'] / 1e9:.2f} | {peak / 1e9:.2f} | {plan['peak'] / peak:.2f} | {stage} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
