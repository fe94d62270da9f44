"""Responses out: streams, bodies, and that what an SDK makes of the stream is the body."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from protocols import event_stream, shapes
from protocols.event_stream import ByteEncoder
from protocols.grammar_responses import Grammar
from protocols.judge_responses import wrong_response
from protocols.official_sdks import openai_sdk
from singletree.checking.streams import Decoder
from singletree.conversation import Reasoning, Request, ToolCall
from singletree.errors import (
    EngineFailed,
)
from singletree.events import Event, Finished, Markup, ReasoningDelta, TextDelta, ToolCallEnd
from singletree.protocols import responses

ID = "resp_0123456789abcdefghijklmn"
CREATED = 1_763_700_000
COMPLETED = CREATED + 2.5
Json = dict[str, Any]


def request(**fields: Any) -> Request:
    given = {"model": "org/model", "input": "Hello", "stream": True, **fields}
    return responses.decode(json.dumps(given).encode())


RAW: Json = {"include": ["reasoning.content"]}
"""Asks for the reasoning itself."""

FORMS: dict[str, Json] = {
    "native": {},
    "summary": {"reasoning": {"summary": "auto"}},
    "raw": RAW,
    "raw_and_summary": {**RAW, "reasoning": {"summary": "detailed"}},
}
"""The forms in which a client gets reasoning, and what asks for them."""

forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def encoder(of: Request | None = None, **more: Any) -> ByteEncoder:
    more |= {"id": ID, "created": CREATED, "usage": shapes.USAGE, "clock": lambda: COMPLETED}
    return event_stream.encoder(responses, of or request(), **more)


def stream(
    events: Iterable[Event], finished: Finished | None = None, of: Request | None = None, **more: Any
) -> bytes:
    encoding = encoder(of, **more)
    pieces = [encoding.start(), *(encoding.feed(event) for event in events)]
    return b"".join(pieces) + encoding.close(finished or shapes.finished())


def encoded(shape: shapes.Shape, of: Request | None = None, **more: Any) -> bytes:
    more |= {"id": ID, "created": CREATED, "clock": lambda: COMPLETED}
    return event_stream.body(responses, of or request(), shape.turn, shape.finished, **more)


def body(shape: shapes.Shape, of: Request | None = None) -> Json:
    answer: Json = json.loads(encoded(shape, of))
    wrong = wrong_response(answer)
    assert not wrong, "\n".join(wrong)
    return answer


def accumulated(data: bytes) -> Json:
    """The response that the SDK's accumulator ends with; for one that is not completed, its last event's."""
    with openai_sdk(data).responses.stream(model="m", input="") as events:
        last = [event for event in events if hasattr(event, "response")][-1]
        final = events.get_final_response() if last.type == "response.completed" else last.response
    return plain(final)


def parsed(data: bytes) -> Json:
    """What the SDK makes of a body."""
    return plain(openai_sdk(data).responses.create(model="m", input=""))


def events(data: bytes) -> list[Json]:
    return [json.loads(event.data) for event in Decoder().feed(data)]


def plain(response: Any) -> Json:
    return response.to_dict(mode="json")  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=shapes.names)
class TestShapes:
    def test_golden(self, shape: shapes.Shape, golden: Callable[[str, bytes], None]) -> None:
        golden(f"responses/{shape.name}.sse", stream(shape.events, shape.finished))
        golden(f"responses/{shape.name}.json", encoded(shape))
        if shape.turn.reasoning:
            for form in ("summary", "raw"):
                of = request(**FORMS[form])
                golden(f"responses/{form}/{shape.name}.sse", stream(shape.events, shape.finished, of))
                golden(f"responses/{form}/{shape.name}.json", encoded(shape, of))

    @forms
    def test_stream_is_grammatical(self, shape: shapes.Shape, form: Json) -> None:  # C14 C32
        Grammar(stream(shape.events, shape.finished, request(**form)))

    @forms
    def test_stream_adds_up_to_the_body(self, shape: shapes.Shape, form: Json) -> None:  # C9 C32
        of = request(**form)
        data = stream(shape.events, shape.finished, of)
        streamed, whole = accumulated(data), parsed(encoded(shape, of))
        if shape.streams_as_folded:
            # The SDK adds what it parsed to what it has streamed to the end.
            assert _without_parsed(streamed) == _without_parsed(whole)
            assert Grammar(data).response == body(shape, of)

    @forms
    def test_reasoning_is_shown_only_as_it_was_asked_for(self, shape: shapes.Shape, form: Json) -> None:
        of = request(**form)
        data = stream(shape.events, shape.finished, of, seal=lambda n: "sealed")
        kinds = {event["type"] for event in events(data)}
        items = [item for item in Grammar(data).items if item["type"] == "reasoning"]
        thoughts = [part.text for part in shape.turn.parts if isinstance(part, Reasoning)]
        is_raw, has_summary = "include" in form, "reasoning" in form
        assert any(kind.startswith("response.reasoning_text.") for kind in kinds) == (
            is_raw and bool(thoughts)
        )
        assert any("reasoning_summary" in kind for kind in kinds) == (has_summary and bool(thoughts))
        assert ["content" in item for item in items] == [is_raw] * len(thoughts)
        assert [[part["text"] for part in item["summary"]] for item in items] == [
            [thought] if has_summary else [] for thought in thoughts
        ]
        assert b"encrypted_content" not in data + encoded(shape, of, seal=lambda n: "sealed")

    def test_nothing_is_lost(self, shape: shapes.Shape) -> None:  # C17
        items = Grammar(stream(shape.events, shape.finished, request(**RAW))).items
        texts = [i["content"][0]["text"] for i in items if i["type"] == "message"]
        thoughts = [i["content"][0]["text"] for i in items if i["type"] == "reasoning"]
        assert "".join(texts) == shape.turn.text
        assert "".join(thoughts) == shape.turn.reasoning

    def test_items_stand_in_the_models_order(self, shape: shapes.Shape) -> None:
        kinds = {"Text": "message", "Reasoning": "reasoning", "ToolCall": "function_call"}
        expected = [kinds[type(part).__name__] for part in shape.turn.parts]
        assert [i["type"] for i in body(shape)["output"]] == expected

    def test_only_whole_calls_are_dispatched(self, shape: shapes.Shape) -> None:  # C15
        seen = Grammar(stream(shape.events, shape.finished))
        dispatched = {i["call_id"]: i["arguments"] for i in seen.dispatched if "call_id" in i}
        assert dispatched == {c.id: c.arguments or "{}" for c in shape.turn.tool_calls if c.complete}
        assert all(isinstance(json.loads(answer), dict) for answer in dispatched.values())

    def test_arguments_are_the_models_own_bytes(self, shape: shapes.Shape) -> None:  # C3 C12
        items = Grammar(stream(shape.events, shape.finished)).items
        seen = {i["call_id"]: i["arguments"] for i in items if "call_id" in i}
        for call in shape.turn.tool_calls:
            assert seen[call.id] == (call.arguments or ("{}" if call.complete else ""))

    def test_status(self, shape: shapes.Shape) -> None:  # C16
        expected = {
            "stop": ("completed", None),
            "stop_sequence": ("completed", None),
            "length": ("incomplete", {"reason": "max_output_tokens"}),
            "context_overflow": ("incomplete", {"reason": "max_output_tokens"}),
            "refusal": ("incomplete", {"reason": "content_filter"}),
            "cancelled": ("cancelled", None),
        }[shape.finished.reason]
        for answer in (Grammar(stream(shape.events, shape.finished)).response, body(shape)):
            assert (answer["status"], answer["incomplete_details"]) == expected

    def test_the_answer_comes_back_as_the_turn_it_was(self, shape: shapes.Shape) -> None:  # C5 C33
        output = body(shape, request(**RAW))["output"]
        again = request(input=[*output, {"role": "user", "content": "Go on."}])
        expected = tuple(
            ToolCall(p.name, p.arguments or "{}", p.id, p.complete) if isinstance(p, ToolCall) else p
            for p in shape.turn.parts
        )
        assert [t.parts for t in again.conversation.turns if t.role == "assistant"] == (
            [expected] if expected else []
        )

    @forms
    def test_a_stream_that_fails(self, shape: shapes.Shape, form: Json) -> None:  # C39
        encoding = encoder(request(**form))
        data = encoding.start() + b"".join(encoding.feed(event) for event in shape.events)
        seen = Grammar(data + encoding.fail(EngineFailed("the engine stopped; send the request again")))
        assert seen.terminal == "response.failed"
        assert seen.response["error"] == {
            "code": "server_error",
            "message": "Internal server error: the engine stopped; send the request again",
        }

    def test_a_failure_at_any_event_closes_all_but_a_call(self, shape: shapes.Shape) -> None:  # C39
        for end in range(len(shape.events) + 1):
            encoding = encoder()
            data = encoding.start() + b"".join(map(encoding.feed, shape.events[:end]))
            closed = data.count(b"event: response.output_item.done")
            data += encoding.fail(EngineFailed(""))
            items = Grammar(data, judged=False).items
            cut = [item for item in items if item["status"] == "incomplete"]
            cut_calls = [item for item in cut if item["type"] not in ("message", "reasoning")]
            closed_now = data.count(b"event: response.output_item.done") - closed
            assert closed + closed_now == len(items) - len(cut_calls)
            assert closed_now == len(cut) - len(cut_calls)


def _without_parsed(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = ("parsed", "parsed_arguments")
        return {k: _without_parsed(v) for k, v in value.items() if k not in dropped}
    return [_without_parsed(v) for v in value] if isinstance(value, list) else value


def test_a_call_is_dispatched_while_the_generation_goes_on() -> None:
    encoding = encoder()
    for event in shapes.call(0, "read_file", '{"path":', ' "a"}', ends=False):
        encoding.feed(event)
    pieces = encoding.feed(ToolCallEnd(0))
    assert [line for line in pieces.split(b"\n") if line.startswith(b"event:")] == [
        b"event: response.function_call_arguments.done",
        b"event: response.output_item.done",
    ]


def test_arguments_leave_with_the_delta_that_brings_them() -> None:  # C10
    encoding = encoder()
    start, *deltas = shapes.call(0, "write_file", *("x" * 4 for _ in range(5000)), ends=False)
    assert b"output_item.added" in encoding.feed(start)
    assert all(b'"delta":"xxxx"' in encoding.feed(delta) for delta in deltas)


@forms
def test_a_delta_costs_what_it_says_however_much_was_written(form: Json) -> None:  # C41
    encoding = encoder(request(**form))
    kinds = (
        [TextDelta("x" * 4, "")],
        [ReasoningDelta("x" * 4, "")],
        [*shapes.call(0, "f", ends=False), *shapes.call(0, "f", "xxxx", ends=False)[1:]],
    )
    for written in kinds:
        for event in written:
            encoding.feed(event)
        sizes = {len(encoding.feed(written[-1])) for _ in range(5000)}
        assert max(sizes) - min(sizes) <= 6, "but for the digits of its number"


def test_empty_deltas_send_nothing() -> None:
    encoding = encoder()
    pieces = [encoding.feed(e) for e in (TextDelta("", ""), ReasoningDelta("", ""), Markup("<x>"))]
    assert pieces == [b"", b"", b""]


def test_keep_alive_is_an_event_of_the_protocol() -> None:  # C11
    encoding = encoder()
    pieces = [encoding.start()]
    for event in shapes.by_name["two_calls_reasoning_between"].events:
        pieces += [encoding.keep_alive(), encoding.feed(event)]
    pieces += [encoding.keep_alive(), encoding.close(shapes.finished())]
    assert pieces[1].startswith(b"event: response.in_progress\n")
    Grammar(b"".join(pieces))
    accumulated(b"".join(pieces))
