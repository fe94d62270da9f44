"""The stream and the body of every shape, their grammar, and what each end and error is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from singletree import errors
from singletree.conversation import Conversation, Reasoning, Request, Text, ToolCall, Turn
from singletree.events import (
    ArgumentsDelta,
    Event,
    FinishReason,
    Markup,
    ReasoningDelta,
    TextDelta,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from singletree.protocols import messages
from singletree.request_options import RequestOptions

from . import event_stream
from . import grammar_messages as grammar
from .event_stream import ByteEncoder
from .shapes import SHAPES, USAGE, Shape, by_name, call, finished, names, reasoning, text

REQUEST = Request("m", Conversation(()), stream=True)
KNOWN_AT_START = Usage(prompt_tokens=1234, cached_tokens=1200)


def encoder(request: Request = REQUEST, **more: Any) -> ByteEncoder:
    return event_stream.encoder(messages, request, id="msg_1", usage=KNOWN_AT_START, **more)


def stream(shape: Shape, **more: Any) -> bytes:
    encode = encoder(**more)
    return encode.start() + b"".join(map(encode.feed, shape.events)) + encode.close(shape.finished)


def body(shape: Shape, request: Request = REQUEST, **more: Any) -> bytes:
    return event_stream.body(messages, request, shape.turn, shape.finished, id="msg_1", **more)


def checked_stream(*events: Event) -> grammar.Grammar:
    return grammar.check(stream(Shape("", events, finished())))


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_golden_stream(shape: Shape, golden: Callable[[str, bytes], None]) -> None:
    golden(f"messages/{shape.name}.sse", stream(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_golden_body(shape: Shape, golden: Callable[[str, bytes], None]) -> None:
    golden(f"messages/{shape.name}.json", body(shape) + b"\n")


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_grammar(shape: Shape) -> None:  # C13 C14
    seen = grammar.check(stream(shape))
    content = json.loads(body(shape))["content"]
    if shape.streams_as_folded:
        assert [b.type for b in seen.blocks] == [b["type"] for b in content]


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_complete_calls_stream_their_own_arguments(shape: Shape) -> None:  # C3 C12
    blocks = [b for b in grammar.check(stream(shape)).blocks if b.type == "tool_use"]
    for part in shape.turn.tool_calls:
        if not (part.complete or part.arguments):
            assert not blocks  # C15: it would read as a call without arguments, and be run
            continue
        block = next(b for b in blocks if b.start["id"] == part.id)
        assert block.start["name"] == part.name
        assert block.text == (part.arguments or "{}" if part.complete else part.arguments)
        if part.complete:
            json.loads(block.text)


def test_text_is_never_lost() -> None:  # C17
    for shape in SHAPES:
        shown = "".join(b.text for b in grammar.check(stream(shape)).blocks if b.type == "text")
        assert shown == shape.turn.text


def test_every_delta_is_one_event_and_nothing_waits() -> None:  # C10
    encode = encoder()
    encode.feed(TextDelta("a", "a"))
    for piece in ("b", "好", "\n\n", "\u2027", '"'):
        sent = encode.feed(TextDelta(piece, piece))
        assert sent.count(b"\n\n") == 1
        assert sent.endswith(b'"text":' + json.dumps(piece, ensure_ascii=False).encode() + b"}}\n\n")


def test_a_call_stops_at_its_end_while_generation_goes_on() -> None:
    encode = encoder()
    for event in call(0, "exec", '{"a": 1}', ends=False):
        encode.feed(event)
    assert encode.feed(ToolCallEnd(0)) == (
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    )
    assert encode.feed(Markup("</tool_call>")) == b""
    assert encode.feed(TextDelta("x", "x")).startswith(b"event: content_block_start\n")


def test_start_is_message_start_and_a_ping_with_exact_counts() -> None:  # C8 C11 C28
    start, ping = encoder().start().split(b"\n\n")[:2]
    usage = json.loads(start.partition(b"data: ")[2])["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (34, 1200)
    assert (usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]) == (0, 0)
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        == 1234
    )
    assert ping == b'event: ping\ndata: {"type":"ping"}'
    assert encoder().keep_alive() == ping + b"\n\n"


def test_usage_at_the_end_is_the_engines() -> None:  # C8
    last = grammar.check(stream(by_name["text_only"])).last["usage"]
    whole = json.loads(body(by_name["text_only"]))["usage"]
    assert {k: v for k, v in whole.items() if k not in grammar.AT_START} == last
    assert last == {
        "input_tokens": USAGE.prompt_tokens - USAGE.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": USAGE.cached_tokens,
        "output_tokens": USAGE.completion_tokens,
        "output_tokens_details": {"thinking_tokens": USAGE.reasoning_tokens},
        "server_tool_use": None,
    }


def test_more_cached_than_sent_never_counts_below_zero() -> None:
    end = replace(finished(), usage=Usage(prompt_tokens=10, cached_tokens=16))
    usage = grammar.check(stream(Shape("", (), end))).last["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (0, 10)


WHOLE, CUT = call(0, "f", "{}"), call(0, "f", '{"a', ends=False)
OVERFLOW = "model_context_window_exceeded"
REASONS: list[tuple[FinishReason, str, str, str]] = [
    # finish, without a call, with a whole one, with a cut one
    ("stop", "end_turn", "tool_use", "end_turn"),
    ("stop_sequence", "stop_sequence", "stop_sequence", "stop_sequence"),
    ("length", "max_tokens", "max_tokens", "max_tokens"),
    ("context_overflow", OVERFLOW, OVERFLOW, OVERFLOW),
    ("refusal", "refusal", "refusal", "refusal"),
    ("cancelled", "max_tokens", "max_tokens", "max_tokens"),
    ("error", "max_tokens", "max_tokens", "max_tokens"),
]


@pytest.mark.parametrize(("finish", *"xyz"), REASONS, ids=[r[0] for r in REASONS])
def test_stop_reasons(finish: FinishReason, x: str, y: str, z: str) -> None:  # C15 C16
    sequence = "END" if finish == "stop_sequence" else None
    for events, expected in ((text("t"), x), (WHOLE, y), (CUT, z)):
        shape = Shape("", events, finished(finish, sequence))
        delta = grammar.check(stream(shape)).last["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == (expected, sequence)
        whole = json.loads(body(shape))
        assert (whole["stop_reason"], whole["stop_sequence"]) == (expected, sequence)


def test_a_whole_call_and_a_cut_one_after_it_is_no_tool_use() -> None:  # C15
    shape = by_name["whole_call_then_cut_call"]
    seen = grammar.check(stream(shape))
    assert [b.text for b in seen.blocks][1] == '{"path": "'
    assert seen.last["delta"]["stop_reason"] == "max_tokens"
    assert json.loads(body(shape))["content"][1]["input"] == {}


def test_a_call_of_which_nothing_but_the_name_came_is_not_shown() -> None:  # C12 C15
    start = ToolCallStart(0, "i", "ls", "<c>")
    cuts: list[tuple[Event, ...]] = [
        (start,),
        (start, ArgumentsDelta(0, " \n", " \n")),
        (start, Markup("x")),
    ]
    for cut in cuts:
        assert [b.type for b in checked_stream(*text("a"), *cut).blocks] == ["text"]
        whole = json.loads(body(Shape("", (*text("a"), *cut), finished("length"))))
        assert [b["type"] for b in whole["content"]] == ["text"]
        assert whole["stop_reason"] == "max_tokens"
        encode = encoder()
        sent = encode.start() + b"".join(map(encode.feed, cut)) + encode.fail(errors.EngineFailed("gone"))
        assert grammar.check(sent).blocks == []


def test_a_broken_call_that_was_shown_ends_and_its_text_follows() -> None:  # C17
    seen = grammar.check(stream(by_name["broken_call"]))
    assert [(b.type, b.text) for b in seen.blocks] == [
        ("text", "See "),
        ("tool_use", '{"a": '),
        ("text", '<tool_call>\n{"name": "x", "arguments": {"a": oops and so on.'),
    ]
    assert seen.last["delta"]["stop_reason"] == "end_turn"


def test_a_call_that_breaks_before_its_arguments_is_never_shown() -> None:  # C17
    events = (*text("See "), ToolCallStart(0, "i", "x", "<c>x"), Markup(" "), ToolCallBroken(0, "?"))
    assert [(b.type, b.text) for b in checked_stream(*events, *text("!")).blocks] == [
        ("text", "See "),
        ("text", "<c>x ?!"),
    ]


def test_white_space_alone_does_not_show_a_call() -> None:
    start = ToolCallStart(0, "i", "x", "")
    seen = checked_stream(
        start, ArgumentsDelta(0, " \n", " \n"), ArgumentsDelta(0, ' {"a": 1}', ""), ToolCallEnd(0)
    )
    assert [b.text for b in seen.blocks] == ['{"a": 1}']
    assert [b.text for b in checked_stream(start, ArgumentsDelta(0, " ", " "), ToolCallEnd(0)).blocks] == [
        "{}"
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_deltas_cut_anywhere_make_the_same_blocks(shape: Shape) -> None:  # C9
    whole = [(b.type, b.start, b.text) for b in grammar.check(stream(shape)).blocks]
    for at, event in enumerate(shape.events):
        for cut in halves(event):
            split = shape._replace(events=(*shape.events[:at], *cut, *shape.events[at + 1 :]))
            assert [(b.type, b.start, b.text) for b in grammar.check(stream(split)).blocks] == whole


def halves(event: Event) -> list[tuple[Event, Event]]:
    """``event`` as two of its kind, cut at every place."""
    if isinstance(event, TextDelta | ReasoningDelta):
        kind, text = type(event), event.text
        return [(kind(text[:i], text[:i]), kind(text[i:], text[i:])) for i in range(len(text) + 1)]
    if isinstance(event, ArgumentsDelta):
        index, text = event.index, event.json
        cuts = [(text[:i], text[i:]) for i in range(len(text) + 1)]
        return [(ArgumentsDelta(index, a, a), ArgumentsDelta(index, b, b)) for a, b in cuts]
    return []


def test_events_of_no_call_send_nothing() -> None:
    seen = checked_stream(ArgumentsDelta(0, "{}", "{}"), ToolCallEnd(0), ArgumentsDelta(3, "1", "1"))
    assert seen.blocks == []
    assert seen.last["delta"]["stop_reason"] == "end_turn"


def test_signatures_are_asked_for_by_span_and_come_before_the_stop() -> None:
    shape = by_name["two_calls_reasoning_between"]
    seen = grammar.check(stream(shape, seal="capsule-{}".format))
    assert [b.signatures for b in seen.blocks if b.type == "thinking"] == [["capsule-0"], ["capsule-1"]]
    whole = json.loads(body(shape, seal="capsule-{}".format))
    thinking = [b["signature"] for b in whole["content"] if b["type"] == "thinking"]
    assert thinking == ["capsule-0", "capsule-1"]


def at_the_end() -> str:
    """Seals the end of a turn whose arguments travel as objects."""
    return "the end"


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_the_end_is_sealed_in_a_block_behind_calls_alone(shape: Shape) -> None:
    """The body says what the stream says, and a turn without a whole call ends in its words."""
    seen = grammar.check(stream(shape, seal="s{}".format, seal_end=at_the_end))
    content = json.loads(body(shape, seal="s{}".format, seal_end=at_the_end))["content"]
    sealed = [block.start for block in seen.blocks if block.type == "redacted_thinking"]
    assert sealed == [{"data": block["data"]} for block in content if block["type"] == "redacted_thinking"]
    thinks = any(block.type == "thinking" for block in seen.blocks)
    wanted = thinks and shape.finished.reason == "stop" and any(c.complete for c in shape.turn.tool_calls)
    assert sealed == ([{"data": "the end"}] if wanted else [])
    assert all(block.type != "redacted_thinking" for block in seen.blocks[:-1])


def test_signatures_are_empty_without_a_signer_and_kept_when_the_part_has_one() -> None:
    assert grammar.check(stream(by_name["only_reasoning"])).blocks[0].signatures == [""]
    turn = Turn("assistant", (Reasoning("a", {"signature": "s"}), Reasoning("b")))
    whole = event_stream.body(messages, REQUEST, turn, finished())
    assert [b["signature"] for b in json.loads(whole)["content"]] == ["s", ""]


def test_omitted_thinking_leaves_a_signature_only() -> None:
    request = replace(REQUEST, options=RequestOptions(hidden_thinking=True))
    shape = by_name["reasoning_call"]
    seen = grammar.check(stream(shape, request=request, seal="s{}".format))
    assert (seen.blocks[0].type, seen.blocks[0].text) == ("thinking", "")
    assert seen.blocks[0].signatures == ["s0"]
    assert json.loads(body(shape, request, seal="s{}".format))["content"][0] == {
        "type": "thinking",
        "thinking": "",
        "signature": "s0",
    }


FAILURES: list[tuple[errors.SingletreeError, int, str]] = [
    (errors.InvalidRequest("x", param="model"), 400, "invalid_request_error"),
    (errors.ContextOverflow(210000, 200000), 400, "invalid_request_error"),
    (errors.Unauthorized("x"), 401, "authentication_error"),
    (errors.ModelNotFound("x"), 404, "not_found_error"),
    (errors.RouteNotFound("x"), 404, "not_found_error"),
    (errors.MethodNotAllowed("x"), 405, "invalid_request_error"),
    (errors.BodyTooLarge("x"), 413, "request_too_large"),
    (errors.UnsupportedEncoding("x"), 415, "invalid_request_error"),
    (errors.Overloaded("x"), 529, "overloaded_error"),
    (errors.EngineFailed("x"), 500, "api_error"),
    (errors.SingletreeError("x"), 500, "api_error"),
]


@pytest.mark.parametrize(("error", "status", "type_"), FAILURES, ids=[type(f[0]).__name__ for f in FAILURES])
def test_errors(error: errors.SingletreeError, status: int, type_: str) -> None:  # C39 C44
    words = f"Internal server error: {error.message}" if status == 500 else error.message
    shown = {"type": "error", "error": {"type": type_, "message": words}}
    assert messages.encode_error(error) == (status, json.dumps(shown, separators=(",", ":")).encode())
    encode = encoder()
    assert grammar.check(encode.start() + encode.fail(error)).last == shown | {"request_id": "req_1"}


def test_a_status_that_no_error_has_yet() -> None:
    error = errors.Rejected("x")
    error.status = 422
    assert json.loads(messages.encode_error(error)[1])["error"]["type"] == "invalid_request_error"


def test_overflow_is_in_the_words_that_make_claude_code_compact() -> None:  # C43
    _, shown = messages.encode_error(errors.ContextOverflow(210000, 200000))
    assert json.loads(shown)["error"]["message"] == "prompt is too long: 210000 tokens > 200000 maximum"


def test_the_request_id_is_shown_when_given() -> None:  # C44
    error = errors.EngineFailed("x")
    assert json.loads(messages.encode_error(error, request_id="req_7")[1])["request_id"] == "req_7"
    encode = encoder(new_id=lambda prefix: f"{prefix}7")
    assert grammar.check(encode.start() + encode.fail(error)).last["request_id"] == "req_7"


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_failing_anywhere_closes_the_block_and_is_the_end(shape: Shape) -> None:  # C39
    for length in range(len(shape.events) + 1):
        encode = encoder()
        sent = encode.start() + b"".join(map(encode.feed, shape.events[:length]))
        sent += encode.fail(errors.EngineFailed("gone"))
        assert grammar.check(sent).last["error"]["type"] == "api_error"
        assert (encode.fail(errors.EngineFailed("again")), encode.close(finished()), encode.keep_alive()) == (
            b"",
        ) * 3


def test_pings_stand_anywhere_before_the_end() -> None:  # C11
    encode = encoder()
    sent = [encode.start(), encode.keep_alive()]
    for event in by_name["interleaved"].events:
        sent += [encode.feed(event), encode.keep_alive()]
    sent += [encode.close(finished()), encode.keep_alive()]
    grammar.check(b"".join(sent))
    assert sent[-1] == b""


def test_half_a_surrogate_pair_does_not_stop_a_stream() -> None:
    half, pair = "a\ud83d", "\ud83d\ude42"
    events = (TextDelta(half, half), TextDelta(pair, pair), *call(0, half, f'{{"x": "{half}"}}'))
    assert [b.text for b in checked_stream(*events).blocks] == ["a\ufffd🙂", '{"x": "a\ufffd"}']
    parts = (Text(half), Reasoning(half), ToolCall(half, f'{{"x": "{half}"}}', "i"))
    whole = event_stream.body(messages, REQUEST, Turn("assistant", parts), finished())
    assert json.loads(whole)["content"][2]["input"] == {"x": "a\ufffd"}


def test_arguments_in_a_body_keep_their_spelling() -> None:  # C3
    spelled = '{"b":1.0,  "a": 1e3, "big": 12345678901234567890123, "\\u00e9": "\\/", "b": 2}'
    shape = Shape("", call(0, "f", spelled), finished())
    assert b'"input":' + spelled.encode() + b"," in body(shape)


@pytest.mark.parametrize(
    "arguments", ["oops", '{"a": 1', '{"a": 1}}', "[" * 100_000, "nan", '{"a":\n"b\nc"}']
)
def test_arguments_that_are_no_json_do_not_break_a_body(arguments: str) -> None:
    turn = Turn("assistant", (ToolCall("f", arguments, "i"),))
    whole = event_stream.body(messages, REQUEST, turn, finished())
    assert json.loads(whole)["content"][0]["input"] in ({}, {"a": 1})


def test_count() -> None:  # C27
    assert messages.encode_count(304) == b'{"input_tokens":304}'


def test_reasoning_marks_that_hold_nothing_show_nothing() -> None:
    assert checked_stream(*reasoning(), *reasoning("")).blocks == []
    assert [
        b.text
        for b in checked_stream(ReasoningDelta("a", "a"), TextDelta("", ""), ReasoningDelta("b", "b")).blocks
    ] == [
        "a",
        "b",
    ]
