"""Anthropic Messages: events to server-sent events, a turn to a body, an error to a status and a body.

https://platform.claude.com/docs/en/build-with-claude/streaming and .../api/errors.

A call that was cut is shown as the API shows it, once it has any arguments: its block is closed and
``stop_reason`` is ``max_tokens``. It never makes the reason ``tool_use``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Request, Text, ToolCall, Turn
from singletree.errors import Overloaded, Rejected, SingletreeError, ThreadUnsupported
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
)
from singletree.protocols import sse, wire
from singletree.protocols.messages_context import applied_edits
from singletree.protocols.messages_input import tool_input

ID_PREFIX = "msg_"

Seal = Callable[[int], str]

_Block = type[TextDelta] | type[ReasoningDelta] | type[ArgumentsDelta]

_PING = sse.frame(b'{"type":"ping"}', "ping")
_STOP = sse.frame(b'{"type":"message_stop"}', "message_stop")
_END_OF_DELTA = b"}}\n\n"

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "context_overflow": "model_context_window_exceeded",
    "refusal": "refusal",
    # The API's one word for a turn that others cut short: harnesses go on from what they have.
    "cancelled": "max_tokens",
    "error": "max_tokens",
}

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_OVERLOADED = 529

_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
_BLOCK_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_EMPTY: dict[_Block, bytes] = {
    TextDelta: b'{"type":"text","text":"","citations":null}',
    ReasoningDelta: b'{"type":"thinking","thinking":"","signature":""}',
}
_TOOL_USE = b'{"type":"tool_use","id":%b,"name":%b,"input":{},"caller":{"type":"direct"}}'
_DELTA_FIELDS: dict[_Block, bytes] = {
    TextDelta: b'"text_delta","text":',
    ReasoningDelta: b'"thinking_delta","thinking":',
    ArgumentsDelta: b'"input_json_delta","partial_json":',
}
# What the API's schema requires and nothing here can fill.
_UNUSED = {"stop_details": None, "container": None}
_UNUSED_IN_USAGE = {"cache_creation": None, "inference_geo": None, "service_tier": None}
_SIGNATURE_FIELD = b'"signature_delta","signature":'


class Encoder:
    """One stream: ``start``, then ``feed`` for each event, then ``close`` or ``fail``.

    A call is shown with the first piece of its arguments, so that a client never sees, and never runs, one
    that turns out before that not to be a call (ToolCallBroken), or that was cut: what has no input yet looks
    like a call without arguments, and Claude Code runs a call when its block stops.

    Args:
        id: the message's id.
        usage: what is known before the first token; ``Finished.usage`` has the last word.
        created: not said on this API.
        seal: gives the signature of the nth block of reasoning, from 0; asked when that block ends.
        request_id: shown in an ``error`` event; a new one by default.
    """

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        usage: Usage,
        new_id: Callable[[str], str],
        seal: Seal | None = None,
        request_id: str | None = None,
    ) -> None:
        self._request_id, self._new_id = request_id, new_id
        self._model, self._id, self._usage, self._seal = request.model, id, usage, seal
        self._only_reads = only_reads(request)
        self._hides_thinking = _hides_thinking(request)
        self._applied_edits = applied_edits(request)
        self._open: _Block | None = None
        self._head = b""  # of a delta of the open block, up to its text
        self._index = 0
        self._reasoned = 0
        self._call: list[str] | None = None  # the raw text of the call in progress
        self._unshown: ToolCallStart | None = None
        self._called = False
        self._over = False

    def start(self) -> bytes:
        """``message_start`` with the usage known so far, and a ``ping`` at once, as the API sends it."""
        message = _message(self._id, self._model, [], None, None, self._usage)
        return _event({"type": "message_start", "message": message}) + _PING

    def feed(self, event: Event) -> bytes:
        """What ``event`` says; empty when it says nothing."""
        if self._only_reads:
            return b""
        if isinstance(event, TextDelta):
            return self._delta(event.text) if self._open is TextDelta else self._begin(TextDelta, event.text)
        if isinstance(event, ReasoningDelta):
            same = self._open is ReasoningDelta
            return self._delta(event.text) if same else self._begin(ReasoningDelta, event.text)
        if isinstance(event, ArgumentsDelta):
            return self._arguments(event)
        if isinstance(event, ToolCallStart):
            return self._begin_call(event)
        if isinstance(event, ToolCallEnd):
            return self._end_call()
        if isinstance(event, ToolCallBroken):
            return self._break_call(event)
        return self._between(event) if isinstance(event, Markup) else b""

    def keep_alive(self) -> bytes:
        """A ``ping``: harnesses count it, and no comment, as a sign of life (Router-Maestro#61)."""
        return b"" if self._over else _PING

    def close(self, finished: Finished) -> bytes:
        """The open block's end, ``message_delta`` with the reason and the final usage, ``message_stop``."""
        if self._over:
            return b""
        self._over = True
        finished = _read_only(finished) if self._only_reads else finished
        delta = {
            "stop_reason": _stop_reason(finished, self._called),
            "stop_sequence": finished.stop_sequence,
            **_UNUSED,
        }
        last = _event(
            {"type": "message_delta", "delta": delta, "usage": _usage(finished.usage), **self._applied_edits}
        )
        return self._end() + last + _STOP

    def fail(self, error: SingletreeError) -> bytes:
        """The open block's end and an ``error`` event; nothing comes after it."""
        if self._over:
            return b""
        self._over = True
        return self._end() + _event(_failure(error, self._request_id or self._new_id("req_")))

    def side_event(self, name: str, said: Mapping[str, Any]) -> bytes:
        """An event beside the API's. To who does not know ``name`` its data is a ``ping``, which may come anywhere."""
        return b"" if self._over else sse.frame(wire.dump({"type": "ping", **said}), name)

    def _delta(self, text: str) -> bytes:
        if not text or (self._hides_thinking and self._open is ReasoningDelta):
            return b""
        return self._head + wire.dump(text) + _END_OF_DELTA

    def _begin(self, kind: _Block, text: str) -> bytes:
        """What was open ends even if ``text`` is empty, as in the fold; what is empty does not open."""
        ended = self._end()
        return ended + self._start(kind, _EMPTY[kind]) + self._delta(text) if text else ended

    def _start(self, kind: _Block, block: bytes) -> bytes:
        self._open = kind
        self._head = _DELTA % (self._index, _DELTA_FIELDS[kind])
        return _START % (self._index, block)

    def _arguments(self, event: ArgumentsDelta) -> bytes:
        if self._call is None:
            return b""
        self._call.append(event.raw)
        if self._open is ArgumentsDelta:
            return self._delta(event.json)
        # White space alone is no JSON yet, and SDKs parse what they have after every delta.
        piece = event.json.lstrip(wire.JSON_SPACE)
        return self._show_call() + self._delta(piece) if piece else b""

    def _between(self, markup: Markup) -> bytes:
        """The format's own text ends a block of reasoning; inside a call it belongs to the call."""
        if self._call is not None:
            self._call.append(markup.raw)
        return self._end() if self._open is ReasoningDelta else b""

    def _begin_call(self, start: ToolCallStart) -> bytes:
        ended = self._end()
        self._call, self._unshown = [start.raw], start
        return ended

    def _show_call(self) -> bytes:
        call, self._unshown = self._unshown, None
        assert call is not None
        return self._start(ArgumentsDelta, _TOOL_USE % (wire.dump(call.id), wire.dump(call.name)))

    def _end_call(self) -> bytes:
        if self._call is None:
            return b""
        self._called = True
        shown = self._show_call() + self._delta("{}") if self._unshown else b""
        return shown + self._end()

    def _break_call(self, event: ToolCallBroken) -> bytes:
        raw = "".join([*(self._call or ()), event.raw])
        ended = self._end()
        return ended + self.feed(TextDelta(raw, raw))

    def _end(self) -> bytes:
        """The end of the open block; a call that was cut before its arguments is left out."""
        kind, self._open, self._call, self._unshown = self._open, None, None, None
        if kind is None:
            return b""
        out = b""
        if kind is ReasoningDelta:
            out = _signature(self._index, self._seal(self._reasoned) if self._seal else "")
            self._reasoned += 1
        out += _BLOCK_STOP % self._index
        self._index += 1
        return out


def encode(
    request: Request,
    turn: Turn,
    finished: Finished,
    *,
    id: str,
    created: int,
    new_id: Callable[[str], str],
    seal: Seal | None = None,
) -> bytes:
    """The body that answers a request without ``stream``: the blocks that the stream would have shown."""
    if only_reads(request):
        turn, finished = Turn("assistant"), _read_only(finished)
    hides, content, reasoned = _hides_thinking(request), [], 0
    for part in turn.parts:
        if isinstance(part, Text):
            content.append({"type": "text", "text": _value(part.text), "citations": None})
        elif isinstance(part, Reasoning):
            signature = seal(reasoned) if seal else (part.extra or {}).get("signature", "")
            text = _value("" if hides else part.text)
            content.append({"type": "thinking", "thinking": text, "signature": signature})
            reasoned += 1
        elif isinstance(part, ToolCall) and (part.complete or part.arguments.strip(wire.JSON_SPACE)):
            content.append(_tool_use(part))
    reason = _stop_reason(finished, any(call.complete for call in turn.tool_calls))
    message = _message(id, request.model, content, reason, finished.stop_sequence, finished.usage)
    return msgspec.json.encode(message | applied_edits(request))


def encode_count(tokens: int, original: int | None = None) -> bytes:
    """The answer to count_tokens; ``original`` is what it was before context editing, where that was asked for."""
    edited = b"" if original is None else b',"context_management":{"original_input_tokens":%d}' % original
    return b'{"input_tokens":%d%b}' % (tokens, edited)


def encode_error(error: SingletreeError, *, request_id: str | None = None) -> tuple[int, bytes]:
    """HTTP status and body. ``request_id`` is shown when it is given, as the API does."""
    return _status(error), msgspec.json.encode(_failure(error, request_id))


def _status(error: SingletreeError) -> int:
    return _OVERLOADED if isinstance(error, Overloaded) else error.status


def _failure(error: SingletreeError, request_id: str | None) -> dict[str, Any]:
    """The error's own object. In a stream, where no status can be given, pi 0.73 tries again only if it reads
    ``Internal server error``, qwen-code 0.24 only if there is a ``request_id``.
    """
    type_, message = _ERROR_TYPES.get(_status(error)), error.message
    if type_ is None and isinstance(error, Rejected):
        type_ = "invalid_request_error"
    elif type_ is None:
        type_, message = "api_error", f"Internal server error: {message}"
    said: dict[str, Any] = {"type": type_, "message": _value(message)}
    if isinstance(error, ThreadUnsupported):
        said["details"] = {"error_code": "thread_unsupported_request"}
    shown: dict[str, Any] = {"type": "error", "error": said}
    return shown if request_id is None else shown | {"request_id": request_id}


def _stop_reason(finished: Finished, called: bool) -> str:
    return "tool_use" if called and finished.reason == "stop" else _STOP_REASONS[finished.reason]


def _usage(usage: Usage) -> dict[str, Any]:
    """The three input counts add up to the prompt (C8). What a prompt put into the cache, no engine tells."""
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
    }


