"""Regular expressions mean the same on every version of Python that is supported."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from source import PACKAGE

_PARSER: Any = vars(re)["_parser"]
_GROUPS = ("SUBPATTERN", "BRANCH")


def possessive_groups(parsed: Any) -> Iterator[Any]:
    """The groups that are repeated possessively, as in ``(ab|c)*+``."""
    for operation, argument in parsed:
        if str(operation) == "POSSESSIVE_REPEAT":
            repeated = argument[2]
            if len(repeated) > 1 or str(repeated[0][0]) in _GROUPS:
                yield repeated
        for inner in argument if isinstance(argument, tuple | list) else [argument]:
            for each in inner if isinstance(inner, list) else [inner]:
                if isinstance(each, _PARSER.SubPattern):
                    yield from possessive_groups(each)


def is_wrong_before_3_11_5(expression: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            return any(possessive_groups(_PARSER.parse(expression)))
    except (re.error, OverflowError):
        return False  # It is no expression.


@pytest.mark.parametrize(
    ("expression", "is_wrong"),
    [
        (r'"(?:[^"\\]++|\\.)*+"', True),
        (r"(?:[eE][+-]?[0-9]++)?+", True),
        (r"a|(?=x(?:bc)*+)", True),
        (r'"(?>(?:[^"\\]++|\\.)*)"', False),
        (r"\s*+x[0-9]++", False),
    ],
)
def test_a_possessive_group_is_found(expression: str, is_wrong: bool) -> None:
    assert is_wrong_before_3_11_5(expression) is is_wrong


def test_no_group_is_repeated_possessively() -> None:
    """Python 3.11.0 to 3.11.4 match a part of such a group (https://github.com/python/cpython/issues/106052).

    An atomic group, ``(?>(?:…)*)``, means the same and is matched rightly.
    """
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and is_wrong_before_3_11_5(node.value)
    ]
    assert found == []
