"""Modules and functions stay small, and names say something."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from source import PACKAGE, ROOT, Function, tracked_python

MODULE_LINES = 400
FUNCTION_LINES = 80
SAYS_NOTHING = {"util", "common", "base", "manager", "handler", "helper"}

FILES = tracked_python()
IDS = [str(path.relative_to(ROOT)) for path in FILES]


def words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in the singular: ``ToolHelpers`` -> tool, helper."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return {word.lower().removesuffix("s") for word in found}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), path.name)


def test_there_is_something_to_measure() -> None:
    assert any(PACKAGE in path.parents for path in FILES)


def test_words() -> None:
    assert words("ToolHelpers") == {"tool", "helper"}
    assert words("http_utils") == {"http", "util"}
    assert words("SSEManager") == {"sse", "manager"}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_module_is_short(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") + 1 <= MODULE_LINES


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_functions_are_short(path: Path) -> None:
    lengths = {
        f"{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree(path))
        if isinstance(node, Function)
    }
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_names_say_something(path: Path) -> None:
    classes = [node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    named = [*path.relative_to(ROOT).with_suffix("").parts, *classes]
    assert {name for name in named if words(name) & SAYS_NOTHING} == set()
