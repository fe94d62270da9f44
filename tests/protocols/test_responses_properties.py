"""Responses, whatever comes: bodies, items and events that nobody thought of."""

from __future__ import annotations

import copy
import json
from itertools import chain
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import event_stream, shapes
from protocols.grammar_responses import Grammar
from protocols.judge_responses import wrong_response
from protocols.test_responses_calls import TOOLS
from protocols.test_responses_encode import COMPLETED, CREATED, ID, Json, encoder, request
from singletree.conversation import Turn
from singletree.errors import EngineFailed, InvalidRequest
from singletree.events import (
    ArgumentsDelta,
    Event,
    Finished,
    FinishReason,
    Markup,
    ReasoningDelta,
    TextDelta,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    fold,
)
from singletree.protocols import responses
from singletree.protocols.openai.answers import encode_error

TEXT = st.text(max_size=8)
NAMES = st.sampled_from(["f", "apply_patch", "multi_agent_v1__spawn", "local_shell"])
ARGUMENTS = st.sampled_from(
    ["{}", '{"input": "a\\nb"}', '{"command": ["ls", "-l"]}', '{"command": 1}', '{"a": [1, {"b": null}]}', ""]
)
REASONS: st.SearchStrategy[FinishReason] = st.sampled_from(
    ["stop", "stop_sequence", "length", "context_overflow", "refusal", "cancelled", "error"]
)


SPANS: list[type[TextDelta] | type[ReasoningDelta]] = [TextDelta, ReasoningDelta]


@st.composite
def spans(draw: st.DrawFn) -> list[Event]:
    kind = draw(st.sampled_from(SPANS))
    pieces: list[Event] = [kind(piece, piece) for piece in draw(st.lists(TEXT, max_size=3))]
    return pieces if draw(st.booleans()) else [Markup("<x>"), *pieces, Markup("</x>")]


END: list[Event] = [ToolCallEnd(0), Markup("</x>")]
BREAK: list[Event] = [Markup("</x>"), ToolCallBroken(0, "?")]
ENDINGS: list[list[Event]] = [END, END, [], BREAK]


@st.composite
def calls(draw: st.DrawFn) -> list[Event]:
    name, arguments, at = draw(NAMES), draw(ARGUMENTS), draw(st.integers(0, 20))
    pieces = [ArgumentsDelta(0, piece, piece) for piece in (arguments[:at], arguments[at:])]
    return [ToolCallStart(0, "", name, "<x>"), *pieces, *draw(st.sampled_from(ENDINGS))]


def numbered(events: list[Event]) -> list[Event]:
    """The calls told apart by index and id, as a parser and a pipeline do."""
    index = -1
    pieces: list[Event] = []
    for event in copy.deepcopy(events):
        if isinstance(event, ToolCallStart):
            index += 1
            event.id = f"call_{index}"
        if isinstance(event, ToolCallStart | ArgumentsDelta | ToolCallEnd | ToolCallBroken):
            event.index = index
        pieces.append(event)
    return pieces


TURNS = st.lists(st.one_of(spans(), calls()), max_size=6).map(lambda parts: numbered([*chain(*parts)]))
ANYTHING = st.lists(
    st.one_of(
        st.builds(TextDelta, TEXT, TEXT),
        st.builds(ReasoningDelta, TEXT, TEXT),
        st.builds(Markup, TEXT),
        st.builds(ToolCallStart, st.integers(0, 3), TEXT, NAMES, TEXT),
        st.builds(ArgumentsDelta, st.integers(0, 3), TEXT, TEXT),
        st.builds(ToolCallEnd, st.integers(0, 3)),
        st.builds(ToolCallBroken, st.integers(0, 3), TEXT),
    ),
    max_size=12,
)
OF = request(tools=TOOLS, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])


def seal(ordinal: int) -> str:
    return f"sealed {ordinal}"


def body(turn: Turn, finished: Finished) -> Json:
    more: Any = {"id": ID, "created": CREATED, "clock": lambda: COMPLETED}
    answer: Json = json.loads(event_stream.body(responses, OF, turn, finished, seal=seal, **more))
    assert not wrong_response(answer)
    return answer


@settings(deadline=None)  # the judges' types are built when they are first asked
@given(TURNS, REASONS)
def test_every_turn_streams_as_its_body(events: list[Event], reason: FinishReason) -> None:  # C9 C14 C32
    finished = Finished(reason)
    encoding = encoder(OF, seal=seal)
    pieces = [encoding.start(), *(encoding.feed(event) for event in events)]
    seen = Grammar(b"".join(pieces) + encoding.close(finished))
    turn = fold(events)
    assert [i["call_id"] for i in seen.dispatched if "call_id" in i] == [
        call.id for call in turn.tool_calls if call.complete
    ]
    # The turn does not tell what was shown of a broken call.
    if not any(isinstance(e, ToolCallBroken) for e in events):
        assert seen.response == body(turn, finished)


@given(TURNS)
def test_every_turn_can_fail(events: list[Event]) -> None:  # C39
    encoding = encoder(OF, seal=seal)
    pieces = [encoding.start(), *(encoding.feed(event) for event in events)]
    Grammar(b"".join(pieces) + encoding.fail(EngineFailed("it died")), judged=False)


