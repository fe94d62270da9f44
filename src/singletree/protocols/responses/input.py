"""Decode the input items of a Responses request into turns.

https://platform.openai.com/docs/api-reference/responses/create#responses-create-input. Consecutive output of the
model (reasoning, messages, calls) is one assistant turn; the outputs that answer it are one tool turn.

``extra`` is the JSON object that a value was decoded from: the item, for user, system and developer turns and for
the parts of assistant and tool turns; the content part, for the parts of a message or an output. Items that the model
does not see (searches that ran elsewhere, references) are only in ``StoredStateOptions.input_items``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from singletree.conversation import (
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
    carried_capsules,
)
from singletree.errors import InvalidRequest
from singletree.protocols import wire
from singletree.protocols.content import argument_text, template_json
from singletree.protocols.limits import malformed, quote_value
from singletree.protocols.openai import custom_tools
from singletree.protocols.responses.native_tools import (
    BY_CALL,
    BY_OUTPUT,
    NATIVE,
    VisiblePart,
    WireObject,
    arguments_of,
    decode_part,
)
from singletree.protocols.responses.state import (
    ITEMS,
    REASONING_FIELD,
    TRIGGER,
    OpenSummary,
    StoredReasoning,
    conversation_id,
    is_reference,
    no_summary,
    shorten,
)
from singletree.protocols.responses.tools import Toolbox, joined_name
from singletree.request_options import References, StoredItems


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    kept: StoredReasoning | None = field(default=None, name=REASONING_FIELD)


class _TextPart(Struct):
    text: str = ""


class _Reasoning(Struct):
    content: list[_TextPart] | None = None
    summary: list[_TextPart] | None = None
    kept: StoredReasoning | None = field(default=None, name=REASONING_FIELD)


class _Call(Struct):
    name: Annotated[str, Meta(min_length=1)]
    arguments: Any = None
    input: str = ""
    namespace: str | None = None


class _Ids(Struct):
    """The fields that calls and outputs share. Local shell outputs have the id of their call in ``id``."""

    call_id: str | None = None
    id: str | None = None
    status: str | None = None
    kept: StoredReasoning | None = field(default=None, name=REASONING_FIELD)


class _Compaction(Struct):
    encrypted_content: str


class _AdditionalTools(Struct):
    tools: list[dict[str, Any]] = []


class _Update(Struct):
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None


class DecodedItem(NamedTuple):
    """An item, and what it adds to the conversation where that depends on nothing else than the names of tools.

    Attributes:
        turn: for an output item, a part of a turn: those around it may belong to the same turn.
        called: name and namespace of the called tool, if the item is a call; the turn has its name without a toolbox.
        is_reference: whether the item refers to another one, which takes its place.
    """

    item: WireObject
    turn: Turn | None = None
    called: tuple[str, str] | None = None
    is_reference: bool = False


class InputItems(NamedTuple):
    """The decoded items of one request, and the same as sent."""

    decoded: Sequence[DecodedItem] = ()
    sent: Sequence[msgspec.Raw] = ()

    def as_sent(self) -> list[WireObject]:
        return list(map(_item_of, self.decoded))

    def size(self, number: int) -> int:
        """Return the size of the item ``number``, in bytes."""
        return memoryview(self.sent[number]).nbytes


def decode_sent(sent: Sequence[msgspec.Raw], at: str = "input") -> InputItems:
    """Decode the items of a request; most are known from the request before. Raises InvalidRequest."""
    return InputItems(wire.decode_each(sent, dict[str, Any], _decode_alone, at), sent)


def decode_text(text: str) -> InputItems:
    """Return the item that a request with a text as its input has: the message of a user."""
    item = DecodedItem({"type": "message", "role": "user", "content": text})
    return InputItems([item], [msgspec.Raw(text.encode())])


def _decode_alone(item: dict[str, Any], at: str) -> DecodedItem:
    kind = _type_of(item)
    if is_reference(item) or not isinstance(kind, str) or kind not in _INDEPENDENT:
        return DecodedItem(item, is_reference=is_reference(item))
    tools = Toolbox()
    reader = _Reader(tools, no_summary)
    reader.read(item, at)
    turns = reader.turns()
    called = (item["name"], item.get("namespace") or "") if kind in _CALLS else None
    # A warning names the path of the item, so it has to be made anew for each request.
    return DecodedItem(item, turns[0] if turns and not tools.warnings else None, called)


def references_of(
    previous_response: str | None, conversation: str | Mapping[str, Any] | None, items: InputItems
) -> References:
    """Return the ids that a request refers to; raise InvalidRequest if it continues a response and a conversation."""
    continued = conversation_id(conversation)
    if continued and previous_response:
        raise InvalidRequest(
            "previous_response_id and conversation are both set; send one of them",
            param="previous_response_id",
        )
    ids = (each.item.get("id") for each in filter(_is_reference, items.decoded))
    return References(
        previous_response or None, continued, tuple(id for id in ids if id and isinstance(id, str))
    )


def resolve_references(items: InputItems, known: StoredItems) -> InputItems:
    """Return ``items`` with each reference replaced by its item; raise InvalidRequest for one that is not known."""
    if not any(map(_is_reference, items.decoded)):
        return items
    sent = [*items.sent]
    for i, each in enumerate(items.decoded):
        if each.is_reference:
            id = each.item.get("id")
            found = known.items.get(id) if isinstance(id, str) else None
            if found is None:
                raise malformed(f"input.{i}.id", f"no item {id!r} is stored here; send the item itself")
            sent[i] = msgspec.Raw(found)
    return decode_sent(sent)


def _type_of(item: WireObject) -> object:
    """Return the type of an item, which may be left out for messages and references; a string if it is valid."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference" if "id" in item else None
    return kind


