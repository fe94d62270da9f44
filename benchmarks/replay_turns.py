"""The turns that benchmarks/replay.py has models say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.returned_turns import MODEL
from singletree.conversation import (
    Conversation,
    Part,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    Turn,
)
from singletree.parsing.parser import parse
from singletree.parsing.render_turn import render_turn
from singletree.server.models.catalog import Model
from singletree.server.turn.prompt import write_prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"type": "string"},
        "city": {"type": "string"},
        "days": {"type": "number"},
        "wind": {"type": "number"},
        "note": {"type": "string"},
    },
}
PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = (("get_weather", "The weather of a city.", SCHEMA), ("read_file", "Reads a file.", PATH))
_NOTE = 'for i in range(3):\\n    print(\\"row\\", i)\\n' * 4
_WEATHER = f'{{"unit": "celsius",  "city": "Par\\u00eds", "days":3.0, "wind": -0.0, "note": "{_NOTE}"}}'
_SINGLE: tuple[Part, ...] = (
    Reasoning("I need the weather.\n\nFirst Paris, then the rest; the user likes it short. "),
    Text("Let me check that for you."),
    ToolCall("get_weather", _WEATHER, "functions.get_weather:0"),
)
_READ = ToolCall("read_file", '{"path":"notes.txt"}', "functions.read_file:1")
TURNS: dict[str, tuple[Part, ...]] = {
    "call alone": (_SINGLE[0], _SINGLE[2]),
    "one call": _SINGLE,
    "two calls": (*_SINGLE, _READ),
    "interleaved": (*_SINGLE, Reasoning("Now the file too."), _READ),
    "no thought": _SINGLE[1:],
    "words": _SINGLE[:2],
}
TAIL = 200
"""How much of a prompt's end tells how its turn is opened, in characters."""


def spoken(served: Model, parts: Sequence[Part], tail: str) -> str:
    """``parts`` as the model writes them behind a prompt; empty where its format cannot say them there."""
    tools = tuple(Tool(*tool) for tool in TOOLS)
    said = render_turn(served.family, parts)
    opened = next((size for size in range(min(len(tail), len(said)), 0, -1) if tail.endswith(said[:size])), 0)
    read = parse(served.family, said[opened:], tools, tail)
    return said[opened:] if _words(read.parts) == _words(parts) else ""


def first_tail(served: Model) -> str:
    """The end of a first prompt that asks for reasoning."""
    asked = Conversation((Turn("user", (Text("x"),)),), tuple(Tool(*tool) for tool in TOOLS))
    request = Request(MODEL, asked, thinking=Thinking(enabled=True, effort="medium"))
    return write_prompt(served, request).text[-TAIL:]


def _words(parts: Iterable[Part]) -> list[tuple[str, str]]:
    words = []
    for part in parts:
        if isinstance(part, ToolCall):
            words.append(("call", part.name))
        elif isinstance(part, Text | Reasoning) and part.text.strip():
            words.append((type(part).__name__, part.text.strip()))
    return words


def generated_at_best(served: Model, parts: Sequence[Part], tail: str) -> str:
    """``parts`` as the model says them, without its reasoning where its prompt or format has none.

    Up to the first token at which its engine stops.
    """
    unthinking = [part for part in parts if not isinstance(part, Reasoning)]
    said = spoken(served, parts, tail) or spoken(served, unthinking, tail)
    tokenizer = served.tokenizer
    stops = [
        text for text, id in tokenizer.added_tokens.items() if id in tokenizer.stop_token_ids and text in said
    ]
    return said[: min(map(said.index, stops), default=len(said))]
