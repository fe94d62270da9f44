"""Read an event stream of each protocol as a client does: what it gave, when, and what was out of place.

The rules are those of the vendors' pages and those whose breach ends a turn in a client. A field more or less is none.
Events are decoded as https://html.spec.whatwg.org/multipage/server-sent-events.html says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from singletree.checking.returned_turns import ReturnedBlock

_MOST_PROBLEMS = 4


@dataclass(frozen=True, slots=True)
class Counts:
    """The usage of an answer. ``prompt`` includes the cached tokens; None for what was not reported."""

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None


def read_counts(protocol: str, usage: Any) -> Counts:
    """Return the counts of a usage object of ``protocol``."""
    if not isinstance(usage, dict):
        return Counts()
    if protocol == "messages":
        read, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
        fresh = usage.get("input_tokens")
        total = None if fresh is None else fresh + (read or 0) + (written or 0)
        return Counts(total, read, usage.get("output_tokens"))
    kind, made = ("input", "output") if protocol == "responses" else ("prompt", "completion")
    details = usage.get(f"{kind}_tokens_details") or {}
    return Counts(usage.get(f"{kind}_tokens"), details.get("cached_tokens"), usage.get(f"{made}_tokens"))


@dataclass
class TurnReader:
    """Feed it the events in order.

    Attributes:
        blocks: the parts of the turn, in the order in which they began.
        begun, done: seconds at which each of them began, and at which a client had all of it.
        problems: what was out of place, in words.
        stop: the reason with which the turn ended; empty if it did not.
        counts: the usage at the end; ``first_counts`` that at the start, if there is one.
        error: the message of an error event.
    """

    protocol: ClassVar[str]
    blocks: list[ReturnedBlock] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stop: str = ""
    counts: Counts = Counts()
    first_counts: Counts | None = None
    error: str = ""
    last: str = ""
    ended: bool = False
    seconds: float = 0.0

    def feed(self, seconds: float, name: str, text: str) -> None:
        """Take one event that came after ``seconds``."""
        if text == "[DONE]":
            # Only Chat has it; SDKs of the others skip an event without a name.
            self.ended = True
            return
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            self.need(False, f"an event has no JSON object: {text[:60]!r}")
            return
        self.seconds = seconds
        try:
            self.take(name, data)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            self.need(False, f"a {data.get('type') or 'chunk'} lacks {error}")

    def take(self, name: str, data: dict[str, Any]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Note what is missing at the end of the stream."""
        for block in self.blocks:
            if block.kind == "call":
                self.need(
                    _is_object(block.text), f"arguments of a call are no JSON object: {block.text[:60]!r}"
                )
                self.need(bool(block.id and block.name), "a call has no id or no name")
        ids = [block.id for block in self.blocks if block.kind == "call"]
        self.need(len(ids) == len(set(ids)), "two calls have one id")

    def need(self, holds: bool, problem: str) -> None:
        if not holds and problem not in self.problems and len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)

    def _begin(self, kind: Any, id: str = "", name: str = "") -> None:
        self.blocks.append(ReturnedBlock(kind, "", id, name))
        self.begun.append(self.seconds)
        self.done.append(self.seconds)

    def _add(self, text: str, at: int = -1, **more: str) -> None:
        block = self.blocks[at]
        self.blocks[at] = ReturnedBlock(
            block.kind, block.text + text, block.id, block.name, more.get("seal", block.seal)
        )
        self.done[at] = self.seconds


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False


