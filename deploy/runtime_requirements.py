"""Print the part of requirements.lock that a container needs, with its hashes.

``python deploy/runtime_requirements.py`` prints what the extra ``all`` needs; with names of distributions, what those
need. It reads the comments of the lock file ("via"), so that nothing is resolved again.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN = "singletree"


def normalized(name: str) -> str:
    """Return the name of a distribution, as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted_names() -> set[str]:
    """Return the distributions that the extra ``all`` names in pyproject.toml, by the extras that it includes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    included = re.findall(r"[a-z]+", extras["all"][0].partition("[")[2])
    lines = [*project["dependencies"], *(line for extra in included for line in extras[extra])]
    return {normalized(found.group()) for line in lines if (found := _NAME.match(line))}


def locked(text: str) -> Iterator[tuple[str, str, set[str]]]:
    """Yield the name, the lines and the dependents of each distribution in the lock file."""
    for block in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE):
        if found := _NAME.match(block):
            lines = block.splitlines()
            comments = " ".join(
                line.strip().removeprefix("#") for line in lines if line.lstrip().startswith("#")
            )
            dependents = {normalized(word) for word in _NAME.findall(comments.replace("via", " ", 1))}
            kept = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
            yield normalized(found.group()), kept, dependents - {_OWN}


def chosen(text: str, names: Iterable[str]) -> str:
    """Return the lines of the lock file for ``names`` and all that they need.

    Raises:
        SystemExit: the lock file lacks one of the names.
    """
    entries = {name: (lines, dependents) for name, lines, dependents in locked(text)}
    if missing := sorted(set(names) - set(entries)):
        raise SystemExit(f"requirements.lock lacks {', '.join(missing)}: run `make lock`")
    found, grew = set(names), True
    while grew:
        more = {name for name, (_, dependents) in entries.items() if dependents & found} - found
        found, grew = found | more, bool(more)
    return "\n".join(entries[name][0] for name in sorted(found))


if __name__ == "__main__":
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    print(chosen(lock, set(map(normalized, sys.argv[1:])) or wanted_names()))
