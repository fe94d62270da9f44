"""The project's own source, read without importing it: what the structure tests look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "singletree"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A module of ours: its dotted name, where it lies, and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The dotted name that its relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def area(self) -> str:
        """The part of the house it belongs to: ``parsing``, ``protocols``, ``events``, ``cli`` …"""
        return area(self.name)


def area(name: str) -> str:
    """The part of the house that the module ``name`` belongs to; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def parsed(path: Path, root: Path) -> Module:
    """The module at ``path``, called by the name by which it is imported when ``root`` is searched."""
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(path.read_text(encoding="utf-8"), path.name))


@cache
def modules() -> tuple[Module, ...]:
    """Every module below ``src/singletree``, by name."""
    return tuple(parsed(path, SOURCE) for path in sorted(PACKAGE.rglob("*.py")))


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, at any depth, ``if TYPE_CHECKING`` and lazy ones included."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.package.split(".")
            start = above[: len(above) - node.level + 1] if node.level else []
            target = ".".join([*start, *([node.module] if node.module else [])])
            # `from singletree import events` imports a module, `from singletree.events import Fold` a name.
            ours = target == "singletree"
            yield from ((node.lineno, f"{target}.{name.name}" if ours else target) for name in node.names)


def tracked_python() -> list[Path]:
    """Every Python file of the project: source, tests, benchmarks and scripts."""
    folders = ("src", "tests", "benchmarks", "docs")
    return sorted(
        p for folder in folders for p in (ROOT / folder).rglob("*.py") if "node_modules" not in p.parts
    )
