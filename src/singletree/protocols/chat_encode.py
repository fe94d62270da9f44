"""OpenAI Chat Completions: the answer, streamed and whole.

https://platform.openai.com/docs/api-reference/chat-streaming. One delta per event, in the model's order; the
whole body is what an SDK accumulates from the stream. Reasoning leaves in the fields that the client uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from singletree.conversation import Request, ToolCall, Turn
from singletree.errors import SingletreeError
from singletree.events import (
    ArgumentsDelta,
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokensRead,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    UsageRead,
)
from singletree.protocols import custom_tools, openai_error, sse, wire
from singletree.protocols.choices import Choice
from singletree.protocols.logprobs import Telling, ids_of, tokens_of
from singletree.protocols.openai_error import encode_error

__all__ = ["ID_PREFIX", "Encoder", "encode", "encode_choices", "encode_error"]

ID_PREFIX = "chatcmpl-"

_DELTA_END = b'},"finish_reason":null}]}\n\n'
_DONE = sse.frame(b"[DONE]")
_json = msgspec.json.Encoder().encode

# What ended before the model did is "length": a client must not take it for an answer that is whole.
FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "context_overflow": "length",
    "refusal": "content_filter",
    "cancelled": "length",
    "error": "length",
}
# Type of the call, and the field of it that holds the arguments.
_CALL_FORMS = {"function": "arguments", "custom": "input"}


@dataclass(slots=True)
class _Call:
    """The call that is being written. ``frame`` stands around each piece of its arguments, once shown; ``blank`` is the
    white space that came before them.
    """

    start: ToolCallStart
    form: str
    raw: list[str]
    input_text: custom_tools.InputText | None
    arguments: list[str] = field(default_factory=list)
    frame: tuple[bytes, bytes] | None = None
    blank: str = ""


class Encoder:
    """Events to Chat Completions chunks; one for each choice. What would seal reasoning has no field on this API.

    Args:
        index: of the choice.
    """

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        usage: Usage,
        new_id: Callable[[str], str],
        seal: Callable[[int], str] | None = None,
        index: int = 0,
    ) -> None:
        head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
        self._head = head % (_json(id), created, wire.dump(request.model))
        self._delta = self._head + b'{"index":%d,"delta":{' % index
        self._text = (self._delta + b'"content":', _DELTA_END)
        self._reasoning = _around(self._delta, request.extra.get("reasoning_fields", ("reasoning_content",)))
        self._include_usage = bool(request.extra.get("include_usage"))
        self._custom = _custom_tools(request)
        self._telling = Telling.of(request)
        self._prompt = _prompt_field(request)
        self._call: _Call | None = None
        self._calls_shown = 0
        self._has_complete_call = False
        self._has_text = False

    def start(self) -> bytes:
        """The chunk that gives the role, and the prompt's token ids if asked for."""
        role = self._delta + b'"role":"assistant","content":null'
        return role + (b'},"finish_reason":null}],%b}\n\n' % self._prompt if self._prompt else _DELTA_END)

    def feed(self, event: Event) -> bytes:
        """What ``event`` adds, ``b""`` if nothing. A call is shown with the first piece of its arguments."""
        if isinstance(event, TextDelta):
            return self._say(event.text)
        if isinstance(event, ReasoningDelta):
            return wire.dump(event.text).join(self._reasoning) if event.text else b""
        if isinstance(event, ArgumentsDelta):
            return self._feed_arguments(event)
        if isinstance(event, ToolCallStart):
            return self._start_call(event)
        if isinstance(event, ToolCallEnd):
            return self._end_call()
        if isinstance(event, ToolCallBroken):
            return self._break_call(event)
        if isinstance(event, TokensRead):
            return self._tell(event)
        if isinstance(event, UsageRead):
            counted = _json(usage_object(event.usage))
            return self._delta + b'},"finish_reason":null}],"usage":%b}\n\n' % counted
        if self._call is not None:
            self._call.raw.append(event.raw)
        return b""

    def _tell(self, event: TokensRead) -> bytes:
        """A chunk of its own with what is wanted of the tokens; what they say is in those behind it."""
        told: dict[str, Any] = (
            {"logprobs": self._telling.chat(event.tokens)} if self._telling.logprobs else {}
        )
        if self._telling.ids:
            told["token_ids"] = ids_of(event.tokens)
        if not told:
            return b""
        return b'%b},%b,"finish_reason":null}]}\n\n' % (self._delta, _json(told)[1:-1])

    def keep_alive(self) -> bytes:
        """A comment: every client skips it, and some refuse events that they do not know."""
        return b": keep-alive\n\n"

    def close(self, finished: Finished) -> bytes:
        """The end of the only choice, and of the stream."""
        return self.end(finished) + self.tail(finished.usage)

    def end(self, finished: Finished) -> bytes:
        """The end of the choice: the call that was cut, if any, then the finish reason."""
        cut = self._cut_call()
        empty = b"" if self._has_text or self._calls_shown else b'"content":""'
        reason = _finish_reason(finished.reason, self._has_complete_call)
        end = b'%b},"finish_reason":"%b"}]}\n\n' % (empty, reason.encode())
        return cut + self._delta + end

    def tail(self, usage: Usage) -> bytes:
        """The end of the stream: the usage if asked for, and the end mark."""
        told = self._head + b'],"usage":%b}\n\n' % _json(usage_object(usage)) if self._include_usage else b""
        return told + _DONE

    def fail(self, error: SingletreeError) -> bytes:
        """An error object in place of a chunk, at which OpenAI's SDKs raise. Nothing says "finished"."""
        return sse.frame(_json({"error": openai_error.error_object(error)})) + _DONE

    def side_event(self, name: str, said: Mapping[str, Any]) -> bytes:
        """An event beside the API's. To who does not know ``name`` it is a chunk without choices."""
        return b"event: %b\n%b],%b\n\n" % (name.encode(), self._head, wire.dump(said)[1:])

    def _say(self, text: str) -> bytes:
        if not text:
            return b""
        self._has_text = True
        return wire.dump(text).join(self._text)

    def _start_call(self, event: ToolCallStart) -> bytes:
        cut = self._cut_call()
        is_custom = event.name in self._custom
        input_text = custom_tools.InputText() if is_custom else None
        self._call = _Call(event, "custom" if is_custom else "function", [event.raw], input_text)
        return cut

    def _feed_arguments(self, event: ArgumentsDelta) -> bytes:
        call = self._call
        if call is None:
            return b""
        call.raw.append(event.raw)
        if call.input_text is None:
            return self._argue(call, event.json)
        call.arguments.append(event.json)
        return self._argue(call, call.input_text.feed(event.json))

    def _argue(self, call: _Call, piece: str) -> bytes:
        """A piece of the arguments. The call goes before the first: one that breaks earlier is never seen, nor one that
        is cut. AI SDKs run a call without arguments as one that takes none.
        """
        if not call.frame and call.input_text is None:
            piece = call.blank + piece
            if not piece.strip(wire.JSON_SPACE):
                call.blank, piece = piece, ""
        if not piece:
            return b""
        shown = b"" if call.frame else self._show(call)
        assert call.frame is not None
        return shown + wire.dump(piece).join(call.frame)

    def _show(self, call: _Call) -> bytes:
        # Not the event's index: a call that broke unseen must leave no gap, or SDKs fail on the next one.
        index, argued = self._calls_shown, _CALL_FORMS[call.form]
        self._calls_shown += 1
        opening = self._delta + b'"tool_calls":[{"index":%d,' % index
        call.frame = (opening + b'"%b":{"%b":' % (call.form.encode(), argued.encode()), b"}}]" + _DELTA_END)
        called = {"name": _raw(call.start.name), argued: ""}
        first = {"id": _raw(call.start.id), "type": call.form, call.form: called}
        return opening + _json(first)[1:] + b"]" + _DELTA_END

    def _end_call(self) -> bytes:
        call, self._call = self._call, None
        if call is None:
            return b""
        self._has_complete_call = True
        return self._rest_of(call, complete=True)

    def _cut_call(self) -> bytes:
        call, self._call = self._call, None
        return b"" if call is None else self._rest_of(call, complete=False)

    def _rest_of(self, call: _Call, *, complete: bool) -> bytes:
        """What was held back of a call that ends here, the call itself if nothing of it was shown."""
        if call.input_text is not None:
            rest = self._argue(call, call.input_text.close("".join(call.arguments), complete=complete))
        else:
            call.blank = ""
            rest = self._argue(call, "{}" if complete and not call.frame else "")
        return rest if call.frame or not complete else self._show(call)

    def _break_call(self, event: ToolCallBroken) -> bytes:
        call, self._call = self._call, None
        return self._say("".join([*(call.raw if call else ()), event.raw]))


