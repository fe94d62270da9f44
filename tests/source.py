"""Read the project's own source without importing it, for the tests of its structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "singletree"

DOORS = {
    "budgets",
    "checking",
    "constraints",
    "drafting",
    "foresight",
    "in_process",
    "inspector",
    "key_files",
    "llamacpp",
    "media",
    "model_files",
    "openapi",
    "prefix_breaks",
    "processes",
    "raw_tokens",
    "ray",
    "records",
    "remote",
    "routing",
    "session_forks",
    "stored_responses",
    "testing",
    "training",
    "turn_stores",
    "websockets",
}
"""Packages and modules that the core does not import: ``server.doors`` loads them when a setting asks for one."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A module of the project: its dotted name, its path and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package from which its relative imports start."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def area(self) -> str:
        """The area that it belongs to: ``parsing``, ``protocols``, ``events``, ``cli`` …"""
        return area(self.name)


def area(name: str) -> str:
    """Return the area of the module ``name``: the part after ``singletree``; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def room(name: str) -> str:
    """Return the folder or module inside its area that the module ``name`` belongs to; empty for an area itself."""
    return name.split(".")[2] if name.count(".") > 1 else ""


@cache
def parsed(path: Path, root: Path) -> Module:
    """Return the module at ``path``, under the name by which it is imported when ``root`` is on the path."""
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(path.read_text(encoding="utf-8"), path.name))


@cache
def modules() -> tuple[Module, ...]:
    """Return every module below ``src/singletree``, in the order of their paths."""
    return tuple(parsed(path, SOURCE) for path in sorted(PACKAGE.rglob("*.py")))


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield every statement, those inside others too. Nine nodes of ten are expressions, which hold none."""
    left: list[ast.AST] = [tree]
    for node in left:
        if isinstance(node, ast.stmt):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, field, ())


@cache
def imports(module: Module) -> tuple[tuple[int, str], ...]:
    """Return (line, dotted name of the module) of each import at any depth, also lazy and ``TYPE_CHECKING`` ones."""
    return tuple(_find_imports(module))


def _find_imports(module: Module) -> Iterator[tuple[int, str]]:
    for node in statements(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.package.split(".")
            start = above[: len(above) - node.level + 1] if node.level else []
            target = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, _imported(target, name.name)) for name in node.names)


def _imported(package: str, name: str) -> str:
    """Return the module that ``from package import name`` imports: ``package``, or its submodule ``name``."""
    inner = SOURCE.joinpath(*package.split("."), name)
    ours = package.partition(".")[0] == PACKAGE.name
    is_module = ours and (inner.with_suffix(".py").is_file() or (inner / "__init__.py").is_file())
    return f"{package}.{name}" if is_module or package == PACKAGE.name else package


def tracked_python() -> list[Path]:
    """Return every Python file of the project: source, tests, benchmarks and scripts."""
    folders = ("src", "tests", "benchmarks", "docs")
    return sorted(
        p for folder in folders for p in (ROOT / folder).rglob("*.py") if "node_modules" not in p.parts
    )
