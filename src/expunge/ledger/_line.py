"""One line of a ledger: fields, a digest of each, a hash over the digests, and a signature over the hash.

A line is written in one way only (keys sorted, no spaces, ASCII), so every byte of it counts. The digests tell *which*
field was changed; the hash, which each next line repeats, ties the lines together; the signature ties them to a key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_HASHED, _SIGNED = b"expunge-ledger/1 hash\n", b"expunge-ledger/1 signature\n"
_PARTS = ("digests", "fields", "hash", "signature")


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written.

    Attributes:
        line: counted from 1; None: of the whole file.
        field: name of the field, "hash", "signature", or None where none can be named.
        text: one sentence for a person.
    """

    line: int | None
    field: str | None
    text: str

    def __str__(self) -> str:
        """The sentence with its place."""
        return self.text if self.line is None else f"line {self.line}: {self.text}"


def canonical(value: Any) -> bytes:
    """The one way in which a JSON value is written.

    Raises:
        ValueError: it holds a number that JSON has not (NaN, infinity).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value, 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def hash_of(fields: dict[str, Any]) -> str:
    """The hash of a line: SHA-256 over the digests of its fields."""
    digests = {name: digest_of(value) for name, value in fields.items()}
    return hashlib.sha256(_HASHED + canonical(digests)).hexdigest()


def make_line(fields: dict[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """Digest, hash and sign the fields of a line."""
    found = hash_of(fields)
    return {
        "fields": fields,
        "digests": {name: digest_of(value) for name, value in fields.items()},
        "hash": found,
        "signature": key.sign(_SIGNED + bytes.fromhex(found)).hex(),
    }


def parse_line(data: bytes, number: int) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Read a line, and say what is wrong with its form.

    Args:
        data: without the end of line.
        number: of the line, counted from 1.
    """
    try:
        line = json.loads(data.decode("ascii"))
    except UnicodeDecodeError as error:
        return None, [Problem(number, None, f"byte {error.start + 1} is no ASCII")]
    except json.JSONDecodeError as error:
        return None, [Problem(number, None, f"is no JSON at byte {error.pos + 1}: {error.msg}")]
    except (ValueError, RecursionError):
        return None, [Problem(number, None, "is no JSON")]
    problem = _form(line, number)
    if problem:
        return None, [problem]
    try:
        same = canonical(line) == data
    except ValueError:
        same = False
    return line, [] if same else [Problem(number, None, "is not written as a ledger writes it (spaces, order, digits)")]


def _form(line: Any, number: int) -> Problem | None:
    if not isinstance(line, dict):
        return Problem(number, None, "is no line of a ledger")
    for name in sorted({*line, *_PARTS}):
        if name not in line:
            return Problem(number, name, f"{name} is missing")
        if name not in _PARTS:
            return Problem(number, name, f"{name!r} is no part of a line")
        kind = dict if name in ("fields", "digests") else str
        if not isinstance(line[name], kind):
            return Problem(number, name, f"{name} is of the wrong type")
    return None


def check_line(line: dict[str, Any], number: int, key: Ed25519PublicKey | None) -> list[Problem]:
    """Recompute digests, hash and signature of a line, and name what does not fit.

    Args:
        line: of the right form.
        number: of the line, counted from 1.
        key: public key of the ledger; None: signatures are not checked.
    """
    fields, digests = line["fields"], line["digests"]
    problems = [
        Problem(number, name, f"field {name!r} {'has no digest' if name in fields else 'is missing'}")
        for name in sorted(set(fields) ^ set(digests))
    ]
    found = hash_of(fields)
    whose = "the digest of field" if found == line["hash"] else "field"
    problems += [
        Problem(number, name, f"{whose} {name!r} was changed")
        for name in sorted(set(fields) & set(digests))
        if digest_of(fields[name]) != digests[name]
    ]
    if found != line["hash"] and not problems:
        problems.append(Problem(number, "hash", "the hash was changed, or fields together with their digests"))
    # The hash as written is tried where the fields do not give it: a changed field is no reason to doubt the signature.
    if key is not None and not any(_signed(key, value, line["signature"]) for value in {found, line["hash"]}):
        problems.append(Problem(number, "signature", "the signature does not fit: it was changed, or of another key"))
    return problems


def _signed(key: Ed25519PublicKey, value: str, signature: str) -> bool:
    try:
        raw = bytes.fromhex(signature)
        if raw.hex() != signature:  # upper case and spaces are read too, but never written
            return False
        key.verify(raw, _SIGNED + bytes.fromhex(value))
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key_of(text: Any) -> Ed25519PublicKey | None:
    """A public key from its 64 hexadecimal digits; None where it is none."""
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    except (TypeError, ValueError):
        return None
