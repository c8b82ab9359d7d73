"""A receipt: one entry with the ledger's header, checked without the ledger and without its secrets."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expunge.errors import UsageError
from expunge.ledger._ledger import ENTRY, HEADER, VERSION, Verification
from expunge.ledger._line import Problem, check_line, parse_line, public_key_of
from expunge.ledger._rows import normalised, tag_of

_KIND = "expunge-receipt"
_NAMES = {"kind", "version", "header", "entry", "opened"}


def is_receipt(path: str | Path) -> bool:
    """Whether a file is a receipt rather than a ledger."""
    try:
        values = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("kind") == _KIND


def read_receipt(path: str | Path) -> dict[str, Any]:
    """Read a receipt.

    Raises:
        UsageError: it is none.
    """
    try:
        values = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"receipt: cannot read {path}: {error.strerror}") from None
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.get("kind") != _KIND or values.get("version") != VERSION:
        raise UsageError(
            f"receipt: {path} is none of version {VERSION}, accepted is what `expunge ledger export` wrote"
        )
    return values


def verify_receipt(
    receipt: Mapping[str, Any], *, public_key: str | None = None, text: str | None = None
) -> Verification:
    """Check a receipt. Needs neither the ledger nor a secret.

    Args:
        receipt: what `Ledger.receipt` or `read_receipt` gave.
        public_key: the key it must be signed with; None: the one it names, which proves only that it is consistent.
        text: must be what the receipt's opened hash is of.

    Returns:
        The problems; lines are counted as 1 for the header and 2 for the entry.
    """
    problems = [Problem(None, name, f"{name!r} is no part of a receipt") for name in sorted({*receipt} - _NAMES)]
    parts: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(("header", "entry"), start=1):
        line, wrong = parse_line(_again(receipt.get(name)), number)
        problems += wrong
        if line is not None:
            parts[name] = line
    if len(parts) < 2:
        return Verification(tuple(problems), 0, None, None)
    header, entry = parts["header"], parts["entry"]
    shown = header["fields"].get("public_key")
    wanted = shown if public_key is None else public_key.strip().lower()
    key = public_key_of(wanted)
    if key is None:
        problems.append(Problem(1, "public_key", "public_key is no Ed25519 key"))
    elif shown != wanted:
        problems.append(Problem(1, "public_key", "the receipt is of another key than the one given"))
    problems += check_line(header, 1, key) + check_line(entry, 2, key)
    if header["fields"].get("kind") != HEADER or entry["fields"].get("kind") != ENTRY:
        problems.append(Problem(None, "kind", "header and entry are not what they should be"))
    if entry["fields"].get("ledger") != header["hash"]:
        problems.append(Problem(2, "ledger", "the entry is of another ledger than the header"))
    problems += _opened(receipt.get("opened"), entry["fields"], text)
    return Verification(tuple(problems), 1, entry["hash"], shown)


def _again(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _opened(opened: Any, fields: Mapping[str, Any], text: str | None) -> list[Problem]:
    """Whether the text is what an opened hash is of."""
    if text is None:
        return []
    if not isinstance(opened, list) or not opened:
        return [Problem(None, "opened", "the receipt opens no hash: the owner of the ledger makes one that does")]
    wanted = normalised(text)
    for one in opened:
        try:
            tag = fields["rows"]["tags"][one["row"]][one["part"]]
            if hmac.compare_digest(tag_of(bytes.fromhex(one["key"]), wanted), tag):
                return []
        except (KeyError, IndexError, TypeError, ValueError):
            continue
    return [Problem(None, "opened", "the text is not the one whose hash the receipt opens")]
