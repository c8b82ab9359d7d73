"""Files that are whole or not there, also after a power cut; and what may be said of where they lie."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, to the disk, and give it its name: a reader sees the former file or this one.

    Args:
        target: the file; its folder exists. A link is followed; an existing file keeps its rights.
        write: writes the file at the path it is given.

    Raises:
        OSError: it cannot be written; the former file is as it was. Other errors of `write` pass through, too.
    """
    target = target.resolve()
    aside = target.with_name(f".{target.name}.part")
    try:
        write(aside)
        if target.exists():
            aside.chmod(stat.S_IMODE(target.stat().st_mode))
        sync(aside)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or, for a folder, the names in it.

    Raises:
        OSError: the disk reports an error.
    """
    if path.is_dir() and os.name != "posix":  # only there can a folder be opened
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_hub_id(name: str) -> bool:
    """Whether a model's name is `owner/name` on a hub, not a folder."""
    return name.count("/") == 1 and name[0] not in "./~" and not name.endswith("/") and not Path(name).exists()


def shown_model(name: str) -> str:
    """A model's name for records that are handed over: a hub id as it is, of a folder its last part.

    Example:
        >>> shown_model("owner/model"), shown_model("/home/me/model")
        ('owner/model', 'model')
    """
    return name if is_hub_id(name) else Path(name).name or name
