"""What harnesses make of a turn before they send it back, on each of the three protocols."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

MODEL = "model"


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a turn as a harness keeps it. ``id`` and ``name`` are a call's; its ``text`` is its arguments.

    ``end`` ends a message, and another one follows; so does ``results``, with the results of its calls between.
    """

    kind: Literal["thought", "text", "call", "end", "results"]
    text: str = ""
    id: str = ""
    name: str = ""


Mutation = Callable[[list[Block]], list[Block]]


def as_given(blocks: list[Block]) -> list[Block]:
    """Untouched."""
    return blocks


def calls_last(blocks: list[Block]) -> list[Block]:
    """Claude Code moves calls behind text that follows them."""
    return sorted(blocks, key=lambda block: block.kind == "call")


def trimmed(blocks: list[Block]) -> list[Block]:
    """White space gone from the edges of all prose."""
    return [replace(block, text=block.text.strip()) for block in blocks]


def joined_thoughts(blocks: list[Block]) -> list[Block]:
    """One thought, trimmed, in front: what is left of many on chat clients."""
    thoughts = [block.text.strip() for block in blocks if block.kind == "thought"]
    joined = [Block("thought", "".join(thoughts))] if thoughts else []
    return [*joined, *no_thoughts(blocks)]


def no_thoughts(blocks: list[Block]) -> list[Block]:
    """The harness carries no reasoning."""
    return [block for block in blocks if block.kind != "thought"]


def compact_arguments(blocks: list[Block]) -> list[Block]:
    """Arguments parsed and written again without spaces."""
    return _written(blocks, separators=(",", ":"), ensure_ascii=False)


def sorted_arguments(blocks: list[Block]) -> list[Block]:
    """Arguments parsed and written again with sorted keys."""
    return _written(blocks, sort_keys=True)


def plain_ids(blocks: list[Block]) -> list[Block]:
    """Ids of letters and digits only."""
    return [replace(block, id="".join(filter(str.isalnum, block.id))) for block in blocks]


MUTATIONS: tuple[Mutation, ...] = (
    as_given,
    calls_last,
    trimmed,
    joined_thoughts,
    no_thoughts,
    compact_arguments,
    sorted_arguments,
    plain_ids,
)


def written_by_javascript(blocks: list[Block]) -> list[Block]:
    """Arguments as JavaScript writes them: ``-0.0`` is ``0``, ``3.0`` is ``3``."""
    return [replace(b, text=b.text.replace("-0.0", "0").replace("3.0", "3")) for b in blocks]


def first_thought(blocks: list[Block]) -> list[Block]:
    """The first thought only (Copilot CLI)."""
    return _with_thoughts(blocks, _thoughts(blocks)[:1])


def last_thought(blocks: list[Block]) -> list[Block]:
    """The last thought only (Grok Build, Haystack)."""
    return _with_thoughts(blocks, _thoughts(blocks)[-1:])


def no_words(blocks: list[Block]) -> list[Block]:
    """``content: null`` where there are calls (CrewAI, Semantic Kernel, Agno)."""
    return [block for block in blocks if block.kind != "text"] if _calls(blocks) else blocks


def calls_alone(blocks: list[Block]) -> list[Block]:
    """Neither thoughts nor words where there are calls."""
    return _calls(blocks) or blocks


def thoughts_as_words(blocks: list[Block]) -> list[Block]:
    """Reasoning given back as text (AutoGen)."""
    return [replace(block, kind="text" if block.kind == "thought" else block.kind) for block in blocks]


def echoed_thoughts(blocks: list[Block]) -> list[Block]:
    """Each thought once more as text (Copilot CLI on Responses)."""
    return [
        each
        for block in blocks
        for each in ([block, replace(block, kind="text")] if block.kind == "thought" else [block])
    ]


def tagged_thoughts(blocks: list[Block]) -> list[Block]:
    """Reasoning in the content, between tags and with line breaks of the harness's own."""
    return [
        Block("text", f"<think>\n\n{block.text}\n\n</think>\n\n") if block.kind == "thought" else block
        for block in blocks
    ]


def words_and_calls_apart(blocks: list[Block]) -> list[Block]:
    """Words and calls as two messages (goose, Open Interpreter)."""
    calls, rest = _calls(blocks), [block for block in blocks if block.kind != "call"]
    return [*rest, Block("end"), *calls] if calls and rest else blocks


