"""Every shape a turn can have, as events: what each encoder is tested on.

``SHAPES`` is the table; a test takes it whole (``@pytest.mark.parametrize("shape", SHAPES, ids=names)``, after
``from .shapes import SHAPES, names``). The raw text is that of a Hermes-like family: ``shape.raw`` reads like a turn.

``streams_as_folded`` is False for the shapes whose stream has to show more than the folded turn holds: a call
that broke has already been shown when it breaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from singletree.conversation import Turn
from singletree.events import (
    ArgumentsDelta,
    Event,
    Finished,
    FinishReason,
    Markup,
    ReasoningDelta,
    TextDelta,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    fold,
)

USAGE = Usage(prompt_tokens=1234, completion_tokens=56, cached_tokens=1200, reasoning_tokens=7)


class Shape(NamedTuple):
    """A turn: the events that say it and how it ended."""

    name: str
    events: tuple[Event, ...]
    finished: Finished
    streams_as_folded: bool = True

    @property
    def turn(self) -> Turn:
        """The turn that the events fold into."""
        return fold(self.events)

    @property
    def raw(self) -> str:
        """The model's own text."""
        return "".join(e.raw for e in self.events)


def text(*pieces: str) -> tuple[Event, ...]:
    """Visible text, a delta for each piece."""
    return tuple(TextDelta(p, p) for p in pieces)


def reasoning(*pieces: str, closed: bool = True) -> tuple[Event, ...]:
    """A reasoning span between its markers; ``closed=False`` when it was cut."""
    end: tuple[Event, ...] = (Markup("</think>"),) if closed else ()
    return (Markup("<think>"), *(ReasoningDelta(p, p) for p in pieces), *end)


def call(index: int, name: str, *pieces: str, ends: bool = True) -> tuple[Event, ...]:
    """A call whose arguments come in ``pieces``; ``ends=False`` when it was cut inside them."""
    opening = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
    start = ToolCallStart(index, call_id(index), name, opening)
    end: tuple[Event, ...] = (ToolCallEnd(index), Markup("}\n</tool_call>")) if ends else ()
    return (start, *(ArgumentsDelta(index, p, p) for p in pieces), *end)


def call_id(index: int) -> str:
    """The id of call ``index`` in every shape."""
    return f"call_{index:024d}"


def broken(index: int, name: str, *pieces: str, raw: str) -> tuple[Event, ...]:
    """A call that turns out, at ``raw``, not to be one."""
    return (*call(index, name, *pieces, ends=False), ToolCallBroken(index, raw))


def finished(reason: FinishReason = "stop", stop_sequence: str | None = None) -> Finished:
    """An end with the usage that all shapes share."""
    return Finished(reason, USAGE, stop_sequence)


_READ = ('{"path": "', "src/a.py", '", "limit": 10}')
_LIST = ('{"command": ["ls", ', '"-la"], "flags": {"all": true, "depth": null}}')
_HARD = 'Größe 好 🙂 \u2028 \x07 "quoted" back\\slash </script>\r\n\t'

SHAPES: list[Shape] = [
    Shape("text_only", text("Hello", ", ", "world", "."), finished()),
    Shape("reasoning_text", (*reasoning("Let me", " see."), *text("\n\nIt is ", "4.")), finished()),
    Shape("reasoning_call", (*reasoning("I must read it."), *call(0, "read_file", *_READ)), finished()),
    Shape(
        "two_calls_reasoning_between",
        (
            *reasoning("First the list."),
            *call(0, "exec", *_LIST),
            *reasoning("Then ", "the file."),
            *call(1, "read_file", *_READ),
        ),
        finished(),
    ),
    Shape("parallel_calls", (*call(0, "exec", *_LIST), *call(1, "read_file", *_READ)), finished()),
    Shape(
        "text_call_text_call_text",
        (
            *text("I list. "),
            *call(0, "exec", *_LIST),
            *text("Now ", "I read. "),
            *call(1, "read_file", *_READ),
            *text("Done."),
        ),
        finished(),
    ),
    Shape(
        "interleaved",
        (
            *reasoning("One."),
            *text("I list."),
            *reasoning("Two."),
            *call(0, "exec", *_LIST),
            *reasoning("Three."),
            *text("Bye."),
        ),
        finished(),
    ),
    Shape("call_no_arguments", call(0, "now", "{}"), finished()),
    Shape("call_no_pieces", call(0, "now"), finished()),
    Shape("call_empty_pieces", call(0, "read_file", "", *_READ, ""), finished()),
    Shape(
        "cut_in_arguments",
        (*text("I read. "), *call(0, "read_file", *_READ[:2], ends=False)),
        finished("length"),
    ),
    Shape("cut_before_arguments", call(0, "read_file", ends=False), finished("length")),
    Shape("cut_in_escape", call(0, "read_file", '{"path": "a\\', ends=False), finished("length")),
    Shape(
        "whole_call_then_cut_call",
        (*call(0, "exec", *_LIST), *call(1, "read_file", _READ[0], ends=False)),
        finished("length"),
    ),
    Shape("stopped_in_arguments", call(0, "read_file", _READ[0], ends=False), finished("stop")),
    Shape("cut_in_reasoning", reasoning("Let me think", " about", closed=False), finished("length")),
    Shape(
        "broken_call",
        (*text("See "), *broken(0, "x", '{"a": ', raw="oops"), *text(" and so on.")),
        finished(),
        streams_as_folded=False,
    ),
    Shape(
        "broken_call_then_call",
        (*broken(0, "x", raw="?"), *call(1, "read_file", *_READ)),
        finished(),
        streams_as_folded=False,
    ),
    Shape("empty", (), finished()),
    Shape("only_markup", (Markup("<think>"), Markup("</think>")), finished()),
    Shape("empty_deltas", (*text(""), *reasoning("", ""), *text("")), finished()),
    Shape("only_reasoning", reasoning("That is all ", "I think."), finished()),
    Shape(
        "unicode",
        (
            *reasoning(_HARD),
            *text(*_HARD),
            *call(0, "größe_好", json.dumps({"ключ": _HARD}, ensure_ascii=False)),
        ),
        finished(),
    ),
    Shape("stop_sequence", text("one, two, "), finished("stop_sequence", "three")),
    Shape(
        "markup_between",
        (
            *text("a"),
            Markup("<|sep|>"),
            *text("b"),
            *reasoning("c"),
            Markup("<|sep|>"),
            *reasoning("d"),
            *text("e"),
        ),
        finished(),
    ),
    Shape("refusal", text("I can't"), finished("refusal")),
    Shape("context_overflow", text("so far"), finished("context_overflow")),
    Shape("cancelled", text("so far"), finished("cancelled")),
]

names = [shape.name for shape in SHAPES]
by_name = {shape.name: shape for shape in SHAPES}


def numbered() -> Callable[[str], str]:
    """A ``new_id`` that counts: ``x_1``, ``x_2`` … for the prefix ``x_``."""
    numbers = count(1)
    return lambda prefix: f"{prefix}{next(numbers)}"
