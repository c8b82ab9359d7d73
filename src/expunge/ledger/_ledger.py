"""The ledger: an append-only file of signed lines, each tied to the one before."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from expunge._files import write_whole
from expunge.errors import RunError, UsageError
from expunge.ledger._entry import Entry
from expunge.ledger._keys import Keys, locked
from expunge.ledger._line import Problem, canonical, check_line, hash_of, make_line, parse_line, public_key_of
from expunge.ledger._rows import Match, commit, find

FILE, HEADER, ENTRY, VERSION = "ledger.jsonl", "expunge-ledger", "entry", 1


@dataclass(frozen=True)
class Verification:
    """What a check found.

    Attributes:
        problems: everything that is not as it was written; empty: all is.
        entries: requests in the ledger.
        head: hash of the last line; what a later `verify(head=...)` is given to see that no line was cut off.
        public_key: of the ledger, 64 hexadecimal digits.
    """

    problems: tuple[Problem, ...]
    entries: int
    head: str | None
    public_key: str | None

    @property
    def ok(self) -> bool:
        """Nothing was changed."""
        return not self.problems


class Ledger:
    """A list of requests that can only grow.

    The first line is a header with the public key. Each line is signed (Ed25519) and repeats the hash of the line
    before. The keys are made with the first entry, readable by their owner only. Whoever has the signing key could
    write a new ledger: a receipt or a head hash kept by someone else shows that.

    Args:
        path: the file, or a folder in which it is `ledger.jsonl`. It need not exist yet.
        keys: folder of the keys; None: beside the file, named after it (`ledger.keys`).

    Example:
        entry = entry_from_run("run", "ticket-17")
        line = Ledger("deletions").append(entry)
        assert Ledger("deletions").verify(head=line["hash"]).ok
    """

    def __init__(self, path: str | Path, *, keys: str | Path | None = None) -> None:
        given = Path(path).expanduser()
        self.path = given / FILE if given.is_dir() or not given.suffix else given
        self.keys_folder = Path(keys).expanduser() if keys is not None else self.path.with_suffix(".keys")

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, entry: Entry, *, at: datetime | None = None) -> dict[str, Any]:
        """Sign an entry and add it: wholly and on disk when this returns, or not at all. Processes wait for each other.

        Args:
            entry: the request.
            at: when, with a time zone; None: now.

        Returns:
            The line: fields, digests, hash, signature.

        Raises:
            UsageError: the ledger is damaged, or the keys are not its own; nothing was written.
            RunError: it cannot be written.
        """
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            former = self._bytes() if self.path.exists() else b""
            keys = self._keys(former)
            lines = self._sound(former, keys) if former else [_header(keys, _utc(at))]
            salt = secrets.token_hex(16)
            fields = entry.fields() | {
                "kind": ENTRY,
                "at": _utc(at),
                "number": len(lines),
                "ledger": lines[0]["hash"],
                "previous": lines[-1]["hash"],
                "rows": {"count": len(entry.rows), "salt": salt, "tags": commit(keys.secret, salt, entry.rows)},
            }
            line = make_line(fields, keys.signing)
            added = [line] if former else [*lines, line]
            self._replace(former + b"".join(canonical(one) + b"\n" for one in added))
        return line

    def _keys(self, former: bytes) -> Keys:
        # A ledger that exists has keys; new ones could not sign for it.
        return Keys.read(self.keys_folder) if former else Keys.create(self.keys_folder)

    def _sound(self, data: bytes, keys: Keys) -> list[dict[str, Any]]:
        """The lines, none of which was changed, of a ledger that has these keys."""
        lines, found = verify_bytes(data)
        if not found.ok:
            raise UsageError(f"ledger: {self.path}: {found.problems[0]}; nothing was added")
        header = lines[0]["fields"]
        if header["public_key"] != keys.public or header["secret_check"] != keys.secret_check:
            raise UsageError(f"keys: those in {self.keys_folder} are not the ones of {self.path}; nothing was added")
        return lines

    def _replace(self, data: bytes) -> None:
        try:
            write_whole(self.path, lambda aside: aside.write_bytes(data))
        except OSError as error:
            raise RunError(f"ledger: cannot write {self.path}: {error.strerror}") from None

    # -- reading -----------------------------------------------------------------------------------------------------

    def verify(
        self,
        *,
        head: str | None = None,
        public_key: str | None = None,
        receipts: Sequence[Mapping[str, Any]] = (),
    ) -> Verification:
        """Recompute every digest, hash and signature, and the chain.

        Args:
            head: hash of a line that is known to have been the last one; it must still be in the ledger. Shows that
                lines were cut off, which nothing in the file itself can.
            public_key: the key it must be signed with; None: the one in its header.
            receipts: what `receipt` gave; their entries must still be in the ledger.

        Raises:
            UsageError: there is no such file.
        """
        lines, found = verify_bytes(self._bytes(), public_key=public_key)
        problems = list(found.problems)
        hashes = [line.get("hash") for line in lines]
        if head is not None and head.strip().lower() not in hashes:
            problems.append(Problem(None, None, f"the line with hash {head[:16]}… is gone: lines were cut off"))
        for receipt in receipts:
            entry = receipt["entry"]
            if entry["hash"] not in hashes:
                name = entry["fields"].get("request")
                problems.append(Problem(None, None, f"the entry of the receipt for {name!r} is not in this ledger"))
        return Verification(tuple(problems), found.entries, found.head, found.public_key)

    def lines(self) -> list[dict[str, Any]]:
        """Header and entries of a ledger that is as it was written.

        Raises:
            UsageError: it is not there, or not as it was written.
        """
        lines, found = verify_bytes(self._bytes())
        if not found.ok:
            raise UsageError(f"ledger: {self.path}: {found.problems[0]}")
        return lines

    def entries(self) -> list[dict[str, Any]]:
        """The entries, oldest first; each has fields, digests, hash and signature."""
        return self.lines()[1:]

    def entry(self, request: str) -> dict[str, Any]:
        """The entry of a request, by its name or its number; the newest where a name was used again.

        Raises:
            UsageError: there is none.
        """
        entries = self.entries()
        for entry in reversed(entries):
            if request in (entry["fields"]["request"], str(entry["fields"]["number"])):
                return entry
        names = ", ".join(repr(entry["fields"]["request"]) for entry in entries[-5:])
        raise UsageError(f"request: found {request!r}, the ledger has {len(entries)}, the newest are {names}")

    def receipt(self, request: str, *, opened: Sequence[Match] = ()) -> dict[str, Any]:
        """What is handed over for a request: it is checked with the public key alone.

        Args:
            request: name or number.
            opened: matches of `prove` in this request; each opens one hash for whoever has the text.
        """
        entry = self.entry(request)
        number = entry["fields"]["number"]
        found = {"kind": "expunge-receipt", "version": VERSION, "header": self.lines()[0], "entry": entry}
        shown = [{"row": one.row, "part": one.part, "key": one.key} for one in opened if one.number == number]
        return found | ({"opened": shown} if shown else {})

    def prove(self, text: str, *, request: str | None = None) -> list[Match]:
        """Find a text, as a whole example or as an answer; needs the ledger's secret.

        Args:
            text: compared after Unicode and white-space normalisation.
            request: name or number; None: all requests.
        """
        keys = Keys.read(self.keys_folder)
        entries = self.entries() if request is None else [self.entry(request)]
        return [match for entry in entries for match in find(keys.secret, entry["fields"], text)]

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise UsageError(f"ledger: cannot read {self.path}: {error.strerror}, accepted is a ledger") from None


def verify_file(path: str | Path) -> Verification:
    """Check a ledger file by itself."""
    return Ledger(path).verify()


def verify_bytes(data: bytes, *, public_key: str | None = None) -> tuple[list[dict[str, Any]], Verification]:
    """Check the content of a ledger file.

    Returns:
        The lines whose form is right, and what was found.
    """
    problems: list[Problem] = []
    lines: list[dict[str, Any]] = []
    chain = _Chain(public_key)
    for number, raw in _split(data):
        line, wrong = parse_line(raw, number)
        problems += wrong
        if line is None:
            chain.broken()
        else:
            problems += chain.check(line, number)
            lines.append(line)
    if not data:
        problems.append(Problem(None, None, "the file is empty"))
    elif not data.endswith(b"\n"):
        problems.append(Problem(data.count(b"\n") + 1, None, "does not end with a new line: it was cut off"))
    problems.sort(key=lambda problem: problem.line or 0)
    head = lines[-1]["hash"] if lines else None
    return lines, Verification(tuple(problems), max(0, len(lines) - 1), head, chain.shown_key)


def _split(data: bytes) -> Iterator[tuple[int, bytes]]:
    parts = data.split(b"\n")
    yield from enumerate(parts[:-1] if parts[-1] == b"" else parts, start=1)


class _Chain:
    """Checks lines one after the other."""

    def __init__(self, expected_key: str | None) -> None:
        self.expected = None if expected_key is None else expected_key.strip().lower()
        self.key = None if self.expected is None else public_key_of(self.expected)
        self.shown_key = self.expected
        self.before: set[str] | None = None  # hash of the line before, as written and as computed; None: unknown
        self.ledger: set[str] | None = None
        if self.expected is not None and self.key is None:
            raise UsageError(f"public key: found {expected_key!r}, accepted are 64 hexadecimal digits")

    def broken(self) -> None:
        """A line could not be read."""
        self.before = None

    def check(self, line: dict[str, Any], number: int) -> list[Problem]:
        """Check a line and its place."""
        fields = line["fields"]
        problems = self._header(line) if number == 1 else []
        problems += check_line(line, number, self.key)
        if number > 1:
            known = {problem.field for problem in problems}
            expected = [("number", {number - 1}), ("previous", self.before), ("ledger", self.ledger), ("kind", {ENTRY})]
            problems += [
                Problem(number, name, f"{name} does not fit the line before: a line is missing, added or moved")
                for name, values in expected
                if values is not None and name not in known and not _one_of(fields.get(name), values)
            ]
        hashes = {line["hash"], hash_of(line["fields"])}
        self.before = hashes
        self.ledger = hashes if number == 1 else self.ledger
        return problems

    def _header(self, line: dict[str, Any]) -> list[Problem]:
        fields = line["fields"]
        problems = []
        if fields.get("kind") != HEADER or fields.get("version") != VERSION:
            problems.append(Problem(1, "kind", f"is no header of a ledger of version {VERSION}"))
        shown = fields.get("public_key")
        if self.expected is None:
            # A header whose key was changed would make every signature look wrong; its own digest tells already.
            whole = not check_line(line, 1, None)
            self.shown_key, self.key = (shown, public_key_of(shown)) if whole else (None, None)
            if whole and self.key is None:
                problems.append(Problem(1, "public_key", "public_key is no Ed25519 key"))
        elif shown != self.expected:
            problems.append(Problem(1, "public_key", "the ledger is of another key than the one given"))
        return problems


def _one_of(value: Any, values: set[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)


def _header(keys: Keys, at: str) -> dict[str, Any]:
    fields = {"kind": HEADER, "version": VERSION, "number": 0, "at": at}
    return make_line(fields | {"public_key": keys.public, "secret_check": keys.secret_check}, keys.signing)


def _utc(at: datetime | None) -> str:
    moment = datetime.now(UTC) if at is None else at
    if moment.tzinfo is None:
        raise ValueError(f"at: found {moment.isoformat()} without a time zone, accepted is one with it")
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
