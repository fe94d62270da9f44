"""Frames as server-sent events, and frames of the encoders: their data is JSON on one line, whatever the sink."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from protocols import event_stream, shapes
from singletree.conversation import Conversation, Request
from singletree.errors import EngineFailed
from singletree.events import ReasoningDelta, TextDelta, fold
from singletree.protocols import chat, messages, responses, wire
from singletree.protocols.answer import (
    KEEP_ALIVE,
    EncodedResponse,
    EventEncoder,
    FinishedChoice,
    Frame,
    encode_sse,
)
from singletree.raw_tokens import completions, generate
from singletree.request_options import CompletionOptions, RequestOptions

APIS = (chat, completions, generate, messages, responses)
each_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.__name__.rsplit(".")[-1])

NAMED: Frame = ("ping", b'{"type":"ping"}')
UNNAMED: Frame = ("", b"[DONE]")


@pytest.mark.parametrize(
    ("frames", "sent"),
    [
        ([], b""),
        ([NAMED], b'event: ping\ndata: {"type":"ping"}\n\n'),
        ([UNNAMED], b"data: [DONE]\n\n"),
        ([KEEP_ALIVE], b": keep-alive\n\n"),
        (
            [NAMED, KEEP_ALIVE, UNNAMED],
            b'event: ping\ndata: {"type":"ping"}\n\n: keep-alive\n\ndata: [DONE]\n\n',
        ),
    ],
)
def test_frames_as_server_sent_events(frames: Sequence[Frame], sent: bytes) -> None:
    assert encode_sse(frames) == sent


def request(api: Any) -> Request:
    completion = CompletionOptions(return_text=True) if api is generate else CompletionOptions()
    options = RequestOptions(include=("reasoning.content",), include_usage=True, completion=completion)
    return Request("m", Conversation(()), stream=True, options=options)


def all_frames(encoder: EventEncoder, shape: shapes.Shape) -> list[Frame]:
    frames = encoder.start()
    for event in shape.events:
        frames = [*frames, *encoder.keep_alive(), *encoder.feed(event)]
    return [*frames, *encoder.end(shape.finished), *encoder.tail(shape.finished.usage)]


@each_api
@pytest.mark.parametrize("shape", shapes.SHAPES, ids=shapes.names)
def test_data_is_one_line_of_json_that_names_its_event(api: Any, shape: shapes.Shape) -> None:
    frames = all_frames(api.Encoder(event_stream.context(request(api))), shape)
    assert all(b"\n" not in data for _, data in frames)
    for event, data in frames:
        if data not in (b"", b"[DONE]"):
            assert json.loads(data).get("type", "") == event


@each_api
def test_an_error_is_a_frame(api: Any) -> None:
    encoder = api.Encoder(event_stream.context(request(api)))
    encoder.start()
    assert any(b"it died" in data for _, data in encoder.fail(EngineFailed("it died")))


@each_api
@pytest.mark.parametrize("kind", [TextDelta, ReasoningDelta])
def test_the_first_piece_and_the_next_ones_are_written_alike(api: Any, kind: Any) -> None:
    """The next piece of an open span goes a short way: ASCII or not, it must not differ."""
    pieces = ["a", "b\u2028", "", "\x85", '"\n', "\ud83d", "好", "c"]
    encoder = api.Encoder(event_stream.context(request(api)))
    sent = b"".join(data for piece in pieces for _, data in encoder.feed(kind(piece, piece)))
    if kind is ReasoningDelta and api in (completions, generate):
        assert sent == b"", "raw text has no reasoning"
    else:
        assert [piece for piece in pieces if piece and wire.dump(piece) not in sent] == []


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=shapes.names)
def test_the_response_that_is_kept_is_the_one_that_is_sent(shape: shapes.Shape) -> None:
    kept: list[EncodedResponse] = []
    asked: Any = {"keep": kept.append, "clock": lambda: 2.0}
    encoder = responses.Encoder(event_stream.context(request(responses), **asked))
    sent = json.loads(all_frames(encoder, shape)[-1][1])["response"]
    choice = FinishedChoice(
        event_stream.context(request(responses), **asked), fold(shape.events), shape.finished
    )
    whole = responses.encode([choice], shape.finished.usage)
    assert [json.loads(each.json) for each in kept] == [sent, json.loads(whole)]
    for each in kept:
        items = json.loads(each.json)["output"]
        assert [json.loads(item.json) for item in each.items] == items
        assert [item.fields["id"] for item in each.items] == [item["id"] for item in items]


def test_a_response_that_fails_is_kept_too() -> None:
    kept: list[EncodedResponse] = []
    encoder = responses.Encoder(event_stream.context(request(responses), keep=kept.append))
    encoder.start()
    encoder.fail(EngineFailed("it died"))
    assert [json.loads(each.json)["status"] for each in kept] == ["failed"]


def test_a_response_in_progress_is_the_one_that_its_stream_begins_with() -> None:
    context = event_stream.context(request(responses))
    first = json.loads(responses.Encoder(context).start()[0][1])
    assert json.loads(responses.encode_in_progress(context)) == first["response"]
