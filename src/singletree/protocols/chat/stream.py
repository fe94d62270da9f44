"""OpenAI Chat Completions: the response, as a stream and as one body.

https://platform.openai.com/docs/api-reference/chat-streaming. One delta per event, in the model's order; the
body equals what an SDK accumulates from the stream. Reasoning is sent in the fields that the client uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from singletree.protocols.openai.answers import (
    FINISH_REASONS,
    CompletionStream,
    TokenDetails,
    ids_of,
    response_diagnostics,
    tokens_of,
    usage_object,
)
from singletree.protocols.wire import encode_ascii

__all__ = ["ID_PREFIX", "Encoder", "encode"]

ID_PREFIX = "chatcmpl-"

_BREAKS = ("\n\n", "\n", "")
"""The break after a span of reasoning, by the number of line breaks that the span ends with."""

_DELTA_END = b'},"finish_reason":null}]}'

# Type of the call, and the field of it that holds the arguments.
_CALL_FORMS = {"function": "arguments", "custom": "input"}


@dataclass(slots=True)
class _Call:
    start: ToolCallStart
    form: str
    raw: list[str]
    input_text: custom_tools.InputText | None
    arguments: list[str] = field(default_factory=list)
    around: tuple[bytes, bytes] | None = None
    """The bytes before and after each piece of the arguments; None until the call is sent."""

    blank: str = ""
    """The white space before the arguments."""


class _SpanJoiner:
    """Join the spans of reasoning of a turn, which share one field on this API, with two line breaks."""

    __slots__ = ("is_open", "last_two")

    def __init__(self) -> None:
        self.is_open = False
        self.last_two = "", ""  # The last two pieces of reasoning; none is empty.

    def add(self, text: str) -> str:
        """Return ``text``, the next piece of reasoning, with a break before it if it begins another span."""
        if not self.is_open:
            self.is_open = True
            end = "".join(self.last_two)[-2:]
            text = _BREAKS[len(end) - len(end.rstrip("\n"))] + text if end else text
        self.last_two = self.last_two[1], text
        return text


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
        self._is_legacy = request.options.legacy_functions
        self._beside = b""
        self._prompt = _prompt_fields(request)
        self._call: _Call | None = None
        self._last_call_id = ""
        self._calls_sent = 0
        self._has_complete_call = False
        self._has_text = False
        self._spans = _SpanJoiner()

    def start(self) -> list[Frame]:
        end = b'},"finish_reason":null}],%b}' % self._prompt if self._prompt else _DELTA_END
        return [("", self._delta + b'"role":"assistant","content":null' + end)]

    def feed(self, event: Event) -> list[Frame]:
        # Text and reasoning come first and in full, because they are most of the tokens.
        if type(event) is TextDelta:
            self._spans.is_open = False
            text = event.text
            if not text:
                return []
            self._has_text = True
            frame = "", (encode_ascii(text) if text.isascii() else wire.dump(text)).join(self._text)
            return [frame] if self._is_plain else self._with_details([frame])
        if type(event) is ReasoningDelta:
            text, spans = event.text, self._spans
            if not text or not self._reasoning:
                return []
            if spans.is_open:
                spans.last_two = spans.last_two[1], text
            else:
                text = spans.add(text)
            frame = "", (encode_ascii(text) if text.isascii() else wire.dump(text)).join(self._reasoning)
            return [frame] if self._is_plain else self._with_details([frame])
        if isinstance(event, TokenLogprobs):
            return self._token_details(event)
        if isinstance(event, UsageUpdate):
            self.count(event.usage)
            return []
        frames = self._feed_call(event)
        return frames if self._is_plain else self._with_details(frames)

    def _feed_call(self, event: Event) -> list[Frame]:
        # Log-probabilities of the prompt are no part of the turn, so they do not end a span of reasoning.
        if not isinstance(event, PromptLogprobs):
            self._spans.is_open = False
        if isinstance(event, ArgumentsDelta):
            return self._feed_arguments(event)
        if isinstance(event, ToolCallStart):
            return self._start_call(event)
        if isinstance(event, ToolCallEnd):
            return self._end_call()
        if isinstance(event, ToolCallBroken):
            return self._break_call(event)
        if self._call is not None:
            self._call.raw.append(event.raw)
        return []

    def _token_details(self, event: TokenLogprobs) -> list[Frame]:
        # They wait for the chunk of their text. Those before them are sent now: tokens of markers, without text.
        without_text = self._with_details([("", self._delta + _DELTA_END)]) if self._beside else []
        fields: dict[str, Any] = (
            {"logprobs": self._details.chat(event.tokens)} if self._details.logprobs else {}
        )
        if self._details.ids:
            fields["token_ids"] = ids_of(event.tokens)
        self._beside = b"," + wire.dump(fields)[1:-1] if fields else b""
        return without_text

    def _with_details(self, frames: list[Frame]) -> list[Frame]:
        beside, counted = self._beside, self._counted
        if not frames or not (beside or counted):
            return frames
        self._beside = b""
        details = [beside, *[b""] * (len(frames) - 1)]
        return [
            (name, b"%b%b}]%b}" % (chunk.removesuffix(b"}]}"), each, counted))
            for (name, chunk), each in zip(frames, details, strict=True)
        ]

    def end(self, finished: Finished) -> list[Frame]:
        cut = self._cut_call()
        empty = b"" if self._has_text or self._calls_sent else b'"content":""'
        reason = _finish_reason(finished.reason, self._has_complete_call, self._is_legacy)
        end = b'%b},"finish_reason":"%b"}]}' % (empty, reason.encode())
        if self._counted:
            self.count(finished.usage)
        details = _capsule_details(self._context, self._last_call_id, finished)
        capsule = [self._delta_of(b"reasoning_details", details)] if details else []
        return self._with_details([*cut, *capsule, ("", self._delta + end)])

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
        # The call itself goes before the first piece. So a call that breaks or is cut before its arguments is never
        # sent: AI SDKs run a call without arguments as one that takes none.
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
        field = b'"%b":{"%b":' % (call.form.encode(), arguments_field.encode())
        call.around = opening + field, b"}}]" + _DELTA_END
        function = {"name": call.start.name, arguments_field: ""}
        first = {"id": call.start.id, "type": call.form, call.form: function}
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
        """Return what is still held back of a call that ends; the whole call if nothing of it was sent."""
        arguments = "".join(call.arguments)
        if self._is_legacy:
            # Sent when it is complete: it has no index, so clients could not distinguish a broken call from the next.
            self._calls_sent += complete
            called = {"name": call.start.name, "arguments": _whole_arguments(arguments)}
            return [self._delta_of(b"function_call", called)] if complete else []
        if call.input_text is not None:
            rest = call.input_text.close(arguments, complete=complete)
        else:
            call.blank, rest = "", "{}" if complete and not call.around else ""
        frames = self._arguments_delta(call, rest)
        return frames if call.around or not complete else [self._send_call(call)]

    def _break_call(self, event: ToolCallBroken) -> list[Frame]:
        call, self._call = self._call, None
        raw = "".join([*(call.raw if call else ()), event.raw])
        self._has_text = self._has_text or bool(raw)
        return [("", wire.dump(raw).join(self._text))] if raw else []


def encode(choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """Encode a response as one body; ``usage`` is the sum over all choices."""
    context = choices[0].context
    request = context.request
    body = {
        "id": context.id,
        "object": "chat.completion",
        "created": context.created,
        "model": request.model,
        "choices": [_choice(index, *choice) for index, choice in enumerate(choices)],
        "usage": usage_object(usage),
    }
    of_prompt = TokenDetails(request).prompt(choices[0].turn)
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
    custom, is_legacy = _custom_tools(request), request.options.legacy_functions
    made = [call for call in turn.tool_calls if call.complete or not is_legacy]
    calls = [whole for call in made if (whole := _whole_call(call, is_custom=call.name in custom))]
    content = turn.text if turn.text or not calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if turn.reasoning:
        message |= dict.fromkeys(_reasoning_fields(request), _reasoning_text(turn))
    if calls and is_legacy:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    called = [call.id for call in turn.tool_calls if call.complete]
    if capsule := _capsule_details(context, "".join(called[-1:]), finished):
        message["reasoning_details"] = capsule
    details, tokens = TokenDetails(request), tokens_of(turn)
    choice = {
        "index": index,
        "message": message,
        "logprobs": details.chat(tokens),
        "finish_reason": _finish_reason(finished.reason, bool(called), is_legacy),
    }
    return choice | ({"token_ids": ids_of(tokens)} if details.ids else {})


def _capsule_details(context: AnswerContext, call_id: str, finished: Finished) -> list[dict[str, Any]]:
    """Return the capsule of a turn with calls as ``reasoning_details``; pi keeps it with the call of that id."""
    sealed = context.sealed_end(finished) if call_id else ""
    detail = {"type": "reasoning.encrypted", "id": call_id, "data": sealed}
    return [{**detail, "format": "singletree-v1", "index": 0}] if sealed else []


def _whole_call(call: ToolCall, *, is_custom: bool) -> dict[str, Any]:
    """Return the call as the client gets it; nothing for one that was cut before its arguments."""
    form, has_arguments = "function", call.complete or call.arguments.strip(wire.JSON_SPACE)
    value = _whole_arguments(call.arguments) if has_arguments else ""
    if is_custom:
        form, value = "custom", custom_tools.to_input(call.arguments, complete=call.complete)
    if not value and not call.complete:
        return {}
    return {"id": call.id, "type": form, form: {"name": call.name, _CALL_FORMS[form]: value}}


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
