"""Make the table of limits in serving.md from the limits of a request."""

from __future__ import annotations

import ast
import inspect
from dataclasses import asdict
from pathlib import Path

import page_parts
from singletree.request_limits import RequestLimits

DOCS = Path(__file__).resolve().parent


def page() -> str:
    """Return the text of serving.md with the present table."""
    return page_parts.with_parts(DOCS / "serving.md", {"limits": table()})


def table() -> str:
    """Return a row for each limit: its name, its default, and what it limits."""
    defaults = asdict(RequestLimits())
    rows = [f"| `{name}` | {defaults[name]:,} | {meaning} |" for name, meaning in _meanings().items()]
    return "\n".join(["| limit | default | what it limits |", "| --- | ---: | --- |", *rows]) + "\n"


def _meanings() -> dict[str, str]:
    """Return the docstring of each field, which stands after it."""
    definition = ast.parse(inspect.getsource(RequestLimits)).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{field.target.id}: a limit needs a docstring"
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
