"""Decode the ``messages`` of a Chat Completions request into turns.

https://platform.openai.com/docs/api-reference/chat/create, and what others add: ``reasoning_content``
(DeepSeek), ``reasoning`` and ``reasoning_details`` (OpenRouter), ``thinking`` parts (Mistral). The format has
no order between the reasoning, the text and the calls of one message; they are decoded in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    ToolCall,
    ToolResult,
    Turn,
    carried_capsules,
)
from singletree.errors import InvalidRequest
from singletree.protocols import limits, media, wire
from singletree.protocols.client_json import template_json
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


class DecodedMessage(NamedTuple):
    """A message, the turn decoded from it, and the fields in which the client keeps reasoning there."""

    message: ChatMessage
    turn: Turn
    reasoning_fields: tuple[str, ...]


def decode_messages(messages: Sequence[msgspec.Raw]) -> list[DecodedMessage]:
    """Decode each of ``messages``.

    Raises:
        InvalidRequest: with ``param`` as a path such as ``messages.0.content``.
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    return wire.decode_each(messages, ChatMessage, _read, "messages")


def collect_turns(messages: Sequence[DecodedMessage]) -> tuple[Turn, ...]:
    """Return the turns of ``messages`` in order; consecutive tool messages become one turn."""
    decoded = tuple(map(attrgetter("turn"), messages))
    if ("tool", "tool") not in pairwise(map(attrgetter("role"), decoded)):
        return decoded
    return tuple(
        t for role, run in groupby(decoded, lambda turn: turn.role) for t in _joined(role, list(run))
    )


def reasoning_fields(messages: Sequence[DecodedMessage]) -> tuple[str, ...]:
    """Return the fields in which the client keeps reasoning, from the last message that has any."""
    return next(filter(None, map(attrgetter("reasoning_fields"), reversed(messages))), ())


def _joined(role: Role, run: Sequence[Turn]) -> Iterator[Turn]:
    if role == "tool" and len(run) > 1:
        yield Turn("tool", tuple(part for turn in run for part in turn.parts))
    else:
        yield from run


def _read(message: ChatMessage, at: str) -> DecodedMessage:
    kept = tuple(field for field in ("reasoning_content", "reasoning") if getattr(message, field))
    if not kept and any(map(_is_foreign, message.reasoning_details or ())):
        kept = ("reasoning",)
    return DecodedMessage(message, _turn(message, at), kept)


def _turn(message: ChatMessage, at: str) -> Turn:
    decode = _ROLES.get(message.role)
    if decode is None:
        cure = f"send one of {', '.join(_ROLES)}"
        raise InvalidRequest(f"{at}.role is {limits.quote_value(message.role)}; {cure}", param=f"{at}.role")
    return decode(message, at)


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
        at = f"{at}.tool_call_id"
        raise InvalidRequest(f"{at}: Field required; send the id of the call that this answers", param=at)
    visible = tuple(_visible_parts(message, at))
    return Turn("tool", (ToolResult(message.tool_call_id, visible, extra=_name(message)),))


def _function(message: ChatMessage, at: str) -> Turn:
    """Decode the result of the last call, which has no id in the legacy form."""
    visible = tuple(_visible_parts(message, at))
    return Turn("tool", (ToolResult("", visible, extra=_name(message)),))


def _visible_parts(message: ChatMessage, at: str) -> Iterator[Text | Image | Document]:
    """Yield the parts of a message that may not hold reasoning."""
    for part in _parts(message.content, f"{at}.content"):
        if not isinstance(part, Text | Image | Document):
            at = f"{at}.content"
            raise InvalidRequest(f"{at}: only a message of role 'assistant' may contain thinking", param=at)
        yield part


def _name(message: ChatMessage) -> dict[str, str] | None:
    return {"name": message.name} if message.name else None


def _reasoning(message: ChatMessage) -> Iterator[Reasoning]:
    details = message.reasoning_details or []
    text = message.reasoning_content or message.reasoning or "".join(_detail_text(d) for d in details)
    if text or details:
        carried = (detail.get("data") for detail in details)
        yield Reasoning(
            text,
            {"reasoning_details": details} if details else None,
            capsules=carried_capsules("reasoning_details", *carried),
        )


