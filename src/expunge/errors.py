"""The errors a user can cause or meet; the command line turns each into one line and an exit code."""

import difflib
from collections.abc import Iterable


class ExpungeError(Exception):
    """Base of all errors with a one-line message meant for the user.

    Attributes:
        exit_code: what the command line exits with.
    """

    exit_code: int = 1


class UsageError(ExpungeError, ValueError):
    """The input or an option is wrong: the message names it, says what was found and what is accepted."""

    exit_code = 2


class RunError(ExpungeError, RuntimeError):
    """The work failed after the input was accepted (disk full, non-finite loss, failed verification)."""

    exit_code = 1


def did_you_mean(found: object, accepted: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that it was probably meant to be.

    Args:
        found: what was given.
        accepted: the known names.

    Returns:
        "; did you mean NAME?", or nothing where no name is close.

    Example:
        >>> did_you_mean("learning-rate", ["lr", "rho"]), did_you_mean("Max_Length", ["max-length", "rho"])
        ('', '; did you mean max-length?')
    """
    names = {_plain(name): name for name in accepted}
    close = difflib.get_close_matches(_plain(str(found)), names, n=1, cutoff=0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