def a_message_each(blocks: list[Block]) -> list[Block]:
    """Each block as a message of its own."""
    return [each for block in blocks for each in (block, Block("end"))][:-1]


def calls_one_by_one(blocks: list[Block]) -> list[Block]:
    """A message for each call, with its result behind it."""
    calls = _calls(blocks)
    rest = [block for block in blocks if block.kind != "call"]
    return [*rest, *[each for call in calls for each in (call, Block("results"))][:-1]] if calls else blocks


def one_call(blocks: list[Block]) -> list[Block]:
    """The second call left out, and its result (gptme)."""
    return [block for block in blocks if block.kind != "call" or block in _calls(blocks)[:1]]


HABITS: tuple[Mutation, ...] = (
    written_by_javascript,
    first_thought,
    last_thought,
    no_words,
    calls_alone,
    thoughts_as_words,
    echoed_thoughts,
    tagged_thoughts,
    words_and_calls_apart,
    a_message_each,
    calls_one_by_one,
    one_call,
)
"""What further clients do: they give a turn back in part, or in several messages."""


def _thoughts(blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block.kind == "thought"]


def _calls(blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block.kind == "call"]


def _with_thoughts(blocks: list[Block], kept: list[Block]) -> list[Block]:
    return [block for block in blocks if block.kind != "thought" or any(block is each for each in kept)]


EDIT = "by hand"


def edited(blocks: list[Block]) -> list[Block]:
    """A turn that somebody changed: it is to come back as changed."""
    last = blocks[-1]
    if last.kind != "call":
        return [*blocks[:-1], replace(last, text=f"{last.text} {EDIT}")]
    arguments = json.loads(last.text or "{}") | {"note": EDIT}
    return [*blocks[:-1], replace(last, text=json.dumps(arguments))]


def _written(blocks: list[Block], **options: Any) -> list[Block]:
    return [
        replace(block, text=json.dumps(json.loads(block.text or "{}"), **options))
        if block.kind == "call"
        else block
        for block in blocks
    ]


Wire = dict[str, Any]


def _arguments(block: Block) -> Any:
    return json.loads(block.text or "{}")


def _messages_of(blocks: Sequence[Block]) -> list[tuple[list[Block], list[Block]]]:
    """The blocks of each message, and the calls whose results stand behind it."""
    messages: list[tuple[list[Block], list[Block]]] = []
    said: list[Block] = []
    unanswered: list[Block] = []
    for block in (*blocks, Block("results")):
        if block.kind == "results":
            messages.append((said, unanswered))
            said, unanswered = [], []
        elif block.kind == "end":
            messages.append((said, []))
            said = []
        else:
            said.append(block)
            unanswered += [block] if block.kind == "call" else []
    return messages


def _messages_turn(blocks: Sequence[Block], listed: bool) -> list[Wire]:
    written: dict[str, Callable[[Block], Wire]] = {
        "thought": lambda b: {"type": "thinking", "thinking": b.text, "signature": ""},
        "text": lambda b: {"type": "text", "text": b.text},
        "call": lambda b: {"type": "tool_use", "id": b.id, "name": b.name, "input": _arguments(b)},
    }
    turn: list[Wire] = []
    for said, calls in _messages_of(blocks):
        turn.append({"role": "assistant", "content": [written[block.kind](block) for block in said]})
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": _content(listed)} for b in calls]
        turn += [{"role": "user", "content": results}] if results else []
    return turn if turn[-1]["role"] == "user" else [*turn, {"role": "user", "content": NEXT}]


def _content(listed: bool) -> Any:
    return [{"type": "text", "text": RESULT}] if listed else RESULT


RESULT = "Sunny, 21 degrees, and no wind to speak of."
NEXT = "And tomorrow?"


def _messages_blocks(body: Wire) -> list[Block]:
    read: dict[str, Callable[[Wire], Block]] = {
        "thinking": lambda b: Block("thought", b["thinking"]),
        "text": lambda b: Block("text", b["text"]),
        "tool_use": lambda b: Block(
            "call", json.dumps(b["input"], ensure_ascii=False, separators=(",", ":")), b["id"], b["name"]
        ),
    }
    return [read[block["type"]](block) for block in body["content"]]


def _chat_turn(blocks: Sequence[Block], listed: bool) -> list[Wire]:
    turn: list[Wire] = []
    for said, answered in _messages_of(blocks):
        turn.append(_chat_message(said, listed))
        turn += [{"role": "tool", "tool_call_id": b.id, "content": _content(listed)} for b in answered]
    return turn if turn[-1]["role"] == "tool" else [*turn, {"role": "user", "content": NEXT}]


