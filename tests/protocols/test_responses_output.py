"""Responses out: the response object, its errors, sealed thoughts."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from protocols import shapes
from protocols.grammar_responses import Grammar
from protocols.official_sdks import openai_sdk
from protocols.test_responses_encode import (
    Json,
    body,
    encoded,
    encoder,
    events,
    request,
    stream,
)
from singletree.conversation import Request, Sampling
from singletree.errors import (
    ContextOverflow,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    SingletreeError,
    Unauthorized,
)
from singletree.events import Finished, FinishReason, Markup, ReasoningDelta, TextDelta, Token, TokenLogprobs
from singletree.protocols import responses
from singletree.protocols.openai.answers import encode_error
from singletree.request_options import StoredItems


def test_usage() -> None:  # C8
    usage = body(shapes.by_name["text_only"])["usage"]
    assert usage == {
        "input_tokens": 1234,
        "input_tokens_details": {"cached_tokens": 1200, "cache_write_tokens": 0},
        "output_tokens": 56,
        "output_tokens_details": {"reasoning_tokens": 7},
        "total_tokens": 1290,
    }


MODEL_OUTPUT: Json = {
    "instructions": "Be brief.",
    "tools": [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
    "tool_choice": {"type": "custom", "name": "apply_patch"},
    "parallel_tool_calls": False,
    "metadata": {"a": "b"},
    "reasoning": {"effort": "high", "summary": "auto", "context": "all_turns"},
    "text": {
        "verbosity": "low",
        "format": {
            "type": "json_schema",
            "name": "n",
            "description": None,
            "schema": {"type": "object"},
            "strict": True,
        },
    },
    "max_output_tokens": 77,
    "max_tool_calls": 3,
    "previous_response_id": "resp_before",
    "temperature": 0.5,
    "top_p": 0.25,
    "top_logprobs": 2,
    "truncation": "auto",
    "service_tier": "flex",
    "prompt_cache_key": "session",
    "safety_identifier": "s",
    "user": "u",
    "store": True,
    "background": True,
}


def test_the_response_repeats_the_request() -> None:  # C33
    shape = shapes.by_name["text_only"]
    of = responses.decode(
        json.dumps({"model": "org/model", "input": "Hello", **MODEL_OUTPUT}).encode(), known=StoredItems()
    )
    for response in (body(shape, of), Grammar(stream(shape.events, of=of)).response):
        assert {field: response[field] for field in MODEL_OUTPUT} == MODEL_OUTPUT
        assert response["model"] == "org/model"
    assert b'"object":"response","created_at":1763700000' in encoded(shape, of)


def test_fields_absent_from_the_request_have_the_apis_defaults() -> None:
    answer = body(shapes.by_name["text_only"])
    assert {
        k: answer[k] for k in ("temperature", "top_p", "tool_choice", "tools", "truncation", "metadata")
    } == {
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "metadata": {},
    }
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "medium"}


@pytest.mark.parametrize(
    ("field", "sent", "expected"),
    [
        ("service_tier", "auto", "default"),
        ("service_tier", "priority", "priority"),
        ("tool_choice", "any", "required"),
        ("conversation", "conv_1", {"id": "conv_1"}),
        ("conversation", {"id": "conv_1"}, {"id": "conv_1"}),
        ("prompt_cache_retention", "24h", "24h"),
        ("prompt_cache_options", {"ttl": "12h"}, {"mode": "implicit", "ttl": "12h"}),
        ("text", {"format": None, "verbosity": None}, {"format": {"type": "text"}, "verbosity": "medium"}),
        (
            "text",
            {"format": {"type": "json_object"}},
            {"format": {"type": "json_object"}, "verbosity": "medium"},
        ),
        ("reasoning", {"effort": "low"}, {"effort": "low", "summary": None}),
        ("metadata", None, {}),
        ("top_logprobs", None, 0),
        ("truncation", "auto", "auto"),
    ],
)
def test_the_fields_of_the_request_in_the_response(field: str, sent: Any, expected: Any) -> None:  # C33
    tools = [{"type": "custom", "name": "apply_patch"}]
    answer = body(shapes.by_name["text_only"], request(tools=tools, **{field: sent}))
    assert answer[field] == expected


def test_a_function_is_reported_with_all_of_its_fields() -> None:
    answer = body(shapes.by_name["text_only"], request(tools=[{"name": "f"}]))
    nothing = {"description": None, "parameters": None, "strict": None}
    assert answer["tools"] == [{"type": "function", "name": "f", **nothing}]


@pytest.mark.parametrize(
    ("reason", "expected"), [("stop", 1_763_700_002), ("length", None), ("cancelled", None), ("error", None)]
)
def test_the_time_of_the_end_is_that_of_a_response_that_is_whole(
    reason: FinishReason, expected: int | None
) -> None:
    shape = shapes.Shape("", shapes.text("Hi"), Finished(reason))
    assert body(shape)["completed_at"] == expected


def test_the_response_reports_the_sampling_that_was_used() -> None:
    of = request()
    resolved = Request(of.model, of.conversation, Sampling(temperature=0.6, top_p=0.95), options=of.options)
    answer = body(shapes.by_name["text_only"], resolved)
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)


FAILURES: list[tuple[SingletreeError, str, str]] = [
    (EngineFailed("it died"), "server_error", "it died"),
    (ContextOverflow(9, 8), "context_length_exceeded", "maximum context length"),
    (Overloaded("no slot is free", retry_after=3), "rate_limit_exceeded", "Please try again in 3s."),
    (InvalidRequest("a schema cannot be used"), "invalid_prompt", "a schema cannot be used"),
]


@pytest.mark.parametrize(("error", "code", "words"), FAILURES)
def test_failures_have_the_codes_that_clients_act_on(error: SingletreeError, code: str, words: str) -> None:
    encoding = encoder()
    seen = Grammar(encoding.start() + encoding.fail(error))
    assert seen.response["error"]["code"] == code
    assert words in seen.response["error"]["message"]


def test_a_generation_that_ended_in_error_closes_what_was_open() -> None:  # C39
    pieces = stream([TextDelta("so", "so")], Finished("error"))
    assert pieces.count(b"event: response.output_item.done") == 1
    seen = Grammar(pieces)
    assert (seen.terminal, seen.dispatched) == ("response.failed", seen.items)
    assert [i["status"] for i in seen.items] == ["incomplete"]
    assert seen.response["error"]["code"] == "server_error"


ERRORS: list[tuple[SingletreeError, type[openai.APIStatusError], str | None]] = [
    (InvalidRequest("no", param="input.0"), openai.BadRequestError, None),
    (ContextOverflow(9, 8), openai.BadRequestError, "context_length_exceeded"),
    (Unauthorized("no key"), openai.AuthenticationError, "invalid_api_key"),
    (ModelNotFound("x"), openai.NotFoundError, "model_not_found"),
    (EngineFailed("it died"), openai.InternalServerError, "server_error"),
]


@pytest.mark.parametrize(("error", "kind", "code"), ERRORS)
def test_errors_before_the_stream(
    error: SingletreeError, kind: type[openai.APIStatusError], code: str | None
) -> None:  # C39 C43
    status, data = encode_error(error, prompt="input")
    with pytest.raises(kind) as caught:
        openai_sdk(data, status).responses.create(model="m", input="")
    assert caught.value.code == code


def test_an_overflow_names_the_input() -> None:  # C43
    answer = json.loads(encode_error(ContextOverflow(9, 8), prompt="input")[1])["error"]
    assert answer["param"] == "input"


class TestSeal:
    def test_it_gives_the_encrypted_content_of_each_thought(self) -> None:  # C34
        of = request(include=["reasoning.encrypted_content"])
        shape = shapes.by_name["two_calls_reasoning_between"]
        data = stream(shape.events, shape.finished, of, seal=lambda n: f"sealed {n}")
        seen = Grammar(data)
        thoughts = [i for i in seen.response["output"] if i["type"] == "reasoning"]
        assert [i["encrypted_content"] for i in thoughts] == ["sealed 0", "sealed 1"]
        assert [i for i in seen.dispatched if i["type"] == "reasoning"] == thoughts
        whole = json.loads(encoded(shape, of, seal=lambda n: f"sealed {n}"))
        assert whole == seen.response

    def test_a_thought_is_not_sealed_before_it_ends(self) -> None:
        of = request(include=["reasoning.encrypted_content"])
        calls: list[int] = []

        def seal(ordinal: int) -> str:
            calls.append(ordinal)
            return "sealed"

        encoding = encoder(of, seal=seal)
        encoding.start()
        for event in shapes.reasoning("a", "b", closed=False):
            encoding.feed(event)
        assert calls == []
        encoding.feed(Markup("</think>"))
        assert calls == [0]

    @pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: shape.name)
    def test_the_end_is_an_item_for_who_includes_it(self, shape: shapes.Shape) -> None:
        """It is asked for at the end, and the body says what the stream says."""

        def seal_end() -> str:
            return "the end"

        of = request(include=["reasoning.encrypted_content"])
        seen = Grammar(stream(shape.events, shape.finished, of, seal_end=seal_end)).response["output"]
        whole = json.loads(encoded(shape, of, seal_end=seal_end))["output"]
        ends = shape.finished.reason == "stop" and any(call.complete for call in shape.turn.tool_calls)
        expected = ["the end"] if ends else []
        assert [i["encrypted_content"] for i in seen if i.get("encrypted_content")] == expected
        assert [i["encrypted_content"] for i in whole if i.get("encrypted_content")] == expected
        assert not ends or seen[-1]["encrypted_content"] == whole[-1]["encrypted_content"]
        assert "the end" not in str(Grammar(stream(shape.events, shape.finished, seal_end=seal_end)).response)

    @pytest.mark.parametrize(("sealed", "shown"), [("sealed", "sealed"), ("", None)])
    def test_there_is_none_where_nothing_could_be_sealed(self, sealed: str, shown: str | None) -> None:
        shape, of = shapes.by_name["only_reasoning"], request(include=["reasoning.encrypted_content"])
        seen = Grammar(stream(shape.events, of=of, seal=lambda n: sealed))
        assert seen.response["output"][0].get("encrypted_content") == shown

    def test_it_is_not_made_for_a_client_that_did_not_ask(self) -> None:
        def seal(ordinal: int) -> str:
            raise AssertionError("a capsule can be made once only, and the store wants this one")

        shape = shapes.by_name["only_reasoning"]
        assert "encrypted_content" not in Grammar(stream(shape.events, seal=seal)).response["output"][0]
        assert b"encrypted_content" not in encoded(shape, seal=seal)


def token(text: str, *others: str, visible: bool = True) -> Token:
    alternatives = tuple(Token(9, other, other.encode(), -2.5) for other in others)
    return Token(1, text, text.encode(), -0.5, alternatives, visible)


LOGPROBS: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


class TestLogprobs:
    EVENTS = (
        TokenLogprobs((token("<think>", visible=False), token("hm", visible=False))),
        ReasoningDelta("hm", "hm"),
        Markup("</think>"),
        TokenLogprobs((token("He", "She"), token("llo"))),
        TextDelta("Hello", "Hello"),
        TokenLogprobs((token(", "),)),
        TextDelta(", ", ", "),
        TokenLogprobs((token("you"),)),
        TextDelta("you", "you"),
        *shapes.call(0, "f", "{}"),
        TokenLogprobs((token("é"), Token(3, "?", b"?"))),
        TextDelta("é?", "é?"),
    )

    def test_they_go_with_the_text_that_they_spell(self) -> None:
        of = request(**LOGPROBS)
        data = stream(self.EVENTS, of=of)
        seen = Grammar(data)
        messages = [item["content"][0] for item in seen.items if item["type"] == "message"]
        assert [[t["token"] for t in part["logprobs"]] for part in messages] == [
            ["He", "llo", ", ", "you"],
            ["é"],
        ]
        assert messages[0]["logprobs"][0] == {
            "token": "He",
            "logprob": -0.5,
            "bytes": [72, 101],
            "top_logprobs": [{"token": "She", "logprob": -2.5, "bytes": [83, 104, 101]}],
        }
        reported = [e["logprobs"] for e in events(data) if e["type"] == "response.output_text.delta"]
        assert [[t["token"] for t in logprobs] for logprobs in reported] == [
            ["He", "llo"],
            [", "],
            ["you"],
            ["é"],
        ]

    def test_the_body_has_the_same(self) -> None:
        of = request(**LOGPROBS)
        shape = shapes.Shape("", self.EVENTS, shapes.finished())
        assert body(shape, of) == Grammar(stream(self.EVENTS, of=of)).response

    def test_nobody_gets_them_who_did_not_ask(self) -> None:
        written = Grammar(stream(self.EVENTS)).response
        assert written == body(shapes.Shape("", self.EVENTS, shapes.finished()))
        texts = [item["content"][0] for item in written["output"] if item["type"] == "message"]
        assert [part["logprobs"] for part in texts] == [[], []]
