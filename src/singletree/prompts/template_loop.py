"""Chat templates entered in the middle: a loop over messages that ran before is not run again from its start.

A template prints a conversation message by message in a loop. What an iteration prints can depend on its message, on
variables that were set before the loop, on namespaces that earlier iterations changed, and on whatever other messages
it looks at. All of that is watched while the loop runs. When the conversation has grown, the loop is entered behind
the last iteration that would be the same, with the text and the namespaces as they were there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, SupportsIndex

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import Namespace, missing

from singletree.prompts.beginnings import same_objects

ENTER = "enter_loop"
"""The function that templates are made to call on what their loops go through."""

LOOP_CONTEXT = "LoopContext"
"""The name by which compiled templates call what ``loop_context`` makes."""

_RUN = " run"
"""The variable in which the rendering under way is found: no template can name it."""

_BEYOND = sys.maxsize
_ATTRIBUTES = "_Namespace__attrs"
_PLAIN = (str, int, float, type(None), list, tuple, dict, Undefined)

_IMPURE = frozenset({"strftime_now", "joiner", "cycler", "lipsum"})
"""Functions that give something else at another time, or from one iteration to the next."""

_UNSEEN = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


def watch_loops(tree: nodes.Template) -> list[tuple[nodes.For, nodes.Node]]:
    """Have the loops at the top of ``tree`` call ``ENTER``, unless something in it depends on more than is watched.

    Gives the loops back with what they went through before, for whoever wants the tree as it was.
    """
    if not _can_be_watched(tree):
        return []
    loops = [loop for loop in _top_loops(tree.body) if not loop.recursive and loop.test is None]
    before = [(loop, loop.iter) for loop in loops]
    for number, loop in enumerate(loops):
        enter = nodes.Name(ENTER, "load", lineno=loop.lineno)
        given = [loop.iter, nodes.Const(number, lineno=loop.lineno)]
        loop.iter = nodes.Call(enter, given, [], None, None, lineno=loop.lineno)
    return before


def _can_be_watched(tree: nodes.Template) -> bool:
    impure = set(_IMPURE)
    macros = list(tree.find_all(nodes.Macro))
    for _ in macros:  # a macro may call another that is found later
        impure.update(macro.name for macro in macros if _is_impure(macro, impure))
    return (
        not any(_is_impure(loop, impure) for loop in tree.find_all(nodes.For))
        and not any(True for _ in tree.find_all(_UNSEEN))
        and _names_its_namespaces(tree)
    )


def _is_impure(outer: nodes.Node, impure: Collection[str]) -> bool:
    return (
        any(name.name in impure for name in outer.find_all(nodes.Name))
        or any(called.name == "random" for called in outer.find_all(nodes.Filter))
        or any(got.attr == "changed" for got in outer.find_all(nodes.Getattr))
    )


def _names_its_namespaces(tree: nodes.Template) -> bool:
    """Whether every namespace that is changed is known under the name under which it was made."""
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


def _top_loops(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            for branch in (node.body, *(other.body for other in node.elif_), node.else_):
                yield from _top_loops(branch)


@dataclass(frozen=True, slots=True)
class Mark:
    """The beginning of an iteration.

    Attributes:
        item: its number.
        printed: how many characters the loop had printed; while it runs, how many pieces there are.
        namespaces: what was in them, by name.
        reach: how many messages the iterations before it looked at.
    """

    item: int
    printed: int
    namespaces: dict[str, dict[str, Any]]
    reach: int


@dataclass(slots=True)
class Loop:
    """A loop that ran.

    Attributes:
        base: the number of its first message.
        variables: those that were set before it.
        begin: where in the text it began; while it runs, how many pieces there were.
        marks: of the iterations that it was entered behind.
        made: of those that it ran through.
    """

    base: int
    variables: Mapping[str, Any]
    begin: int
    marks: list[Mark]
    made: list[Mark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Printed:
    """What a template printed of ``messages``; ``given`` are its other variables, ``loops`` those that were watched."""

    text: str
    messages: Sequence[Any]
    given: Mapping[str, Any]
    loops: dict[int, Loop]


class Run:
    """One rendering, which goes on from what was printed ``before``.

    Attributes:
        reach: how many messages the template looked at since it entered its last loop.
    """

    def __init__(self, before: Printed | None) -> None:
        self._before = before
        self._same = 0
        self._pieces: list[str] = []
        self._loops: dict[int, Loop] = {}
        self._open: Loop | None = None
        self._namespaces: dict[str, dict[str, Any]] = {}
        self.reach = 0

    def render(self, template: Template, messages: list[Any], given: Mapping[str, Any]) -> Printed:
        """What ``template`` prints. Raises what it raises."""
        if self._before is not None and _is_same(self._before.given, given):
            self._same = same_objects(self._before.messages, messages)
        context = template.new_context({**given, "messages": Watched(messages, self), _RUN: self})
        try:
            self._pieces.extend(template.root_render_func(context))
        except Exception:
            template.environment.handle_exception()
        ends = [0, *accumulate(map(len, self._pieces))]
        for loop in self._loops.values():
            loop.begin = ends[loop.begin]
            new = (Mark(m.item, ends[m.printed] - loop.begin, m.namespaces, m.reach) for m in loop.made)
            loop.marks, loop.made = [*loop.marks, *new], []
        return Printed("".join(self._pieces), messages, given, self._loops)

    def saw(self, messages: int) -> None:
        """The template looked at the first ``messages``; at how many there are, if they are more than there are."""
        if messages > self.reach:
            self.reach = messages

    def enter(self, messages: Watched, number: int, context: Context) -> Entered | None:
        """What the loop of that number goes through, if it can be watched."""
        variables = _variables(context)
        if variables is None:
            return None
        marks: list[Mark] = []
        known = self._before.loops.get(number) if self._before is not None else None
        if known is not None and known.base == messages.base and _is_same(known.variables, variables):
            most = min(self._same, messages.base + list.__len__(messages) - 1)
            marks = [m for m in known.marks if messages.base + m.item <= most and m.reach <= self._same]
        self._open = self._loops[number] = Loop(messages.base, variables, len(self._pieces), marks[:-1])
        self._namespaces = {
            name: getattr(value, _ATTRIBUTES)
            for name, value in context.vars.items()
            if type(value) is Namespace
        }
        self.reach = 0
        begin = 0
        if marks and self._before is not None and known is not None:
            begin = marks[-1].item
            self._pieces.append(self._before.text[known.begin : known.begin + marks[-1].printed])
            self.reach = marks[-1].reach
            for name, attributes in marks[-1].namespaces.items():
                self._namespaces[name].clear()
                self._namespaces[name].update(attributes)
        return Entered(messages, begin, self)

    def mark(self, item: int) -> None:
        """Iteration ``item`` of the open loop begins."""
        if self._open is not None and all(map(_is_plain, self._namespaces.values())):
            namespaces = {name: dict(attributes) for name, attributes in self._namespaces.items()}
            self._open.made.append(Mark(item, len(self._pieces), namespaces, self.reach))
        else:
            self._open = None


def _variables(context: Context) -> dict[str, Any] | None:
    """The variables that were set, as far as they can be different; None where one cannot be compared."""
    found: dict[str, Any] = {}
    for name, value in context.vars.items():
        if type(value) is Watched:
            found[name] = (Watched, value.base)
        elif type(value) is Namespace:
            attributes = getattr(value, _ATTRIBUTES)
            if not _is_plain(attributes):
                return None
            found[name] = dict(attributes)
        elif isinstance(value, Undefined | Macro):
            found[name] = type(value)
        elif isinstance(value, _PLAIN):
            found[name] = value
        else:
            return None
    return found


def _is_same(one: Any, other: Any) -> bool:
    """Whether a template can print nothing that tells one value from the other: unlike 1, 1.0 and True."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is list or kind is tuple:
        return len(one) == len(other) and all(map(_is_same, one, other))
    if kind is dict:
        return list(one) == list(other) and all(map(_is_same, one.values(), other.values()))
    return one == other if kind is str else kind in (int, float, bool) and repr(one) == repr(other)