def _chat_message(blocks: Sequence[Block], listed: bool) -> Wire:
    text = "".join(block.text for block in blocks if block.kind == "text")
    thought = "".join(block.text for block in blocks if block.kind == "thought")
    calls = [
        {"type": "function", "id": b.id, "function": {"name": b.name, "arguments": b.text}}
        for b in blocks
        if b.kind == "call"
    ]
    content: Any = [{"type": "text", "text": text}] if listed and text else text or None
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    return message | ({"reasoning_content": thought} if thought else {})


def _chat_blocks(body: Wire) -> list[Block]:
    message = body["choices"][0]["message"]
    thought = message.get("reasoning_content") or message.get("reasoning")
    blocks = [Block("thought", thought)] if thought else []
    if message.get("content"):
        blocks.append(Block("text", message["content"]))
    for call in message.get("tool_calls") or ():
        blocks.append(Block("call", call["function"]["arguments"], call["id"], call["function"]["name"]))
    return blocks


def _responses_turn(blocks: Sequence[Block], listed: bool) -> list[Wire]:
    written: dict[str, Callable[[int, Block], Wire]] = {
        "thought": lambda i, b: {
            "type": "reasoning",
            "id": f"rs_{i}",
            "summary": [{"type": "summary_text", "text": b.text}],
        },
        "text": lambda i, b: {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": b.text}] if listed else b.text,
        },
        "call": lambda i, b: {
            "type": "function_call",
            "call_id": b.id,
            "name": b.name,
            "arguments": b.text,
        },
    }
    turn: list[Wire] = []
    for said, calls in _messages_of(blocks):
        turn += [written[block.kind](len(turn) + i, block) for i, block in enumerate(said)]
        turn += [{"type": "function_call_output", "call_id": b.id, "output": RESULT} for b in calls]
    is_answered = bool(turn) and turn[-1]["type"] == "function_call_output"
    return turn if is_answered else [*turn, {"type": "message", "role": "user", "content": NEXT}]


def _responses_blocks(body: Wire) -> list[Block]:
    read: dict[str, Callable[[Wire], Block]] = {
        "reasoning": lambda i: Block(
            "thought", "".join(part["text"] for part in i.get("content") or i.get("summary") or ())
        ),
        "message": lambda i: Block("text", "".join(part["text"] for part in i["content"])),
        "function_call": lambda i: Block("call", i["arguments"], i["call_id"], i["name"]),
    }
    return [read[item["type"]](item) for item in body["output"]]


@dataclass(frozen=True, slots=True)
class Protocol:
    """How one protocol says a tool session.

    Attributes:
        turn: an assistant's turn with the results of its calls; the flag asks for lists where strings would do.
        blocks: an answer's body as blocks.
        tool: a tool by name, description and schema.
        settings: what a harness sends beside.
    """

    name: str
    path: str
    said: str
    turn: Callable[[Sequence[Block], bool], list[Wire]]
    blocks: Callable[[Wire], list[Block]]
    tool: Callable[[str, str, Wire], Wire]
    settings: Mapping[str, Any]

    def request(self, asked: str, turns: Sequence[Wire], tools: Sequence[tuple[str, str, Wire]]) -> Wire:
        """A request with one question and what came of it so far."""
        said = [{"role": "user", "content": asked}, *turns]
        return {
            "model": MODEL,
            self.said: said,
            "tools": [self.tool(*tool) for tool in tools],
            **self.settings,
        }


PROTOCOLS = (
    Protocol(
        "messages",
        "/v1/messages",
        "messages",
        _messages_turn,
        _messages_blocks,
        lambda name, description, schema: {
            "name": name,
            "description": description,
            "input_schema": schema,
        },
        {"max_tokens": 8000, "thinking": {"type": "enabled", "budget_tokens": 4000}},
    ),
    Protocol(
        "chat",
        "/v1/chat/completions",
        "messages",
        _chat_turn,
        _chat_blocks,
        lambda name, description, schema: {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": schema},
        },
        {"max_tokens": 8000, "reasoning_effort": "medium"},
    ),
    Protocol(
        "responses",
        "/v1/responses",
        "input",
        _responses_turn,
        _responses_blocks,
        lambda name, description, schema: {
            "type": "function",
            "name": name,
            "description": description,
            "parameters": schema,
        },
        {"max_output_tokens": 8000, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False},
    ),
)
