"""State that a Responses request refers to by id: earlier responses, conversations and items.

https://platform.openai.com/docs/guides/conversation-state. ``References`` holds the ids to look up.
``StoredItems`` holds the items that were found; ``responses.decode`` takes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from singletree.errors import InvalidRequest
from singletree.protocols import wire
from singletree.protocols.responses.known_prefixes import KnownPrefix, KnownPrefixes
from singletree.protocols.responses.native_tools import NATIVE, WireObject

REASONING_FIELD = "singletree_reasoning"
"""The field of a stored reasoning item that holds what the client did not get. It is never sent to a client."""


class StoredReasoning(Struct, omit_defaults=True):
    """The part of a stored reasoning item that is not sent: the reasoning itself, and its capsule."""

    text: str = ""
    encrypted_content: str = ""


@dataclass(frozen=True, slots=True)
class References:
    """The ids that a request refers to; all are empty for a self-contained request."""

    previous_response: str | None = None
    conversation: str | None = None
    items: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.previous_response or self.conversation or self.items)


@dataclass(frozen=True, slots=True)
class StoredItems:
    """The items that were found, as JSON: the history before the request's own items, and referenced items by id."""

    history: Sequence[bytes] = ()
    items: Mapping[str, bytes] = field(default_factory=dict)


def conversation_id(conversation: str | Mapping[str, Any] | None) -> str | None:
    """Return the id in either form of the field; raise InvalidRequest for an object without one."""
    if isinstance(conversation, Mapping):
        conversation = conversation.get("id")
        if not isinstance(conversation, str):
            raise InvalidRequest("conversation.id: Field required, a string", param="conversation.id")
    return conversation or None


def is_reference(item: WireObject) -> bool:
    """Return whether ``item`` refers to another by ``id``; the API allows such an item to have no type."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.get("role") is None)


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
# Fields that an item of the API has and that a client may leave out.
_STATUS = {"status": "completed"}
_DEFAULTS: Mapping[str, WireObject] = {
    **dict.fromkeys(("message", "function_call", "custom_tool_call"), _STATUS),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "computer_call_output"), _STATUS),
    **{native.item: {**_STATUS, **native.item_fields} for native in NATIVE.values()},
    **{native.output: {**_STATUS, **native.item_fields} for native in NATIVE.values()},
}
_PART_DEFAULTS: Mapping[str, WireObject] = {
    "output_text": {"annotations": [], "logprobs": []},
    "input_image": {"detail": "auto"},
}


def with_id(item: WireObject, new_id: Callable[[str], str]) -> dict[str, Any]:
    """Return ``item`` in its full form: with a type, an id (its own if it has one), and a message's text as a part."""
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


class ItemForm(NamedTuple):
    """An input item in its full form (``with_id``), as JSON before and behind its id.

    Attributes:
        item: the item as sent.
        id: its own id; empty if it has none. With an id of its own, ``head`` is all of the JSON.
        prefix: the start of an id for it.
        digest: of ``head`` and ``tail``; items with the same digest are the same but for ids that the server makes.
    """

    item: WireObject
    id: str
    prefix: str
    head: bytes
    tail: bytes
    digest: bytes

    def encode(self, new_id: Callable[[str], str]) -> tuple[str, bytes]:
        """Return the id of the item, made by ``new_id`` if it has none, and the item as JSON."""
        if self.id:
            return self.id, self.head
        id = new_id(self.prefix)
        return id, self.head + msgspec.json.encode(id) + self.tail


def item_form(item: WireObject) -> ItemForm:
    """Return the full form of ``item``. It is encoded once for all requests that contain the item."""
    return wire.known_value((ItemForm, id(item)), partial(_make_form, item))


def _make_form(item: WireObject) -> tuple[ItemForm, int]:
    prefixes: list[str] = []

    def place(prefix: str) -> str:
        prefixes.append(prefix)
        return _PLACE

    full = with_id(item, place)
    encoded = msgspec.json.encode(full)
    if not prefixes:
        form = ItemForm(item, full["id"], "", encoded, b"", item_digest(encoded))
    else:
        head, _, tail = encoded.partition(b'"%b"' % _PLACE.encode())
        form = ItemForm(item, "", prefixes[0], head, tail, item_digest(head, tail))
    return form, _form_size(form)


class InputForms(NamedTuple):
    """The items of an input in their full form, and for each a digest of it and all before it."""

    forms: Sequence[ItemForm] = ()
    digests: Sequence[bytes] = ()


def input_forms(items: Sequence[WireObject]) -> InputForms:
    """Return the full form of ``items``. Nothing is made again for those at the beginning that an input had before."""
    known = _FORMS.longest(items)
    if known is not None and len(known.items) == len(items):
        return known.made
    before, size = (known.made, known.size) if known is not None else (InputForms(), 0)
    made = joined_forms(before, [item_form(item) for item in items[len(before.forms) :]])
    size += sum(_form_size(form) for form in made.forms[len(before.forms) :])
    _FORMS.keep(KnownPrefix(items, made, size), known)
    return made


def joined_forms(before: InputForms, added: Sequence[ItemForm]) -> InputForms:
    """Return the forms of an input that begins with ``before``."""
    digests = [*before.digests]
    digest = digests[-1] if digests else b""
    for form in added:
        digest = blake2b(digest + form.digest, digest_size=16).digest()
        digests.append(digest)
    return InputForms([*before.forms, *added], digests)


def _form_size(form: ItemForm) -> int:
    return _FORM_FACTOR * (len(form.head) + len(form.tail))


def item_digest(head: bytes, tail: bytes = b"") -> bytes:
    """Return the digest of an item as JSON, before and behind an id that the server makes."""
    digest = blake2b(b"%d:" % len(head), digest_size=16)
    digest.update(head)
    digest.update(tail)
    return digest.digest()


_PLACE = secrets.token_hex(16)
"""Stands for an id in encoded items. No client knows it, so no item contains it."""
_FORM_FACTOR = 4
"""Estimated bytes in memory for each byte of an encoded item: the JSON, and the item itself."""
_FORMS: KnownPrefixes[InputForms] = KnownPrefixes(32 * 2**20)


def _with_defaults(item: Any, defaults: Mapping[str, WireObject]) -> Any:
    """Return ``item`` with the default fields of its type that it does not set."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    missing = defaults.get(kind, {}) if isinstance(kind, str) else {}
    if not missing:
        return item
    return {**item, **{name: value for name, value in missing.items() if item.get(name) is None}}


def client_item(item: bytes) -> bytes:
    """Return ``item``, a stored item as JSON, without the fields that only the server keeps."""
    if REASONING_FIELD.encode() not in item:
        return item
    fields: dict[str, Raw] = msgspec.json.decode(item, type=dict[str, Raw])
    fields.pop(REASONING_FIELD, None)
    return msgspec.json.encode(fields)
