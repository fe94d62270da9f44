"""State of a Responses conversation: what a request refers to by id, and the summary that stands for the rest.

https://platform.openai.com/docs/guides/conversation-state.

In a compaction, a summary replaces what the model did (https://developers.openai.com/api/docs/guides/compaction). A
``compaction_trigger`` at the end of the input (as Codex sends it), a request to ``/v1/responses/compact`` or a
``compact_threshold`` starts it. The model writes the summary after the prompt that it already had, so the engine does
not read that prompt again. The client carries the summary in the ``encrypted_content`` of a ``compaction`` item. Where
such an item is in an input, the model sees the messages of users, developers and the system before it, then the
summary, but not its own turns or the results of its tools.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from singletree.conversation import Reasoning, Request, Text, ToolChoice, Turn
from singletree.protocols import wire
from singletree.protocols.limits import malformed
from singletree.protocols.responses.native_tools import NATIVE, WireObject

REASONING_FIELD = "singletree_reasoning"
"""The field of a stored output item that holds what the client did not get. It is never sent to a client."""


class StoredReasoning(Struct, omit_defaults=True):
    """The part of a stored output item that is not sent: its reasoning, and a capsule of the turn's tokens."""

    text: str = ""
    encrypted_content: str = ""


def conversation_id(conversation: str | Mapping[str, Any] | None) -> str | None:
    """Return the id in either form of the field; raise InvalidRequest for an object without one."""
    if isinstance(conversation, Mapping):
        conversation = conversation.get("id")
        if not isinstance(conversation, str):
            raise malformed("conversation.id", "Field required, a string")
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
    _FORMS.keep(wire.KnownPrefix(items, made, size), known)
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
_FORMS: wire.KnownPrefixes[InputForms] = wire.KnownPrefixes(32 * 2**20)


def _with_defaults(item: Any, defaults: Mapping[str, WireObject]) -> Any:
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


TRIGGER = "compaction_trigger"
ITEMS = ("compaction", "compaction_summary")
"""The type of the item, and its older name, which Codex still reads."""

OpenSummary = Callable[[str, str], str | None]
"""``encrypted_content`` and its path in the request -> the summary; None if it cannot be decrypted."""

_QUESTION = (
    "The conversation is about to be shortened: your turns and the results of your tools will be removed, and you will "
    "go on from your summary alone. Write that summary now, as text, and call no tool. Say what was asked for and what "
    "the user wants to be kept to; what was done, with the files, commands and results that matter; what was decided "
    "and why; what failed; and what is left to do, the next step first."
)
_INTRODUCTION = (
    "The conversation was shortened here: your earlier turns and the results of your tools were removed. This is the "
    "summary that you wrote of them. Go on from it; do nothing twice.\n\n"
)
_KEPT_ROLES = ("system", "developer", "user")


def no_summary(sealed: str, at: str) -> str | None:
    """Return None: an ``OpenSummary`` without a key."""
    return None


def no_summaries(model: str) -> OpenSummary:
    """Return ``no_summary``, for any model."""
    return no_summary


def is_triggered(items: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the input ends with a compaction trigger."""
    return bool(items) and items[-1].get("type") == TRIGGER


def summary_request(request: Request) -> Request:
    """Return a request for the summary of the conversation of ``request``: the same prompt, followed by a question.

    The question is a system turn: after a user turn, templates leave out the reasoning of the tool loop before it.
    """
    turns = (*request.conversation.turns, Turn("system", (Text(_QUESTION),)))
    return replace(
        request,
        conversation=replace(request.conversation, turns=turns),
        tool_choice=ToolChoice("none"),
        response_format=None,
        options=replace(request.options, compacts=True),
    )


def shorten(turns: Iterable[Turn], summary: str, item: Mapping[str, Any]) -> list[Turn]:
    """Return ``turns`` with ``summary`` in place of what the model did; ``item`` is the item that holds it."""
    kept = [
        turn for turn in turns if turn.role in _KEPT_ROLES and (turn.extra or {}).get("type") not in ITEMS
    ]
    return [*kept, Turn("user", (Text(_INTRODUCTION + summary),), item)]


def summary_of(turn: Turn) -> str:
    """Return the text of ``turn``, or its reasoning if there is no text, which is better than nothing."""
    reasoning = "\n\n".join(part.text for part in turn.parts if isinstance(part, Reasoning))
    return turn.text.strip() or reasoning.strip()
