"""Ctrl-C and SIGTERM: the first ends a run with a checkpoint, the second ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from expunge.train import InterruptedRun, Progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class Interruption:
    """Whether the run was asked to end, and by which signal.

    Args:
        out: the run folder, for what is said.

    Attributes:
        number: of the first signal; None before it.
    """

    def __init__(self, out: str | Path) -> None:
        self.out = out
        self.number: int | None = None

    def asked(self) -> bool:
        """Whether a signal has come; `unlearn` asks after every update."""
        return self.number is not None

    def watching(self, watch: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """A progress watch that ends the run where there is no update to wait for.

        What is on the disk can be resumed at any moment, so nothing is written then.
        """

        def tell(state: Progress) -> None:
            if self.asked() and state.stage != "train":
                raise InterruptedRun(f"interrupted; {self._advice()}")
            watch(state)

        return tell

    def _advice(self) -> str:
        if (Path(self.out) / "run.json").is_file():
            return f"`expunge resume {self.out}` continues"
        return "nothing was written yet"

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.asked():
            # At once: no clean-up, which might wait, and whose work is never needed.
            text = f"{_SHOW_CURSOR if sys.stderr.isatty() else ''}expunge: ended at once; {self._advice()}\n"
            os.write(2, text.encode())
            os._exit(128 + number)
        self.number = number
        if sys.stderr.isatty():
            os.write(2, b"\nexpunge: ends after this update; once more ends it at once\n")


@contextlib.contextmanager
def interruptible(out: str | Path) -> Iterator[Interruption]:
    """Inside the block the first SIGINT or SIGTERM is noted, and a second one ends the process at once.

    Args:
        out: the run folder.

    Raises:
        InterruptedRun: as the block did, with the exit code of the signal: 130 or 143.
    """
    found = Interruption(out)
    former = {number: signal.signal(number, found._note) for number in _SIGNALS}
    try:
        yield found
    except InterruptedRun as error:
        if found.number is not None:
            error.exit_code = 128 + found.number
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
