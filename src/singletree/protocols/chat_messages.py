"""The ``messages`` of a Chat Completions request, as turns.

https://platform.openai.com/docs/api-reference/chat/create, and what others add: ``reasoning_content``
(DeepSeek), ``reasoning`` and ``reasoning_details`` (OpenRouter), ``thinking`` parts (Mistral). The wire keeps
no order between the reasoning, the text and the calls of one message; they are read in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import msgspec

from singletree.conversation import Document, Image, Part, Reasoning, Role, Text, ToolCall, ToolResult, Turn
from singletree.errors import InvalidRequest
from singletree.protocols import custom_tools as custom
from singletree.protocols import limits, media, wire


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


class Message(msgspec.Struct):
    """One message as it goes over the wire."""

    role: str
    content: str | list[_ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[dict[str, Any]] | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    prefix: bool | None = None
    partial: bool | None = None


class Read(NamedTuple):
    """A message, and what it says."""

    message: Message
    turn: Turn


def read(messages: Sequence[msgspec.Raw]) -> list[Read]:
    """Each of ``messages`` with what it says.

    Raises:
        InvalidRequest: with ``param`` as a path such as ``messages.0.content``.
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    return wire.read_each(messages, Message, _read, "messages")


def turns(messages: Sequence[Read]) -> tuple[Turn, ...]:
    """The turns that ``messages`` say, each role in its place; a run of tool messages is one turn."""
    said = [turn for _, turn in messages]
    if not any(a.role == b.role == "tool" for a, b in pairwise(said)):
        return tuple(said)
    return tuple(t for role, run in groupby(said, lambda turn: turn.role) for t in _joined(role, list(run)))


def reasoning_fields(messages: Sequence[Read]) -> tuple[str, ...]:
    """The fields in which the client keeps reasoning, seen from the last message of its that has any."""
    for message, _ in reversed(messages):
        kept = tuple(f for f in ("reasoning_content", "reasoning") if getattr(message, f))
        if kept or message.reasoning_details:
            return kept or ("reasoning",)
    return ()


def _joined(role: Role, run: Sequence[Turn]) -> Iterator[Turn]:
    if role == "tool" and len(run) > 1:
        yield Turn("tool", tuple(part for turn in run for part in turn.parts))
    else:
        yield from run


def _read(message: Message, at: str) -> Read:
    return Read(message, _turn(message, at))


def _turn(message: Message, at: str) -> Turn:
    say = _ROLES.get(message.role)
    if say is None:
        cure = _ROLE_CURES.get(message.role, f"send one of {', '.join(_ROLES)}")
        raise InvalidRequest(f"{at}.role is {limits.shown(message.role)}; {cure}", param=f"{at}.role")
    if message.function_call is not None:
        at = f"{at}.function_call"
        raise InvalidRequest(f"{at} is the legacy form and not supported; send tool_calls", param=at)
    return say(message, at)


def _plain(message: Message, at: str) -> Turn:
    role: Role = message.role  # type: ignore[assignment]  # a key of _ROLES
    return Turn(role, tuple(_shown_parts(message, at)), _name(message))


def _assistant(message: Message, at: str) -> Turn:
    parts: list[Part] = [*_reasoning(message), *_parts(message.content, f"{at}.content")]
    if message.refusal:
        parts.append(Text(message.refusal))
    for i, call in enumerate(message.tool_calls or ()):
        parts.append(_tool_call(call, f"{at}.tool_calls.{i}"))
    return Turn("assistant", tuple(parts), _name(message))


def _tool(message: Message, at: str) -> Turn:
    if not message.tool_call_id:
        at = f"{at}.tool_call_id"
        raise InvalidRequest(f"{at}: Field required; send the id of the call that this answers", param=at)
    shown = tuple(_shown_parts(message, at))
    return Turn("tool", (ToolResult(message.tool_call_id, shown, extra=_name(message)),))


