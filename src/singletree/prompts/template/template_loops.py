"""What the syntax tree of a chat template tells about its loops, and the loops that search the messages backwards.

``can_be_tracked`` tells whether loops can be entered in the middle (``incremental_render``).

Qwen's templates look for the last question of the user: in an agent's long turn that is far from the end, and the whole
conversation would be searched for each prompt.

    {% for message in messages[::-1] %}
        {% set index = (messages|length - 1) - loop.index0 %}
        {% if ns.searches and message.role == "user" and … %}
            {% set ns.searches = false %}
            {% set ns.last_query_index = index %}
        {% endif %}
    {% endfor %}

``search_flag`` recognises such a loop: it prints nothing, a namespace's flag tells whether the search goes on, nothing
is changed unless the flag is cleared with it, and whether that happens depends on the message alone. So the search ends
with the first message found, and messages that an earlier search did not find are not looked at again
(``BackwardSearch``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from jinja2 import nodes
from jinja2.runtime import LoopContext

_IMPURE = frozenset({"strftime_now", "joiner", "cycler", "lipsum"})
"""Functions whose result differs at another time, or from one iteration to the next."""

_UNTRACKED_NODES = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


def nodes_below(node: nodes.Node) -> list[nodes.Node]:
    """Return all nodes below ``node``, each before those below it.

    As ``find_all`` of jinja2, which takes four times as long: a template is searched a dozen times when it is loaded.
    """
    found: list[nodes.Node] = []
    _collect(node, found)
    return found


def _collect(node: nodes.Node, found: list[nodes.Node]) -> None:
    for name in node.fields:
        value = getattr(node, name, None)
        for each in value if type(value) is list else (value,):
            if isinstance(each, nodes.Node):
                found.append(each)
                _collect(each, found)


def method_calls(below: Iterable[nodes.Node]) -> Iterator[tuple[str, nodes.Call]]:
    """Yield the calls of methods among ``below``, each with the method's name."""
    for each in below:
        if isinstance(each, nodes.Call) and isinstance(each.node, nodes.Getattr):
            yield each.node.attr, each


def is_pure(tree: nodes.Template) -> bool:
    """Return whether a template prints the same for the same messages and variables at any time."""
    below = nodes_below(tree)
    return not _is_impure(below, _IMPURE) and not any(isinstance(each, _UNTRACKED_NODES) for each in below)


def can_be_tracked(tree: nodes.Template) -> bool:
    """Return whether the loops of a template depend on nothing that is not tracked (``incremental_render``)."""
    impure = set(_IMPURE)
    below = nodes_below(tree)
    macros = {each.name: nodes_below(each) for each in below if isinstance(each, nodes.Macro)}
    for _ in macros:  # a macro may call one that is defined later
        impure.update(name for name, inner in macros.items() if _is_impure(inner, impure))
    loops = (nodes_below(each) for each in below if isinstance(each, nodes.For))
    return (
        not any(isinstance(each, _UNTRACKED_NODES) for each in below)
        and _names_its_namespaces(below)
        and not any(_is_impure(inner, impure) for inner in loops)
    )


def _is_impure(below: Iterable[nodes.Node], impure: Collection[str]) -> bool:
    return any(
        each.name in impure
        if isinstance(each, nodes.Name)
        else each.name == "random"
        if isinstance(each, nodes.Filter)
        else isinstance(each, nodes.Getattr) and each.attr == "changed"
        for each in below
    )


def _names_its_namespaces(below: Sequence[nodes.Node]) -> bool:
    """Return whether every namespace that is changed is used by the name under which it was made."""
    made: set[str] = set()
    other: set[str] = set()
    for assign in below:
        if not isinstance(assign, nodes.Assign | nodes.AssignBlock | nodes.For):
            continue
        names = {
            each.name for each in (assign.target, *nodes_below(assign.target)) if isinstance(each, nodes.Name)
        }
        is_new = isinstance(assign, nodes.Assign) and _makes_namespace(assign.node)
        (made if is_new else other).update(names)
    other.update(name.name for macro in below if isinstance(macro, nodes.Macro) for name in macro.args)
    return all(ref.name in made - other for ref in below if isinstance(ref, nodes.NSRef))


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


MESSAGES = "messages"
"""The name of the variable that is searched."""

_BACKWARDS = tuple(
    nodes.Getitem(nodes.Name(MESSAGES, "load"), nodes.Slice(None, None, step), "load")
    for step in (nodes.Const(-1), nodes.Neg(nodes.Const(1)))
)
_PLACES = frozenset({"index", "index0"})
"""The attributes of ``loop`` that such a loop may use; all others depend on which messages were looked at."""
_PURE = (
    *(nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.CondExpr, nodes.Test, nodes.Filter),
    *(nodes.Const, nodes.List, nodes.Tuple, nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Slice),
    *(nodes.Call, nodes.Keyword, nodes.Add, nodes.Sub, nodes.Neg),
)
"""The nodes of an expression whose value depends on the names in it, unless a macro is called."""


