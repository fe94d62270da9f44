"""OpenAI Chat Completions: the response, as a stream and as one body.

https://platform.openai.com/docs/api-reference/chat-streaming. One delta per event, in the model's order; the
body equals what an SDK accumulates from the stream. Reasoning is sent in the fields that the client uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Request, ToolCall, Turn
from singletree.events import (
    ArgumentsDelta,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    UsageUpdate,
)
from singletree.protocols import wire
from singletree.protocols.answer import AnswerContext, FinishedChoice, Frame
from singletree.protocols.openai import custom_tools
from singletree.protocols.openai.cache_diagnostics import response_diagnostics
from singletree.protocols.openai.chunks import FINISH_REASONS, CompletionStream, usage_object
from singletree.protocols.openai.errors import encode_error
from singletree.protocols.openai.logprobs import TokenDetails, ids_of, tokens_of
from singletree.protocols.wire import encode_ascii

__all__ = ["ID_PREFIX", "Encoder", "encode", "encode_error"]

ID_PREFIX = "chatcmpl-"

_NEWLINE = "\n"
_BREAKS = ("\n\n", "\n", "")
"""The break after a span of reasoning, by the number of line breaks that the span ends with."""

# Events that are not part of the turn, so they do not end a span of reasoning.
_SIDE_EVENTS = (TokenLogprobs, PromptLogprobs, UsageUpdate)

_DELTA_END = b'},"finish_reason":null}]}'

# Type of the call, and the field of it that holds the arguments.
_CALL_FORMS = {"function": "arguments", "custom": "input"}


@dataclass(slots=True)
class _Call:
    """The call in progress.

    Attributes:
        around: the bytes before and after each piece of the arguments; None until the call is sent.
        blank: the white space before the arguments.
    """

    start: ToolCallStart
    form: str
    raw: list[str]
    input_text: custom_tools.InputText | None
    arguments: list[str] = field(default_factory=list)
    around: tuple[bytes, bytes] | None = None
    blank: str = ""


class _SpanJoiner:
    """Join the spans of reasoning of a turn, which share one field on this API, with two line breaks.

    Attributes:
        is_open: whether a span is in progress.
        last_two: the last two pieces of reasoning, of which none is empty.
    """

    __slots__ = ("is_open", "last_two")

    def __init__(self) -> None:
        self.is_open = False
        self.last_two = "", ""

    def add(self, text: str) -> str:
        """Return ``text``, the next piece of reasoning, with a break before it if it begins another span."""
        if not self.is_open:
            self.is_open = True
            text = self._break() + text
        self.last_two = self.last_two[1], text
        return text

    def _break(self) -> str:
        end = "".join(self.last_two)[-2:]
        return _BREAKS[len(end) - len(end.rstrip(_NEWLINE))] if end else ""


class Encoder(CompletionStream):
    """Encode the events of one choice as Chat Completions chunks.

    No field of this API carries a capsule of reasoning while it streams. One capsule of the whole turn is sent at its
    end, in OpenRouter's ``reasoning_details``, for the clients that send those back.
    """

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context, b"chat.completion.chunk")
        request = context.request
        self._context = context
        self._delta = self._head + b'{"index":%d,"delta":{' % context.index
        self._text = (self._delta + b'"content":', _DELTA_END)
        self._reasoning = _around(self._delta, _reasoning_fields(request))
        self._custom = _custom_tools(request)
        self._is_legacy = _is_legacy(request)
        self._details = TokenDetails.of(request)
        self._prompt = _prompt_fields(request)
        self._call: _Call | None = None
        self._last_call_id = ""
        self._calls_sent = 0
        self._has_complete_call = False
        self._has_text = False
        self._spans = _SpanJoiner()

    def start(self) -> list[Frame]:
        """Return the chunk with the role, and with what the request asks to know of the prompt."""
        end = b'},"finish_reason":null}],%b}' % self._prompt if self._prompt else _DELTA_END
        return [("", self._delta + b'"role":"assistant","content":null' + end)]

    def feed(self, event: Event) -> list[Frame]:
        """Encode ``event``; no frames if it adds nothing. A call is sent with the first piece of its arguments."""
        # Text and reasoning come first and in full, because they are most of the tokens.
        if type(event) is TextDelta:
            self._spans.is_open = False
            text = event.text
            if not text:
                return []
            self._has_text = True
            return [("", (encode_ascii(text) if text.isascii() else wire.dump(text)).join(self._text))]
        if type(event) is ReasoningDelta:
            text, spans = event.text, self._spans
            if not text or not self._reasoning:
                return []
            if spans.is_open:
                spans.last_two = spans.last_two[1], text
            else:
                text = spans.add(text)
            return [("", (encode_ascii(text) if text.isascii() else wire.dump(text)).join(self._reasoning))]
        if not isinstance(event, _SIDE_EVENTS):
            self._spans.is_open = False
        if isinstance(event, ArgumentsDelta):
            return self._feed_arguments(event)
        if isinstance(event, ToolCallStart):
            return self._start_call(event)
        if isinstance(event, ToolCallEnd):
            return self._end_call()
        if isinstance(event, ToolCallBroken):
            return self._break_call(event)
        if isinstance(event, TokenLogprobs):
            return self._token_details(event)
        if isinstance(event, UsageUpdate):
            counted = wire.dump(usage_object(event.usage))
            return [("", self._delta + b'},"finish_reason":null}],"usage":%b}' % counted)]
        if self._call is not None:
            self._call.raw.append(event.raw)
        return []

    def _token_details(self, event: TokenLogprobs) -> list[Frame]:
        """Return a chunk with the requested details of the tokens; their text is in the chunks after it."""
        fields: dict[str, Any] = (
            {"logprobs": self._details.chat(event.tokens)} if self._details.logprobs else {}
        )
        if self._details.ids:
            fields["token_ids"] = ids_of(event.tokens)
        if not fields:
            return []
        encoded = wire.dump(fields)[1:-1]
        return [("", b'%b},%b,"finish_reason":null}]}' % (self._delta, encoded))]

    def end(self, finished: Finished) -> list[Frame]:
        """End the choice: the unfinished call, if any, then the finish reason."""
        cut = self._cut_call()
        empty = b"" if self._has_text or self._calls_sent else b'"content":""'
        reason = _finish_reason(finished.reason, self._has_complete_call, self._is_legacy)
        end = b'%b},"finish_reason":"%b"}]}' % (empty, reason.encode())
        return [*cut, *self._capsule(finished), ("", self._delta + end)]

    def _capsule(self, finished: Finished) -> list[Frame]:
        details = _capsule_details(self._context, self._last_call_id, finished)
        return [self._delta_of(b"reasoning_details", details)] if details else []

    def _delta_of(self, field: bytes, value: Any) -> Frame:
        return "", b'%b"%b":%b%b' % (self._delta, field, wire.dump(value), _DELTA_END)

    def _start_call(self, event: ToolCallStart) -> list[Frame]:
        cut = self._cut_call()
        is_custom = event.name in self._custom
        input_text = custom_tools.InputText() if is_custom else None
        self._call = _Call(event, "custom" if is_custom else "function", [event.raw], input_text)
        return cut

    def _feed_arguments(self, event: ArgumentsDelta) -> list[Frame]:
        call = self._call
        if call is None:
            return []
        call.raw.append(event.raw)
        if self._is_legacy:
            call.arguments.append(event.json)
            return []
        if call.input_text is None:
            return self._arguments_delta(call, event.json)
        call.arguments.append(event.json)
        return self._arguments_delta(call, call.input_text.feed(event.json))

    def _arguments_delta(self, call: _Call, piece: str) -> list[Frame]:
        """Return a piece of the arguments; the call itself goes before the first piece.

        So a call that breaks or is cut before its arguments is never sent: AI SDKs run a call without arguments as one
        that takes none.
        """
        if not call.around and call.input_text is None:
            piece = call.blank + piece
            if not piece.strip(wire.JSON_SPACE):
                call.blank, piece = piece, ""
        if not piece:
            return []
        shown = [] if call.around else [self._send_call(call)]
        assert call.around is not None
        return [*shown, ("", wire.dump(piece).join(call.around))]

    def _send_call(self, call: _Call) -> Frame:
        # Not the event's index: a broken call that was not sent must leave no gap, or SDKs fail on the next one.
        index, arguments_field = self._calls_sent, _CALL_FORMS[call.form]
        self._calls_sent += 1
        opening = self._delta + b'"tool_calls":[{"index":%d,' % index
        call.around = (
            opening + b'"%b":{"%b":' % (call.form.encode(), arguments_field.encode()),
            b"}}]" + _DELTA_END,
        )
        function = {"name": _raw(call.start.name), arguments_field: ""}
        first = {"id": _raw(call.start.id), "type": call.form, call.form: function}
        return "", opening + wire.dump(first)[1:] + b"]" + _DELTA_END

    def _end_call(self) -> list[Frame]:
        call, self._call = self._call, None
        if call is None:
            return []
        self._has_complete_call = True
        self._last_call_id = call.start.id
        return self._rest_of(call, complete=True)

    def _cut_call(self) -> list[Frame]:
        call, self._call = self._call, None
        return [] if call is None else self._rest_of(call, complete=False)

    def _rest_of(self, call: _Call, *, complete: bool) -> list[Frame]:
        """Return what is still held back of a call that ends; the whole call if nothing of it was sent.

        In the legacy form a call is sent when it is complete: it has no index, so if it broke, clients could not
        distinguish the next call from it.
        """
        if self._is_legacy:
            self._calls_sent += complete
            called = {
                "name": _raw(call.start.name),
                "arguments": _raw(_whole_arguments("".join(call.arguments))),
            }
            return [self._delta_of(b"function_call", called)] if complete else []
        if call.input_text is not None:
            rest = self._arguments_delta(
                call, call.input_text.close("".join(call.arguments), complete=complete)
            )
        else:
            call.blank = ""
            rest = self._arguments_delta(call, "{}" if complete and not call.around else "")
        return rest if call.around or not complete else [self._send_call(call)]

    def _break_call(self, event: ToolCallBroken) -> list[Frame]:
        call, self._call = self._call, None
        raw = "".join([*(call.raw if call else ()), event.raw])
        return self.feed(TextDelta(raw, raw))


def encode(choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """Encode a response as one body; ``usage`` is the sum over all choices."""
    context = choices[0].context
    request = context.request
    body = {
        "id": context.id,
        "object": "chat.completion",
        "created": context.created,
        "model": _raw(request.model),
        "choices": [_choice(index, *choice) for index, choice in enumerate(choices)],
        "usage": usage_object(usage),
    }
    of_prompt = TokenDetails.of(request).prompt(choices[0].turn)
    encoded = wire.dump(body if of_prompt is None else body | {"prompt_logprobs": of_prompt})
    prompt = _prompt_fields(request)
    return b"%b,%b}" % (encoded[:-1], prompt) if prompt else encoded


def _prompt_fields(request: Request) -> bytes:
    """Return what the request asks to know of the prompt, as members of a JSON object; empty if nothing."""
    fields = response_diagnostics(request.prompt_report)
    if request.prompt_report.token_ids is not None:
        fields["prompt_token_ids"] = request.prompt_report.token_ids
    return wire.dump(fields)[1:-1] if fields else b""


def _choice(index: int, context: AnswerContext, turn: Turn, finished: Finished) -> dict[str, Any]:
    request = context.request
    custom = _custom_tools(request)
    is_legacy = _is_legacy(request)
    made = [call for call in turn.tool_calls if call.complete or not is_legacy]
    calls = [
        whole
        for call in made
        if (whole := _whole_call(call, "custom" if call.name in custom else "function"))
    ]
    content = _raw(turn.text) if turn.text or not calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if turn.reasoning:
        message |= dict.fromkeys(_reasoning_fields(request), _raw(_reasoning_text(turn)))
    if calls and is_legacy:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    called = [call.id for call in turn.tool_calls if call.complete]
    if capsule := _capsule_details(context, "".join(called[-1:]), finished):
        message["reasoning_details"] = capsule
    details, tokens = TokenDetails.of(request), tokens_of(turn)
    choice = {
        "index": index,
        "message": message,
        "logprobs": details.chat(tokens),
        "finish_reason": _finish_reason(finished.reason, bool(called), is_legacy),
    }
    return choice | ({"token_ids": ids_of(tokens)} if details.ids else {})


def _capsule_details(context: AnswerContext, call_id: str, finished: Finished) -> list[dict[str, Any]]:
    """Return the capsule of a turn with calls as ``reasoning_details``; pi keeps it with the call of that id."""
    wanted = call_id and finished.reason == "stop"
    sealed = context.seal_end(as_objects=False) if wanted and context.seal_end is not None else ""
    if not sealed:
        return []
    detail = {"type": "reasoning.encrypted", "id": _raw(call_id), "data": sealed}
    return [{**detail, "format": "singletree-v1", "index": 0}]


def _whole_call(call: ToolCall, form: str) -> dict[str, Any]:
    """Return the call as the client gets it; nothing for one that was cut before its arguments."""
    if form == "custom":
        value = custom_tools.to_input(call.arguments, complete=call.complete)
    else:
        value = (
            _whole_arguments(call.arguments) if call.complete or call.arguments.strip(wire.JSON_SPACE) else ""
        )
    if not value and not call.complete:
        return {}
    called = {"name": _raw(call.name), _CALL_FORMS[form]: _raw(value)}
    return {"id": _raw(call.id), "type": form, form: called}


def _reasoning_text(turn: Turn) -> str:
    spans, text = _SpanJoiner(), []
    for part in turn.parts:
        if isinstance(part, Reasoning):
            text.append(spans.add(part.text))
            spans.is_open = False
    return "".join(text)


def _custom_tools(request: Request) -> frozenset[str]:
    return frozenset(tool.name for tool in request.conversation.tools if tool.kind == "custom")


def _whole_arguments(arguments: str) -> str:
    return arguments if arguments.strip(wire.JSON_SPACE) else "{}"


def _is_legacy(request: Request) -> bool:
    """Return whether the client sent ``functions``, and so reads ``function_call``."""
    return request.options.legacy_functions


def _reasoning_fields(request: Request) -> tuple[str, ...]:
    fields = request.options.reasoning_fields
    return ("reasoning_content",) if fields is None else fields


def _finish_reason(reason: FinishReason, has_complete_call: bool, is_legacy: bool) -> str:
    if reason == "stop" and has_complete_call:
        return "function_call" if is_legacy else "tool_calls"
    return FINISH_REASONS[reason]


def _around(delta: bytes, fields: Sequence[str]) -> tuple[bytes, ...]:
    """Return the bytes around the same text in each of ``fields``, for ``bytes.join``; empty without fields."""
    if not fields:
        return ()
    first, *others = (b'"%b":' % name.encode() for name in fields)
    return (delta + first, *(b"," + name for name in others), _DELTA_END)


def _raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(wire.dump(text))
