"""What a Chat Completions stream may look like, as a checker that fails on the first thing out of place."""

from __future__ import annotations

import json
from typing import Any

from singletree.checking.streams import Decoder
from singletree.protocols.answer import encode_sse

FINISH_REASONS = {"stop", "length", "tool_calls", "function_call", "content_filter"}
DELTA_FIELDS = {
    "role",
    "content",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    "function_call",
    "reasoning_details",
}
HEAD = ("id", "object", "created", "model")
ASIDES = ("tool_call_dispatch", "reasoning_dispatch")
"""Events beside the protocol, which only who asks for them gets."""
ARGUMENTS = {"function": "arguments", "custom": "input"}


class Grammar:
    """Reads a stream whole. ``calls`` are the calls as a client puts them together, in order."""

    def __init__(self, stream: bytes) -> None:
        self.calls: list[dict[str, str]] = []
        self.text = ""
        self.reasoning = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self._head: dict[str, Any] | None = None
        assert stream.endswith(b"\n\n")
        decoder = Decoder()
        events = decoder.feed(stream)
        asides = [event for event in events if event.event in ASIDES]
        assert all(json.loads(aside.data)["choices"] == [] for aside in asides), "they say nothing"
        heads = [{k: v for k, v in json.loads(aside.data).items() if k in HEAD} for aside in asides]
        events = [event for event in events if event.event not in ASIDES]
        assert all(event.event == "" for event in events), "no named events: some clients fail on them"
        *chunks, last = [event.data for event in events]
        assert last == "[DONE]", "the end mark is last"
        for i, data in enumerate(chunks):
            self._chunk(json.loads(data), first=i == 0)
        assert all(head == self._head for head in heads), "with the head of every chunk"
        assert (self.finish_reason is None) == (self.error is not None), "a stream finishes or fails"

    def _chunk(self, chunk: dict[str, Any], *, first: bool) -> None:
        assert self.error is None, "nothing follows an error"
        if "error" in chunk:
            assert self.finish_reason is None, "what has finished cannot fail"
            assert set(chunk["error"]) == {"message", "type", "param", "code"}
            self.error = chunk["error"]
            return
        head = {k: chunk[k] for k in HEAD}
        assert self._head in (None, head), "every chunk has the same head"
        self._head = head
        assert head["object"] == "chat.completion.chunk"
        assert self.usage is None, "nothing follows the usage"
        if not chunk["choices"]:
            assert self.finish_reason is not None, "usage follows the finish"
            self.usage = chunk["usage"]
            return
        assert self.finish_reason is None, "one finish, and no delta after it"
        [choice] = chunk["choices"]
        assert choice["index"] == 0
        self._delta(choice["delta"], first=first)
        self.finish_reason = choice["finish_reason"]
        assert self.finish_reason in {None, *FINISH_REASONS}

    def _delta(self, delta: dict[str, Any], *, first: bool) -> None:
        assert set(delta) <= DELTA_FIELDS
        assert (delta.get("role") == "assistant") == first, "the first chunk, and no other, gives the role"
        self.text += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            self._call(call)
        if "function_call" in delta:
            assert not self.calls, "a message has room for one, and it comes whole"
            self.calls.append({"type": "function_call", **delta["function_call"]})
        for detail in delta.get("reasoning_details", ()):
            assert detail.keys() == {"type", "id", "data", "format", "index"}
            assert detail["id"] == self.calls[-1]["id"], "it stands with the last call"

    def _call(self, call: dict[str, Any]) -> None:
        index = call["index"]
        kind = next(k for k in ARGUMENTS if k in call)
        piece = call[kind]
        if index == len(self.calls):
            assert call["type"] == kind
            assert call["id"]
            assert all(call["id"] != other["id"] for other in self.calls), "ids are distinct"
            known = {"id": call["id"], "type": kind, "name": piece["name"], "arguments": ""}
            self.calls.append(known)
        else:
            assert index == len(self.calls) - 1, "indices have no gap, and no call is taken up again"
            assert set(call) == {"index", kind}, "id and type come once"
            assert set(piece) == {ARGUMENTS[kind]}, "the name comes once"
            assert piece[ARGUMENTS[kind]], "no empty pieces"
        assert kind == self.calls[index]["type"]
        self.calls[index]["arguments"] += piece[ARGUMENTS[kind]]


def check(stream: bytes) -> list[Grammar]:
    """Each choice of a stream that may have several: alone, every one is a stream of its own."""
    chunks = [event.data for event in Decoder().feed(stream) if event.event not in ASIDES]
    places = {choice["index"] for data in chunks if data != "[DONE]" for choice in _choices(data)}
    if len(places) < 2:
        return [Grammar(stream)]
    assert places == set(range(len(places)))
    written = [[_only(data, index) for data in chunks] for index in sorted(places)]
    return [Grammar(b"".join(_unfailed(own) if any(map(_finishes, own)) else own)) for own in written]


def _finishes(frame: bytes) -> bool:
    return b'"finish_reason": "' in frame


def _unfailed(own: list[bytes]) -> list[bytes]:
    """Without the error of another choice, which ends the stream for one that is whole."""
    return [frame for frame in own if not frame.startswith(b'data: {"error"')]


def _choices(data: str) -> list[dict[str, Any]]:
    return json.loads(data).get("choices", [])  # type: ignore[no-any-return]


def _only(data: str, index: int) -> bytes:
    """What of a chunk is that choice's, as its only one."""
    choices = [] if data == "[DONE]" else _choices(data)
    if choices and choices[0]["index"] != index:
        return b""
    if choices:
        data = json.dumps(json.loads(data) | {"choices": [choices[0] | {"index": 0}]})
    return encode_sse([("", data.encode())])