class MessagesReader(TurnReader):
    """https://platform.claude.com/docs/en/build-with-claude/streaming"""

    protocol = "messages"
    _KINDS: ClassVar = {
        "text": "text",
        "thinking": "thought",
        "redacted_thinking": "thought",
        "tool_use": "call",
    }
    _DELTAS: ClassVar = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thought", "thinking"),
        "input_json_delta": ("call", "partial_json"),
    }
    _EVENTS: ClassVar = ("message_start", "content_block_start", "content_block_delta", "content_block_stop")
    _ENDS: ClassVar = ("message_delta", "message_stop", "ping", "error")
    _open = False

    def take(self, name: str, data: dict[str, Any]) -> None:
        kind = data["type"]
        self.need(kind in self._EVENTS + self._ENDS, f"unknown event {kind!r}: OpenCode ends the turn")
        self.need(name == kind, f"event {name!r} has data of type {kind!r}")
        if kind == "ping":
            return
        self.need((kind == "message_start") == (self.last == ""), f"{kind} at {self.last or 'the start'}")
        self.need(self.last not in ("message_stop", "error"), f"{kind} after the end")
        self.last = kind
        if kind == "message_start":
            self.first_counts = read_counts("messages", data["message"]["usage"])
            self.need(data["message"]["content"] == [], "message_start has content")
        elif kind == "content_block_start":
            self._start(data["index"], data["content_block"])
        elif kind == "content_block_delta":
            self._delta(data["index"], data["delta"])
        elif kind == "content_block_stop":
            self.need(
                self._open and data["index"] == len(self.blocks) - 1, "a stop of a block that is not open"
            )
            self._open, self.done[-1] = False, self.seconds
        elif kind == "message_delta":
            self.need(not self._open, "message_delta in an open block")
            self.stop = data["delta"]["stop_reason"] or self.stop
            self.counts = self._final(data.get("usage") or {})
        elif kind == "error":
            self.error = str(data["error"]["message"])

    def _start(self, index: int, block: dict[str, Any]) -> None:
        self.need(not self._open, "a block starts in an open block")
        self.need(index == len(self.blocks), f"block {len(self.blocks)} has the index {index}")
        self._open = True
        self._begin(self._KINDS.get(block["type"], "text"), block.get("id", ""), block.get("name", ""))
        given = block.get("input")
        self._add(json.dumps(given) if given else block.get("text") or block.get("thinking") or "")

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        self.need(self._open and index == len(self.blocks) - 1, "a delta of a block that is not open")
        kind = self.blocks[-1].kind
        if delta["type"] == "signature_delta":
            self.need(kind == "thought", f"a signature in a block of kind {kind}")
            self._add("", seal=delta["signature"])
        elif delta["type"] in self._DELTAS:
            of, key = self._DELTAS[delta["type"]]
            self.need(of == kind, f"a {delta['type']} in a block of kind {kind}")
            self._add(delta[key])

    def _final(self, usage: dict[str, Any]) -> Counts:
        """Return the counts at the end: those of the start, where the end does not repeat them (or has 0)."""
        last, first = read_counts("messages", usage), self.first_counts or Counts()
        prompt = last.prompt or first.prompt
        return Counts(prompt, last.cached if last.prompt else first.cached, last.generated)

    def end(self) -> None:
        super().end()
        self.need(self.last in ("message_stop", "error"), f"the stream ends with {self.last or 'nothing'}")
        self.need(bool(self.stop or self.error), "no stop_reason")


class ChatReader(TurnReader):
    """https://platform.openai.com/docs/api-reference/chat-streaming"""

    protocol = "chat"
    _id: str | None = None

    def take(self, name: str, data: dict[str, Any]) -> None:
        if "error" in data:
            error = data["error"]
            self.error = str(error.get("message") if isinstance(error, dict) else error)
            return
        self.need(data["object"] == "chat.completion.chunk", f"a chunk is a {data['object']!r}")
        self.need(self._id in (None, data["id"]), "the id changes between chunks")
        self.need(not self.ended, "a chunk after [DONE]")
        self._id = data["id"]
        if usage := data.get("usage"):
            self.counts = read_counts("chat", usage)
        for choice in data["choices"]:
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        written = {
            "thought": delta.get("reasoning_content") or delta.get("reasoning"),
            "text": delta.get("content"),
        }
        for kind, text in written.items():
            if text:
                self.need(not self.stop, "text after the finish")
                if not self.blocks or self.blocks[-1].kind != kind:
                    self._begin(kind)
                self._add(text)
        for call in delta.get("tool_calls") or ():
            self.need(not self.stop, "a call after the finish")
            self._call(call)
        if reason := choice.get("finish_reason"):
            self.need(not self.stop, "a second finish_reason")
            self.stop = reason

    def _call(self, call: dict[str, Any]) -> None:
        places = [at for at, block in enumerate(self.blocks) if block.kind == "call"]
        function, index = call.get("function") or {}, call["index"]
        if index == len(places):
            self._begin("call", call.get("id") or "", function.get("name") or "")
            places.append(len(self.blocks) - 1)
        self.need(index == len(places) - 1, f"call {index} goes on after call {len(places) - 1} began")
        if text := function.get("arguments"):
            self._add(text, places[index] if index < len(places) else -1)

    def end(self) -> None:
        super().end()
        self.need(bool(self.stop or self.error), "no finish_reason")
        self.need(self.ended, "no [DONE] at the end")


