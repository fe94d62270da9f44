"""Decode content blocks and tools of the Messages API into parts of a conversation.

https://platform.claude.com/docs/en/api/messages. A block type of the API that an open model has no use for is
left out with a warning; a block type that the API does not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import msgspec

from singletree.conversation import (
    CAPSULE_PREFIX,
    Document,
    Extra,
    Image,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolReference,
    ToolResult,
    carried_capsules,
)
from singletree.protocols import content as client_content
from singletree.protocols import wire
from singletree.protocols.limits import malformed, quote_value
from singletree.protocols.messages.tools import RequestNotes, ToolDefinition, decode_tool, required

ContentPlace = Literal["user", "assistant", "system", "tool_result"]
ResultPart = Text | Image | Document | ToolReference

_ABSENT = msgspec.Raw()


class Block(msgspec.Struct, frozen=True):
    """One content block of any type, with the fields of all types. Each type has its own decoding function.

    Raw fields are decoded by that function: ``input`` because a prompt shows its numbers as they were sent,
    ``content`` and ``source`` because their form depends on the type.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: Any = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = _ABSENT
    tool_use_id: str | None = None
    content: msgspec.Raw = _ABSENT
    is_error: bool | None = None
    source: msgspec.Raw = _ABSENT
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None
    tool: Any = None
    cache_control: Any = None


BlockContent = str | list[Block] | None


class MediaSource(msgspec.Struct, frozen=True):
    """The source of an image or a document: inline data, or a URL."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: BlockContent = None


class ToolChange(msgspec.Struct, frozen=True):
    """The tool that a ``tool_addition`` block adds (by name or definition) or a ``tool_removal`` block removes."""

    type: str
    name: str | None = None
    server_name: str | None = None
    definition: ToolDefinition | None = None


class _Unparsed(msgspec.Struct, frozen=True):
    raw: str


class _Kept(msgspec.Struct, frozen=True):
    """The object in which Claude Code 2.1 keeps arguments that were not valid JSON."""

    unparsed: _Unparsed = msgspec.field(name="__unparsedToolInput")


_UNPARSED = b'{"__unparsedToolInput":{"raw":'


def decode_blocks(content: BlockContent, place: ContentPlace, at: str, notes: RequestNotes) -> list[Part]:
    """Decode ``content`` into parts, in order, without empty text. Raises InvalidRequest with the path of a block.

    ``place`` is the role of the message, or ``tool_result`` inside one. ``notes`` collects warnings and new tools.
    """
    if isinstance(content, str):
        return [Text(content)] if content else []
    parts: list[Part] = []
    wire.spend(wire.BLOCK_COST * len(content or ()))
    for i, block in enumerate(content or ()):
        where = f"{at}.{i}"
        if block.type in _IGNORED:
            notes.warn(f"{block.type} blocks are ignored: {_IGNORED[block.type]}")
            continue
        read = _READERS.get(block.type)
        if read is None:
            known = f"send one of {', '.join(_READERS)}"
            why = f"{quote_value(block.type)} is not a type of content block; {known}"
            raise malformed(f"{where}.type", why)
        for part in read(block, where, notes):
            if place not in _PLACES.get(type(part), _ANYWHERE):
                raise malformed(f"{where}.type", f"{block.type} is not allowed in {place} content")
            parts.append(part)
    return parts


def _decode(kind: Any, raw: msgspec.Raw, at: str) -> Any:
    if not (sent := bytes(raw)):
        raise malformed(at)
    return wire.decode_raw(sent, kind, at)


def _marks(block: Block) -> Extra | None:
    return None if block.cache_control is None else {"cache_control": block.cache_control}


def _text(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    if block.text is None:
        raise malformed(f"{at}.text")
    return (Text(block.text, _marks(block)),) if block.text else ()


def _thinking(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    # Without its text a block may still carry the turn in its signature (display: omitted).
    if not block.thinking and not block.signature:
        return ()
    extra = {"signature": block.signature} if block.signature else None
    return (Reasoning(block.thinking or "", extra, capsules=carried_capsules("signature", block.signature)),)


def _redacted_thinking(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    """Decode encrypted reasoning. Here it is a capsule of the turn; other servers' blocks are ignored."""
    if isinstance(block.data, str) and block.data.startswith(CAPSULE_PREFIX):
        return (Reasoning("", {"data": block.data}, capsules=carried_capsules("data", block.data)),)
    notes.warn(f"{block.type} blocks are ignored: only the server that encrypted it can read it")
    return ()


