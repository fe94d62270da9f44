"""The input items of a Responses request, as turns.

https://platform.openai.com/docs/api-reference/responses/create#responses-create-input. What the model said in
one go (reasoning, messages, calls) is one assistant turn; the outputs that answer it are one tool turn.

``extra`` is the wire object that a value came from: the item, for user, system and developer turns and for
the parts of assistant and tool turns; the content part, for what is inside of a message or an output. Items
that say nothing to the model (searches done elsewhere, references) stay in ``Request.extra["input"]`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from singletree.conversation import (
    Document,
    Image,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
)
from singletree.errors import InvalidRequest
from singletree.protocols import custom_tools, limits, media, wire
from singletree.protocols.responses_compaction import ITEMS, TRIGGER, shortened, unopened
from singletree.protocols.responses_native import BY_CALL, BY_OUTPUT, NATIVE, Wire, arguments_of
from singletree.protocols.responses_tools import Toolbox

Shown = Text | Image | Document


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None


class _Said(Struct):
    text: str = ""


class _Reasoning(Struct):
    content: list[_Said] | None = None
    summary: list[_Said] | None = None


class _Call(Struct):
    name: Annotated[str, Meta(min_length=1)]
    arguments: Any = None
    input: str = ""
    namespace: str | None = None


class _Ids(Struct):
    """What calls and outputs have in common. Local shell outputs give the id of their call as ``id``."""

    call_id: str | None = None
    id: str | None = None
    status: str | None = None


class _Compaction(Struct):
    encrypted_content: str


class _AdditionalTools(Struct):
    tools: list[dict[str, Any]] = []


class _ImageURL(Struct):
    url: str


class _Part(Struct):
    type: str = "input_text"
    text: str = ""
    refusal: str = ""
    image_url: str | _ImageURL | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None


def read(
    items: Sequence[Wire],
    tools: Toolbox,
    history: Sequence[Wire] = (),
    open_summary: Callable[[str, str], str | None] = unopened,
) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """The turns that ``history`` and then ``items`` say, and the paths of items that refer to what a server has stored.

    Tools that items bring along are added to ``tools``, and warnings to its warnings. ``open_summary`` gives the
    summary of a compaction from its ``encrypted_content`` and the path of that. Raises InvalidRequest
    with ``param`` as a path such as ``input.3.name``.
    """
    reader = _Reader(tools, open_summary)
    for i, item in enumerate(history):
        reader.read(item, f"history.{i}")
    for i, item in enumerate(items):
        reader.read(item, f"input.{i}")
    return reader.turns(), tuple(reader.references)


class _Reader:
    def __init__(self, tools: Toolbox, open_summary: Callable[[str, str], str | None]) -> None:
        self._open_summary = open_summary
        self.references: list[str] = []
        self._tools = tools
        self._turns: list[Turn] = []
        self._role: Role = "user"
        self._parts: list[Part] = []
        self._unsaid: set[str] = set()

    def turns(self) -> tuple[Turn, ...]:
        self._end_turn()
        return tuple(self._turns)

    def read(self, item: Wire, at: str) -> None:
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference" if "id" in item else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"{at}.type: Field required, a string", param=f"{at}.type")
        _READERS.get(kind, _Reader._nothing)(self, item, at)

    def _say(self, role: Role, *parts: Part) -> None:
        if role != self._role:
            self._end_turn()
            self._role = role
        self._parts += parts

    def _end_turn(self) -> None:
        if self._parts:
            self._turns.append(Turn(self._role, tuple(self._parts)))
            self._parts = []

    def _message(self, item: Wire, at: str) -> None:
        said = wire.convert(item, _Message, at)
        parts = tuple(self._shown(said.content, f"{at}.content"))
        if said.role == "assistant":
            self._say("assistant", *(replace(part, extra=item) for part in parts))
        else:
            self._end_turn()
            self._turns.append(Turn(said.role, parts, item))

    def _reasoning(self, item: Wire, at: str) -> None:
        """The summary speaks only where the thought itself did not come along."""
        said = wire.convert(item, _Reasoning, at)
        text = "".join(s.text for s in said.content or ()) or "\n\n".join(s.text for s in said.summary or ())
        if text or item.get("encrypted_content"):
            self._say("assistant", Reasoning(text, item))

    def _function_call(self, item: Wire, at: str) -> None:
        said = wire.convert(item, _Call, at)
        self._call(item, at, self._tools.name(said.name, said.namespace or ""), _arguments(said.arguments))

    def _custom_call(self, item: Wire, at: str) -> None:
        said = wire.convert(item, _Call, at)
        arguments = custom_tools.to_arguments(said.input)
        self._call(item, at, self._tools.name(said.name, said.namespace or ""), arguments)

    def _native_call(self, item: Wire, at: str) -> None:
        kind = BY_CALL[item["type"]]
        self._call(item, at, self._tools.native(kind), arguments_of(NATIVE[kind], item))

    def _call(self, item: Wire, at: str, name: str, arguments: str) -> None:
        ids = wire.convert(item, _Ids, at)
        call = ToolCall(name, arguments, ids.call_id or ids.id or "", ids.status != "incomplete", item)
        self._say("assistant", call)

    def _output(self, item: Wire, at: str) -> None:
        ids, output = wire.convert(item, _Ids, at), item.get("output")
        failed = ids.status == "failed"
        if isinstance(output, Mapping) and isinstance(output.get("content"), str):
            output, failed = output["content"], failed or output.get("success") is False
        if not isinstance(output, str | list) or (item["type"] in BY_OUTPUT and isinstance(output, list)):
            output = "" if output is None else msgspec.json.encode(output).decode()
        parts = tuple(self._shown(output, f"{at}.output"))
        self._say("tool", ToolResult(ids.call_id or ids.id or "", parts, failed, item))

    def _tool_search_output(self, item: Wire, at: str) -> None:
        ids, said = wire.convert(item, _Ids, at), wire.convert(item, _AdditionalTools, at)
        names = self._tools.add(said.tools, f"{at}.tools", found=True)
        found = tuple(ToolReference(name) for name in names)
        self._say("tool", ToolResult(ids.call_id or ids.id or "", found, extra=item))

    def _compaction(self, item: Wire, at: str) -> None:
        at = f"{at}.encrypted_content"
        summary = self._open_summary(wire.convert(item, _Compaction, at).encrypted_content, at)
        if summary is None:
            self._tools.warnings.append(f"{at} cannot be opened here, so the model does not see the summary")
            return
        self._end_turn()
        self._turns = shortened(self._turns, summary, item)

    def _trigger(self, item: Wire, at: str) -> None:
        """Says nothing: the request as a whole asks what it asks."""

    def _additional_tools(self, item: Wire, at: str) -> None:
        self._tools.add(wire.convert(item, _AdditionalTools, at).tools, f"{at}.tools")

    def _reference(self, item: Wire, at: str) -> None:
        self.references.append(at)

    def _nothing(self, item: Wire, at: str) -> None:
        self._warn(at, str(item.get("type")))

    def _shown(self, content: str | list[Any] | None, at: str) -> Iterator[Shown]:
        """The parts that say something: an empty text equals none."""
        if isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        for i, given in enumerate(content or ()):
            part = wire.convert(given, _Part, f"{at}.{i}")
            read_part = _PARTS.get(part.type)
            if read_part is None:
                self._warn(f"{at}.{i}", part.type)
            elif (shown := read_part(part, given, f"{at}.{i}")) != Text(""):
                yield shown

    def _warn(self, at: str, kind: str) -> None:
        """Once for each type: a long history may hold hundreds of the same."""
        if kind not in self._unsaid:
            self._unsaid.add(kind)
            self._tools.warnings.append(f"{at}: type {limits.shown(kind)} is kept but not shown to the model")


_READERS: dict[str, Callable[[_Reader, Wire, str], None]] = {
    "message": _Reader._message,
    "reasoning": _Reader._reasoning,
    "function_call": _Reader._function_call,
    "custom_tool_call": _Reader._custom_call,
    **dict.fromkeys(BY_CALL, _Reader._native_call),
    "function_call_output": _Reader._output,
    "custom_tool_call_output": _Reader._output,
    **dict.fromkeys(BY_OUTPUT, _Reader._output),
    "tool_search_output": _Reader._tool_search_output,
    "additional_tools": _Reader._additional_tools,
    "item_reference": _Reader._reference,
    **dict.fromkeys(ITEMS, _Reader._compaction),
    TRIGGER: _Reader._trigger,
}


def _arguments(value: Any) -> str:
    """A string byte for byte; arguments that were sent as an object are written out."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return "{}" if text.strip() in ("", "null") else text


