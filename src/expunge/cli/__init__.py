"""The command line."""

from expunge.cli._main import main

__all__ = ["main"]
