"""Content blocks and tools of the Messages API, as parts of a conversation.

https://platform.claude.com/docs/en/api/messages. A block type that the API has and that means nothing to an
open model is left out with a warning; one that the API does not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import msgspec

from singletree.conversation import (
    Document,
    Extra,
    Image,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolReference,
    ToolResult,
)
from singletree.errors import InvalidRequest
from singletree.protocols import media, wire
from singletree.protocols.limits import shown
from singletree.protocols.messages_tools import Reading, ToolDefinition, required, tool

Place = Literal["user", "assistant", "system", "tool_result"]
Said = Text | Image | Document | ToolReference

_ABSENT = msgspec.Raw()


class Block(msgspec.Struct, frozen=True):
    """One content block of any type: the fields of all types, each read by its type's own function.

    What stays raw is read by that function: ``input`` because a prompt shows the very bytes that came,
    ``content`` and ``source`` because their shape depends on the type.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
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


Content = str | list[Block] | None


class Source(msgspec.Struct, frozen=True):
    """Where an image or a document is: here, or elsewhere."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Content = None


class ToolChange(msgspec.Struct, frozen=True):
    """What a ``tool_addition`` block adds, a tool by name or by value; or what a ``tool_removal`` block takes away."""

    type: str
    name: str | None = None
    server_name: str | None = None
    definition: ToolDefinition | None = None


_CONTENT: msgspec.json.Decoder[Content] = msgspec.json.Decoder(Content)
_SOURCE = msgspec.json.Decoder(Source)
_STRING = msgspec.json.Decoder(str)
_SUMMARY: msgspec.json.Decoder[str | None] = msgspec.json.Decoder(str | None)
_ANYTHING: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

T = TypeVar("T")


class _Unparsed(msgspec.Struct, frozen=True):
    raw: str


class _Kept(msgspec.Struct, frozen=True):
    """What Claude Code 2.1 keeps of arguments that were no JSON."""

    unparsed: _Unparsed = msgspec.field(name="__unparsedToolInput")


_UNPARSED = b'{"__unparsedToolInput":{"raw":'
_KEPT = msgspec.json.Decoder(_Kept)


def parts(content: Content, place: Place, at: str, reading: Reading) -> Iterator[Part]:
    """The parts that ``content`` says, in order. Empty text says nothing.

    Args:
        place: the role of the message, or ``tool_result`` inside one.
        at: the path of ``content``.

    Raises:
        InvalidRequest: naming the block by its path.
    """
    if isinstance(content, str):
        content = [Block("text", content)]
    for i, block in enumerate(content or ()):
        where = f"{at}.{i}"
        if block.type in _IGNORED:
            reading.warn(f"{block.type} blocks are ignored: {_IGNORED[block.type]}")
            continue
        read = _READERS.get(block.type)
        if read is None:
            known = f"send one of {', '.join(_READERS)}"
            raise InvalidRequest(
                f"{where}.type: {shown(block.type)} is not a type of content block; {known}",
                param=f"{where}.type",
            )
        for part in read(block, where, reading):
            if place not in _PLACES.get(type(part), _ANYWHERE):
                raise InvalidRequest(
                    f"{where}.type: {block.type} cannot stand in {place} content", param=f"{where}.type"
                )
            yield part


def _decode(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, at: str) -> T:
    if not bytes(raw):
        raise InvalidRequest(f"{at}: Field required", param=at)
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise wire.refusal(error, at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{at}: not valid JSON ({error})", param=at) from None


def _marks(block: Block) -> Extra | None:
    return None if block.cache_control is None else {"cache_control": block.cache_control}


def _text(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    if block.text is None:
        raise InvalidRequest(f"{at}.text: Field required", param=f"{at}.text")
    if block.text:
        yield Text(block.text, _marks(block))


def _thinking(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    # Without its text a block may still carry the turn in its signature (display: omitted).
    if block.thinking or block.signature:
        yield Reasoning(block.thinking or "", {"signature": block.signature} if block.signature else None)


def _tool_use(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    name, call_id = required(block.name, f"{at}.name"), required(block.id, f"{at}.id")
    arguments, complete = _arguments(block.input, f"{at}.input")
    yield ToolCall(name, arguments, call_id, complete, _marks(block))


def _arguments(given: msgspec.Raw, at: str) -> tuple[str, bool]:
    """The client's own spelling of ``input``, and whether it is whole.

    Arguments that were no JSON come as a string or in Claude Code's own object: the model's text, as it was.
    """
    raw = bytes(given)
    if not raw or raw == b"null":
        return "{}", True
    if raw.startswith(b'"'):
        return _decode(_STRING, given, at), False
    if raw.startswith(_UNPARSED):
        return _decode(_KEPT, given, at).unparsed.raw, False
    if b"\n" in raw:
        # The body was printed with indentation (qwen-code's is): that is not the call's spelling.
        raw = msgspec.json.format(raw, indent=0)
    try:
        return raw.decode(), True
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{at}: not valid UTF-8 ({error.reason})", param=at) from None


def _tool_result(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    call_id = required(block.tool_use_id, f"{at}.tool_use_id")
    content = _decode(_CONTENT, block.content, f"{at}.content") if bytes(block.content) else None
    said = tuple(cast(Iterator[Said], parts(content, "tool_result", f"{at}.content", reading)))
    yield ToolResult(call_id, said, bool(block.is_error), _marks(block))


def _server_tool_result(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    """What a tool of Anthropic's own servers answered in an earlier turn, as far as others can read it."""
    call_id = required(block.tool_use_id, f"{at}.tool_use_id")
    content = _decode(_ANYTHING, block.content, f"{at}.content") if bytes(block.content) else None
    said: tuple[Said, ...] = (Text(msgspec.json.encode(_readable(content)).decode()),)
    if isinstance(content, dict) and isinstance(found := content.get("tool_references"), list):
        names = [r.get("tool_name") for r in found if isinstance(r, dict)]
        said = tuple(ToolReference(name) for name in names if isinstance(name, str))
    yield ToolResult(call_id, said, extra=_marks(block))


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(v) for v in value]
    if not isinstance(value, dict):
        return value
    hidden = "data" if value.get("type") == "base64" else ""
    return {k: _readable(v) for k, v in value.items() if k != hidden and not k.startswith("encrypted")}


