"""Chat Completions out: streams, bodies, and that an SDK makes the body from the stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from protocols import event_stream, shapes
from protocols.event_stream import ByteEncoder
from protocols.grammar_chat import Grammar
from protocols.official_sdks import openai_sdk
from singletree.conversation import Conversation, PromptReport, Reasoning, Request, Tool
from singletree.errors import ContextOverflow, EngineFailed, ModelNotFound, Overloaded, Unauthorized
from singletree.events import (
    ArgumentsDelta,
    Event,
    Finished,
    Markup,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    Token,
    TokenLogprobs,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    UsageUpdate,
    fold,
)
from singletree.protocols import chat
from singletree.protocols.openai.answers import encode_error
from singletree.request_options import RequestOptions

ID = "chatcmpl-0123456789abcdefghijklmn"
CREATED = 1_763_700_000


TOKENS = (
    Token(1, "Hi", b"Hi", -0.25, (Token(2, "Yo", b"Yo", float("-inf")),)),
    Token(3, "\ufffd", b"\xf0", None),
    Token(9, "<|end|>", b"<|end|>", -1.5, is_visible=False),
)


def request(
    tools: tuple[Tool, ...] = (), prompt_token_ids: Sequence[int] | None = None, **options: Any
) -> Request:
    asked: dict[str, Any] = {"include_usage": True, "reasoning_fields": ("reasoning_content",)} | options
    return Request(
        "org/model",
        Conversation((), tools),
        options=RequestOptions(**asked),
        prompt_report=PromptReport(prompt_token_ids),
    )


def encoder(of: Request | None = None, **more: Any) -> ByteEncoder:
    more |= {"id": ID, "created": CREATED, "usage": shapes.USAGE}
    return event_stream.encoder(chat, of or request(), **more)


def stream(
    events: tuple[Event, ...] | list[Event], finished: Finished | None = None, of: Request | None = None
) -> bytes:
    encoding = encoder(of)
    streamed = b"".join(encoding.feed(event) for event in events)
    return encoding.start() + streamed + encoding.close(finished or shapes.finished())


def encoded(shape: shapes.Shape, of: Request | None = None, **more: Any) -> bytes:
    more |= {"id": ID, "created": CREATED}
    return event_stream.body(chat, of or request(), shape.turn, shape.finished, **more)


def body(shape: shapes.Shape, of: Request | None = None) -> dict[str, Any]:
    return json.loads(encoded(shape, of))  # type: ignore[no-any-return]


def accumulated(data: bytes) -> dict[str, Any]:
    """What the SDK's accumulator makes of a stream."""
    with openai_sdk(data).chat.completions.stream(model="m", messages=[]) as events:
        return plain(events.until_done().current_completion_snapshot)


def plain(completion: ChatCompletion) -> dict[str, Any]:
    """A completion without what only one of the two ways has: nulls, no annotations, and indices of streamed calls."""
    dumped = completion.model_dump(exclude_none=True)
    message = dumped["choices"][0]["message"]
    assert message.pop("annotations", []) == []
    for call in message.get("tool_calls", ()):
        call.pop("index", None)
    return dumped


