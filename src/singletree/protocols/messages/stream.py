"""Anthropic Messages: encode events as server-sent events, a turn as a body, an error as a status and a body.

https://platform.claude.com/docs/en/build-with-claude/streaming and .../api/errors.

A call that was cut is sent as the API does, if it has any arguments: its block is closed and ``stop_reason`` is
``max_tokens``. A cut call never makes the reason ``tool_use``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Text, ToolCall, Turn
from singletree.errors import BudgetSpent, Overloaded, Rejected, SingletreeError, ThreadUnsupported
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
from singletree.protocols import wire
from singletree.protocols.answer import AnswerContext, FinishedChoice, Frame
from singletree.protocols.messages.tools import applied_edits, message_diagnostics, tool_input
from singletree.protocols.wire import encode_ascii

ID_PREFIX = "msg_"

_Block = type[TextDelta] | type[ReasoningDelta] | type[ArgumentsDelta]

_PING: Frame = ("ping", b'{"type":"ping"}')
_STOP: Frame = ("message_stop", b'{"type":"message_stop"}')

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "context_overflow": "model_context_window_exceeded",
    "refusal": "refusal",
    # The API's only reason for a turn that was cut short: harnesses continue from what they have.
    "cancelled": "max_tokens",
    "error": "max_tokens",
}

_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}

_START = b'{"type":"content_block_start","index":%d,"content_block":%b}'
_DELTA = b'{"type":"content_block_delta","index":%d,"delta":{"type":%b'
_BLOCK_STOP = b'{"type":"content_block_stop","index":%d}'
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
# Fields that the API's schema requires and that have no value here.
_UNUSED = {"stop_details": None, "container": None}
_UNUSED_IN_USAGE = {"cache_creation": None, "inference_geo": None, "service_tier": None}
_SIGNATURE_FIELD = b'"signature_delta","signature":'


class Encoder:
    """Encode the events of one stream.

    A call is sent with the first piece of its arguments. So a client never sees, and never runs, a call that breaks
    (ToolCallBroken) or is cut before that: a call without input looks like one without arguments, and Claude Code
    runs a call when its block stops.
    """

    def __init__(self, context: AnswerContext) -> None:
        request = context.request
        self._context = context
        self._wants_thinking = request.thinking.enabled is True
        self._only_reads = request.options.prefill_only
        self._hides_thinking = request.options.hidden_thinking
        self._applied_edits = applied_edits(request)
        self._open: _Block | None = None
        self._around = b"", b""  # a delta of the open block, before and after its text
        # The open block if it is one of text or reasoning that is sent.
        self._streamed: type[TextDelta] | type[ReasoningDelta] | None = None
        self._index = 0
        self._reasoned = 0
        self._call: list[str] | None = None  # the raw text of the call in progress
        self._unsent: ToolCallStart | None = None
        self._called = False
        self._over = False

    def start(self) -> list[Frame]:
        context = self._context
        # An engine may have generated the whole turn by now; its tokens are counted at the end.
        read = replace(context.usage, completion_tokens=0, reasoning_tokens=0)
        message = _message(context.id, context.request.model, [], None, None, read)
        message |= message_diagnostics(context.request)
        return [_event({"type": "message_start", "message": message}), _PING]

    def feed(self, event: Event) -> list[Frame]:
        # The next piece of the open block comes first and in full, because it is most of the tokens.
        if type(event) is self._streamed and (text := event.text):
            data = (encode_ascii(text) if text.isascii() else wire.dump(text)).join(self._around)
            return [("content_block_delta", data)]
        if self._only_reads:
            return []
        if isinstance(event, TextDelta | ReasoningDelta):
            kind = type(event)
            return self._delta(event.text) if self._open is kind else self._begin(kind, event.text)
        if isinstance(event, ArgumentsDelta):
            return self._arguments(event)
        if isinstance(event, ToolCallStart):
            return self._begin_call(event)
        if isinstance(event, ToolCallEnd):
            return self._end_call()
        if isinstance(event, ToolCallBroken):
            return self._break_call(event)
        return self._markup(event) if isinstance(event, Markup) else []

    def keep_alive(self) -> list[Frame]:
        # Harnesses reset their idle timer on a ping, but not on a comment (Router-Maestro#61).
        return [] if self._over else [_PING]

    def end(self, finished: Finished) -> list[Frame]:
        if self._over:
            return []
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
        return [*self._end(), *self._capsule(finished), last, _STOP]

    def tail(self, usage: Usage) -> list[Frame]:
        return []

    def _capsule(self, finished: Finished) -> list[Frame]:
        """Return the capsule of the turn as a block that no client displays; it restores the turn's tokens later.

        A client that neither asked for reasoning nor got any does not get this block either.
        """
        wanted = self._called and (self._wants_thinking or self._reasoned)
        sealed = self._context.sealed_end(finished) if wanted else ""
        if not sealed:
            return []
        index, self._index = self._index, self._index + 1
        return [_start(index, msgspec.json.encode(_redacted(sealed))), _stop(index)]

    def fail(self, error: SingletreeError) -> list[Frame]:
        if self._over:
            return []
        self._over = True
        return [*self._end(), _event(_failure(error, self._context.new_id("req_")))]

    def side_event(self, name: str, data: Mapping[str, Any]) -> list[Frame]:
        # A ping may come anywhere.
        return [] if self._over else [(name, wire.dump({"type": "ping", **data}))]

    def _delta(self, text: str) -> list[Frame]:
        if not text or (self._hides_thinking and self._open is ReasoningDelta):
            return []
        return [("content_block_delta", wire.dump(text).join(self._around))]

    def _begin(self, kind: _Block, text: str) -> list[Frame]:
        """End the open block, even if ``text`` is empty, as in the fold; begin a new one if ``text`` is not empty."""
        ended = self._end()
        return [*ended, self._start(kind, _EMPTY[kind]), *self._delta(text)] if text else ended

    def _start(self, kind: _Block, block: bytes) -> Frame:
        self._open = kind
        if kind is TextDelta:
            self._streamed = TextDelta
        elif kind is ReasoningDelta and not self._hides_thinking:
            self._streamed = ReasoningDelta
        self._around = _DELTA % (self._index, _DELTA_FIELDS[kind]), b"}}"
        return _start(self._index, block)

    def _arguments(self, event: ArgumentsDelta) -> list[Frame]:
        if self._call is None:
            return []
        self._call.append(event.raw)
        if self._open is ArgumentsDelta:
            return self._delta(event.json)
        # White space alone is not JSON, and SDKs parse what they have after every delta.
        piece = event.json.lstrip(wire.JSON_SPACE)
        return [self._send_call(), *self._delta(piece)] if piece else []

    def _markup(self, markup: Markup) -> list[Frame]:
        """End a block of reasoning at markup of the format; inside a call, markup belongs to the call."""
        if self._call is not None:
            self._call.append(markup.raw)
        return self._end() if self._open is ReasoningDelta else []

    def _begin_call(self, start: ToolCallStart) -> list[Frame]:
        ended = self._end()
        self._call, self._unsent = [start.raw], start
        return ended

    def _send_call(self) -> Frame:
        call, self._unsent = self._unsent, None
        assert call is not None
        return self._start(ArgumentsDelta, _TOOL_USE % (wire.dump(call.id), wire.dump(call.name)))

    def _end_call(self) -> list[Frame]:
        if self._call is None:
            return []
        self._called = True
        shown = [self._send_call(), *self._delta("{}")] if self._unsent else []
        return [*shown, *self._end()]

    def _break_call(self, event: ToolCallBroken) -> list[Frame]:
        raw = "".join([*(self._call or ()), event.raw])
        return [*self._end(), *self.feed(TextDelta(raw, raw))]

    def _end(self) -> list[Frame]:
        """End the open block; a call that was cut before its arguments is left out."""
        kind, self._open, self._call, self._unsent = self._open, None, None, None
        self._streamed = None
        if kind is None:
            return []
        out: list[Frame] = []
        if kind is ReasoningDelta:
            seal = self._context.seal
            signature = wire.dump(seal(self._reasoned) if seal else "")
            delta = b"%b%b}}" % (_DELTA % (self._index, _SIGNATURE_FIELD), signature)
            out.append(("content_block_delta", delta))
            self._reasoned += 1
        out.append(_stop(self._index))
        self._index += 1
        return out


def encode(choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """Encode a response, which is one choice, as one body, with the same blocks that the stream has."""
    [(context, turn, finished)] = choices
    request, seal = context.request, context.seal
    if request.options.prefill_only:
        turn, finished = Turn("assistant"), _read_only(finished)
    content, reasoned = [], 0
    for part in turn.parts:
        if isinstance(part, Text):
            content.append({"type": "text", "text": _value(part.text), "citations": None})
        elif isinstance(part, Reasoning):
            signature = seal(reasoned) if seal else (part.extra or {}).get("signature", "")
            text = _value("" if request.options.hidden_thinking else part.text)
            content.append({"type": "thinking", "thinking": text, "signature": signature})
            reasoned += 1
        elif isinstance(part, ToolCall) and (part.complete or part.arguments.strip(wire.JSON_SPACE)):
            content.append(_tool_use(part))
    called = any(call.complete for call in turn.tool_calls)
    wanted = called and (reasoned or request.thinking.enabled is True)
    if wanted and (sealed := context.sealed_end(finished)):
        content.append(_redacted(sealed))
    reason = _stop_reason(finished, called)
    message = _message(context.id, request.model, content, reason, finished.stop_sequence, finished.usage)
    return msgspec.json.encode(message | applied_edits(request) | message_diagnostics(request))


def encode_count(tokens: int, original: int | None = None) -> bytes:
    """Encode the response to count_tokens; ``original`` is the count before context editing, if that was requested."""
    edited = b"" if original is None else b',"context_management":{"original_input_tokens":%d}' % original
    return b'{"input_tokens":%d%b}' % (tokens, edited)


def encode_error(error: SingletreeError, *, request_id: str | None = None) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body for ``error``, with ``request_id`` if given."""
    return _status(error), msgspec.json.encode(_failure(error, request_id))


