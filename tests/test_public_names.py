"""Each public name says what it is. ``docs/public-names.txt`` lists them: see ``test_docs_current``."""

from __future__ import annotations

import ast

from make_docs import definitions, public_modules


def _protocol_methods() -> set[str]:
    """Methods that a ``Protocol`` documents: a class that implements one need not say it again."""
    return {
        member.name
        for _, tree in public_modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Protocol" in {getattr(base, "id", "") for base in node.bases}
        for member in node.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(member)
    }


def test_every_public_class_and_function_has_a_docstring() -> None:
    said_elsewhere = _protocol_methods()
    bare = [
        name
        for module, tree in public_modules()
        for name, node in definitions(tree.body, module)
        if not ast.get_docstring(node)
        and not (name.count(".") > module.count(".") + 1 and node.name in said_elsewhere)
    ]
    assert bare == []


def test_every_public_module_has_a_docstring() -> None:
    bare = [module for module, tree in public_modules() if tree.body and not ast.get_docstring(tree)]
    assert bare == []
