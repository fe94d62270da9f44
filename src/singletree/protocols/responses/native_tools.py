"""Tools that OpenAI's own clients run themselves and whose calls have their own item types; and content parts of items.

``local_shell``, ``shell``, ``apply_patch`` and a ``tool_search`` that the client executes: the model sees a
function, the client gets the item that it knows. https://platform.openai.com/docs/guides/tools-local-shell, and there
``tools-shell``, ``tools-apply-patch`` and ``tools-tool-search``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from singletree.conversation import Document, Image, Text, Tool
from singletree.errors import InvalidRequest
from singletree.protocols import content, wire
from singletree.protocols.client_tools import OPENAI
from singletree.protocols.content import template_json
from singletree.protocols.limits import malformed

WireObject = Mapping[str, Any]
"""A JSON object as the client sends it."""


@dataclass(frozen=True, slots=True)
class NativeTool:
    """A tool type whose calls have their own item type.

    Attributes:
        tool: the model's view of the tool, unless the client changes it.
        item: the item type of a call.
        output: the item type of a result.
        prefix: the prefix of the id of a call's item.
        arguments_field: the field of the item that holds the arguments.
        arguments_type: the type that arguments must have, from the official SDK. A call that does not match stays a
            function call, since clients fail on an item of another form.
        fixed_values: values that ``arguments_field`` holds besides the arguments. Arguments may contain only those of
            these keys that ``arguments_type`` has too.
        item_fields: fields that every call item has.
    """

    tool: Tool
    item: str
    output: str
    prefix: str
    arguments_field: str
    arguments_type: Any
    fixed_values: WireObject = field(default_factory=dict)
    item_fields: WireObject = field(default_factory=dict)


# Codex reads these as unsigned 64-bit integers; JavaScript clients are exact up to here.
_Count = Annotated[int, Meta(ge=0, le=2**53)]


class _Exec(Struct):
    command: list[str]
    working_directory: str | None = None
    timeout_ms: _Count | None = None
    env: dict[str, str] = {}


class _Shell(Struct):
    commands: list[str]
    timeout_ms: _Count | None = None
    max_output_length: _Count | None = None


class _CreateFile(Struct, tag="create_file"):
    path: str
    diff: str


class _UpdateFile(Struct, tag="update_file"):
    path: str
    diff: str


class _DeleteFile(Struct, tag="delete_file"):
    path: str


class _Search(Struct):
    """Any arguments: the client's own schema defines them."""


def _native(kind: str, prefix: str, arguments_field: str, arguments_type: Any, **others: Any) -> NativeTool:
    items = {"item": f"{kind}_call", "output": f"{kind}_call_output", **others}
    return NativeTool(
        OPENAI[kind], prefix=prefix, arguments_field=arguments_field, arguments_type=arguments_type, **items
    )


NATIVE: Mapping[str, NativeTool] = {
    "local_shell": _native("local_shell", "lsh_", "action", _Exec, fixed_values={"type": "exec", "env": {}}),
    "shell": _native("shell", "sh_", "action", _Shell),
    "apply_patch": _native("apply_patch", "apc_", "operation", _CreateFile | _UpdateFile | _DeleteFile),
    "tool_search": _native(
        "tool_search",
        "tsc_",
        "arguments",
        _Search,
        output="tool_search_output",
        item_fields={"execution": "client"},
    ),
}
BY_CALL = {native.item: kind for kind, native in NATIVE.items()}
BY_OUTPUT = {native.output: kind for kind, native in NATIVE.items()}


def call_fields(native: NativeTool, arguments: str) -> dict[str, Any] | None:
    """Return the fields of a call's item for ``arguments``, values byte for byte; None if the form does not match."""
    try:
        # Decoded, not the text itself: of a key that occurs twice, the last one counts, as in the item.
        value = msgspec.json.decode(arguments)
        msgspec.convert(value, native.arguments_type)
        fields = msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    fixed = native.fixed_values.keys() - getattr(native.arguments_type, "__struct_fields__", ())
    if fixed & fields.keys() or not _is_shallow(value):
        return None
    return {**native.item_fields, native.arguments_field: {**native.fixed_values, **fields}}


_MAX_DEPTH = 64
"""The largest nesting depth of arguments in an item. Codex drops an event that is nested 128 levels deep."""


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return True
    return False


def arguments_of(native: NativeTool, item: WireObject) -> tuple[str, bool]:
    """Return the arguments of a call that was sent back as ``item``, as JSON text, and whether they are verbatim."""
    sent = item.get(native.arguments_field)
    if isinstance(sent, str):
        return sent, True
    if isinstance(sent, dict):
        sent = {key: value for key, value in sent.items() if (key, value) not in native.fixed_values.items()}
    return template_json(msgspec.json.encode(sent)), False


VisiblePart = Text | Image | Document


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


def decode_part(given: WireObject, at: str) -> VisiblePart | str:
    """Decode a content part, which becomes ``extra``; return its type if the model does not see parts of that type."""
    part = wire.convert(given, _Part, at)
    decode = _PARTS.get(part.type)
    return part.type if decode is None else decode(part, given, at)


def _image(part: _Part, given: WireObject, at: str) -> VisiblePart:
    url = part.image_url.url if isinstance(part.image_url, _ImageURL) else part.image_url
    if not url:
        raise _not_here(f"{at}.image_url", "the image as a data: URL")
    return content.image(url, given)


def _file(part: _Part, given: WireObject, at: str) -> VisiblePart:
    title = part.filename or ""
    if part.file_data and not part.file_data.startswith("data:"):
        return Document(data=part.file_data, title=title, extra=given)
    url = part.file_data or part.file_url
    if not url:
        raise _not_here(f"{at}.file_data", "the data itself, in base64")
    return content.document(url, title, given)


def _not_here(at: str, cure: str) -> InvalidRequest:
    return malformed(at, f"Field required; files are not stored here, so send {cure}")


_PARTS: dict[str, Callable[[_Part, WireObject, str], VisiblePart]] = {
    **dict.fromkeys(("input_text", "output_text", "text"), lambda part, given, at: Text(part.text, given)),
    "refusal": lambda part, given, at: Text(part.refusal, given),
    "input_image": _image,
    "computer_screenshot": _image,
    "input_file": _file,
}