def _status(error: SingletreeError) -> int:
    # Codex repeats what others of the client's faults get than 400; to a 400 Claude Code reacts with fewer features.
    return 529 if isinstance(error, Overloaded) else 402 if isinstance(error, BudgetSpent) else error.status


def _failure(error: SingletreeError, request_id: str | None) -> dict[str, Any]:
    # A stream cannot send a status any more: there, pi 0.73 retries only on the text "Internal server error", and
    # qwen-code 0.24 only if there is a request_id.
    type_, message = _ERROR_TYPES.get(_status(error)), error.message
    if type_ is None and isinstance(error, Rejected):
        type_ = "invalid_request_error"
    elif type_ is None:
        type_, message = "api_error", f"Internal server error: {message}"
    fields: dict[str, Any] = {"type": type_, "message": _value(message)}
    if isinstance(error, ThreadUnsupported):
        fields["details"] = {"error_code": "thread_unsupported_request"}
    body: dict[str, Any] = {"type": "error", "error": fields}
    return body if request_id is None else body | {"request_id": request_id}


def _stop_reason(finished: Finished, called: bool) -> str:
    return "tool_use" if called and finished.reason == "stop" else _STOP_REASONS[finished.reason]


def _usage(usage: Usage) -> dict[str, Any]:
    # The three input counts add up to the prompt (C8). No engine reports its cache writes.
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    fields = {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
    }
    return fields if usage.details is None else {**fields, **usage.details}


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
    return {
        "type": "tool_use",
        "id": _value(call.id),
        "name": _value(call.name),
        "input": tool_input(call.arguments, complete=call.complete),
        "caller": {"type": "direct"},
    }


def _read_only(finished: Finished) -> Finished:
    # Engines generate at least one token, which is not sent.
    return Finished("length", replace(finished.usage, completion_tokens=0, reasoning_tokens=0))


def _redacted(sealed: str) -> dict[str, Any]:
    return {"type": "redacted_thinking", "data": sealed}


def _start(index: int, block: bytes) -> Frame:
    return "content_block_start", _START % (index, block)


def _stop(index: int) -> Frame:
    return "content_block_stop", _BLOCK_STOP % index


def _event(data: dict[str, Any]) -> Frame:
    return data["type"], wire.dump(data)


def _value(text: str) -> msgspec.Raw:
    return msgspec.Raw(wire.dump(text))