@dataclass
class ResponsesReader(TurnReader):
    """https://platform.openai.com/docs/api-reference/responses-streaming"""

    protocol = "responses"
    _KINDS: ClassVar = {"message": "text", "reasoning": "thought", "function_call": "call"}
    _ENDS: ClassVar = ("response.completed", "response.incomplete", "response.failed", "error")
    _TEXTS: ClassVar = (
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.function_call_arguments.delta",
    )
    _number: int = -1
    _places: dict[str, int] = field(default_factory=dict)
    _open: set[str] = field(default_factory=set)
    _summaries: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, data: dict[str, Any]) -> None:
        kind = data["type"]
        self.need(name == kind, f"event {name!r} has data of type {kind!r}")
        self.need((kind == "response.created") == (self.last == ""), f"{kind} at {self.last or 'the start'}")
        self.need(self.last not in self._ENDS, f"{kind} after the end")
        number = data.get("sequence_number", -1)
        self.need(number > self._number, "sequence numbers are missing, or do not count up")
        self._number, self.last = number, kind
        if kind == "response.output_item.added":
            self._added(data.get("output_index"), data["item"])
        elif kind == "response.output_item.done":
            self._finished(data["item"])
        elif kind in self._TEXTS:
            self.need(data["item_id"] in self._open, f"{kind} of an item that is not open")
            self._add(data["delta"], self._places.get(data["item_id"], -1))
        elif kind == "response.reasoning_summary_text.delta":
            self._summaries[data["item_id"]] = self._summaries.get(data["item_id"], "") + data["delta"]
        elif kind in self._ENDS:
            self._end(kind, data)

    def _added(self, index: int | None, item: dict[str, Any]) -> None:
        self.need(index == len(self.blocks), f"item {len(self.blocks)} has the index {index}")
        self._places[item["id"]] = len(self.blocks)
        self._open.add(item["id"])
        self._begin(self._KINDS.get(item["type"], "text"), item.get("call_id", ""), item.get("name", ""))

    def _finished(self, item: dict[str, Any]) -> None:
        self.need(item["id"] in self._open, "an item is done that is not open, or its id changed")
        self._open.discard(item["id"])
        at = self._places.get(item["id"], -1)
        block = self.blocks[at]
        if block.kind == "call":
            self.need(item["arguments"] == block.text, "the deltas of a call are not its arguments")
        if block.kind == "thought":
            summary = "" if block.text else self._summaries.get(item["id"], "")
            self._add(summary, at, seal=item.get("encrypted_content") or "")
        self.done[at] = self.seconds

    def _end(self, kind: str, data: dict[str, Any]) -> None:
        self.need(not self._open or kind != "response.completed", "the response is completed in an open item")
        if kind == "error":
            self.error = str(data.get("message") or data.get("error"))
            return
        response = data["response"]
        self.stop = kind.removeprefix("response.")
        self.counts = read_counts("responses", response.get("usage"))
        if kind == "response.failed":
            self.error = str((response.get("error") or {}).get("message"))
            return
        kinds = [self._KINDS.get(item["type"], "text") for item in response["output"]]
        self.need(
            kinds == [b.kind for b in self.blocks], "the response at the end has other items than were sent"
        )

    def end(self) -> None:
        super().end()
        self.need(self.last in self._ENDS, f"the stream ends with {self.last or 'nothing'}")
        self.need(bool(self.stop or self.error), "no terminal event")


READERS = {reader.protocol: reader for reader in (MessagesReader, ChatReader, ResponsesReader)}
"""By the name of the protocol."""


@dataclass(slots=True)
class ServerSentEvent:
    """One decoded event; ``event`` is empty if the stream names none."""

    event: str
    data: str


class Decoder:
    """Decode a stream that may be cut anywhere. Comments and unknown fields are skipped, as the standard requires."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that ``chunk`` completes."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        return [e for line in lines if (e := self._line(line.removesuffix(b"\r").decode("utf-8", "replace")))]

    def _line(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        event = ServerSentEvent(self._event, "\n".join(self._data)) if self._data else None
        self._event, self._data = "", []
        return event
