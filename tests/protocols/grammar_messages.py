"""The event grammar of an Anthropic Messages stream, as a state machine that refuses everything else.

https://platform.claude.com/docs/en/build-with-claude/streaming:

    message_start ping (ping | block)* (message_delta message_stop | error)
    block = content_block_start (content_block_delta | ping)* content_block_stop

One block is open at a time and indices count from 0; a delta is of its block's type; a ``thinking`` block has
exactly one ``signature_delta``, its last delta; the keys of every event are those of the API.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from singletree.checking.streams import Decoder

STOP_REASONS = {
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "refusal",
    "model_context_window_exceeded",
}
ERROR_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
}
USAGE = {
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "output_tokens_details",
    "server_tool_use",
}
AT_START = {"cache_creation", "inference_geo", "service_tier"}
"""Of the usage in ``message_start`` only; null here, as all of the API's that an open model has no use for."""
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"text": "", "citations": None},
    "thinking": {"thinking": "", "signature": ""},
    "redacted_thinking": {"data": str},
    "tool_use": {"id": str, "name": str, "input": {}, "caller": {"type": "direct"}},
}
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
KEYS = {
    "message_start": {"type", "message"},
    "ping": {"type"},
    "content_block_start": {"type", "index", "content_block"},
    "content_block_delta": {"type", "index", "delta"},
    "content_block_stop": {"type", "index"},
    "message_delta": {"type", "delta", "usage"},
    "message_stop": {"type"},
    "error": {"type", "error", "request_id"},
}
ENDS = ("message_delta", "message_stop", "error")
ASIDES = ("tool_call_dispatch", "reasoning_dispatch")
"""Events beside the API's, which only who asks for them gets: to everybody else a ping."""
END = {"stop_reason", "stop_sequence", "stop_details", "container"}
MESSAGE = {"id", "type", "role", "model", "content", "usage"} | END


class Ungrammatical(AssertionError):
    """The stream is not one that the API could have sent."""


def need(holds: bool, *what: object) -> None:
    """Refuse the stream unless ``holds``."""
    if not holds:
        raise Ungrammatical(" ".join(map(str, what)))


@dataclass
class Block:
    """A block as it was streamed; ``deltas`` are the texts of its own kind, joined."""

    type: str
    start: dict[str, Any]
    text: str = ""
    signatures: list[str] = field(default_factory=list)
    at_event: int = 0


