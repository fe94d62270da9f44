"""What the syntax tree of a chat template tells about its loops: which can be entered in the middle."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from jinja2 import nodes

_IMPURE = frozenset({"strftime_now", "joiner", "cycler", "lipsum"})
"""Functions whose result differs at another time, or from one iteration to the next."""

_UNTRACKED_NODES = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


def is_pure(tree: nodes.Template) -> bool:
    """Return whether a template prints the same for the same messages and variables at any time."""
    return not _is_impure(tree, _IMPURE) and not any(True for _ in tree.find_all(_UNTRACKED_NODES))


def can_be_tracked(tree: nodes.Template) -> bool:
    """Return whether the loops of a template depend on nothing that is not tracked (``incremental_render``)."""
    impure = set(_IMPURE)
    macros = list(tree.find_all(nodes.Macro))
    for _ in macros:  # a macro may call one that is defined later
        impure.update(macro.name for macro in macros if _is_impure(macro, impure))
    return (
        not any(_is_impure(loop, impure) for loop in tree.find_all(nodes.For))
        and not any(True for _ in tree.find_all(_UNTRACKED_NODES))
        and _names_its_namespaces(tree)
    )


def _is_impure(outer: nodes.Node, impure: Collection[str]) -> bool:
    return (
        any(name.name in impure for name in outer.find_all(nodes.Name))
        or any(called.name == "random" for called in outer.find_all(nodes.Filter))
        or any(got.attr == "changed" for got in outer.find_all(nodes.Getattr))
    )


def _names_its_namespaces(tree: nodes.Template) -> bool:
    """Return whether every namespace that is changed is used by the name under which it was made."""
    made: set[str] = set()
    other: set[str] = set()
    for assign in tree.find_all((nodes.Assign, nodes.AssignBlock, nodes.For)):
        names = {name.name for name in _names_in(assign.target)}  # type: ignore[attr-defined]
        is_new = isinstance(assign, nodes.Assign) and _makes_namespace(assign.node)
        (made if is_new else other).update(names)
    other.update(name.name for macro in tree.find_all(nodes.Macro) for name in macro.args)
    return all(ref.name in made - other for ref in tree.find_all(nodes.NSRef))


def _names_in(target: nodes.Node) -> Iterator[nodes.Name]:
    yield from [target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name)


def _makes_namespace(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"
    )


def top_loops(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    """Yield the loops of a template that are in no other loop."""
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            for branch in (node.body, *(other.body for other in node.elif_), node.else_):
                yield from top_loops(branch)