def decode_items(
    items: InputItems, tools: Toolbox, history: InputItems, open_summary: OpenSummary = no_summary
) -> tuple[tuple[Turn, ...], Sequence[str], Mapping[str, dict[str, Any]]]:
    """Decode ``history``, then ``items``: return the turns, the paths of unresolved references to stored items, and
    what items say in the place of the fields ``reasoning`` and ``text``.

    ``tools`` collects the tools that items define, and the warnings. Raises InvalidRequest.
    """
    reader, earlier, together = _Reader(tools, open_summary), len(history.decoded), items
    if earlier:
        together = InputItems([*history.decoded, *items.decoded], [*history.sent, *items.sent])
    for i in range(reader.read_known(together), len(together.decoded)):
        at = f"history.{i}" if i < earlier else f"input.{i - earlier}"
        if not reader.take(together, i):
            reader.read(together.decoded[i].item, at)
    return reader.turns(), reader.references, reader.updated


class _Progress(NamedTuple):
    """What was read of a conversation up to one of its items: the turns, the open one, and the names of calls."""

    turns: Sequence[Turn]
    role: Role
    parts: Sequence[Part]
    size: int
    called: frozenset[tuple[str, str]]


class _Reader:
    def __init__(self, tools: Toolbox, open_summary: OpenSummary) -> None:
        self._open_summary = open_summary
        self.references: list[str] = []
        self.updated: dict[str, dict[str, Any]] = {}
        self._tools = tools
        self._turns: list[Turn] = []
        self._role: Role = "user"
        self._parts: list[Part] = []
        self._size = self._taken = 0
        self._has_new_parts = False
        self._warned: set[str] = set()
        self._called: set[tuple[str, str]] = set()

    def turns(self) -> tuple[Turn, ...]:
        self._end_turn()
        return tuple(self._turns)

    def read_known(self, items: InputItems) -> int:
        """Read the items up to the first that depends on what came before, and return how many these are.

        Those that an earlier request had are not read again.
        """
        known = _PROGRESS.longest(items.decoded)
        if known is not None and not all(map(self._is_plain, known.made.called)):
            known = None
        start = number = size = 0
        if known is not None:
            turns, self._role, parts, self._size, called = known.made
            self._turns, self._parts, self._called = [*turns], [*parts], {*called}
            start = number = len(known.items)
            size = known.size
        while number < len(items.decoded) and self.take(items, number):
            number += 1
        if number > start:
            size += _TURN_FACTOR * self._taken
            made = _Progress(
                self._turns.copy(), self._role, self._parts.copy(), self._size, frozenset(self._called)
            )
            _PROGRESS.keep(wire.KnownPrefix(items.decoded[:number], made, size), known)
        return number

    def take(self, items: InputItems, number: int) -> bool:
        """Take over an item that was decoded alone; return False if it has to be read for this request."""
        _, turn, called, _ = items.decoded[number]
        if turn is None or (called is not None and not self._is_plain(called)):
            return False
        if called is not None:
            self._called.add(called)
        size = items.size(number)
        self._taken += size
        if turn.role in ("assistant", "tool"):
            self._append(turn.role, *turn.parts)
            self._size += size
        else:
            self._end_turn()
            self._turns.append(turn)
        return True

    def _is_plain(self, called: tuple[str, str]) -> bool:
        """Return whether the model's name for a called tool is the one that it has without a toolbox."""
        return self._tools.has_plain_names or self._tools.name(*called) == joined_name(*called)

    def read(self, item: WireObject, at: str) -> None:
        kind = _type_of(item)
        if not isinstance(kind, str):
            raise malformed(f"{at}.type", "Field required, a string")
        if read := _READERS.get(kind):
            read(self, item, at)
        else:
            self._warn(at, kind)
        self._has_new_parts = bool(self._parts)

    def _append(self, role: Role, *parts: Part) -> None:
        if role != self._role:
            self._end_turn()
            self._role = role
        self._parts += parts

    def _end_turn(self) -> None:
        if self._parts:
            parts = tuple(self._parts)
            is_new, role = self._has_new_parts, self._role
            self._turns.append(Turn(role, parts) if is_new else _known_turn(role, parts, self._size))
            self._parts = []
        self._size, self._has_new_parts = 0, False

    def _message(self, item: WireObject, at: str) -> None:
        message = wire.convert(item, _Message, at)
        parts = tuple(self._visible(message.content, f"{at}.content"))
        if message.role == "assistant":
            self._append("assistant", *(replace(part, extra=item) for part in parts), *_rest(message.kept))
        else:
            self._end_turn()
            self._turns.append(Turn(message.role, parts, item))

    def _reasoning(self, item: WireObject, at: str) -> None:
        """Decode the reasoning itself, if the client sent it or the server stored it; else the summary.

        An item without text is reasoning too: its turn is found by its id, its ``encrypted_content``, or other parts.
        """
        fields = wire.convert(item, _Reasoning, at)
        kept = fields.kept or StoredReasoning()
        text = "".join(s.text for s in fields.content or ()) or kept.text
        text = text or "\n\n".join(s.text for s in fields.summary or ())
        if kept.encrypted_content and not item.get("encrypted_content"):
            item = {**item, "encrypted_content": kept.encrypted_content}
        id, sealed = item.get("id"), carried_capsules("encrypted_content", item.get("encrypted_content"))
        read = Reasoning(text, item, id=id if isinstance(id, str) else "", capsules=sealed)
        self._append("assistant", read)

    def _function_call(self, item: WireObject, at: str) -> None:
        call = wire.convert(item, _Call, at)
        self._call(item, at, self._tools.name(call.name, call.namespace or ""), *_arguments(call.arguments))

    def _custom_call(self, item: WireObject, at: str) -> None:
        call = wire.convert(item, _Call, at)
        arguments = custom_tools.to_arguments(call.input)
        self._call(item, at, self._tools.name(call.name, call.namespace or ""), arguments, verbatim=False)

    def _native_call(self, item: WireObject, at: str) -> None:
        kind = BY_CALL[item["type"]]
        self._call(item, at, self._tools.native(kind), *arguments_of(NATIVE[kind], item))

    def _call(self, item: WireObject, at: str, name: str, arguments: str, verbatim: bool = True) -> None:
        ids = wire.convert(item, _Ids, at)
        call_id, complete = ids.call_id or ids.id or "", ids.status != "incomplete"
        made = ToolCall(name, arguments, call_id, complete, item, verbatim=verbatim)
        self._append("assistant", made, *_rest(ids.kept))

    def _output(self, item: WireObject, at: str) -> None:
        ids, output = wire.convert(item, _Ids, at), item.get("output")
        failed = ids.status == "failed"
        if isinstance(output, Mapping) and isinstance(output.get("content"), str):
            output, failed = output["content"], failed or output.get("success") is False
        if not isinstance(output, str | list) or (item["type"] in BY_OUTPUT and isinstance(output, list)):
            output = "" if output is None else msgspec.json.encode(output).decode()
        parts = tuple(self._visible(output, f"{at}.output"))
        self._append("tool", ToolResult(ids.call_id or ids.id or "", parts, failed, item))

    def _tool_search_output(self, item: WireObject, at: str) -> None:
        ids, output = wire.convert(item, _Ids, at), wire.convert(item, _AdditionalTools, at)
        names = self._tools.add(output.tools, f"{at}.tools", found=True)
        found = tuple(ToolReference(name) for name in names)
        self._append("tool", ToolResult(ids.call_id or ids.id or "", found, extra=item))

    def _compaction(self, item: WireObject, at: str) -> None:
        sealed, at = wire.convert(item, _Compaction, at).encrypted_content, f"{at}.encrypted_content"
        summary = self._open_summary(sealed, at)
        if summary is None:
            self._tools.warnings.append(
                f"{at} cannot be decrypted here, so the model does not see the summary"
            )
            return
        self._end_turn()
        self._turns = shorten(self._turns, summary, item)

    def _additional_tools(self, item: WireObject, at: str) -> None:
        """Put the first tools at the head of the prompt, and show later ones here: what is before them stays cached."""
        later = bool((self._turns or self._parts) and self._tools.tools)
        names = self._tools.add(wire.convert(item, _AdditionalTools, at).tools, f"{at}.tools", found=later)
        if shown := tuple(ToolReference(name) for name in names if self._tools.is_deferred(name)):
            self._end_turn()
            self._turns.append(Turn("developer", shown, item))

    def _configuration(self, item: WireObject, at: str) -> None:
        for name, value in msgspec.structs.asdict(wire.convert(item, _Update, at)).items():
            self.updated[name] = self.updated.get(name, {}) | (value or {})

    def _visible(self, content: str | list[Any] | None, at: str) -> Iterator[VisiblePart]:
        if isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        wire.spend(wire.BLOCK_COST * len(content or ()))
        for i, given in enumerate(content or ()):
            part = decode_part(given, f"{at}.{i}")
            if isinstance(part, str):
                self._warn(f"{at}.{i}", part)
            elif part != Text(""):
                yield part

    def _warn(self, at: str, kind: str) -> None:
        """Warn once for each type: a long history may hold hundreds of the same."""
        if kind not in self._warned:
            self._warned.add(kind)
            shown = quote_value(kind)
            self._tools.warnings.append(f"{at}: type {shown} is kept but not shown to the model")


