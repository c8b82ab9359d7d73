"""The signed, append-only list of deletion requests, its receipts and proofs. Knows saved runs, not models."""

from expunge.ledger._entry import Entry, entry_from_run
from expunge.ledger._keys import Keys
from expunge.ledger._ledger import Ledger, Verification, verify_file
from expunge.ledger._line import Problem
from expunge.ledger._receipt import is_receipt, read_receipt, verify_receipt
from expunge.ledger._rows import Match

__all__ = [
    "Entry",
    "Keys",
    "Ledger",
    "Match",
    "Problem",
    "Verification",
    "entry_from_run",
    "is_receipt",
    "read_receipt",
    "verify_file",
    "verify_receipt",
]
