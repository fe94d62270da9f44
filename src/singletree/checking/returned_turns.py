"""A turn as harnesses keep it and give it back, and how the three protocols write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ReturnedBlock:
    """A part of a turn as a harness keeps it. ``id`` and ``name`` are a call's; its ``text`` is its arguments.

    ``end`` ends a message, and another one follows; so does ``results``, with the results of its calls between.
    ``seal`` is what a server wants back unchanged with a thought: a signature, or encrypted content.
    """

    kind: Literal["thought", "text", "call", "end", "results"]
    text: str = ""
    id: str = ""
    name: str = ""
    seal: str = ""


Mutation = Callable[[list[ReturnedBlock]], list[ReturnedBlock]]


def as_given(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Untouched."""
    return blocks


def calls_last(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Claude Code moves calls behind text that follows them."""
    return sorted(blocks, key=lambda block: block.kind == "call")


def trimmed(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """White space gone from the edges of all prose."""
    return [replace(block, text=block.text.strip()) for block in blocks]


def joined_thoughts(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """One thought, trimmed, in front: what is left of many on chat clients."""
    thoughts = [block.text.strip() for block in blocks if block.kind == "thought"]
    joined = [ReturnedBlock("thought", "".join(thoughts))] if thoughts else []
    return [*joined, *no_thoughts(blocks)]


def no_thoughts(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """The harness carries no reasoning."""
    return [block for block in blocks if block.kind != "thought"]


def compact_arguments(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Arguments parsed and written again without spaces."""
    return rewritten(blocks, separators=(",", ":"), ensure_ascii=False)


def rewritten(blocks: list[ReturnedBlock], **options: Any) -> list[ReturnedBlock]:
    """Arguments parsed and written again, with these options of ``json.dumps``."""
    return [
        replace(block, text=json.dumps(json.loads(block.text or "{}"), **options))
        if block.kind == "call"
        else block
        for block in blocks
    ]


WireBody = dict[str, Any]

RESULT = "Sunny, 21 degrees, and no wind to speak of."
NEXT = "And tomorrow?"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a harness sends after a turn: the ``result`` of its calls, or else the user's ``next`` question.

    ``listed`` asks for lists of parts where strings would do.
    """

    result: str = RESULT
    next: str = NEXT
    listed: bool = False

    @property
    def content(self) -> Any:
        """The result as the content of a message."""
        return [{"type": "text", "text": self.result}] if self.listed else self.result


def _messages_of(blocks: Sequence[ReturnedBlock]) -> list[tuple[list[ReturnedBlock], list[ReturnedBlock]]]:
    messages: list[tuple[list[ReturnedBlock], list[ReturnedBlock]]] = []
    open_blocks: list[ReturnedBlock] = []
    unanswered: list[ReturnedBlock] = []
    for block in (*blocks, ReturnedBlock("results")):
        if block.kind == "results":
            messages.append((open_blocks, unanswered))
            open_blocks, unanswered = [], []
        elif block.kind == "end":
            messages.append((open_blocks, []))
            open_blocks = []
        else:
            open_blocks.append(block)
            unanswered += [block] if block.kind == "call" else []
    return messages


def _messages_turn(blocks: Sequence[ReturnedBlock], reply: Reply) -> list[WireBody]:
    written: dict[str, Callable[[ReturnedBlock], WireBody]] = {
        "thought": lambda b: {"type": "thinking", "thinking": b.text, "signature": b.seal},
        "text": lambda b: {"type": "text", "text": b.text},
        "call": lambda b: {
            "type": "tool_use",
            "id": b.id,
            "name": b.name,
            "input": json.loads(b.text or "{}"),
        },
    }
    turn: list[WireBody] = []
    for open_blocks, calls in _messages_of(blocks):
        turn.append({"role": "assistant", "content": [written[block.kind](block) for block in open_blocks]})
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": reply.content} for b in calls]
        turn += [{"role": "user", "content": results}] if results else []
    return turn if turn[-1]["role"] == "user" else [*turn, {"role": "user", "content": reply.next}]


def _messages_blocks(body: WireBody) -> list[ReturnedBlock]:
    read: dict[str, Callable[[WireBody], ReturnedBlock]] = {
        "thinking": lambda b: ReturnedBlock("thought", b["thinking"]),
        "text": lambda b: ReturnedBlock("text", b["text"]),
        "tool_use": lambda b: ReturnedBlock(
            "call", json.dumps(b["input"], ensure_ascii=False, separators=(",", ":")), b["id"], b["name"]
        ),
    }
    return [read[block["type"]](block) for block in body["content"]]


def _chat_turn(blocks: Sequence[ReturnedBlock], reply: Reply) -> list[WireBody]:
    turn: list[WireBody] = []
    for open_blocks, answered in _messages_of(blocks):
        turn.append(_chat_message(open_blocks, reply.listed))
        turn += [{"role": "tool", "tool_call_id": b.id, "content": reply.content} for b in answered]
    return turn if turn[-1]["role"] == "tool" else [*turn, {"role": "user", "content": reply.next}]


def _chat_message(blocks: Sequence[ReturnedBlock], listed: bool) -> WireBody:
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


def _chat_blocks(body: WireBody) -> list[ReturnedBlock]:
    message = body["choices"][0]["message"]
    thought = message.get("reasoning_content") or message.get("reasoning")
    blocks = [ReturnedBlock("thought", thought)] if thought else []
    if message.get("content"):
        blocks.append(ReturnedBlock("text", message["content"]))
    for call in message.get("tool_calls") or ():
        blocks.append(
            ReturnedBlock("call", call["function"]["arguments"], call["id"], call["function"]["name"])
        )
    return blocks


def _responses_turn(blocks: Sequence[ReturnedBlock], reply: Reply) -> list[WireBody]:
    written: dict[str, Callable[[int, ReturnedBlock], WireBody]] = {
        "thought": lambda i, b: {
            "type": "reasoning",
            "id": f"rs_{i}",
            "summary": [{"type": "summary_text", "text": b.text}],
            **({"encrypted_content": b.seal} if b.seal else {}),
        },
        "text": lambda i, b: {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": b.text}] if reply.listed else b.text,
        },
        "call": lambda i, b: {"type": "function_call", "call_id": b.id, "name": b.name, "arguments": b.text},
    }
    turn: list[WireBody] = []
    for open_blocks, calls in _messages_of(blocks):
        turn += [written[block.kind](len(turn) + i, block) for i, block in enumerate(open_blocks)]
        turn += [{"type": "function_call_output", "call_id": b.id, "output": reply.result} for b in calls]
    is_answered = bool(turn) and turn[-1]["type"] == "function_call_output"
    return turn if is_answered else [*turn, {"type": "message", "role": "user", "content": reply.next}]


def _responses_blocks(body: WireBody) -> list[ReturnedBlock]:
    read: dict[str, Callable[[WireBody], ReturnedBlock]] = {
        "reasoning": lambda i: ReturnedBlock(
            "thought", "".join(part["text"] for part in i.get("content") or i.get("summary") or ())
        ),
        "message": lambda i: ReturnedBlock("text", "".join(part["text"] for part in i["content"])),
        "function_call": lambda i: ReturnedBlock("call", i["arguments"], i["call_id"], i["name"]),
    }
    return [read[item["type"]](item) for item in body["output"]]


@dataclass(frozen=True, slots=True)
class TurnProtocol:
    """How one protocol writes a tool session.

    Attributes:
        history: the field of the messages.
        written: an assistant's turn, with the reply to it.
        blocks: an answer's body as blocks.
        tool: a tool by name, description and schema.
        settings: what a harness sends beside.
    """

    name: str
    path: str
    history: str
    written: Callable[[Sequence[ReturnedBlock], Reply], list[WireBody]]
    blocks: Callable[[WireBody], list[ReturnedBlock]]
    tool: Callable[[str, str, WireBody], WireBody]
    settings: Mapping[str, Any]

    def turn(self, blocks: Sequence[ReturnedBlock], listed: bool) -> list[WireBody]:
        """Return an assistant's turn with ``RESULT`` for its calls, or ``NEXT`` if there is none."""
        return self.written(blocks, Reply(listed=listed))


PROTOCOLS = (
    TurnProtocol(
        "messages",
        "/v1/messages",
        "messages",
        _messages_turn,
        _messages_blocks,
        lambda name, description, schema: {"name": name, "description": description, "input_schema": schema},
        {"max_tokens": 8000, "thinking": {"type": "enabled", "budget_tokens": 4000}},
    ),
    TurnProtocol(
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
    TurnProtocol(
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