def search_flag(loop: nodes.For) -> tuple[str, str] | None:
    """Return the namespace and the attribute that end ``loop`` as a search; None if it is another kind of loop."""
    if loop.iter not in _BACKWARDS or not isinstance(loop.target, nodes.Name) or loop.else_:
        return None
    *before, last = loop.body or [loop]
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return None
    flag = last.test
    while isinstance(flag, nodes.And):
        flag = flag.left
    if not isinstance(flag, nodes.Getattr) or not isinstance(flag.node, nodes.Name):
        return None
    found = flag.node.name, flag.attr
    places = {"loop", MESSAGES}
    for assign in before:
        if not isinstance(assign, nodes.Assign) or not isinstance(assign.target, nodes.Name):
            return None
        if not _counts_places(assign.node):
            return None
        places.add(assign.target.name)
    names = {loop.target.name}
    is_search = _depends_on(last.test, names, found) and _only_ends(last.body, found, names, places)
    return found if is_search else None


def _counts_places(expression: nodes.Node) -> bool:
    """Return whether ``expression`` is made of the place in the loop and the number of messages alone."""
    if isinstance(expression, nodes.Getattr):
        return expression.node == nodes.Name("loop", "load") and expression.attr in _PLACES
    if isinstance(expression, nodes.Filter):
        return expression.name in ("length", "count") and expression.node == nodes.Name(MESSAGES, "load")
    if isinstance(expression, nodes.Const):
        return type(expression.value) is int
    return isinstance(expression, nodes.Add | nodes.Sub) and all(
        map(_counts_places, (expression.left, expression.right))
    )


def _depends_on(expression: nodes.Node, names: Collection[str], flag: tuple[str, str]) -> bool:
    """Return whether ``expression`` reads ``names`` alone, of the namespace only its ``flag``, and changes nothing."""
    if not isinstance(expression, _PURE):
        return False
    if isinstance(expression, nodes.Getattr) and isinstance(expression.node, nodes.Name):
        if expression.node.name == flag[0]:
            return expression.attr == flag[1]
    elif isinstance(expression, nodes.Name):
        return expression.name in names and expression.name != flag[0]
    elif isinstance(expression, nodes.Call) and not isinstance(expression.node, nodes.Getattr):
        return False  # a macro may read and change anything
    return all(_depends_on(inner, names, flag) for inner in expression.iter_child_nodes())


def _only_ends(
    body: Sequence[nodes.Node], flag: tuple[str, str], names: Collection[str], places: Collection[str]
) -> bool:
    """Return whether ``body`` changes something only where it clears ``flag``, by tests that depend on ``names``."""
    assigns = [each for each in body if isinstance(each, nodes.Assign)]
    cleared = [each.node == nodes.Const(False) for each in assigns if each.target == nodes.NSRef(*flag)]
    is_end = bool(cleared) and all(cleared)
    known = {*names}
    for each in body:
        if isinstance(each, nodes.If) and not each.elif_ and not each.else_:
            if not _depends_on(each.test, known, flag) or not _only_ends(each.body, flag, known, places):
                return False
        elif not isinstance(each, nodes.Assign):
            return False
        elif isinstance(each.target, nodes.NSRef):
            if not is_end or not _depends_on(each.node, {*known, *places}, flag):
                return False
        elif not isinstance(each.target, nodes.Name) or each.target.name in places:
            return False
        elif _depends_on(each.node, known, flag):
            known.add(each.target.name)
        else:
            return False
    return True


@dataclass(eq=False, slots=True)
class BackwardSearch:
    """The iterable of a search, which looks at the last of ``length`` messages first.

    Attributes:
        message: returns the message with a number.
        namespace: the attributes of the namespace with the flag.
        earlier: the number of the message that an earlier search found; None for none.
        same: how many messages, from the first on, are those of the earlier search; 0 without one.
        index0: the number of messages that come after the one that is looked at.
        found: the number of the message that was found, after the search; None for none.
    """

    message: Callable[[SupportsIndex], Any]
    length: int
    namespace: Mapping[str, Any]
    flag: str
    earlier: int | None
    same: int
    index0: int = -1
    found: int | None = None

    def __iter__(self) -> Iterator[Any]:
        number = last = self.length - 1
        while number >= 0:
            if number < self.same:
                if self.earlier is None:
                    return
                number = min(number, self.earlier)
            self.index0 = last - number
            yield self.message(number)
            if not self.namespace[self.flag]:
                self.found = number
                return
            number -= 1


class SearchLoopContext(LoopContext):
    """The ``loop`` variable of a search, which has only ``index`` and ``index0``."""

    _iterable: BackwardSearch

    def __next__(self) -> tuple[Any, LoopContext]:
        message = next(self._iterator)
        self.index0 = self._iterable.index0
        return message, self
