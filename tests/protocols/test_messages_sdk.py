"""The official SDK is the judge: what it makes of a stream is what it makes of the body."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jiter import from_json

from singletree import errors
from singletree.conversation import Conversation, Request
from singletree.protocols import messages
from singletree.protocols.messages.tools import complete_values

from . import event_stream
from .official_sdks import anthropic_sdk
from .shapes import SHAPES, Shape, by_name, names
from .test_messages_encode import body, encoder, stream

AS_FOLDED = [shape for shape in SHAPES if shape.streams_as_folded]


def accumulated(*pieces: bytes) -> dict[str, Any]:
    """The message that the SDK puts together from a stream."""
    sdk = anthropic_sdk(200, "text/event-stream", *pieces)
    asked = sdk.messages.stream(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with asked as events:
        return events.get_final_message().to_dict()


def accumulated_by_beta(*pieces: bytes) -> dict[str, Any]:
    """The same by the SDK's beta half, which Claude Code uses."""
    sdk = anthropic_sdk(200, "text/event-stream", *pieces)
    asked = sdk.beta.messages.stream(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with asked as events:
        return events.get_final_message().to_dict()


def parsed(whole: bytes) -> dict[str, Any]:
    """The message that the SDK reads from a body."""
    sdk = anthropic_sdk(200, "application/json", whole)
    asked = sdk.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    return asked.to_dict()


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without what a message says only when it is streamed or only when it is whole: fields that are null."""
    return {key: value for key, value in message.items() if value is not None}


@pytest.mark.parametrize("shape", AS_FOLDED, ids=[s.name for s in AS_FOLDED])
def test_stream_accumulates_to_the_body(shape: Shape) -> None:
    whole = plain(parsed(body(shape)))
    assert plain(accumulated(stream(shape))) == whole
    assert plain(accumulated_by_beta(stream(shape))) == whole


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_no_shape_upsets_the_sdk(shape: Shape) -> None:
    message = accumulated(stream(shape))
    assert "".join(b["text"] for b in message["content"] if b["type"] == "text") == shape.turn.text
    assert message["stop_reason"] == json.loads(body(shape))["stop_reason"]


def test_a_split_of_the_bytes_says_the_same() -> None:
    sent = stream(by_name["reasoning_call"])
    whole = accumulated(sent)
    for at in range(
        1, len(sent), 7
    ):  # How events are split is the SDK's matter: every place would test it alone.
        assert accumulated(sent[:at], sent[at:]) == whole


def test_byte_by_byte_says_the_same() -> None:
    sent = stream(by_name["unicode"])
    assert accumulated(*(sent[i : i + 1] for i in range(len(sent)))) == accumulated(sent)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.InvalidRequest("x"), anthropic.BadRequestError),
        (errors.Unauthorized("x"), anthropic.AuthenticationError),
        (errors.ModelNotFound("x"), anthropic.NotFoundError),
        (errors.BodyTooLarge("x"), anthropic.APIStatusError),
        (errors.Overloaded("x"), anthropic.APIStatusError),
        (errors.EngineFailed("x"), anthropic.InternalServerError),
    ],
)
def test_errors_are_read_as_what_they_are(
    error: errors.SingletreeError, expected: type[anthropic.APIStatusError]
) -> None:  # C39
    status, shown = messages.encode_error(error)
    sdk = anthropic_sdk(status, "application/json", shown)
    with pytest.raises(expected) as raised:
        sdk.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    assert raised.value.status_code == status
    assert raised.value.body == json.loads(shown)


def test_an_error_in_the_stream_is_raised() -> None:  # C39
    encode = encoder()
    sent = encode.start() + b"".join(map(encode.feed, by_name["interleaved"].events))
    with pytest.raises(anthropic.APIStatusError, match="gone"):
        accumulated(sent + encode.fail(errors.EngineFailed("gone")))


def test_count() -> None:  # C27
    sdk = anthropic_sdk(200, "application/json", messages.encode_count(304))
    counted = sdk.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}])
    assert counted.input_tokens == 304


def test_usage_known_only_at_the_end_is_what_counts() -> None:  # C8
    shape = by_name["text_only"]
    encode = event_stream.encoder(messages, Request("m", Conversation(())), id="msg_1")
    sent = encode.start() + b"".join(map(encode.feed, shape.events)) + encode.close(shape.finished)
    assert accumulated(sent)["usage"] == json.loads(body(shape))["usage"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5), st.booleans(), st.data())
def test_a_cut_call_holds_what_the_sdk_makes_of_it(
    value: dict[str, Any], escaped: bool, data: st.DataObject
) -> None:  # C15
    text = json.dumps(value, ensure_ascii=escaped)
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert json.loads(complete_values(cut)) == from_json(cut.encode(), partial_mode=True)
