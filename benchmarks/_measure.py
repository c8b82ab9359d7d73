"""What the benchmarks share: memory of this process, and one measurement in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def _status_kb(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def resident_kb() -> int:
    """Resident memory of this process now, in kB."""
    return _status_kb("VmRSS")


def peak_kb() -> int:
    """Peak resident memory of this process since it began or since the last `reset_peak`, in kB.

    Not `ru_maxrss`, in which a child keeps the peak of the process that started it.
    """
    return _status_kb("VmHWM")


def reset_peak() -> int:
    """Set the peak to what is resident now, and return that, in kB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kb()


def in_process(script: str, arguments: list[str], threads: int) -> dict[str, Any]:
    """Run a script in a process of its own; its last line is JSON."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])