def _known_turn(role: Role, parts: tuple[Part, ...], size: int) -> Turn:
    """Return the turn of ``parts``: the same object as for the same parts before, which later stages recognise."""
    taken = _PART_BYTES * len(parts) + _TURN_FACTOR * size
    return wire.known_value((Turn, role, *map(id, parts)), lambda: (Turn(role, parts), taken))


_item_of, _is_reference = attrgetter("item"), attrgetter("is_reference")
_PROGRESS: wire.KnownPrefixes[_Progress] = wire.KnownPrefixes(32 * 2**20)
_PART_BYTES = 100
_TURN_FACTOR = 3
"""Estimated bytes in memory for each byte of the items of a turn, which stay in memory with it."""


_CALLS = ("function_call", "custom_tool_call")

_READERS: dict[str, Callable[[_Reader, WireObject, str], None]] = {
    "message": _Reader._message,
    "reasoning": _Reader._reasoning,
    _CALLS[0]: _Reader._function_call,
    _CALLS[1]: _Reader._custom_call,
    **dict.fromkeys(BY_CALL, _Reader._native_call),
    "function_call_output": _Reader._output,
    "custom_tool_call_output": _Reader._output,
    **dict.fromkeys(BY_OUTPUT, _Reader._output),
    "tool_search_output": _Reader._tool_search_output,
    "additional_tools": _Reader._additional_tools,
    "configuration_update": _Reader._configuration,
    "item_reference": lambda reader, item, at: reader.references.append(at),
    **dict.fromkeys(ITEMS, _Reader._compaction),
    TRIGGER: lambda reader, item, at: None,  # ``resolve_request`` handles it.
}

_ALONE = (_Reader._message, _Reader._reasoning, _Reader._output, _Reader._function_call, _Reader._custom_call)
_INDEPENDENT = frozenset(kind for kind, read in _READERS.items() if read in _ALONE)
"""The types of items that are decoded without what came before, but for the names of tools."""


def _rest(kept: StoredReasoning | None) -> tuple[Reasoning, ...]:
    """Return the reasoning without text that carries the capsule of the end of a stored turn; empty without one."""
    sealed = "" if kept is None else kept.encrypted_content
    return (Reasoning("", capsules=carried_capsules("encrypted_content", sealed)),) if sealed else ()


def _arguments(value: Any) -> tuple[str, bool]:
    # As JSON text, and whether that is verbatim. An object sent instead of a string is written as templates write JSON.
    if isinstance(value, str):
        return argument_text(value)
    text = template_json(msgspec.json.encode(value))
    return "{}" if text == "null" else text, False
