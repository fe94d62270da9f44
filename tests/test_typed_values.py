"""Areas pass one another typed values: no module reads what another one put into a mapping under a name."""

from __future__ import annotations

import ast
from dataclasses import fields

import pytest

from singletree.conversation import PromptReport, Request
from singletree.request_options import CompletionOptions, RequestOptions, StoredStateOptions
from source import modules

OWNERS = {"protocols", "events"}
"""``extra`` belongs to the protocol that wrote it; a ``Fold`` records tokens in it for the encoders."""


def reads_of_extra(tree: ast.AST) -> list[str]:
    """The places that read or write a key of some ``.extra``, directly or through ``(x.extra or {})``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            inner: ast.AST | None = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inner = node.func.value
        elif isinstance(node, ast.Compare):
            inner = node.comparators[-1] if isinstance(node.ops[-1], ast.In | ast.NotIn) else None
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            inner = node.value
        else:
            continue
        if inner is not None and any(
            isinstance(each, ast.Attribute) and each.attr == "extra" for each in _operands(inner)
        ):
            found.append(ast.unparse(node))
    return found


def _operands(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.BoolOp):
        return [each for value in node.values for each in _operands(value)]
    return _operands(node.body) + _operands(node.orelse) if isinstance(node, ast.IfExp) else [node]


@pytest.mark.parametrize(
    "text",
    [
        "part.extra['id']",
        "(part.extra or {}).get('id')",
        "part.extra.get('id')",
        "'id' in turn.extra",
        "known = (tool.extra if tool else None) or {}",
    ],
)
def test_a_read_of_a_key_is_seen(text: str) -> None:
    assert reads_of_extra(ast.parse(text))


def test_only_protocols_read_what_is_in_an_extra() -> None:
    found = {
        module.name: reads
        for module in modules()
        if module.area not in OWNERS and (reads := reads_of_extra(module.tree))
    }
    assert not found


@pytest.mark.parametrize(
    "kind", [Request, PromptReport, RequestOptions, CompletionOptions, StoredStateOptions]
)
def test_a_request_has_no_untyped_mapping(kind: type) -> None:
    bags = ("dict[", "Mapping[", "Extra", "Any")
    found = [(f.name, str(f.type)) for f in fields(kind) if str(f.type).startswith(bags)]
    assert not [name for name, type in found if type != "Mapping[str, Picture]"]