def encode(
    request: Request,
    turn: Turn,
    finished: Finished,
    *,
    id: str,
    created: int,
    new_id: Callable[[str], str],
    seal: Callable[[int], str] | None = None,
) -> bytes:
    """The body of a response that is not streamed; ``created`` in unix seconds."""
    return encode_choices([Choice(request, turn, finished)], finished.usage, id=id, created=created)


def encode_choices(choices: Sequence[Choice], usage: Usage, *, id: str, created: int) -> bytes:
    """The body of a response with several choices; ``usage`` is that of all together."""
    request = choices[0].request
    said = [_choice(index, *choice) for index, choice in enumerate(choices)]
    body = {"id": id, "object": "chat.completion", "created": created, "model": _raw(request.model)}
    of_prompt = Telling.of(request).prompt(choices[0].turn)
    told = {} if of_prompt is None else {"prompt_logprobs": of_prompt}
    encoded = _json({**body, "choices": said, "usage": usage_object(usage), **told})
    prompt = _prompt_field(request)
    return b"%b,%b}" % (encoded[:-1], prompt) if prompt else encoded


def _prompt_field(request: Request) -> bytes:
    """``prompt_token_ids`` as a member of an object; empty when not asked for."""
    ids = request.extra.get("prompt_token_ids")
    return b"" if ids is None else b'"prompt_token_ids":%b' % _json(ids)