def _is_plain(attributes: Mapping[str, Any]) -> bool:
    return all(isinstance(value, _PLAIN) and type(value) is not Watched for value in attributes.values())


@pass_context
def enter_loop(context: Context, iterable: Any, number: int) -> Any:
    """What the loop of that number goes through: ``iterable``, or what is left of it."""
    run = context.get(_RUN)
    if run is None or type(iterable) is not Watched:
        return iterable
    return run.enter(iterable, number, context) or iterable


class Watched(list[Any]):
    """Messages that tell ``run`` which of them a template looks at; ``base`` is the number of the first."""

    __slots__ = ("base", "run")

    def __init__(self, messages: Sequence[Any], run: Run, base: int = 0) -> None:
        super().__init__(messages)
        self.run = run
        self.base = base

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            self.run.saw(_BEYOND)
            start, _, step = at.indices(super().__len__())
            found = super().__getitem__(at)
            return Watched(found, self.run, self.base + start) if step == 1 else found
        is_inside = isinstance(at, int) and 0 <= at < super().__len__()
        self.run.saw(self.base + at + 1 if is_inside else _BEYOND)
        return super().__getitem__(at)


def _watching(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def watched(self: Watched, *given: Any) -> Any:
        self.run.reach = _BEYOND  # of all of them, or of how many they are
        return method(self, *given)

    return watched


for _name in (
    *("__len__", "__iter__", "__reversed__", "__contains__", "__add__", "__mul__", "__rmul__", "__repr__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "copy", "count", "index"),
):
    setattr(Watched, _name, _watching(_name))


class Entered:
    """What a loop goes through, from item ``begin`` on."""

    def __init__(self, messages: Watched, begin: int, run: Run) -> None:
        self.messages = messages
        self.begin = begin
        self.run = run

    def __iter__(self) -> Iterator[Any]:
        for item in range(self.begin, list.__len__(self.messages)):
            self.run.mark(item)
            yield list.__getitem__(self.messages, item)


def loop_context(iterable: Any, *given: Any) -> LoopContext:
    """What a template calls ``loop`` while it goes through ``iterable``."""
    return WatchedLoop(iterable, *given) if type(iterable) is Entered else LoopContext(iterable, *given)


class WatchedLoop(LoopContext):
    """One that is entered in the middle, and tells which messages are looked at."""

    _iterable: Entered

    def __init__(self, entered: Entered, *given: Any) -> None:
        super().__init__(entered, *given)
        self.index0 = entered.begin - 1
        if entered.begin:
            self._current = list.__getitem__(entered.messages, self.index0)

    @staticmethod
    def _to_iterator(iterable: Any) -> Iterator[Any]:
        messages: Watched = iterable.messages
        return map(messages_item(messages), range(iterable.begin, list.__len__(messages)))

    @property
    def length(self) -> int:
        """How many messages there are."""
        self._iterable.run.saw(_BEYOND)
        return list.__len__(self._iterable.messages)

    def _peek_next(self) -> Any:
        following = super()._peek_next()
        base = self._iterable.messages.base
        self._iterable.run.saw(_BEYOND if following is missing else base + self.index0 + 2)
        return following

    def __next__(self) -> tuple[Any, LoopContext]:
        if self.index0 + 1 < list.__len__(self._iterable.messages):
            self._iterable.run.mark(self.index0 + 1)
        return super().__next__()


def messages_item(messages: Watched) -> Callable[[SupportsIndex], Any]:
    """Gets a message without telling."""
    return super(Watched, messages).__getitem__
