"""Bodies are read typed and refused in words that name the field; what cannot be sent is mended."""

from __future__ import annotations

import json

import msgspec
import pytest

from singletree.errors import InvalidRequest
from singletree.protocols import wire


class Body(msgspec.Struct):
    text: str
    numbers: dict[str, int] = {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"text": 1}', "text"),
        (b"{}", "text"),
        (b'{"text": "", "numbers": {"a": "x"}}', "numbers"),
        (b"[]", None),
        (b"{", None),
        (b"", None),
        (b'{"text": "\xff"}', None),
    ],
)
def test_refusals_name_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        wire.decode_body(body, Body)
    assert refused.value.param == param
    assert refused.value.message


def test_half_an_emoji_does_not_end_a_session() -> None:
    body = rb'{"text": "cut \ud83d and \ud83d\ude00, \\ud83d, \ude00"}'
    assert wire.decode_body(body, Body).text == "cut \ufffd and 😀, \\ud83d, \ufffd"


def test_what_a_model_wrote_can_always_be_sent() -> None:
    value = {"\ud83d": ["a\ud83d\ude00", "b\udc00"]}
    assert json.loads(wire.dump(value)) == {"\ufffd": ["a😀", "b\ufffd"]}


def test_equally_long_turns_of_many_sessions_are_read_once() -> None:
    """They differ in the middle alone, as turns of a harness do in the ids of their calls."""
    edge = " " * 100
    sent = [msgspec.Raw(f'{{{edge}"text": "{number:03d}"{edge}}}'.encode()) for number in range(50)]

    def make(body: Body, at: str) -> Body:
        return body

    first = wire.decode_each(sent, Body, make, "messages")
    again = [wire.decode_each([one], Body, make, "messages")[0] for one in sent]
    assert [body.text for body in first] == [f"{number:03d}" for number in range(50)]
    assert all(one is other for one, other in zip(first, again, strict=True))
