"""Public names: they are documented, few are promised, and no two modules define the same one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module

import pytest

from make_docs import PROMISED, definitions, exported, public_modules, public_names

MOST_PROMISED = 80
"""How many names programs may rely on: each one is a thing that cannot change freely."""

_PROTOCOL = "the interface of a protocol module, which server.turn.protocol declares"
_NOTATION = "the interface of a notation of arguments, which parsing.arguments describes"
_COMMAND = "the command has the name of what it runs"
SHARED: dict[str, str] = {
    "Encoder": _PROTOCOL,
    "decode": _PROTOCOL,
    "encode": _PROTOCOL,
    "encode_count": _PROTOCOL,
    "encode_error": _PROTOCOL,
    "compile_arguments": _NOTATION,
    "parse": _COMMAND,
    "main": "the entry point of a process",
}
"""Names that several modules define on purpose, and why. Any other name has one definition."""


def test_public_names_have_docstrings() -> None:
    """Classes and functions have one; of methods, those of promised classes: the signatures of others say enough."""
    promised = set(public_names().split())
    bare = [
        name
        for module, tree in public_modules()
        for name, node in definitions(tree.body, module)
        if not ast.get_docstring(node)
        and (name.rpartition(".")[0] == module or name.rpartition(".")[0] in promised)
    ]
    assert bare == []


def test_every_public_module_has_a_docstring() -> None:
    bare = [module for module, tree in public_modules() if tree.body and not ast.get_docstring(tree)]
    assert bare == []


def test_few_names_are_promised() -> None:
    assert len(public_names().splitlines()) <= MOST_PROMISED


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_exist(module: str) -> None:
    names = exported(dict(public_modules())[module])
    assert names
    assert [name for name in names if not hasattr(import_module(module), name)] == []


def _top_level(tree: ast.Module) -> Iterator[str]:
    """Yield the public names of classes, functions and type aliases that a module defines."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()) if _is_type(
                name
            ):
                yield name


def _is_type(name: str) -> bool:
    """Whether a name has the form of a type: CamelCase, of more than one letter."""
    return name[:1].isupper() and not name.isupper()


def test_names_have_one_definition() -> None:
    modules: dict[str, list[str]] = {}
    for module, tree in public_modules():
        for name in _top_level(tree):
            if not name.startswith("_"):
                modules.setdefault(name, []).append(module)
    several = {name: found for name, found in modules.items() if len(found) > 1}
    assert {name: found for name, found in several.items() if name not in SHARED} == {}
    assert SHARED.keys() - several.keys() == set(), "defined once now: take these out of the lists"