@given(ANYTHING, REASONS)
def test_no_events_break_an_encoder(events: list[Event], reason: FinishReason) -> None:
    encoding = encoder(OF, seal=seal)
    pieces = [encoding.start(), *(encoding.feed(event) for event in events)]
    Grammar(b"".join(pieces) + encoding.close(Finished(reason)), judged=False)


ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=10)
ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
IDS = st.from_regex(r"[a-z]{2,4}_[0-9a-f]{4}", fullmatch=True)
PARTS = st.lists(
    st.one_of(
        st.builds(lambda t: {"type": "input_text", "text": t}, ANY_TEXT),
        st.just({"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}),
        st.just({"type": "input_file", "file_data": "AAAA", "filename": "a.pdf"}),
        st.builds(lambda v: {"type": "x_new", "value": v}, ANY_JSON),
    ),
    max_size=3,
)
TEXTS = st.lists(st.builds(lambda t: {"type": "reasoning_text", "text": t}, ANY_TEXT), max_size=2)
CONTENT = st.one_of(ANY_TEXT, PARTS)
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "message": {"role": st.sampled_from(["user", "system", "developer", "assistant"]), "content": CONTENT},
    "reasoning": {"summary": TEXTS, "content": TEXTS, "encrypted_content": st.none() | ANY_TEXT},
    "function_call": {"name": IDS, "arguments": ANY_TEXT, "namespace": IDS},
    "custom_tool_call": {"name": IDS, "input": ANY_TEXT},
    "function_call_output": {"output": CONTENT},
    "custom_tool_call_output": {"output": CONTENT},
    "local_shell_call": {"action": st.builds(lambda t: {"type": "exec", "command": [t]}, ANY_TEXT)},
    "local_shell_call_output": {"output": ANY_TEXT},
    "shell_call": {"action": st.builds(lambda t: {"commands": [t]}, ANY_TEXT)},
    "shell_call_output": {"output": st.lists(st.builds(lambda t: {"stdout": t}, ANY_TEXT), max_size=2)},
    "apply_patch_call": {"operation": st.just({"type": "delete_file", "path": "a"})},
    "apply_patch_call_output": {"output": ANY_TEXT},
    "tool_search_call": {"arguments": ANY_JSON, "execution": st.just("client")},
    "tool_search_output": {"tools": st.just([{"type": "function", "name": "found"}])},
    "additional_tools": {"tools": st.just([{"type": "function", "name": "more"}])},
    "web_search_call": {"action": ANY_JSON},
    "item_reference": {},
    "compaction": {"encrypted_content": ANY_TEXT},
    "x_unheard_of": {"value": ANY_JSON},
}
SILENT = {"additional_tools", "web_search_call", "item_reference", "compaction", "x_unheard_of"}


@st.composite
def items(draw: st.DrawFn) -> Json:
    kind = draw(st.sampled_from(sorted(FIELDS)))
    fields = {name: draw(values) for name, values in FIELDS[kind].items()}
    more = {f"x_{name}": value for name, value in draw(st.dictionaries(IDS, ANY_JSON, max_size=1)).items()}
    return {"type": kind, "id": draw(IDS), "call_id": draw(IDS), **fields, **more}


@given(st.lists(items(), min_size=1, max_size=8, unique_by=lambda item: item["id"]))
def test_no_field_of_an_item_is_lost(sent: list[Json]) -> None:  # C33
    messages = request(input=[*sent, {"role": "user", "content": "Go on.", "id": "last"}])
    assert messages.options.stored_state.input_items[:-1] == sent
    kept: list[Any] = [v.extra for t in messages.conversation.turns for v in ([t] if t.extra else t.parts)]
    in_order = [item for item in sent if item["id"] in {item["id"] for item in kept}]
    assert [item for item, before in zip(kept, [None, *kept], strict=False) if item != before][
        :-1
    ] == in_order
    assert all(item in in_order or _is_silent(item) for item in sent)


def _is_silent(item: Json) -> bool:
    """Assistant messages and thoughts without a word leave nothing in a turn."""
    return item["type"] in SILENT or item["type"] == "reasoning" or item.get("role") == "assistant"


BODIES: list[Json] = [
    {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "b"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "c"}],
            },
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "d"},
            {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "tool_search_output", "call_id": "c4", "tools": [{"type": "function", "name": "g"}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
        ],
        "tools": [*TOOLS, {"type": "tool_search", "execution": "client"}, {"type": "web_search"}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "custom", "name": "apply_patch"}],
        },
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "temperature": 1,
        "max_output_tokens": 5,
        "prompt_cache_key": "s",
    }
]


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, below in inner for path in paths(below, (*at, key)))]


@given(st.sampled_from(BODIES), st.data())
def test_a_mutated_body_is_answered_or_refused(body: Json, data: st.DataObject) -> None:
    mutated = copy.deepcopy(body)
    *above, key = data.draw(st.sampled_from(paths(body)[1:]))
    place: Any = mutated
    for step in above:
        place = place[step]
    if data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(ANY_JSON)
    answered_or_refused(json.dumps(mutated).encode())


@given(st.sampled_from(BODIES), st.integers(0, 2000), st.binary(max_size=3))
def test_damaged_bytes_are_answered_or_refused(body: Json, at: int, damage: bytes) -> None:
    data = json.dumps(body).encode()
    answered_or_refused(data[:at] + damage + data[at + len(damage) :])


def answered_or_refused(data: bytes) -> None:
    try:
        decoded = responses.decode(data)
    except InvalidRequest as error:
        json.loads(encode_error(error, prompt="input")[1])
        return
    shape = shapes.by_name["interleaved"]
    encoding = encoder(decoded)
    pieces = [encoding.start(), *(encoding.feed(event) for event in shape.events)]
    Grammar(b"".join(pieces) + encoding.close(shape.finished), judged=False)