def parsed(data: dict[str, Any]) -> dict[str, Any]:
    sdk = openai_sdk(json.dumps(data).encode())
    return plain(sdk.chat.completions.create(model="m", messages=[]))


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=shapes.names)
class TestShapes:
    def test_golden(self, shape: shapes.Shape, golden: Callable[[str, bytes], None]) -> None:
        golden(f"chat/{shape.name}.sse", stream(shape.events, shape.finished))
        golden(f"chat/{shape.name}.json", encoded(shape))

    def test_the_end_is_sealed_with_the_last_call(self, shape: shapes.Shape) -> None:  # C34
        """The body says what the stream says, and a turn without a whole call has none."""

        def seal_end() -> str:
            return "the end"

        encoding = encoder(seal_end=seal_end)
        streamed = b"".join(map(encoding.feed, shape.events))
        data = encoding.start() + streamed + encoding.close(shape.finished)
        Grammar(data)
        message = json.loads(encoded(shape, seal_end=seal_end))["choices"][0]["message"]
        called = [call.id for call in shape.turn.tool_calls if call.complete]
        ends = shape.finished.reason == "stop" and bool(called)
        details = message.get("reasoning_details", [])
        assert [(d["type"], d["data"], d["id"]) for d in details] == (
            [("reasoning.encrypted", "the end", called[-1])] if ends else []
        )
        assert data.count(b'"reasoning_details":') == ends
        assert not ends or json.dumps(details, separators=(",", ":")).encode() in data

    def test_stream_is_grammatical(self, shape: shapes.Shape) -> None:  # C13 C14
        Grammar(stream(shape.events, shape.finished))

    def test_stream_adds_up_to_the_body(self, shape: shapes.Shape) -> None:  # C9 C32
        streamed, whole = accumulated(stream(shape.events, shape.finished)), parsed(body(shape))
        if not shape.streams_as_folded:
            shown, made = (m["choices"][0]["message"].pop("tool_calls", []) for m in (streamed, whole))
            assert [call for call in shown if call in made] == made
        assert streamed == whole

    def test_nothing_is_lost(self, shape: shapes.Shape) -> None:  # C17
        seen = Grammar(stream(shape.events, shape.finished))
        assert seen.text == shape.turn.text
        thoughts = [part.text for part in shape.turn.parts if isinstance(part, Reasoning)]
        assert seen.reasoning == "\n\n".join(thoughts)

    def test_finish_reason(self, shape: shapes.Shape) -> None:  # C15 C16
        seen = Grammar(stream(shape.events, shape.finished))
        whole = any(call.complete for call in shape.turn.tool_calls)
        expected = {
            "stop": "tool_calls" if whole else "stop",
            "stop_sequence": "stop",
            "length": "length",
            "context_overflow": "length",
            "cancelled": "length",
            "refusal": "content_filter",
        }[shape.finished.reason]
        assert seen.finish_reason == expected == body(shape)["choices"][0]["finish_reason"]

    def test_arguments_are_the_models_own_bytes(self, shape: shapes.Shape) -> None:  # C3 C12
        seen = {call["id"]: call["arguments"] for call in Grammar(stream(shape.events)).calls}
        for call in shape.turn.tool_calls:
            if not (call.complete or call.arguments):
                assert call.id not in seen  # C15: SDKs would run it as a call without arguments
                continue
            assert seen[call.id] == (call.arguments or "{}")
            if call.complete:
                assert isinstance(json.loads(seen[call.id]), dict)

    def test_a_stream_that_fails_is_grammatical_and_raises(self, shape: shapes.Shape) -> None:  # C39
        encoding = encoder()
        data = encoding.start() + b"".join(encoding.feed(event) for event in shape.events)
        data += encoding.fail(EngineFailed("the engine stopped; send the request again"))
        assert Grammar(data).error is not None
        with pytest.raises(openai.APIError, match="the engine stopped") as caught:
            accumulated(data)
        assert caught.value.code == "server_error"


def test_an_event_that_says_nothing_is_not_sent() -> None:
    encoding = encoder()
    nothing: list[Event] = [
        TextDelta("", ""),
        ReasoningDelta("", ""),
        Markup("<x>"),
        ToolCallStart(0, "c", "f", ""),
    ]
    assert [encoding.feed(event) for event in nothing] == [b""] * 4
    assert encoding.feed(ArgumentsDelta(0, "", "")) == b""


def test_order_is_the_models() -> None:
    shape = shapes.by_name["interleaved"]
    encoding = encoder()
    sent = [data for event in shape.events if (data := encoding.feed(event))]
    kinds = [next(iter(json.loads(data.split(b"\n")[0][6:])["choices"][0]["delta"])) for data in sent]
    dispatched = ["reasoning_content", "content", "reasoning_content", *["tool_calls"] * 2]
    assert kinds == [*dispatched, "reasoning_content", "content"]


def test_a_call_is_live_from_its_first_piece() -> None:  # C10
    encoding = encoder()
    start, first, *_ = shapes.call(0, "read_file", '{"path', '": "a"}')
    assert encoding.feed(start) == b""
    data = encoding.feed(first)
    assert data.count(b"data: ") == 2
    assert b'"name":"read_file"' in data
    assert b'{"arguments":"{\\"path"}' in data


def test_a_call_that_breaks_before_its_arguments_is_never_seen() -> None:  # C17
    events = (
        *shapes.text("Write "),
        *shapes.broken(0, "x", raw=" as in prose"),
        *shapes.call(1, "now", "{}"),
    )
    seen = Grammar(stream(events))
    assert [call["name"] for call in seen.calls] == ["now"]
    assert seen.text == fold(events).text


def test_a_broken_call_never_becomes_valid_and_never_counts() -> None:  # C15 C17
    shape = shapes.by_name["broken_call"]
    seen = Grammar(stream(shape.events))
    assert seen.finish_reason == "stop"
    [call] = seen.calls
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(call["arguments"])
    assert '<tool_call>\n{"name": "x", "arguments": {"a": oops and so on.' in seen.text


