"""A loop that searches the messages backwards goes on from the search of an earlier prompt.

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
with the first message found, and messages that an earlier search did not find are not looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from jinja2 import nodes
from jinja2.runtime import LoopContext

MESSAGES = "messages"
"""The name of the variable that is searched."""

_PLACES = frozenset({"index", "index0"})
"""The attributes of ``loop`` that such a loop may use; all others depend on which messages were looked at."""
_PURE = (
    *(nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.CondExpr, nodes.Test, nodes.Filter),
    *(
        nodes.Const,
        nodes.List,
        nodes.Tuple,
        nodes.Name,
        nodes.Getattr,
        nodes.Getitem,
        nodes.Slice,
        nodes.Call,
    ),
    *(nodes.Keyword, nodes.Add, nodes.Sub, nodes.Neg),
)
"""The nodes of an expression whose value depends on the names in it, unless a macro is called."""


def search_flag(loop: nodes.For) -> tuple[str, str] | None:
    """Return the namespace and the attribute that end ``loop`` as a search; None if it is another kind of loop."""
    if not _goes_backwards(loop.iter) or not isinstance(loop.target, nodes.Name) or loop.else_:
        return None
    *before, last = loop.body or [loop]
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return None
    flag = _first_operand(last.test)
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


def _goes_backwards(iterable: nodes.Node) -> bool:
    return (
        isinstance(iterable, nodes.Getitem)
        and isinstance(iterable.node, nodes.Name)
        and iterable.node.name == MESSAGES
        and isinstance(iterable.arg, nodes.Slice)
        and iterable.arg.start is None
        and iterable.arg.stop is None
        and iterable.arg.step in (nodes.Const(-1), nodes.Neg(nodes.Const(1)))
    )


def _first_operand(test: nodes.Node) -> nodes.Node:
    while isinstance(test, nodes.And):
        test = test.left
    return test


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
    body: Iterable[nodes.Node], flag: tuple[str, str], names: Collection[str], places: Collection[str]
) -> bool:
    """Return whether ``body`` changes a namespace only where it clears ``flag``, by tests that depend on ``names``.

    Args:
        names: the variables that depend on the message alone.
        places: the variables that depend on its place, too.
    """
    statements = [*body]
    changes = [
        each for each in statements if isinstance(each, nodes.Assign) and each.target == nodes.NSRef(*flag)
    ]
    is_end = bool(changes) and all(each.node == nodes.Const(False) for each in changes)
    known = {*names}
    for each in statements:
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


class BackwardSearch:
    """The iterable of a search.

    Args:
        message: returns the message with a number.
        length: the number of messages; the last one is looked at first.
        namespace: the attributes of the namespace with the flag.
        flag: the name of the flag.
        earlier: the number of the message that an earlier search found; None for none.
        same: how many messages, from the first on, are those of the earlier search; 0 without one.

    Attributes:
        index0: the number of messages that come after the one that is looked at.
        found: the number of the message that was found, after the search; None for none.
    """

    def __init__(
        self,
        message: Callable[[SupportsIndex], Any],
        length: int,
        namespace: Mapping[str, Any],
        flag: str,
        earlier: int | None,
        same: int,
    ) -> None:
        self._message = message
        self._length = length
        self._namespace = namespace
        self._flag = flag
        self._earlier = earlier
        self._same = same
        self.index0 = -1
        self.found: int | None = None

    def __iter__(self) -> Iterator[Any]:
        number = last = self._length - 1
        while number >= 0:
            if number < self._same:
                if self._earlier is None:
                    return
                number = min(number, self._earlier)
            self.index0 = last - number
            yield self._message(number)
            if not self._namespace[self._flag]:
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