def _tool_use(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    name, call_id = required(block.name, f"{at}.name"), required(block.id, f"{at}.id")
    arguments, complete = _arguments(block.input, f"{at}.input")
    # Incomplete arguments are sent as a string, which no client reformats.
    return (ToolCall(name, arguments, call_id, complete, _marks(block), verbatim=not complete),)


def _arguments(sent: msgspec.Raw, at: str) -> tuple[str, bool]:
    """Return the arguments in ``input`` as JSON text, and whether they are complete.

    ``input`` is an object, which each client formats in its own way. Arguments that were not valid JSON are sent as a
    string, or in Claude Code's own object; both hold the model's text unchanged.
    """
    raw = bytes(sent)
    if not raw or raw == b"null":
        return "{}", True
    if raw.startswith(b'"'):
        return _decode(str, sent, at), False
    if raw.startswith(_UNPARSED):
        return _decode(_Kept, sent, at).unparsed.raw, False
    try:
        return client_content.template_json(raw), True
    except UnicodeDecodeError as error:
        raise malformed(at, f"not valid UTF-8 ({error.reason})") from None


def _tool_result(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    call_id = required(block.tool_use_id, f"{at}.tool_use_id")
    parts = cast(list[ResultPart], _inner(block, at, notes))
    return (ToolResult(call_id, tuple(parts), bool(block.is_error), _marks(block)),)


def _inner(block: Block, at: str, notes: RequestNotes) -> list[Part]:
    content = _decode(BlockContent, block.content, f"{at}.content") if bytes(block.content) else None
    return decode_blocks(content, "tool_result", f"{at}.content", notes)


def _server_tool_result(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    """Decode the result of a tool that Anthropic's servers ran in an earlier turn, without its encrypted fields."""
    call_id = required(block.tool_use_id, f"{at}.tool_use_id")
    content = _decode(Any, block.content, f"{at}.content") if bytes(block.content) else None
    content_parts: tuple[ResultPart, ...] = (Text(msgspec.json.encode(_readable(content)).decode()),)
    if isinstance(content, dict) and isinstance(found := content.get("tool_references"), list):
        names = [r.get("tool_name") for r in found if isinstance(r, dict)]
        content_parts = tuple(ToolReference(name) for name in names if isinstance(name, str))
    return (ToolResult(call_id, content_parts, extra=_marks(block)),)


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(v) for v in value]
    if not isinstance(value, dict):
        return value
    hidden = "data" if value.get("type") == "base64" else ""
    return {k: _readable(v) for k, v in value.items() if k != hidden and not k.startswith("encrypted")}


def _tool_reference(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    return (ToolReference(required(block.tool_name, f"{at}.tool_name"), _marks(block)),)


def _tool_addition(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    change = wire.convert(block.tool, ToolChange, f"{at}.tool")
    name = change.name
    if change.definition is not None:
        added = decode_tool(change.definition, f"{at}.tool.definition", notes)
        if added is None:
            return ()
        notes.tools.append(replace(added, deferred=True))
        name = added.name
    return (ToolReference(required(name, f"{at}.tool.name"), _marks(block)),)


def _tool_removal(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    """Tell the model in place. The tool stays at the head of the prompt, so that the prompt after it stays cached."""
    change = wire.convert(block.tool, ToolChange, f"{at}.tool")
    name = required(change.name or change.server_name, f"{at}.tool.name")
    return (Text(f"The tool {name} is not available any more.", _marks(block)),)


def _image(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    at = f"{at}.source"
    source = _decode(MediaSource, block.source, at)
    if source.type == "url":
        return (client_content.image(required(source.url, f"{at}.url"), _marks(block)),)
    return (Image(source.media_type or "", _inline(source, at), extra=_marks(block)),)


def _document(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    at, title = f"{at}.source", block.title or ""
    source = _decode(MediaSource, block.source, at)
    if source.type == "text":
        return _paragraphs(block, title, block.context, source.data)
    if source.type == "content":
        parts = decode_blocks(source.content, "tool_result", f"{at}.content", notes)
        return (*_paragraphs(block, title, block.context), *parts)
    if source.type == "url":
        document = client_content.document(required(source.url, f"{at}.url"), title, _marks(block))
    else:
        document = Document(source.media_type or "", _inline(source, at), title=title, extra=_marks(block))
    return (*_paragraphs(block, block.context), document)


def _inline(source: MediaSource, at: str) -> str:
    if source.type != "base64":
        cure = "files are not stored here: send the data as base64, or a url"
        raise malformed(f"{at}.type", f"{quote_value(source.type)} is not supported; {cure}")
    return required(source.data, f"{at}.data")


def _search_result(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    source = _decode(str, block.source, f"{at}.source") if bytes(block.source) else None
    return (*_paragraphs(block, block.title, source), *_inner(block, at, notes))


def _compaction(block: Block, at: str, notes: RequestNotes) -> Sequence[Part]:
    return _paragraphs(block, _decode(str | None, block.content, f"{at}.content"))


def _paragraphs(block: Block, *texts: str | None) -> Sequence[Part]:
    text = "\n\n".join(t for t in texts if t)
    return (Text(text, _marks(block)),) if text else ()


_READERS: dict[str, Callable[[Block, str, RequestNotes], Sequence[Part]]] = {
    "text": _text,
    "thinking": _thinking,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
    "tool_reference": _tool_reference,
    "redacted_thinking": _redacted_thinking,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_addition": _tool_addition,
    "tool_removal": _tool_removal,
    "server_tool_use": _tool_use,
    "mcp_tool_use": _tool_use,
    "mcp_tool_result": _tool_result,
    "web_search_tool_result": _server_tool_result,
    "web_fetch_tool_result": _server_tool_result,
    "code_execution_tool_result": _server_tool_result,
    "bash_code_execution_tool_result": _server_tool_result,
    "text_editor_code_execution_tool_result": _server_tool_result,
    "tool_search_tool_result": _server_tool_result,
    "advisor_tool_result": _server_tool_result,
    "compaction": _compaction,
}

_IGNORED = {
    "container_upload": "there is no container here",
    "mcp_tool_listing": "the client calls MCP servers itself",
    "fallback": "this server does not fall back to other models",
    "browser_state": "there are no browser tools here",
}

_ANYWHERE: tuple[ContentPlace, ...] = ("user", "assistant", "system", "tool_result")
_PLACES: dict[type[Part], tuple[ContentPlace, ...]] = {
    Reasoning: ("assistant",),
    ToolCall: ("assistant",),
    ToolResult: ("user", "assistant"),
}
