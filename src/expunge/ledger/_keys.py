"""The two secrets of a ledger: the key that signs, and the secret under which texts are hashed."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from expunge.errors import RunError, UsageError

SIGNING, ROWS = "signing.pem", "rows.key"
_CHECK = b"expunge-ledger/1 secret"


@dataclass(frozen=True)
class Keys:
    """The keys of a ledger.

    Attributes:
        signing: private Ed25519 key.
        secret: 32 bytes, the HMAC key of the rows.
    """

    signing: Ed25519PrivateKey
    secret: bytes

    def __repr__(self) -> str:
        """Never the secrets."""
        return f"Keys(public={self.public})"

    @property
    def public(self) -> str:
        """The public key, 64 hexadecimal digits."""
        return self.signing.public_key().public_bytes_raw().hex()

    @property
    def secret_check(self) -> str:
        """Tells whether a secret is the ledger's, without telling it."""
        return hmac.new(self.secret, _CHECK, hashlib.sha256).hexdigest()

    @classmethod
    def create(cls, folder: Path) -> Keys:
        """Make both keys, readable by their owner only; those that are there already are taken.

        Raises:
            RunError: they cannot be written.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make(folder / SIGNING, lambda: _pem(Ed25519PrivateKey.generate()))
            _make(folder / ROWS, lambda: (secrets.token_hex(32) + "\n").encode())
        except OSError as error:
            raise RunError(f"keys: cannot write to {folder}: {error.strerror}") from None
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> Keys:
        """Read both keys.

        Raises:
            UsageError: one is missing, damaged, or readable by others.
        """
        pem, secret = _read(folder / SIGNING), _read(folder / ROWS)
        try:
            signing = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError):
            raise UsageError(f"keys: {folder / SIGNING} is no private key, accepted is the ledger's own") from None
        if not isinstance(signing, Ed25519PrivateKey):
            raise UsageError(f"keys: {folder / SIGNING} is another kind of key, accepted is Ed25519")
        try:
            value = bytes.fromhex(secret.decode("ascii").strip())
        except ValueError:
            value = b""
        if len(value) != 32:
            raise UsageError(f"keys: {folder / ROWS} is damaged, accepted is the ledger's own secret")
        return cls(signing, value)


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _make(path: Path, content: Callable[[], bytes]) -> None:
    """Write a file of the owner's, whole or not at all, unless it is there."""
    if path.exists():
        return
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content())
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if os.name == "posix" and mode & 0o077:
                raise UsageError(f"keys: {path} has mode {mode:04o}, accepted is 0600: others could read it")
            return file.read()
    except OSError as error:
        raise UsageError(f"keys: cannot read {path}: {error.strerror}") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock file, and hold it inside the block.

    Raises:
        RunError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise RunError(f"ledger: cannot write to {path.parent}: {error.strerror}") from None
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)  # which gives the lock back


def _lock(handle: int) -> None:
    if os.name == "posix":
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)
    else:
        import importlib

        windows = importlib.import_module("msvcrt")
        windows.locking(handle, windows.LK_LOCK, 1)