def _shown_parts(message: Message, at: str) -> Iterator[Text | Image | Document]:
    """The parts of a message that nobody thought."""
    for part in _parts(message.content, f"{at}.content"):
        if not isinstance(part, Text | Image | Document):
            at = f"{at}.content"
            raise InvalidRequest(f"{at}: only a message of role 'assistant' may hold thinking", param=at)
        yield part


def _name(message: Message) -> dict[str, str] | None:
    return {"name": message.name} if message.name else None


def _reasoning(message: Message) -> Iterator[Reasoning]:
    details = message.reasoning_details or []
    text = message.reasoning_content or message.reasoning or "".join(_detail_text(d) for d in details)
    if text or details:
        yield Reasoning(text, {"reasoning_details": details} if details else None)


def _detail_text(detail: dict[str, Any]) -> str:
    text = detail.get("text") or detail.get("summary")
    return text if isinstance(text, str) else ""


def _tool_call(call: _ToolCall, at: str) -> ToolCall:
    if call.custom is not None:
        return ToolCall(call.custom.name, custom.to_arguments(call.custom.input or ""), call.id or "")
    if call.function is None:
        raise InvalidRequest(f"{at}.function: Field required", param=f"{at}.function")
    arguments = _arguments(call.function.arguments, f"{at}.function.arguments")
    return ToolCall(call.function.name, arguments, call.id or "")


def _arguments(raw: msgspec.Raw, at: str) -> str:
    """The string that was sent, byte for byte; an object sent in its place is kept as it is written."""
    written = bytes(raw)
    try:
        text = msgspec.json.decode(written, type=str) if written.startswith(b'"') else written.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{at}: not valid JSON ({error}); send a string", param=at) from None
    return "{}" if text.strip() in ("", "null") else text


def _parts(content: str | list[_ContentPart] | None, at: str) -> Iterator[Part]:
    """The parts that say something: an empty text equals none."""
    if isinstance(content, str):
        content = [_ContentPart("text", content)]
    for i, part in enumerate(content or ()):
        read = _PARTS.get(part.type)
        if read is None:
            where, kind = f"{at}.{i}.type", limits.shown(part.type)
            cure = _PART_CURES.get(part.type, f"send one of {', '.join(_PARTS)}")
            raise InvalidRequest(f"{where} is {kind}, which is not supported here; {cure}", param=where)
        said = read(part, f"{at}.{i}")
        if not isinstance(said, Text | Reasoning) or said.text:
            yield said


def _text_part(part: _ContentPart, at: str) -> Part:
    return Text(_required(part.text, f"{at}.text"))


def _refusal_part(part: _ContentPart, at: str) -> Part:
    return Text(_required(part.refusal, f"{at}.refusal"))


def _thinking_part(part: _ContentPart, at: str) -> Part:
    said = part.thinking if part.thinking is not None else part.text
    if isinstance(said, list):
        return Reasoning("".join(p.text or "" for p in said))
    return Reasoning(_required(said, f"{at}.thinking"))


def _image_part(part: _ContentPart, at: str) -> Part:
    given = part.image_url
    url = given.url if isinstance(given, _ImageURL) else given
    detail = given.detail if isinstance(given, _ImageURL) else None
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


_ROLES: dict[str, Callable[[Message, str], Turn]] = {
    "system": _plain,
    "developer": _plain,
    "user": _plain,
    "assistant": _assistant,
    "tool": _tool,
}
_ROLE_CURES = {"function": "the legacy form is not supported: send role 'tool' with tool_call_id"}

_PARTS: dict[str, Callable[[_ContentPart, str], Part]] = {
    "text": _text_part,
    "image_url": _image_part,
    "file": _file_part,
    "refusal": _refusal_part,
    "thinking": _thinking_part,
}
_AUDIO = "the models served here read no audio: send a transcript as text"
_PART_CURES = {
    "input_audio": _AUDIO,
    "audio_url": _AUDIO,
    "video_url": "the models served here watch no video: send frames as image_url",
}
