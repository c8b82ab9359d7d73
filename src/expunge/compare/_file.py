"""A comparison's YAML file, with the values of its placeholders put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from expunge.compare._names import check_known
from expunge.errors import UsageError

_PLACEHOLDER = re.compile(r"\$\{([^}]*)\}")


def read_file(path: str | Path) -> dict[str, Any]:
    """Read the mapping that a file holds, placeholders as they are.

    Raises:
        UsageError: the file is missing, no YAML, or no mapping.
    """
    try:
        values = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"file: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1})" if mark is not None else ""
        raise UsageError(f"file: {path} is no YAML{place}; accepted is a mapping such as those in recipes/") from None
    if not isinstance(values, dict):
        raise UsageError(f"file: {path} holds a {type(values).__name__}, accepted is a mapping")
    return values


def fill(values: Any, settings: Mapping[str, str]) -> Any:
    """Put values in the place of `${name}` in every text of a file.

    Args:
        values: what `read_file` gave.
        settings: value by name.

    Raises:
        UsageError: a placeholder has no value, or a value no placeholder.

    Example:
        >>> fill({"data": "${data}/tofu"}, {"data": "files"})
        {'data': 'files/tofu'}
    """
    used: set[str] = set()

    def put(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in settings:
            raise UsageError(f"set: ${{{name}}} has no value, accepted is --set {name}=VALUE")
        used.add(name)
        return settings[name]

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return _PLACEHOLDER.sub(put, value)
        if isinstance(value, dict):
            return {name: walk(one) for name, one in value.items()}
        return [walk(one) for one in value] if isinstance(value, list) else value

    filled = walk(values)
    for name in settings:
        check_known("set", name, used)
    return filled
