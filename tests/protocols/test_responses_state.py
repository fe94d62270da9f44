"""Responses that go on from others: what a request names, and what it says with what was found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from singletree.errors import InvalidRequest
from singletree.protocols import responses
from singletree.protocols.responses.state import with_id
from singletree.request_options import References, StoredItems

ASKED = {"type": "message", "role": "user", "content": "What is here?"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Look."}],
}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "ls", "arguments": '{"a": 1.0}'}
PRINTED = {"type": "function_call_output", "call_id": "c1", "output": "notes.txt"}
TOOLS = [{"type": "function", "name": "ls", "parameters": {"type": "object", "properties": {}}}]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "tools": TOOLS, **fields}).encode()


def stored(*history: dict[str, Any]) -> StoredItems:
    return StoredItems([json.dumps(item).encode() for item in history])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": "hi"}, References()),
        ({"input": [ASKED, CALLED, PRINTED]}, References()),
        ({"input": "hi", "previous_response_id": "resp_1"}, References("resp_1")),
        ({"input": "hi", "conversation": "conv_1"}, References(None, "conv_1")),
        ({"input": "hi", "conversation": {"id": "conv_1"}}, References(None, "conv_1")),
        (
            {"input": [{"type": "item_reference", "id": "a"}, {"id": "b"}, ASKED]},
            References(items=("a", "b")),
        ),
    ],
)
def test_what_a_request_names(fields: dict[str, Any], named: References) -> None:
    assert responses.parse_body(body(**fields)).references == named
    assert bool(responses.parse_body(body(**fields)).references) == (named != References())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "c", "previous_response_id": "r"}, "previous_response_id"),
        ({"conversation": {}}, "conversation.id"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        assert not responses.parse_body(body(input="hi", **fields)).references
    assert refused.value.param == param


def test_new_items_after_a_history_mean_what_all_of_them_would() -> None:  # C30
    whole = responses.decode(body(input=[ASKED, THOUGHT, CALLED, PRINTED]))
    rest = responses.decode(
        body(input=[PRINTED], previous_response_id="resp_1"), known=stored(ASKED, THOUGHT, CALLED)
    )
    assert rest.conversation == whole.conversation
    assert rest.options.stored_state.input_items == [PRINTED], "what is stored with it is its own"
    assert rest.options.stored_state.unresolved == ()


def test_a_reference_is_what_it_refers_to() -> None:
    given = [ASKED, {"type": "item_reference", "id": "fc_1"}, PRINTED]
    messages = responses.decode(
        body(input=given), known=StoredItems(items={"fc_1": json.dumps(CALLED).encode()})
    )
    assert messages.conversation == responses.decode(body(input=[ASKED, CALLED, PRINTED])).conversation
    with pytest.raises(InvalidRequest, match="no item 'fc_1' is stored") as refused:
        responses.decode(body(input=given), known=StoredItems())
    assert refused.value.param == "input.1.id"


def test_tools_and_instructions_are_those_of_the_request_itself() -> None:
    decoded = responses.decode(body(input="hi", instructions="Be brief."), known=stored(ASKED))
    assert [turn.role for turn in decoded.conversation.turns] == ["system", "user", "user"]


@pytest.mark.parametrize(
    ("fields", "known", "stored"),
    [({}, StoredItems(), True), ({"store": False}, StoredItems(), False), ({"store": True}, None, False)],
)
def test_a_response_is_stored_unless_the_client_says_no_or_the_server_cannot(
    fields: dict[str, Any], known: StoredItems | None, stored: bool
) -> None:
    decoded = responses.decode(body(input="hi", **fields), known=known)
    assert decoded.options.stored_state.store is stored
    assert json.loads(decoded.options.echoed_fields)["store"] is stored


def test_items_get_ids_where_they_have_none() -> None:
    ids = iter(("msg_1", "fco_1", "item_1"))

    def new_id(prefix: str) -> str:
        id = next(ids)
        assert id.startswith(prefix)
        return id

    assert with_id({"role": "user", "content": "hi"}, new_id)["id"] == "msg_1"
    assert with_id(PRINTED, new_id)["id"] == "fco_1"
    assert with_id({"type": "something_new"}, new_id)["id"] == "item_1"
    assert with_id(CALLED, new_id) == {**CALLED, "status": "completed"}
