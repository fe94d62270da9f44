"""Responses out: streams, bodies, and that what an SDK makes of the stream is the body."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import httpx2
import openai
import pytest

from protocols import shapes
from protocols.grammar_responses import Grammar
from protocols.judge_responses import wrong_response
from singletree.conversation import Request, ToolCall
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
    said = {"model": "org/model", "input": "Hello", "stream": True, **fields}
    return responses.decode(json.dumps(said).encode())


def encoder(of: Request | None = None, **more: Any) -> responses.Encoder:
    of = of or request()
    more |= {"id": ID, "created": CREATED, "new_id": shapes.numbered(), "clock": lambda: COMPLETED}
    return responses.Encoder(of, usage=shapes.USAGE, **more)


def stream(
    events: Iterable[Event], finished: Finished | None = None, of: Request | None = None, **more: Any
) -> bytes:
    encoding = encoder(of, **more)
    pieces = [encoding.start(), *(encoding.feed(event) for event in events)]
    return b"".join(pieces) + encoding.close(finished or shapes.finished())


def encoded(shape: shapes.Shape, of: Request | None = None, **more: Any) -> bytes:
    more |= {"id": ID, "created": CREATED, "new_id": shapes.numbered(), "clock": lambda: COMPLETED}
    return responses.encode(of or request(), shape.turn, shape.finished, **more)


def body(shape: shapes.Shape, of: Request | None = None) -> Json:
    said: Json = json.loads(encoded(shape, of))
    wrong = wrong_response(said)
    assert not wrong, "\n".join(wrong)
    return said


def sdk(data: bytes, status: int = 200) -> openai.OpenAI:
    kind = "text/event-stream" if data.startswith(b"event:") else "application/json"

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, content=data, headers={"content-type": kind})

    http_client = httpx2.Client(transport=httpx2.MockTransport(answer))
    return openai.OpenAI(api_key="k", base_url="http://test/v1", http_client=http_client, max_retries=0)


def accumulated(data: bytes) -> Json:
    """The response that the SDK's accumulator ends with; for one that is not completed, its last event's."""
    with sdk(data).responses.stream(model="m", input="") as events:
        last = [event for event in events if hasattr(event, "response")][-1]
        final = events.get_final_response() if last.type == "response.completed" else last.response
    return plain(final)


def parsed(data: bytes) -> Json:
    """What the SDK makes of a body."""
    with sdk(data) as client:
        return plain(client.responses.create(model="m", input=""))


def plain(response: Any) -> Json:
    return response.to_dict(mode="json")  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=shapes.names)
class TestShapes:
    def test_golden(self, shape: shapes.Shape, golden: Callable[[str, bytes], None]) -> None:
        golden(f"responses/{shape.name}.sse", stream(shape.events, shape.finished))
        golden(f"responses/{shape.name}.json", encoded(shape))

    def test_stream_is_grammatical(self, shape: shapes.Shape) -> None:  # C14 C32
        Grammar(stream(shape.events, shape.finished))

    def test_stream_adds_up_to_the_body(self, shape: shapes.Shape) -> None:  # C9 C32
        streamed, whole = accumulated(stream(shape.events, shape.finished)), parsed(encoded(shape))
        if shape.streams_as_folded:
            # The SDK adds what it parsed to what it has streamed to the end.
            assert _without_parsed(streamed) == _without_parsed(whole)
            assert Grammar(stream(shape.events, shape.finished)).response == body(shape)

    def test_nothing_is_lost(self, shape: shapes.Shape) -> None:  # C17
        items = Grammar(stream(shape.events, shape.finished)).items
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
        assert all(isinstance(json.loads(said), dict) for said in dispatched.values())

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
        for said in (Grammar(stream(shape.events, shape.finished)).response, body(shape)):
            assert (said["status"], said["incomplete_details"]) == expected

    def test_the_answer_comes_back_as_the_turn_it_was(self, shape: shapes.Shape) -> None:  # C5 C33
        again = request(input=[*body(shape)["output"], {"role": "user", "content": "Go on."}])
        expected = tuple(
            ToolCall(p.name, p.arguments or "{}", p.id, p.complete) if isinstance(p, ToolCall) else p
            for p in shape.turn.parts
        )
        assert [t.parts for t in again.conversation.turns if t.role == "assistant"] == (
            [expected] if expected else []
        )

    def test_a_summary_comes_with_its_thought_if_asked_for(self, shape: shapes.Shape) -> None:
        of = request(reasoning={"summary": "auto"})
        seen = Grammar(stream(shape.events, shape.finished, of))
        for item in seen.items:
            if item["type"] == "reasoning":
                thought = item["content"][0]["text"]
                assert item["summary"] == [{"type": "summary_text", "text": thought}]
        if shape.streams_as_folded:
            assert seen.response == body(shape, of)

    def test_a_stream_that_fails(self, shape: shapes.Shape) -> None:  # C39
        encoding = encoder()
        data = encoding.start() + b"".join(encoding.feed(event) for event in shape.events)
        seen = Grammar(data + encoding.fail(EngineFailed("the engine stopped; send the request again")))
        assert seen.terminal == "response.failed"
        assert seen.response["error"] == {
            "code": "server_error",
            "message": "Internal server error: the engine stopped; send the request again",
        }

    def test_what_was_open_when_a_stream_fails_is_not_done(self, shape: shapes.Shape) -> None:  # C39
        encoding = encoder()
        for event in shape.events:
            encoding.feed(event)
        assert b".done" not in encoding.fail(EngineFailed(""))


def _without_parsed(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = ("parsed", "parsed_arguments")
        return {k: _without_parsed(v) for k, v in value.items() if k not in dropped}
    return [_without_parsed(v) for v in value] if isinstance(value, list) else value


def test_a_call_is_dispatched_while_the_generation_goes_on() -> None:
    encoding = encoder()
    for event in shapes.call(0, "read_file", '{"path":', ' "a"}', ends=False):
        encoding.feed(event)
    said = encoding.feed(ToolCallEnd(0))
    assert [line for line in said.split(b"\n") if line.startswith(b"event:")] == [
        b"event: response.function_call_arguments.done",
        b"event: response.output_item.done",
    ]


def test_arguments_leave_with_the_delta_that_brings_them() -> None:  # C10
    encoding = encoder()
    start, *deltas = shapes.call(0, "write_file", *("x" * 4 for _ in range(5000)), ends=False)
    assert b"output_item.added" in encoding.feed(start)
    assert all(b'"delta":"xxxx"' in encoding.feed(delta) for delta in deltas)


def test_a_delta_costs_what_it_says_however_much_was_said() -> None:  # C41
    encoding = encoder(request(reasoning={"summary": "auto"}))
    kinds = (
        [TextDelta("x" * 4, "")],
        [ReasoningDelta("x" * 4, "")],
        [*shapes.call(0, "f", ends=False), *shapes.call(0, "f", "xxxx", ends=False)[1:]],
    )
    for events in kinds:
        for event in events:
            encoding.feed(event)
        sizes = {len(encoding.feed(events[-1])) for _ in range(5000)}
        assert max(sizes) - min(sizes) <= 6, "but for the digits of its number"


def test_empty_deltas_say_nothing() -> None:
    encoding = encoder()
    said = [encoding.feed(e) for e in (TextDelta("", ""), ReasoningDelta("", ""), Markup("<x>"))]
    assert said == [b"", b"", b""]


def test_keep_alive_is_an_event_of_the_protocol() -> None:  # C11
    encoding = encoder()
    pieces = [encoding.start()]
    for event in shapes.by_name["two_calls_reasoning_between"].events:
        pieces += [encoding.keep_alive(), encoding.feed(event)]
    pieces += [encoding.keep_alive(), encoding.close(shapes.finished())]
    assert pieces[1].startswith(b"event: response.in_progress\n")
    Grammar(b"".join(pieces))
    accumulated(b"".join(pieces))
