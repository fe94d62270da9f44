"""Incremental rendering: a loop over messages that ran for an earlier prompt is entered in the middle.

A template prints a conversation message by message in a loop. What an iteration prints can depend on its message, on
variables that were set before the loop, on namespaces that earlier iterations changed, and on any other message that
it reads. All of these are recorded while the loop runs. When the conversation has grown, the loop starts after the
last iteration that would be the same, with the text and the namespaces as they were there.

How it is done:

1. ``track_loops`` changes the syntax tree before it is compiled: ``{% for m in messages %}`` becomes
   ``{% for m in enter_loop(messages, 0) %}``, where 0 is the number of the loop. The compiled template also gets
   ``make_loop_context`` in place of jinja2's ``LoopContext``, which makes the variable ``loop``.
2. ``Rendering`` passes the messages as ``TrackedMessages``, a list that notes the furthest message that was read
   (``Rendering.reach``): ``messages[-1]`` or ``messages|length`` depends on all of them, ``messages[0]`` on the first.
3. At the start of each iteration ``Rendering.add_checkpoint`` saves how much text there is, the namespaces, and how far
   the iterations before it have read. The text, the messages and these checkpoints are the ``RenderRecord``.
4. For the next prompt, ``Rendering.enter`` chooses the last checkpoint whose iterations would run as before. It copies
   their text from the record, restores the namespaces, and gives the loop only the messages that remain.

An example: the messages were ``system, user, assistant, tool``, and now two more follow. A template that looks at no
other message starts with ``tool``, the last message that it had. A template that asks in each iteration whether there
is a message two places on starts with ``assistant``, because there it found none. A template that prints
``messages|length`` in each iteration starts with ``system``.

Invariants:

1. The result is the text that a full render gives, byte for byte. Where this is not certain, the loop runs from its
   start, or the template is never tracked.
2. A loop is entered after iteration N only if everything that the first N iterations read is unchanged: the same
   message objects up to ``reach``, equal variables, equal template arguments.
   A search (``BackwardSearch``) leaves out messages that an earlier search did not find, which change nothing.
3. A namespace is restored only if it holds plain values, and every namespace that a template changes is known by the
   name under which it was made; otherwise no checkpoint is made.
4. Templates with impure functions (time, random, ``joiner``, ``loop.changed``), blocks, includes or imports are not
   tracked, nor are templates that change lists in place.
5. jinja2 has no interface for this. ``missing_internals`` lists the internals that this module needs; if one is
   missing, no template is tracked and each prompt is rendered in full.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, SupportsIndex

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import Namespace, missing

from singletree.prefixes import identical_prefix
from singletree.prompts.template.template_loops import (
    BackwardSearch,
    SearchLoopContext,
    can_be_tracked,
    search_flag,
    top_loops,
)

LOG = logging.getLogger(__name__)

ENTER = "enter_loop"
"""The name of the function that compiled templates call on the iterables of their tracked loops."""

LOOP_CONTEXT = "LoopContext"
"""The global of compiled templates that makes the ``loop`` variable; ``make_loop_context`` replaces it."""

_RENDERING = " rendering"
"""The template variable that holds the current rendering; no template can name it."""

_BEYOND = sys.maxsize
_ATTRIBUTES = "_Namespace__attrs"
_PLAIN = (str, int, float, type(None), list, tuple, dict, Undefined)


def track_loops(tree: nodes.Template) -> list[tuple[nodes.For, nodes.Node]]:
    """Make the top loops of ``tree`` call ``ENTER`` if they can be tracked; return them, with their old iterables."""
    if missing_internals() or not can_be_tracked(tree):
        return []
    loops = [loop for loop in top_loops(tree.body) if not loop.recursive and loop.test is None]
    before = [(loop, loop.iter) for loop in loops]
    for number, loop in enumerate(loops):
        enter = nodes.Name(ENTER, "load", lineno=loop.lineno)
        given = [loop.iter, nodes.Const(number, lineno=loop.lineno)]
        if (flag := search_flag(loop)) is not None:
            assert isinstance(loop.iter, nodes.Getitem)
            given = [loop.iter.node, given[1], nodes.Const(flag, lineno=loop.lineno)]
        loop.iter = nodes.Call(enter, given, [], None, None, lineno=loop.lineno)
    return before


@cache
def missing_internals() -> tuple[str, ...]:
    """Return the names of the jinja2 internals that this module needs and does not find, and log them once."""
    loop = "{% for item in items %}{{ loop.index }}{% endfor %}"
    template = Environment(autoescape=False).from_string(loop)
    render = getattr(template, "root_render_func", None)
    try:
        iterable = getattr(LoopContext([0], Undefined), "_iterable", None)
    except Exception:  # another signature, or another method that it needs
        iterable = None
    found = {
        "Namespace.__attrs": getattr(Namespace(key=1), _ATTRIBUTES, None) == {"key": 1},
        "LoopContext._iterable": iterable == [0],
        "LoopContext.index0": getattr(LoopContext, "index0", None) == -1,
        "LoopContext._current": hasattr(LoopContext, "_current"),
        "LoopContext._to_iterator": callable(getattr(LoopContext, "_to_iterator", None)),
        "LoopContext._peek_next": callable(getattr(LoopContext, "_peek_next", None)),
        "LoopContext.length": isinstance(getattr(LoopContext, "length", None), property),
        "LoopContext.__next__": callable(getattr(LoopContext, "__next__", None)),
        "root_render_func": LOOP_CONTEXT in getattr(render, "__globals__", {}),
        "LoopContext by name": LOOP_CONTEXT in getattr(getattr(render, "__code__", None), "co_names", ()),
        "Context.vars": getattr(template.new_context(), "vars", None) == {},
    }
    absent = tuple(name for name, is_there in found.items() if not is_there)
    if absent:
        LOG.warning(
            "jinja2 lacks %s; each prompt is rendered in full, which takes longer. Install jinja2>=3.1.6,<3.2",
            ", ".join(absent),
        )
    return absent


@dataclass(frozen=True, slots=True)
class LoopCheckpoint:
    """The state at the beginning of iteration ``item``.

    Attributes:
        length: how many characters the loop had printed; while the template runs, how many pieces there were.
        namespaces: the values in the namespaces, by the name of the namespace.
        reach: how many messages, counted from the first, the iterations before it read.
    """

    item: int
    length: int
    namespaces: dict[str, dict[str, Any]]
    reach: int


@dataclass(slots=True)
class TrackedLoop:
    """A loop that ran, from message ``base`` on.

    Attributes:
        variables: the template's variables that were set before it.
        begin: the offset in the text at which it began; while the template runs, how many pieces there were.
        checkpoints: those taken over from the earlier prompt; after the rendering, all checkpoints.
        new_checkpoints: those of this rendering, while the template runs.
    """

    base: int
    variables: Mapping[str, Any]
    begin: int
    checkpoints: list[LoopCheckpoint]
    new_checkpoints: list[LoopCheckpoint] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RenderRecord:
    """A rendered prompt with the tracked loops that ran, by number, and the variables without the messages.

    ``searches`` has the searches that ran (``BackwardSearch``), by the number of the loop: the number of the first
    message, and that of the message that was found, counted from there; None for none.
    """

    text: str
    messages: Sequence[Any]
    variables: Mapping[str, Any]
    loops: dict[int, TrackedLoop]
    searches: Mapping[int, tuple[int, int | None]]


_NOTHING = RenderRecord("", (), {}, {}, {})


class Rendering:
    """One rendering of a template, which goes on from the earlier prompt ``before``. Use it once.

    ``reach`` is how many messages, counted from the first, the template read since it entered its last loop.
    """

    def __init__(self, before: RenderRecord | None) -> None:
        self._before = _NOTHING if before is None else before
        self._same = 0
        self._pieces: list[str] = []
        self._loops: dict[int, TrackedLoop] = {}
        self._searches: dict[int, tuple[int, BackwardSearch]] = {}
        self._open: TrackedLoop | None = None
        self._namespaces: dict[str, dict[str, Any]] = {}
        self.reach = 0

    def render(self, template: Template, messages: list[Any], variables: Mapping[str, Any]) -> RenderRecord:
        if self._before is not _NOTHING and is_same_value(self._before.variables, variables):
            self._same = identical_prefix(self._before.messages, messages)
        context = template.new_context(
            {**variables, "messages": TrackedMessages(messages, self), _RENDERING: self}
        )
        try:
            self._pieces.extend(template.root_render_func(context))
        except Exception:
            template.environment.handle_exception()
        ends = [0, *accumulate(map(len, self._pieces))]
        for loop in self._loops.values():
            loop.begin = ends[loop.begin]
            new = (
                LoopCheckpoint(m.item, ends[m.length] - loop.begin, m.namespaces, m.reach)
                for m in loop.new_checkpoints
            )
            loop.checkpoints, loop.new_checkpoints = [*loop.checkpoints, *new], []
        searches = {number: (base, search.found) for number, (base, search) in self._searches.items()}
        return RenderRecord("".join(self._pieces), messages, variables, self._loops, searches)

    def note_read(self, count: int) -> None:
        """Record that the template read some of the first ``count`` messages; ``_BEYOND`` if it used their number."""
        if count > self.reach:
            self.reach = count

    def enter(self, messages: TrackedMessages, number: int, context: Context) -> ResumedMessages | None:
        """Return the iterable of the loop ``number``; None if a variable cannot be compared: it is not tracked."""
        variables = _variables(context)
        if variables is None:
            return None
        checkpoints: list[LoopCheckpoint] = []
        known = self._before.loops.get(number)
        if known is not None and known.base == messages.base and is_same_value(known.variables, variables):
            last = min(self._same, messages.base + list.__len__(messages) - 1)
            # Both rise from iteration to iteration.
            end = bisect_right(known.checkpoints, last - messages.base, key=attrgetter("item"))
            end = bisect_right(known.checkpoints, self._same, hi=end, key=attrgetter("reach"))
            checkpoints = known.checkpoints[:end]
        self._open = self._loops[number] = TrackedLoop(
            messages.base, variables, len(self._pieces), checkpoints[:-1]
        )
        self._namespaces = {
            name: getattr(value, _ATTRIBUTES)
            for name, value in context.vars.items()
            if type(value) is Namespace
        }
        self.reach = 0
        begin = 0
        if checkpoints and known is not None:
            begin = checkpoints[-1].item
            self._pieces.append(self._before.text[known.begin : known.begin + checkpoints[-1].length])
            self.reach = checkpoints[-1].reach
            for name, attributes in checkpoints[-1].namespaces.items():
                self._namespaces[name].clear()
                self._namespaces[name].update(attributes)
        return ResumedMessages(messages, begin, self)

    def search(
        self, messages: TrackedMessages, number: int, flag: tuple[str, str], context: Context
    ) -> BackwardSearch | None:
        """Return the iterable of the loop ``number``, a search; None if its ``flag`` is not set as it has to be."""
        namespace = context.vars.get(flag[0])
        attributes = getattr(namespace, _ATTRIBUTES) if type(namespace) is Namespace else {}
        if attributes.get(flag[1]) is not True:
            return None
        base, found = self._before.searches.get(number, (-1, None))
        same = self._same - messages.base if base == messages.base else 0
        search = BackwardSearch(
            untracked_getter(messages), list.__len__(messages), attributes, flag[1], found, same
        )
        self._searches[number] = messages.base, search
        self.note_read(_BEYOND)
        return search

    def add_checkpoint(self, item: int) -> None:
        if self._open is not None and all(map(_is_plain, self._namespaces.values())):
            namespaces = {name: dict(attributes) for name, attributes in self._namespaces.items()}
            self._open.new_checkpoints.append(LoopCheckpoint(item, len(self._pieces), namespaces, self.reach))
        else:
            self._open = None


def _variables(context: Context) -> dict[str, Any] | None:
    """Return the variables that were set, in a form that can be compared; None if one cannot be compared."""
    found: dict[str, Any] = {}
    for name, value in context.vars.items():
        if type(value) is TrackedMessages:
            found[name] = (TrackedMessages, value.base)
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


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether a template prints the same for both values. Unlike in Python, 1, 1.0 and True differ."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is list or kind is tuple:
        return len(one) == len(other) and all(map(is_same_value, one, other))
    if kind is dict:
        return list(one) == list(other) and all(map(is_same_value, one.values(), other.values()))
    if kind is str or callable(one):  # the only function that a request brings is its clock
        return bool(one == other)
    return kind in (int, float, bool) and repr(one) == repr(other)


def _is_plain(attributes: Mapping[str, Any]) -> bool:
    return all(
        isinstance(value, _PLAIN) and type(value) is not TrackedMessages for value in attributes.values()
    )


@pass_context
def enter_loop(context: Context, iterable: Any, number: int, flag: tuple[str, str] | None = None) -> Any:
    """Return ``iterable``, or what of it has to be rendered; backwards for a search, which has a ``flag``."""
    rendering = context.get(_RENDERING)
    is_tracked = rendering is not None and type(iterable) is TrackedMessages
    if flag is None:
        return (is_tracked and rendering.enter(iterable, number, context)) or iterable
    search = rendering.search(iterable, number, flag, context) if is_tracked else None
    return context.environment.getitem(iterable, slice(None, None, -1)) if search is None else search


class TrackedMessages(list[Any]):
    """A list of messages that records in ``rendering`` which a template reads; ``base`` is the number of the first."""

    __slots__ = ("base", "rendering")

    def __init__(self, messages: Sequence[Any], rendering: Rendering, base: int = 0) -> None:
        super().__init__(messages)
        self.rendering = rendering
        self.base = base

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            self.rendering.note_read(_BEYOND)
            start, _, step = at.indices(super().__len__())
            found = super().__getitem__(at)
            return TrackedMessages(found, self.rendering, self.base + start) if step == 1 else found
        is_inside = isinstance(at, int) and 0 <= at < super().__len__()
        self.rendering.note_read(self.base + at + 1 if is_inside else _BEYOND)
        return super().__getitem__(at)


def _recording(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def recorded(self: TrackedMessages, *given: Any) -> Any:
        self.rendering.reach = _BEYOND  # the result depends on all of them, or on their number
        return method(self, *given)

    return recorded


for _name in (
    *("__len__", "__iter__", "__reversed__", "__contains__", "__add__", "__mul__", "__rmul__", "__repr__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "copy", "count", "index"),
):
    setattr(TrackedMessages, _name, _recording(_name))


@dataclass(eq=False, slots=True)
class ResumedMessages:
    """The iterable of a tracked loop: ``messages`` from item ``begin`` on."""

    messages: TrackedMessages
    begin: int
    rendering: Rendering

    def __iter__(self) -> Iterator[Any]:
        for item in range(self.begin, list.__len__(self.messages)):
            self.rendering.add_checkpoint(item)
            yield list.__getitem__(self.messages, item)


def make_loop_context(iterable: Any, *given: Any) -> LoopContext:
    """Return the ``loop`` variable of a loop over ``iterable``."""
    if type(iterable) is BackwardSearch:
        return SearchLoopContext(iterable, *given)
    kind = TrackedLoopContext if type(iterable) is ResumedMessages else LoopContext
    return kind(iterable, *given)


class TrackedLoopContext(LoopContext):
    """The ``loop`` variable of a tracked loop, which may start in the middle and records which messages are read."""

    _iterable: ResumedMessages

    def __init__(self, entered: ResumedMessages, *given: Any) -> None:
        super().__init__(entered, *given)
        self.index0 = entered.begin - 1
        if entered.begin:
            self._current = list.__getitem__(entered.messages, self.index0)

    @staticmethod
    def _to_iterator(iterable: Any) -> Iterator[Any]:
        messages: TrackedMessages = iterable.messages
        return map(untracked_getter(messages), range(iterable.begin, list.__len__(messages)))

    @property
    def length(self) -> int:
        self._iterable.rendering.note_read(_BEYOND)
        return list.__len__(self._iterable.messages)

    def _peek_next(self) -> Any:
        following = super()._peek_next()
        base = self._iterable.messages.base
        self._iterable.rendering.note_read(_BEYOND if following is missing else base + self.index0 + 2)
        return following

    def __next__(self) -> tuple[Any, LoopContext]:
        if self.index0 + 1 < list.__len__(self._iterable.messages):
            self._iterable.rendering.add_checkpoint(self.index0 + 1)
        return super().__next__()


def untracked_getter(messages: TrackedMessages) -> Callable[[SupportsIndex], Any]:
    """Return a function that returns a message by its index without recording the read."""
    return super(TrackedMessages, messages).__getitem__
