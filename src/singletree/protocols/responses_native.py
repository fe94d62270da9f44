"""Tools that OpenAI's own clients run themselves and that have item types of their own.

``local_shell``, ``shell``, ``apply_patch`` and a ``tool_search`` that the client executes: the model sees a
function, the client the item it knows. https://platform.openai.com/docs/guides/tools-local-shell, and there
``tools-shell``, ``tools-apply-patch`` and ``tools-tool-search``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from singletree.conversation import Tool

Wire = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Native:
    """A tool type whose calls have an item type of their own.

    Attributes:
        tool: what the model sees where the client does not say otherwise.
        item: the type of a call; ``output`` is that of its result.
        prefix: of the id of a call's item.
        arguments_field: the field of the item that holds the arguments.
        form: what arguments must look like; a call that does not fit stays a function call.
        beside: what stands in that field besides the arguments.
        item_fields: fields that every call has.
    """

    tool: Tool
    item: str
    output: str
    prefix: str
    arguments_field: str
    form: type[Struct]
    beside: Wire = field(default_factory=dict)
    item_fields: Wire = field(default_factory=dict)


class _Exec(Struct):
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] | None = None


class _Shell(Struct):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Patch(Struct):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class _Search(Struct):
    """The client's own schema says what it takes."""


def _object(required: Sequence[str], **properties: Wire) -> Wire:
    return {"type": "object", "properties": properties, "required": list(required)}


_STRINGS: Wire = {"type": "array", "items": {"type": "string"}}

NATIVE: Mapping[str, Native] = {
    "local_shell": Native(
        Tool(
            "local_shell",
            "Runs a command on the user's machine. The command is a list: the program, then its arguments.",
            _object(
                ["command"],
                command=_STRINGS,
                working_directory={"type": "string"},
                timeout_ms={"type": "integer"},
                env={"type": "object", "additionalProperties": {"type": "string"}},
            ),
        ),
        item="local_shell_call",
        output="local_shell_call_output",
        prefix="lsh_",
        arguments_field="action",
        form=_Exec,
        beside={"type": "exec", "env": {}},
    ),
    "shell": Native(
        Tool(
            "shell",
            "Runs shell commands and returns what each of them prints.",
            _object(
                ["commands"],
                commands=_STRINGS,
                timeout_ms={"type": "integer"},
                max_output_length={"type": "integer"},
            ),
        ),
        item="shell_call",
        output="shell_call_output",
        prefix="sh_",
        arguments_field="action",
        form=_Shell,
    ),
    "apply_patch": Native(
        Tool(
            "apply_patch",
            "Creates, updates or deletes one file. `diff` is a V4A diff; deleting needs none.",
            _object(
                ["type", "path"],
                type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                path={"type": "string"},
                diff={"type": "string"},
            ),
        ),
        item="apply_patch_call",
        output="apply_patch_call_output",
        prefix="apc_",
        arguments_field="operation",
        form=_Patch,
    ),
    "tool_search": Native(
        Tool(
            "tool_search",
            "Finds tools that are not listed yet and makes them callable.",
            _object(["query"], query={"type": "string"}),
        ),
        item="tool_search_call",
        output="tool_search_output",
        prefix="tsc_",
        arguments_field="arguments",
        form=_Search,
        item_fields={"execution": "client"},
    ),
}
BY_CALL = {native.item: kind for kind, native in NATIVE.items()}
BY_OUTPUT = {native.output: kind for kind, native in NATIVE.items()}


def call_fields(native: Native, arguments: str) -> dict[str, Any] | None:
    """The fields of a call's item that say ``arguments``, values byte for byte; None if they do not fit."""
    try:
        msgspec.json.decode(arguments, type=native.form)
        said = msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    return {**native.item_fields, native.arguments_field: {**native.beside, **said}}


def arguments_of(native: Native, item: Wire) -> str:
    """The arguments, as JSON text, of a call that came back as ``item``."""
    said = item.get(native.arguments_field)
    if isinstance(said, str):
        return said
    if isinstance(said, dict):
        said = {key: value for key, value in said.items() if (key, value) not in native.beside.items()}
    return msgspec.json.encode(said).decode()