def _is_foreign(detail: dict[str, Any]) -> bool:
    """Return whether ``detail`` is not a capsule; a capsule does not show which field the client reads."""
    return not str(detail.get("data", "")).startswith(CAPSULE_PREFIX)


def _detail_text(detail: dict[str, Any]) -> str:
    text = detail.get("text") or detail.get("summary")
    return text if isinstance(text, str) else ""


def _tool_call(call: _ToolCall, at: str) -> ToolCall:
    if call.custom is not None:
        arguments = custom.to_arguments(call.custom.input or "")
        return ToolCall(call.custom.name, arguments, call.id or "", verbatim=False)
    if call.function is None:
        raise InvalidRequest(f"{at}.function: Field required", param=f"{at}.function")
    arguments, verbatim = _arguments(call.function.arguments, f"{at}.function.arguments")
    return ToolCall(call.function.name, arguments, call.id or "", verbatim=verbatim)


def _arguments(raw: msgspec.Raw, at: str) -> tuple[str, bool]:
    """Return the arguments as JSON text, and whether that text is verbatim.

    A string is taken byte for byte. An object sent instead of a string is sent as chat templates write JSON.
    """
    sent = bytes(raw)
    verbatim = sent.startswith(b'"') or not sent
    try:
        text = msgspec.json.decode(sent or b'""', type=str) if verbatim else template_json(sent)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{at}: not valid JSON ({error}); send a string", param=at) from None
    return "{}" if text.strip() in ("", "null") else text, verbatim


def _parts(content: str | list[_ContentPart] | None, at: str) -> Iterator[Part]:
    """Yield the parts of ``content`` without empty text."""
    if isinstance(content, str):
        content = [_ContentPart("text", content)]
    for i, part in enumerate(content or ()):
        decode = _PARTS.get(part.type)
        if decode is None:
            where, kind = f"{at}.{i}.type", limits.quote_value(part.type)
            cure = _PART_CURES.get(part.type, f"send one of {', '.join(_PARTS)}")
            raise InvalidRequest(f"{where} is {kind}, which is not supported here; {cure}", param=where)
        decoded = decode(part, f"{at}.{i}")
        if not isinstance(decoded, Text | Reasoning) or decoded.text:
            yield decoded


def _text_part(part: _ContentPart, at: str) -> Part:
    return Text(_required(part.text, f"{at}.text"))


def _refusal_part(part: _ContentPart, at: str) -> Part:
    return Text(_required(part.refusal, f"{at}.refusal"))


def _thinking_part(part: _ContentPart, at: str) -> Part:
    thinking = part.thinking if part.thinking is not None else part.text
    if isinstance(thinking, list):
        return Reasoning("".join(p.text or "" for p in thinking))
    return Reasoning(_required(thinking, f"{at}.thinking"))


def _image_part(part: _ContentPart, at: str) -> Part:
    image = part.image_url
    url = image.url if isinstance(image, _ImageURL) else image
    detail = image.detail if isinstance(image, _ImageURL) else None
    return media.image(_required(url, f"{at}.image_url"), {"detail": detail} if detail else None)


def _file_part(part: _ContentPart, at: str) -> Part:
    file = part.file or _File()
    if not file.file_data:
        raise InvalidRequest(
            f"{at}.file.file_data: Field required; files are not stored here, so send the data itself",
            param=f"{at}.file.file_data",
        )
    return media.document(file.file_data, file.filename or "")


def _required(value: str | None, at: str) -> str:
    if value is None:
        raise InvalidRequest(f"{at}: Field required", param=at)
    return value


_ROLES: dict[str, Callable[[ChatMessage, str], Turn]] = {
    "system": _plain,
    "developer": _plain,
    "user": _plain,
    "assistant": _assistant,
    "tool": _tool,
    "function": _function,
}

_PARTS: dict[str, Callable[[_ContentPart, str], Part]] = {
    "text": _text_part,
    "image_url": _image_part,
    "file": _file_part,
    "refusal": _refusal_part,
    "thinking": _thinking_part,
}
_AUDIO = "the models served here do not accept audio: send a transcript as text"
_PART_CURES = {
    "input_audio": _AUDIO,
    "audio_url": _AUDIO,
    "video_url": "the models served here do not accept video: send frames as image_url",
}
