"""The errors a user can cause or meet; the command line turns each into one line and an exit code."""


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
