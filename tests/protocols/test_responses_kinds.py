"""Golden wire files of every kind of item: as it is sent, what the model is told of it, as it is stored; and of every
kind of call as it is answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, get_args

import pytest
from openai.types.responses import ResponseInputItem

from protocols import shapes
from protocols.grammar_responses import Grammar
from protocols.item_kinds import FOUND, KINDS, Json
from protocols.judge_responses import wrong_stored
from protocols.test_responses_encode import body, encoded, request, stream
from singletree.conversation import Request, ToolCall, ToolResult, Turn
from singletree.protocols import responses
from singletree.protocols.responses.state import with_id
from singletree.request_options import StoredItems

CUSTOM: Json = {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}
AGENTS: Json = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{**FOUND, "name": "spawn"}, {**CUSTOM, "name": "tell"}],
}
TOOLS: list[Json] = [
    {**FOUND, "name": "f"},
    CUSTOM,
    AGENTS,
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "tool_search", "execution": "client", "description": None, "parameters": None},
]
REFERRED: Json = {
    "type": "message",
    "id": "msg_known",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Said before.", "annotations": [], "logprobs": []}],
}
# Told of by whoever makes them.
ELSEWHERE = {"compaction", "compaction_trigger"}
each_kind = pytest.mark.parametrize("kind", KINDS)


def sent(kind: str, *items: Json) -> Request:
    """A request with an item of a kind, or ``items``, between a question and a request to go on."""
    between = items or (KINDS[kind],)
    messages = [{"role": "user", "content": "Hello."}, *between, {"role": "user", "content": "Go on."}]
    asked = {"model": "m", "input": messages, "tools": TOOLS}
    return responses.decode(
        json.dumps(asked).encode(), known=StoredItems(items={"msg_known": json.dumps(REFERRED).encode()})
    )


def turns_between(request: Request) -> list[Turn]:
    return list(request.conversation.turns[1:-1])


def stored(request: Request) -> Json:
    return with_id(request.options.stored_state.input_items[1], shapes.numbered())


def plain(value: Any) -> Any:
    """A turn or a part, without what is kept for the wire and what is not said."""
    if isinstance(value, tuple):
        return [plain(inner) for inner in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    given = {f.name: getattr(value, f.name) for f in fields(value) if f.compare}
    return {"is": type(value).__name__} | {k: plain(v) for k, v in given.items() if v not in ("", (), False)}


@each_kind
def test_golden(kind: str, golden: Callable[[str, bytes], None]) -> None:  # C33
    request = sent(kind)
    shown = {
        "sent": KINDS[kind],
        "turns": [plain(turn) for turn in turns_between(request)],
        "stored": stored(request),
        "warnings": list(request.warnings),
    }
    golden(f"responses/items/{kind}.json", json.dumps(shown, indent=1, ensure_ascii=False).encode() + b"\n")


def test_every_kind_that_the_sdk_knows_is_here() -> None:
    known = get_args(get_args(ResponseInputItem)[0])
    kinds = {kind for model in known for kind in _strings(model.model_fields["type"].annotation)}
    assert kinds - {item.get("type", "message") for item in KINDS.values()} == ELSEWHERE


def _strings(annotation: Any) -> Iterator[str]:
    for arg in get_args(annotation):
        if isinstance(arg, str):
            yield arg
        else:
            yield from _strings(arg)


@each_kind
def test_it_is_stored_with_all_it_wrote_as_the_api_shows_it(kind: str) -> None:  # C33
    item, full = KINDS[kind], stored(sent(kind))
    if kind.startswith("item_reference"):
        item = REFERRED
    if kind != "unheard_of":
        wrong = wrong_stored(full)
        assert not wrong, "\n".join(wrong)
    for name, value in item.items():
        assert _holds(full[name], value)


def _holds(full: Any, written: Any) -> bool:
    """Whether all that is ``said`` stands in ``full``."""
    if isinstance(written, dict):
        return all(_holds(full[name], value) for name, value in written.items())
    if isinstance(written, list):
        return len(full) == len(written) and all(map(_holds, full, written))
    return bool(full == written or (isinstance(full, list) and full[0]["text"] == written))


@each_kind
def test_what_was_stored_is_the_same_for_the_model(kind: str) -> None:  # C33
    assert turns_between(sent(kind, stored(sent(kind)))) == turns_between(sent(kind))


@each_kind
def test_an_item_of_the_models_parts_nothing(kind: str) -> None:  # C5 C33
    """Whatever stands between a call and its result, both are told."""
    call = {"type": "function_call", "call_id": "own", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "own", "output": "o"}
    request = sent(kind, call, KINDS[kind], result)
    parts = [part for turn in request.conversation.turns for part in turn.parts]
    assert [p.id for p in parts if isinstance(p, ToolCall) and p.id == "own"] == ["own"]
    assert [p.call_id for p in parts if isinstance(p, ToolResult) and p.call_id == "own"] == ["own"]


CALLS: dict[str, tuple[list[Json], str, str]] = {
    "function": (TOOLS, "f", '{"b": 1.0, "a": "é"}'),
    "namespace": (TOOLS, "agents__spawn", "{}"),
    "namespace_custom": (TOOLS, "agents__tell", '{"input": "a\\nb"}'),
    "custom": (TOOLS, "apply_patch", '{"input": "*** Begin Patch\\n\\u00e9"}'),
    "local_shell": (TOOLS, "local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}'),
    "shell": (TOOLS, "shell", '{"commands": ["ls"], "max_output_length": 9}'),
    "apply_patch": (
        [{"type": "apply_patch"}],
        "apply_patch",
        '{"type": "update_file", "path": "a", "diff": "@@"}',
    ),
    "tool_search": (TOOLS, "tool_search", '{"query": "agents", "limit": 8}'),
    "undeclared": (TOOLS, "nobody", "{}"),
}


@pytest.mark.parametrize("name", CALLS)
def test_golden_calls(name: str, golden: Callable[[str, bytes], None]) -> None:  # C25 C26 C32
    tools, called, arguments = CALLS[name]
    of = request(tools=tools)
    events = shapes.call(0, called, arguments[:9], arguments[9:])
    shape = shapes.Shape(name, events, shapes.finished())
    golden(f"responses/calls/{name}.sse", stream(events, of=of))
    golden(f"responses/calls/{name}.json", encoded(shape, of))
    seen = Grammar(stream(events, of=of))
    assert seen.response == body(shape, of)
    again = request(tools=tools, input=[*seen.items, {"role": "user", "content": "Go on."}])
    [call] = again.conversation.turns[0].tool_calls
    assert (call.name, call.id, json.loads(call.arguments)) == (
        called,
        shapes.call_id(0),
        json.loads(arguments),
    )
