"""Unknown names, answered with the closest known one."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any

from expunge.errors import UsageError
from expunge.train import option_types

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_LISTED = 10


def check_known(where: str, found: object, accepted: Collection[str]) -> None:
    """Refuse a name that is not among the accepted ones.

    Raises:
        UsageError: names the closest one; lists them all where they are few.
    """
    if found in accepted:
        return
    close = difflib.get_close_matches(str(found), list(accepted), n=1, cutoff=0.0)
    told = [f"closest is {close[0]!r}"] if close else []
    if len(accepted) <= _LISTED:
        told.append(f"accepted {'are' if len(accepted) > 1 else 'is'} {', '.join(accepted) or 'none'}")
    raise UsageError(f"{where}: found {found!r}, {'; '.join(told)}")


def check_name(where: str, found: object) -> str:
    """Return a name that can be a folder's.

    Raises:
        UsageError: it has other characters than letters, digits and `._+-`, or begins with one of these.
    """
    if not isinstance(found, str) or _NAME.fullmatch(found) is None:
        raise UsageError(f"{where}: found {found!r}, accepted is a name of letters, digits and . _ + -")
    return found


def mapping(where: str, found: object, accepted: Collection[str] | None = None) -> dict[str, Any]:
    """Return a mapping with known names.

    Args:
        where: what the message calls it.
        found: the value.
        accepted: the names; None: any.

    Raises:
        UsageError: it is no mapping, or has an unknown name.
    """
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{where}: found {found!r}, accepted is a mapping of names to values")
    for name in found if accepted is not None else ():
        check_known(where, name, accepted or ())
    return dict(found)


def text(where: str, found: object) -> str:
    """Return a text that is not empty.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(found, str) or not found:
        raise UsageError(f"{where}: found {found!r}, accepted is a text")
    return found


def items(where: str, found: object) -> list[Any]:
    """Return a list that is not empty.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(found, list) or not found:
        raise UsageError(f"{where}: found {found!r}, accepted is a list")
    return found


def typed(where: str, value: Any, hint: Any) -> Any:
    """Return a value as the type of its field.

    Args:
        where: what the message calls it.
        value: as YAML gives it.
        hint: of the field: a plain type, a union, a tuple of texts or whole numbers, or a mapping to texts.

    Raises:
        UsageError: it is of another type.
    """
    members = option_types(hint)
    if typing.get_origin(hint) is tuple:
        member = typing.get_args(hint)[0]
        return tuple(typed(where, one, member) for one in items(where, value))
    if typing.get_origin(hint) is not None and not isinstance(value, str):
        rows = mapping(where, value)
        return {name: text(f"{where}: {name}", one) for name, one in rows.items()}
    number = float(value) if float in members and type(value) in (int, float) else value
    if type(number) not in members:
        names = {str: "a text", int: "a whole number", float: "a number", type(None): "none"}
        raise UsageError(f"{where}: found {value!r}, accepted is {' or '.join(names.get(m, '?') for m in members)}")
    return number