def _choice(index: int, request: Request, turn: Turn, finished: Finished) -> dict[str, Any]:
    custom = _custom_tools(request)
    calls = [
        whole
        for call in turn.tool_calls
        if (whole := _whole_call(call, "custom" if call.name in custom else "function"))
    ]
    content = _raw(turn.text) if turn.text or not calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if turn.reasoning:
        fields = request.extra.get("reasoning_fields", ("reasoning_content",))
        message |= dict.fromkeys(fields, _raw(turn.reasoning))
    if calls:
        message["tool_calls"] = calls
    telling, tokens = Telling.of(request), tokens_of(turn)
    choice = {
        "index": index,
        "message": message,
        "logprobs": telling.chat(tokens),
        "finish_reason": _finish_reason(finished.reason, any(call.complete for call in turn.tool_calls)),
    }
    return choice | ({"token_ids": ids_of(tokens)} if telling.ids else {})


def _whole_call(call: ToolCall, form: str) -> dict[str, Any]:
    """The call as it is shown; nothing of one that was cut before its arguments."""
    if form == "custom":
        value = custom_tools.to_input(call.arguments, complete=call.complete)
    else:
        value = call.arguments if call.arguments.strip(wire.JSON_SPACE) else "{}" if call.complete else ""
    if not value and not call.complete:
        return {}
    called = {"name": _raw(call.name), _CALL_FORMS[form]: _raw(value)}
    return {"id": _raw(call.id), "type": form, form: called}


def _custom_tools(request: Request) -> frozenset[str]:
    return frozenset(tool.name for tool in request.conversation.tools if tool.kind == "custom")


def _finish_reason(reason: FinishReason, has_complete_call: bool) -> str:
    return "tool_calls" if reason == "stop" and has_complete_call else FINISH_REASONS[reason]


def usage_object(usage: Usage) -> Mapping[str, Any]:
    """Token counts as Chat Completions and Completions tell them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _around(delta: bytes, fields: Sequence[str]) -> tuple[bytes, ...]:
    """What stands around the same text in each of ``fields``, for ``bytes.join``; nothing without fields."""
    if not fields:
        return ()
    first, *others = (b'"%b":' % name.encode() for name in fields)
    return (delta + first, *(b"," + name for name in others), _DELTA_END)


def _raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(wire.dump(text))
