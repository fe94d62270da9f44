"""What a Responses request leaves to the server to know: earlier responses, conversations and items by their ids.

https://platform.openai.com/docs/guides/conversation-state. ``refers_to`` reads from a body what has to be looked up,
``Known`` is what was found, and ``decode`` of ``responses`` takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw, Struct

from singletree.errors import InvalidRequest
from singletree.protocols import wire
from singletree.protocols.responses_native import NATIVE

Wire = Mapping[str, Any]


class _Item(Struct):
    type: str | None = None
    id: str | None = None
    role: str | None = None


class _Body(Struct):
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    input: str | list[_Item] | None = None


@dataclass(frozen=True, slots=True)
class References:
    """Ids that a request names; all empty for one that says everything itself."""

    previous_response: str | None = None
    conversation: str | None = None
    items: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.previous_response or self.conversation or self.items)


@dataclass(frozen=True, slots=True)
class Known:
    """What was found: all items before the request's own, and those that it names."""

    history: Sequence[Wire] = ()
    items: Mapping[str, Wire] = field(default_factory=dict)


def refers_to(body: bytes) -> References:
    """What ``body`` names. Raises InvalidRequest for a body that cannot be read."""
    said = wire.read(body, _Body)
    conversation = conversation_id(said.conversation)
    if conversation and said.previous_response_id:
        raise InvalidRequest(
            "previous_response_id and conversation both say what came before; send one of them",
            param="previous_response_id",
        )
    items = said.input if isinstance(said.input, list) else []
    named = tuple(item.id for item in items if item.id and is_reference(item.type, item.role))
    return References(said.previous_response_id or None, conversation, named)


def conversation_id(conversation: str | Mapping[str, Any] | None) -> str | None:
    """The id in either form of the field. Raises InvalidRequest for an object without one."""
    if isinstance(conversation, Mapping):
        conversation = conversation.get("id")
        if not isinstance(conversation, str):
            raise InvalidRequest("conversation.id: Field required, a string", param="conversation.id")
    return conversation or None


def is_reference(type: str | None, role: str | None) -> bool:
    """Whether an item stands for another, by its ``id``: the API lets the type be left out."""
    return type == "item_reference" or (type is None and role is None)


def resolved(items: Sequence[Wire], known: Known) -> list[Wire]:
    """``items`` with what they refer to in its place.

    Raises:
        InvalidRequest: there is no such item.
    """
    found: list[Wire] = []
    for i, item in enumerate(items):
        if not is_reference(item.get("type"), item.get("role")):
            found.append(item)
            continue
        id = item.get("id")
        meant = known.items.get(id) if isinstance(id, str) else None
        if meant is None:
            at = f"input.{i}.id"
            raise InvalidRequest(f"{at}: no item {id!r} is stored here; send the item itself", param=at)
        found.append(meant)
    return found


_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "compaction": "cmp_",
    **{native.item: native.prefix for native in NATIVE.values()},
    **{native.output: f"{native.prefix.removesuffix('_')}o_" for native in NATIVE.values()},
}
# What an item of the API has that a client may leave out.
_STATUS = {"status": "completed"}
_DEFAULTS: Mapping[str, Wire] = {
    **dict.fromkeys(("message", "function_call", "custom_tool_call"), _STATUS),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "computer_call_output"), _STATUS),
    **{native.item: {**_STATUS, **native.item_fields} for native in NATIVE.values()},
    **{native.output: {**_STATUS, **native.item_fields} for native in NATIVE.values()},
}
_PART_DEFAULTS: Mapping[str, Wire] = {
    "output_text": {"annotations": [], "logprobs": []},
    "input_image": {"detail": "auto"},
}


def with_id(item: Wire, new_id: Callable[[str], str]) -> dict[str, Any]:
    """``item`` in its full form: of a type, under an id (its own if it has one), a message's text as a part."""
    kind, id, content = item.get("type") or "message", item.get("id"), item.get("content")
    if not isinstance(id, str) or not id:
        id = new_id(_PREFIXES.get(kind, "item_"))
    full: dict[str, Any] = {**item, "type": kind, "id": id}
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        full["content"] = [{"type": part, "text": content}]
    for parts in ("content", "output"):
        if isinstance(full.get(parts), list):
            full[parts] = [_with_defaults(part, _PART_DEFAULTS) for part in full[parts]]
    whole: dict[str, Any] = _with_defaults(full, _DEFAULTS)
    return whole


def _with_defaults(said: Any, defaults: Mapping[str, Wire]) -> Any:
    """``said``, with what a thing of its type has and it does not say."""
    kind = said.get("type") if isinstance(said, Mapping) else None
    missing = defaults.get(kind, {}) if isinstance(kind, str) else {}
    if not missing:
        return said
    return {**said, **{name: value for name, value in missing.items() if said.get(name) is None}}


class _Terminal(Struct):
    response: Raw


def response_of(end: bytes) -> bytes:
    """The response object at the end of an answer: its body, or the last event of its stream."""
    if end.startswith(b"{"):
        return end
    event = end.rstrip(b"\n").rsplit(b"\n\n", 1)[-1]
    return bytes(msgspec.json.decode(event[event.index(b"data: ") + 6 :], type=_Terminal).response)