def _message(
    id: str, model: str, content: list[Any], stop_reason: str | None, stop_sequence: str | None, usage: Usage
) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        **_UNUSED,
        "usage": _usage(usage) | _UNUSED_IN_USAGE,
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    given = tool_input(call.arguments, complete=call.complete)
    return {
        "type": "tool_use",
        "id": _value(call.id),
        "name": _value(call.name),
        "input": given,
        "caller": {"type": "direct"},
    }


def only_reads(request: Request) -> bool:
    """Whether the prompt is to be read and nothing said (``max_tokens`` of 0): it fills the engine's cache."""
    return bool(request.extra.get("only_reads"))


def _read_only(finished: Finished) -> Finished:
    """The end of an answer that says nothing: engines write at least one token."""
    return Finished("length", replace(finished.usage, completion_tokens=0, reasoning_tokens=0))


def _hides_thinking(request: Request) -> bool:
    return request.extra.get("display") == "omitted"


def _signature(index: int, signature: str) -> bytes:
    return _DELTA % (index, _SIGNATURE_FIELD) + wire.dump(signature) + _END_OF_DELTA


def _event(data: dict[str, Any]) -> bytes:
    return sse.frame(msgspec.json.encode(data), data["type"])


def _value(text: str) -> msgspec.Raw:
    return msgspec.Raw(wire.dump(text))