def test_keep_alive_is_a_comment() -> None:  # C11
    encoding = encoder()
    alive = encoding.keep_alive()
    assert alive.startswith(b":")
    data = encoding.start() + alive + encoding.feed(TextDelta("hi", "hi")) + alive
    assert accumulated(data + encoding.close(shapes.finished()))["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize(
    "fields", [("reasoning_content",), ("reasoning",), ("reasoning_content", "reasoning"), ()]
)
def test_reasoning_leaves_in_the_fields_asked_for(fields: tuple[str, ...]) -> None:
    of = request(reasoning_fields=fields)
    shape = shapes.by_name["two_calls_reasoning_between"]
    whole = body(shape, of)
    message = whole["choices"][0]["message"]
    thoughts = {f: message[f] for f in ("reasoning_content", "reasoning") if f in message}
    assert thoughts == dict.fromkeys(fields, "First the list.\n\nThen the file.")
    assert accumulated(stream(shape.events, shape.finished, of)) == parsed(whole)


def test_usage_only_when_asked_for() -> None:
    assert Grammar(stream(())).usage == {
        "prompt_tokens": 1234,
        "completion_tokens": 56,
        "total_tokens": 1290,
        "prompt_tokens_details": {"cached_tokens": 1200},
        "completion_tokens_details": {"reasoning_tokens": 7},
    }
    assert Grammar(stream((), of=request(include_usage=False))).usage is None


CUSTOM = (Tool("apply_patch", "Edits.", kind="custom"),)


@pytest.mark.parametrize(
    ("pieces", "raw_input"),
    [
        (('{"input": "*** Begin', "\\n+\\ud83d", '\\ude42 \\"x\\""}'), '*** Begin\n+🙂 "x"'),
        (('{"in', 'put":"', "a", "\\", "n", '"', "}"), "a\n"),
        (("{}",), "{}"),
        (('{"input": ""}',), ""),
    ],
)
def test_a_custom_call_streams_its_raw_input(pieces: tuple[str, ...], raw_input: str) -> None:  # C25
    of = request(CUSTOM)
    events = shapes.call(0, "apply_patch", *pieces)
    [call] = Grammar(stream(events, of=of)).calls
    assert call == {"id": shapes.call_id(0), "type": "custom", "name": "apply_patch", "arguments": raw_input}
    whole = body(shapes.Shape("custom", events, shapes.finished()), of)["choices"][0]["message"]["tool_calls"]
    fields = {"name": "apply_patch", "input": raw_input}
    assert whole == [{"id": shapes.call_id(0), "type": "custom", "custom": fields}]