@dataclass
class Grammar:
    """Feed it the events in order; what it saw stays in its fields."""

    blocks: list[Block] = field(default_factory=list)
    open: Block | None = None
    seen: list[str] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def feed(self, name: str, data: dict[str, Any]) -> None:
        """One more event."""
        kind = data.get("type")
        if name in ASIDES:
            need(
                kind == "ping" and self.seen[1:2] == ["ping"] and self.seen[-1] not in ENDS,
                name,
                "at",
                self.seen[-1:],
            )
            return
        need(name == kind, "event", name, "has data of type", kind)
        need(kind in KEYS, "unknown event", kind)
        edited = {"context_management"} if kind == "message_delta" else set()
        need(set(data) - edited == KEYS[str(kind)], kind, "has keys", sorted(data))
        before = self.seen[-1] if self.seen else ""
        need((kind == "message_start") == (not self.seen), "message_start is first, and only first")
        need(self.seen[1:2] in ([], ["ping"]), "a ping follows message_start")
        need(before not in ("message_stop", "error"), kind, "after the end")
        need((before == "message_delta") == (kind == "message_stop"), "message_stop follows message_delta")
        self.seen.append(str(kind))
        if rule := getattr(self, f"_{kind}", None):
            rule(data)

    def end(self) -> None:
        """The stream is over."""
        need(self.seen[-1:] in (["message_stop"], ["error"]), "no terminal event, but", self.seen[-1:])

    def _message_start(self, data: dict[str, Any]) -> None:
        self.message = message = data["message"]
        need(set(message) == MESSAGE, "message has keys", sorted(message))
        need(message["type"] == "message" and message["role"] == "assistant", message)
        need(message["content"] == [] and message["stop_reason"] is message["stop_sequence"] is None, message)
        need(set(message["usage"]) >= AT_START, message["usage"])
        usage({k: v for k, v in message["usage"].items() if k not in AT_START})

    def _content_block_start(self, data: dict[str, Any]) -> None:
        need(self.open is None, "a block starts in a block")
        need(data["index"] == len(self.blocks), "index", data["index"], "of block", len(self.blocks))
        block = dict(data["content_block"])
        kind = block.pop("type")
        need(kind in BLOCKS and set(block) == set(BLOCKS[kind]), "content_block", data["content_block"])
        for key, value in BLOCKS[kind].items():
            need(block[key] == value or (value is str and isinstance(block[key], str)), key, block[key])
        self.open = Block(kind, block)
        self.blocks.append(self.open)

    def _content_block_delta(self, data: dict[str, Any]) -> None:
        block = self.open
        assert block is not None, "a delta without an open block"
        need(data["index"] == len(self.blocks) - 1, "a delta of block", data["index"])
        delta = dict(data["delta"])
        kind = delta.pop("type")
        need(kind in DELTAS, "delta", kind)
        of, key = DELTAS[kind]
        need(of == block.type and set(delta) == {key}, kind, delta, "in a block of type", block.type)
        need(not block.signatures, "a delta after the signature")
        if kind == "signature_delta":
            block.signatures.append(delta[key])
        else:
            need(delta[key] != "", "an empty", kind)
            block.text += delta[key]

    def _content_block_stop(self, data: dict[str, Any]) -> None:
        block, self.open = self.open, None
        assert block is not None, "a stop without an open block"
        need(data["index"] == len(self.blocks) - 1, "a stop of block", data["index"])
        need(len(block.signatures) == (block.type == "thinking"), "signatures", block.signatures)
        block.at_event = len(self.seen)

    def _message_delta(self, data: dict[str, Any]) -> None:
        need(self.open is None, "the message ends in a block")
        need(set(data["delta"]) == END, data["delta"])
        reason, sequence = data["delta"]["stop_reason"], data["delta"]["stop_sequence"]
        need(reason in STOP_REASONS, "stop_reason", reason)
        need((reason == "stop_sequence") == isinstance(sequence, str), reason, sequence)
        need(reason != "tool_use" or any(b.type == "tool_use" for b in self.blocks), "tool_use without one")
        usage(data["usage"])
        self.last = data

    def _error(self, data: dict[str, Any]) -> None:
        need(self.open is None, "an error in a block")
        need(set(data["error"]) == {"type", "message"}, data["error"])
        need(data["error"]["type"] in ERROR_TYPES, data["error"])
        self.last = data


def usage(counts: dict[str, Any]) -> None:
    """Refuse counts that the API would not send."""
    need(set(counts) == USAGE, "usage has keys", sorted(counts))
    details = counts["output_tokens_details"]
    need(set(details) == {"thinking_tokens"}, details)
    need(counts["server_tool_use"] is None, counts)
    no_number = ("output_tokens_details", "server_tool_use")
    numbers = [v for k, v in counts.items() if k not in no_number] + [details["thinking_tokens"]]
    need(all(type(n) is int and n >= 0 for n in numbers), counts)


def check(stream: bytes) -> Grammar:
    """The stream, refused unless it is whole and grammatical."""
    need(stream.endswith(b"\n\n"), "the last event has no end")
    need(b"[DONE]" not in stream.rsplit(b"\n\n", 2)[-2], "[DONE] is not of this API")
    grammar = Grammar()
    for event in Decoder().feed(stream):
        grammar.feed(event.event, json.loads(event.data))
    grammar.end()
    return grammar
