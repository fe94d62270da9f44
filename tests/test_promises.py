"""Every promise in docs/stability.md names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stability_promises import PROMISES

TESTS = Path(__file__).parent


@pytest.mark.parametrize("test", sorted({test for promise in PROMISES for test in promise.tests}))
def test_a_promise_names_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
