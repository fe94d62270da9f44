"""Decode the ``messages`` of a Chat Completions request into turns.

https://platform.openai.com/docs/api-reference/chat/create, and what others add: ``reasoning_content``
(DeepSeek), ``reasoning`` and ``reasoning_details`` (OpenRouter), ``thinking`` parts (Mistral). The format has
no order between the reasoning, the text and the calls of one message; they are decoded in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from singletree.conversation import (
    CAPSULE_PREFIX,
    Document,
    Image,
    Part,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
    carried_capsules,
)
from singletree.protocols import content, wire
from singletree.protocols.chat.tools import SentTool, read_tools
from singletree.protocols.limits import malformed, quote_value, refused
from singletree.protocols.openai import custom_tools as custom


class _ImageURL(msgspec.Struct):
    url: str
    detail: str | None = None


class _File(msgspec.Struct):
    file_data: str | None = None
    filename: str | None = None


class _ContentPart(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[_ContentPart] | None = None
    image_url: _ImageURL | str | None = None
    file: _File | None = None


class _FunctionCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"null")


class _CustomCall(msgspec.Struct):
    name: str
    input: str | None = None


class _ToolCall(msgspec.Struct):
    id: str | None = None
    function: _FunctionCall | None = None
    custom: _CustomCall | None = None


class ChatMessage(msgspec.Struct):
    """One message, as the client sends it."""

    role: str
    content: str | list[_ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[dict[str, Any]] | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: _FunctionCall | None = None
    prefix: bool | None = None
    partial: bool | None = None
    tools: list[SentTool] | None = None


class DecodedMessage(NamedTuple):
    """A message, the turn decoded from it, the fields in which the client keeps reasoning there, and the tools that a
    system message adds from there on (Kimi K3, pi).
    """

    message: ChatMessage
    turn: Turn
    reasoning_fields: tuple[str, ...]
    tools: tuple[Tool, ...] = ()


def decode_messages(messages: Sequence[msgspec.Raw]) -> list[DecodedMessage]:
    """Decode each of ``messages``. Raises InvalidRequest with ``param`` as a path such as ``messages.0.content``."""
    if not messages:
        raise refused("messages", "is empty; send at least one message")
    # Tools name a path in their request, so they keep a message from being used again elsewhere.
    return wire.decode_each(messages, ChatMessage, _read, "messages", lambda made: not made.tools)


def collect_turns(messages: Sequence[DecodedMessage]) -> tuple[Turn, ...]:
    """Return the turns of ``messages`` in order; consecutive tool messages become one turn."""
    decoded = tuple(map(attrgetter("turn"), messages))
    if ("tool", "tool") not in pairwise(map(attrgetter("role"), decoded)):
        return decoded
    turns: list[Turn] = []
    for role, run in groupby(decoded, attrgetter("role")):
        same = tuple(run)
        if role == "tool" and len(same) > 1:
            same = (Turn("tool", tuple(part for turn in same for part in turn.parts)),)
        turns += same
    return tuple(turns)


def reasoning_fields(messages: Sequence[DecodedMessage]) -> tuple[str, ...]:
    """Return the fields in which the client keeps reasoning, from the last message that has any."""
    return next(filter(None, map(attrgetter("reasoning_fields"), reversed(messages))), ())


def _read(message: ChatMessage, at: str) -> DecodedMessage:
    kept = tuple(field for field in ("reasoning_content", "reasoning") if getattr(message, field))
    details = message.reasoning_details
    # A capsule does not show which field the client reads; the details of other servers do.
    if not kept and details and not all(str(d.get("data", "")).startswith(CAPSULE_PREFIX) for d in details):
        kept = ("reasoning",)
    decode = _ROLES.get(message.role)
    if decode is None:
        raise refused(f"{at}.role", f"is {quote_value(message.role)}; send one of {', '.join(_ROLES)}")
    turn = decode(message, at)
    if not message.tools or turn.role not in ("system", "developer"):
        return DecodedMessage(message, turn, kept)
    tools = tuple(replace(tool, deferred=True) for tool in read_tools(message.tools, f"{at}.tools").tools)
    named = tuple(ToolReference(tool.name) for tool in tools)
    return DecodedMessage(message, replace(turn, parts=turn.parts + named), kept, tools)


def _plain(message: ChatMessage, at: str) -> Turn:
    role: Role = message.role  # type: ignore[assignment]  # a key of _ROLES
    return Turn(role, tuple(_visible_parts(message, at)), _name(message))


def _assistant(message: ChatMessage, at: str) -> Turn:
    parts: list[Part] = [*_reasoning(message), *_parts(message.content, f"{at}.content")]
    if message.refusal:
        parts.append(Text(message.refusal))
    for i, call in enumerate(message.tool_calls or ()):
        parts.append(_tool_call(call, f"{at}.tool_calls.{i}"))
    if message.function_call is not None:
        arguments, verbatim = _arguments(message.function_call.arguments, f"{at}.function_call.arguments")
        parts.append(ToolCall(message.function_call.name, arguments, verbatim=verbatim))
    return Turn("assistant", tuple(parts), _name(message))


def _tool(message: ChatMessage, at: str) -> Turn:
    if not message.tool_call_id:
        raise malformed(f"{at}.tool_call_id", "Field required; send the id of the call that this answers")
    return _result(message, at, message.tool_call_id)


def _result(message: ChatMessage, at: str, call_id: str) -> Turn:
    visible = tuple(_visible_parts(message, at))
    return Turn("tool", (ToolResult(call_id, visible, extra=_name(message)),))


def _visible_parts(message: ChatMessage, at: str) -> Iterator[Text | Image | Document]:
    for part in _parts(message.content, f"{at}.content"):
        if not isinstance(part, Text | Image | Document):
            raise malformed(f"{at}.content", "only a message of role 'assistant' may contain thinking")
        yield part


def _name(message: ChatMessage) -> dict[str, str] | None:
    return {"name": message.name} if message.name else None


def _reasoning(message: ChatMessage) -> Iterator[Reasoning]:
    details = message.reasoning_details or []
    text = message.reasoning_content or message.reasoning or ""
    if details and not text:
        texts = (detail.get("text") or detail.get("summary") for detail in details)
        text = "".join(each for each in texts if isinstance(each, str))
    if text or details:
        carried = (detail.get("data") for detail in details)
        extra = {"reasoning_details": details} if details else None
        yield Reasoning(text, extra, capsules=carried_capsules("reasoning_details", *carried))


def _tool_call(call: _ToolCall, at: str) -> ToolCall:
    if call.custom is not None:
        arguments = custom.to_arguments(call.custom.input or "")
        return ToolCall(call.custom.name, arguments, call.id or "", verbatim=False)
    if call.function is None:
        raise malformed(f"{at}.function")
    arguments, verbatim = _arguments(call.function.arguments, f"{at}.function.arguments")
    return ToolCall(call.function.name, arguments, call.id or "", verbatim=verbatim)


def _arguments(raw: msgspec.Raw, at: str) -> tuple[str, bool]:
    # As JSON text, and whether that is verbatim. An object sent instead of a string is written as templates write JSON.
    sent = bytes(raw)
    try:
        if sent.startswith(b'"') or not sent:
            return content.argument_text(msgspec.json.decode(sent or b'""', type=str))
        text = content.template_json(sent)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(at, f"not valid JSON ({error}); send a string") from None
    return "{}" if text == "null" else text, False


def _parts(sent: str | list[_ContentPart] | None, at: str) -> Iterator[Part]:
    if isinstance(sent, str):
        sent = [_ContentPart("text", sent)]
    wire.spend(wire.BLOCK_COST * len(sent or ()))
    for i, part in enumerate(sent or ()):
        decode = _PARTS.get(part.type)
        if decode is None:
            cure = _PART_CURES.get(part.type, f"send one of {', '.join(_PARTS)}")
            why = f"is {quote_value(part.type)}, which is not supported here; {cure}"
            raise refused(f"{at}.{i}.type", why)
        decoded = decode(part, f"{at}.{i}")
        if not isinstance(decoded, Text | Reasoning) or decoded.text:
            yield decoded


def _thinking_part(part: _ContentPart, at: str) -> Part:
    thinking = part.thinking if part.thinking is not None else part.text
    if isinstance(thinking, list):
        return Reasoning("".join(p.text or "" for p in thinking))
    return Reasoning(_required(thinking, f"{at}.thinking"))


def _image_part(part: _ContentPart, at: str) -> Part:
    image = part.image_url
    url = image.url if isinstance(image, _ImageURL) else image
    detail = image.detail if isinstance(image, _ImageURL) else None
    return content.image(_required(url, f"{at}.image_url"), {"detail": detail} if detail else None)


def _file_part(part: _ContentPart, at: str) -> Part:
    file = part.file or _File()
    if not file.file_data:
        cure = "files are not stored here, so send the data itself"
        raise malformed(f"{at}.file.file_data", f"Field required; {cure}")
    return content.document(file.file_data, file.filename or "")


def _required(value: str | None, at: str) -> str:
    if value is None:
        raise malformed(at)
    return value


_ROLES: dict[str, Callable[[ChatMessage, str], Turn]] = {
    "system": _plain,
    "developer": _plain,
    "user": _plain,
    "assistant": _assistant,
    "tool": _tool,
    "function": lambda message, at: _result(message, at, ""),  # The last call: it has no id here.
}

_PARTS: dict[str, Callable[[_ContentPart, str], Part]] = {
    "text": lambda part, at: Text(_required(part.text, f"{at}.text")),
    "image_url": _image_part,
    "file": _file_part,
    "refusal": lambda part, at: Text(_required(part.refusal, f"{at}.refusal")),
    "thinking": _thinking_part,
}
_AUDIO = "the models served here do not accept audio: send a transcript as text"
_PART_CURES = {
    "input_audio": _AUDIO,
    "audio_url": _AUDIO,
    "video_url": "the models served here do not accept video: send frames as image_url",
}