def test_a_cut_custom_call_shows_what_there_is() -> None:  # C15
    of = request(CUSTOM)
    events = shapes.call(0, "apply_patch", '{"input": "ab', "\\u00", ends=False)
    shape = shapes.Shape("cut", events, shapes.finished())
    seen = Grammar(stream(shape.events, of=of))
    assert (seen.calls[0]["arguments"], seen.finish_reason) == ("ab", "stop")
    assert body(shape, of)["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == "ab"


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_call_of_which_nothing_but_the_name_came_is_not_shown(blank: str) -> None:  # C12 C15
    events = (*shapes.text("a"), ToolCallStart(0, "i", "ls", "<c>"), ArgumentsDelta(0, blank, blank))
    shape = shapes.Shape("cut", events, shapes.finished("length"))
    [choice] = accumulated(stream(events, shapes.finished("length")))["choices"]
    assert choice["message"].get("tool_calls") is None
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in body(shape)["choices"][0]["message"]
    begun = stream((*events, ArgumentsDelta(0, "{", "{")), shapes.finished("length"))
    assert [call["arguments"] for call in Grammar(begun).calls] == [blank + "{"]
    ended = stream((*events, ToolCallEnd(0)))
    assert [call["arguments"] for call in Grammar(ended).calls] == ["{}"]


def test_half_a_surrogate_pair_does_not_raise() -> None:
    events = (*shapes.text("a\ud83d"), *shapes.reasoning("\udc00"), *shapes.call(0, "f\ud800", '"\ud800"'))
    seen = Grammar(stream(events))
    assert (seen.text, seen.reasoning) == ("a\ufffd", "\ufffd")
    shape = shapes.Shape("half", events, shapes.finished())
    assert body(shape)["choices"][0]["message"]["content"] == "a\ufffd"


@pytest.mark.parametrize(
    ("error", "raised", "code", "words"),
    [
        (
            ContextOverflow(9000, 8192),
            openai.BadRequestError,
            "context_length_exceeded",
            "maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens",
        ),
        (ModelNotFound("x", ("y",)), openai.NotFoundError, "model_not_found", "'x' is not served here"),
        (Unauthorized("no key"), openai.AuthenticationError, "invalid_api_key", "no key"),
        (Overloaded("all busy"), openai.InternalServerError, "overloaded", "is overloaded: all busy"),
        (EngineFailed("it died"), openai.InternalServerError, "server_error", "server error: it died"),
    ],
)
def test_errors_reach_the_sdk(error: Any, raised: type[openai.APIStatusError], code: str, words: str) -> None:
    # C43 C44
    status, data = encode_error(error)
    with pytest.raises(raised, match=words) as caught:
        openai_sdk(data, status).chat.completions.create(model="m", messages=[])
    assert caught.value.code == code
    assert caught.value.param == getattr(error, "param", None) or code == "context_length_exceeded"


TEXT = st.text(max_size=6)
INDEX = st.integers(0, 3)
EVENT = st.one_of(
    st.builds(TextDelta, TEXT, TEXT),
    st.builds(ReasoningDelta, TEXT, TEXT),
    st.builds(Markup, TEXT),
    st.builds(ToolCallStart, INDEX, st.just("c"), st.sampled_from(["f", "apply_patch"]), TEXT),
    st.builds(ArgumentsDelta, INDEX, st.one_of(TEXT, st.just('{"input": "')), TEXT),
    st.builds(ToolCallEnd, INDEX),
    st.builds(ToolCallBroken, INDEX, TEXT),
    st.just(TokenLogprobs(TOKENS)),
    st.just(PromptLogprobs(TOKENS)),
    st.just(UsageUpdate(shapes.USAGE)),
)


@given(
    st.lists(EVENT, max_size=20),
    st.sampled_from(["stop", "length", "refusal", "cancelled", "error"]),
    st.booleans(),
)
def test_any_events_make_a_grammatical_stream(events: list[Event], reason: Any, expected: bool) -> None:
    for i, event in enumerate(events):
        if isinstance(event, ToolCallStart):
            event.id = f"call_{i}"
    Grammar(stream(events, Finished(reason), request(CUSTOM, return_token_ids=expected)))


def arguments(value: str, size: int) -> list[str]:
    text = json.dumps({"input": value}, ensure_ascii=len(value) % 2 == 0)
    return [text[i : i + size] for i in range(0, len(text), size)]


NAME, PIECES = (
    st.sampled_from(["f", "apply_patch"]),
    st.builds(arguments, st.text(max_size=12), st.integers(1, 5)),
)
PART: st.SearchStrategy[Callable[[int], tuple[Event, ...]]] = st.one_of(
    st.text(max_size=8).map(lambda pieces: lambda index: shapes.text(*pieces)),
    st.text(max_size=8).map(lambda pieces: lambda index: shapes.reasoning(*pieces)),
    st.builds(lambda name, pieces: lambda index: shapes.call(index, name, *pieces), NAME, PIECES),
    st.builds(
        lambda name, pieces: lambda index: shapes.call(index, name, *pieces[:-2], ends=False), NAME, PIECES
    ),
)


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "piece by piece"])
@pytest.mark.parametrize("between", [(Markup("|"),), shapes.text("x"), shapes.call(0, "f", "{}")])
@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("a", "b", "a\n\nb"),
        ("a\n", "b", "a\n\nb"),
        ("a\n\n", "b", "a\n\nb"),
        ("a\n\n\n", "b", "a\n\n\nb"),
        ("\n", "b", "\n\nb"),
        ("a ", "\nb", "a \n\n\nb"),
        ("", "b", "b"),
    ],
)
def test_a_break_stands_between_two_thoughts(
    first: str, second: str, shown: str, between: tuple[Event, ...], pieces: bool
) -> None:
    parts = [shapes.reasoning(*(text if pieces else (text,)), closed=False) for text in (first, second)]
    events = (*parts[0], TokenLogprobs(()), *between, *parts[1])
    shape = shapes.Shape("", events, shapes.finished())
    assert Grammar(stream(events)).reasoning == shown
    assert body(shape)["choices"][0]["message"]["reasoning_content"] == shown


@given(st.lists(PART, max_size=6))
def test_any_turn_adds_up_to_its_body(parts: list[Callable[[int], tuple[Event, ...]]]) -> None:  # C9 C32
    events = tuple(event for index, part in enumerate(parts) for event in part(index))
    shape = shapes.Shape("any", events, shapes.finished())
    of = request(CUSTOM)
    seen, whole = Grammar(stream(events, of=of)), body(shape, of)["choices"][0]
    message = whole["message"]
    assert seen.text == (message["content"] or "")
    assert seen.reasoning == message.get("reasoning_content", "")
    assert seen.finish_reason == whole["finish_reason"]
    dispatched = [(c["id"], c["type"], *c[c["type"]].values()) for c in message.get("tool_calls", ())]
    assert [tuple(c.values()) for c in seen.calls] == dispatched