def _text(part: _Part, given: Wire, at: str) -> Shown:
    return Text(part.text, given)


def _refusal(part: _Part, given: Wire, at: str) -> Shown:
    return Text(part.refusal, given)


def _image(part: _Part, given: Wire, at: str) -> Shown:
    url = part.image_url.url if isinstance(part.image_url, _ImageURL) else part.image_url
    if not url:
        raise _not_here(f"{at}.image_url", "the picture as a data: URL")
    return media.image(url, given)


def _file(part: _Part, given: Wire, at: str) -> Shown:
    title = part.filename or ""
    if part.file_data and not part.file_data.startswith("data:"):
        return Document(data=part.file_data, title=title, extra=given)
    url = part.file_data or part.file_url
    if not url:
        raise _not_here(f"{at}.file_data", "the data itself, in base64")
    return media.document(url, title, given)


def _not_here(at: str, cure: str) -> InvalidRequest:
    return InvalidRequest(f"{at}: Field required; files are not stored here, so send {cure}", param=at)


_PARTS: dict[str, Callable[[_Part, Wire, str], Shown]] = {
    "input_text": _text,
    "output_text": _text,
    "text": _text,
    "refusal": _refusal,
    "input_image": _image,
    "computer_screenshot": _image,
    "input_file": _file,
}