def _tool_reference(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    yield ToolReference(required(block.tool_name, f"{at}.tool_name"), _marks(block))


def _tool_addition(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    change = wire.convert(block.tool, ToolChange, f"{at}.tool")
    name = change.name
    if change.definition is not None:
        added = tool(change.definition, f"{at}.tool.definition", reading)
        if added is None:
            return
        reading.tools.append(replace(added, deferred=True))
        name = added.name
    yield ToolReference(required(name, f"{at}.tool.name"), _marks(block))


def _tool_removal(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    """The head of the prompt keeps the tool, so that what is behind it stays cached; the model is told in place."""
    change = wire.convert(block.tool, ToolChange, f"{at}.tool")
    name = required(change.name or change.server_name, f"{at}.tool.name")
    yield Text(f"The tool {name} is not available any more.", _marks(block))


def _image(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    at = f"{at}.source"
    source = _decode(_SOURCE, block.source, at)
    if source.type == "url":
        yield media.image(required(source.url, f"{at}.url"), _marks(block))
    else:
        yield Image(source.media_type or "", _inline(source, at), extra=_marks(block))


def _document(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    at, title = f"{at}.source", block.title or ""
    source = _decode(_SOURCE, block.source, at)
    if source.type == "text":
        yield from _paragraphs(block, title, block.context, source.data)
    elif source.type == "content":
        yield from _paragraphs(block, title, block.context)
        yield from parts(source.content, "tool_result", f"{at}.content", reading)
    else:
        yield from _paragraphs(block, block.context)
        if source.type == "url":
            yield media.document(required(source.url, f"{at}.url"), title, _marks(block))
        else:
            yield Document(source.media_type or "", _inline(source, at), title=title, extra=_marks(block))


def _inline(source: Source, at: str) -> str:
    if source.type != "base64":
        cure = "files are not stored here: send the bytes as base64, or a url"
        raise InvalidRequest(f"{at}.type: {shown(source.type)} cannot be read; {cure}", param=f"{at}.type")
    return required(source.data, f"{at}.data")


def _search_result(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    source = _decode(_STRING, block.source, f"{at}.source") if bytes(block.source) else None
    content = _decode(_CONTENT, block.content, f"{at}.content") if bytes(block.content) else None
    yield from _paragraphs(block, block.title, source)
    yield from parts(content, "tool_result", f"{at}.content", reading)


def _compaction(block: Block, at: str, reading: Reading) -> Iterator[Part]:
    yield from _paragraphs(block, _decode(_SUMMARY, block.content, f"{at}.content"))


def _paragraphs(block: Block, *texts: str | None) -> Iterator[Part]:
    if text := "\n\n".join(t for t in texts if t):
        yield Text(text, _marks(block))


_READERS: dict[str, Callable[[Block, str, Reading], Iterator[Part]]] = {
    "text": _text,
    "thinking": _thinking,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
    "tool_reference": _tool_reference,
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
    "redacted_thinking": "only the model that wrote it can read it",
    "container_upload": "there is no container here",
    "mcp_tool_listing": "MCP servers are the client's to call",
    "fallback": "there is one model",
    "browser_state": "there are no browser tools here",
}

_ANYWHERE: frozenset[Place] = frozenset(("user", "assistant", "system", "tool_result"))
_PLACES: dict[type[Part], frozenset[Place]] = {
    Reasoning: frozenset(("assistant",)),
    ToolCall: frozenset(("assistant",)),
    ToolResult: frozenset(("user", "assistant")),
}
