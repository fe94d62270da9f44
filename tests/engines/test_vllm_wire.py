"""The bytes of vLLM's completions: what is asked, and what recorded answers mean however they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from engines.vllm_recording import (
    OF,
    PARIS,
    QUESTION,
    SCENARIOS,
    SCHEMA,
    STREAMS,
    STRUCTURAL_TAG,
    WINDOW,
    Exchange,
)
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob, token_limit
from singletree.errors import (
    ContextOverflow,
    EngineFailed,
    EngineUnfit,
    InvalidRequest,
    Overloaded,
    SingletreeError,
)
from singletree.remote.vllm.wire import CompletionReader, CompletionsWire


def as_chunk(new: list[int] | Chunk | None) -> Chunk | None:
    """What a reader returns, as the engine yields it."""
    if isinstance(new, list):
        return Chunk(new) if new else None
    return new


def read(
    pieces: Iterable[bytes], prompt_tokens: int = 16, *, echoed: Sequence[int] = ()
) -> tuple[list[Chunk], CompletionReader]:
    """What the engine's loop does, without the engine."""
    reader = CompletionReader(echoed or range(prompt_tokens), echoes=bool(echoed))
    chunks: list[Chunk | None] = []
    for piece in pieces:
        chunks.append(as_chunk(reader.feed(piece)))
        if reader.done:
            break
    else:
        chunks.append(reader.close())
    return [c for c in chunks if c is not None], reader


def outcome(pieces: Iterable[bytes]) -> tuple[Any, ...]:
    """All that a stream says, whatever its chunks."""
    chunks, reader = read(pieces)
    tokens = [t for c in chunks for t in c.token_ids]
    logprobs = [row for c in chunks for row in c.logprobs or ()]
    finishes = [c.finish for c in chunks]
    assert reader.failure is None or finishes[-1:] in ([], [None])
    assert all(f is None for f in finishes[:-1])
    last = chunks[-1] if chunks else Chunk(())
    return tokens, logprobs, last.finish, last.cached_tokens, type(reader.failure), str(reader.failure)


def event(**choice: Any) -> bytes:
    fields = {"index": 0, "text": "x", "token_ids": [5], "finish_reason": None, **choice}
    return b"data: %b\n\n" % json.dumps({"choices": [fields]}).encode()


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_stream(name: str) -> None:
    tokens, finish, cached, failure = STREAMS[name]
    exchange = Exchange.load(name)
    assert exchange.status == 200
    found = outcome([exchange.answer])
    assert tokens is None or found[0] == tokens
    assert (found[2], found[3]) == (finish, cached)
    assert found[4] is (failure or type(None))


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_stream_cut_anywhere(name: str) -> None:
    answer = Exchange.load(name).answer
    whole = outcome([answer])
    assert outcome(answer[i : i + 1] for i in range(len(answer))) == whole
    for cut in range(1, len(answer)):
        assert outcome((answer[:cut], answer[cut:])) == whole, cut


def test_recorded_stream_truncated_anywhere_ends_or_fails() -> None:  # C39
    answer = Exchange.load("answer").answer
    reported = answer.index(b'"finish_reason":"stop"')
    end_of_event = answer.index(b"\n", reported)
    for cut in range(len(answer)):
        tokens, _, finish, _, failure, why = outcome([answer[:cut]] if cut else [])
        assert tokens == PARIS[: len(tokens)]
        if cut <= end_of_event:
            assert (finish, failure) == (None, EngineFailed)
            assert "without a finish reason" in why
        else:
            assert (tokens, finish) == (PARIS, "stop")


def test_tokens_leave_as_they_arrive() -> None:
    answer = Exchange.load("answer").answer
    events = [e + b"\n\n" for e in answer.split(b"\n\n")]
    chunks, _ = read(events)
    assert [list(c.token_ids) for c in chunks] == [[t] for t in PARIS] + [[]]


def test_tokens_that_arrive_together_leave_together() -> None:
    chunks, _ = read([Exchange.load("answer").answer])
    assert chunks == [Chunk(PARIS, "stop", 0)]


def test_logprobs_have_the_token_first_and_no_token_twice() -> None:
    chunks, _ = read([Exchange.load("logprobs").answer])
    rows = chunks[0].logprobs
    assert rows is not None
    assert [row[0][0] for row in rows] == list(chunks[0].token_ids)
    assert [row[1][0] for row in rows] == [60, 14937, 2240]
    assert all(row[0][1] > row[1][1] for row in rows)
    assert all(len({token for token, _ in row}) == len(row) for row in rows)


def test_logprobs_of_an_unlikely_token_still_put_it_first() -> None:
    fields = {
        "tokens": ["token_id:9", "token_id:5"],
        "token_logprobs": [-8.5, None],
        "top_logprobs": [
            {"token_id:9": -8.5, "token_id:1": -0.1, "token_id:2": -9999.0, "token_id:3": None},
            None,
        ],
    }
    chunks, _ = read([event(token_ids=[9, 5], logprobs=fields)])
    assert chunks[0].logprobs == [[(9, -8.5), (1, -0.1), (2, -9999.0)], ()]


def test_logprobs_of_the_prompt_come_apart_from_those_of_the_answer() -> None:
    answer = Exchange.load("prompt_logprobs").answer
    for cut in range(1, len(answer), 7):
        chunks, reader = read([answer[:cut], answer[cut:]], echoed=QUESTION)
        assert reader.failure is None
        assert [t for c in chunks for t in c.token_ids] == PARIS[:2]
        assert [row[0][0] for c in chunks for row in c.logprobs or ()] == PARIS[:2]
        [received] = [c.prompt_logprobs for c in chunks if c.prompt_logprobs is not None]
        assert received[0] == ()
        assert [row[0][0] for row in received[1:]] == list(QUESTION[1:])
        assert received[1] == [(4093, -13.98673152923584), (29, -0.9867314696311951)]


@pytest.mark.parametrize(
    "noise",
    [b": keep-alive\n\n", b"\n", b"event: message\n", b"id: 3\nretry: 5\n", b"\r\n"],
)
def test_what_is_no_data_is_skipped(noise: bytes) -> None:
    pieces = [
        noise,
        event(),
        noise,
        event(finish_reason="length").replace(b"\n", b"\r\n"),
        noise,
        b"data:[DONE]\n",
    ]
    assert outcome([b"".join(pieces)])[:3] == ([5, 5], [], "length")


def test_several_tokens_in_an_event() -> None:  # C9
    pieces = [event(token_ids=[1, 2, 3]), event(token_ids=[], finish_reason="stop"), b"data: [DONE]\n\n"]
    assert outcome(pieces)[:3] == ([1, 2, 3], [], "stop")


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", "stop"), ("length", "length"), ("abort", "cancelled"), ("repetition", "stop")],
)
def test_finish_reasons(reason: str, finish: str) -> None:  # C16
    assert outcome([event(finish_reason=reason)])[2] == finish


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (event(finish_reason="error"), "'error'"),
        (event(token_ids=None), "0.11"),
        (b"data: not json\n\n", "not a completion chunk"),
        (b'data: {"choices": 3}\n\n', "not a completion chunk"),
        (b'data: {"choices": [{"token_ids": ["x"]}]}\n\n', "not a completion chunk"),
        (b'data: "\xff"\n\n', "not a completion chunk"),
        (event(logprobs={"token_logprobs": [], "top_logprobs": []}), "not a completion chunk"),
        (
            event(logprobs={"token_logprobs": [-1.0], "top_logprobs": [{" the": -1.0}]}),
            "not a completion chunk",
        ),
    ],
)
def test_a_broken_promise_is_an_engine_failure_after_what_stands(bad: bytes, says: str) -> None:
    for pieces in ([event(token_ids=[7]), bad], [event(token_ids=[7]) + bad]):
        tokens, _, finish, _, failure, why = outcome(pieces)
        assert tokens[:1] == [7]
        assert (finish, failure) == (None, EngineFailed if says == "'error'" else EngineUnfit)
        assert says in why


def test_a_line_without_end_is_not_kept() -> None:
    chunks, reader = read(b"x" * 2**22 for _ in range(1000))
    assert not chunks
    assert isinstance(reader.failure, EngineFailed)
    assert "bytes" in reader.failure.message


def error_event(code: Any, message: str) -> bytes:
    return (
        b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"error": {"message": message, "code": code}}).encode()
    )


@pytest.mark.parametrize(
    ("code", "message", "before", "after"),
    [
        (400, "bad grammar", InvalidRequest, EngineFailed),
        (503, "scaling", Overloaded, EngineFailed),
        (500, "oops", EngineFailed, EngineFailed),
        ("weird", "oops", EngineFailed, EngineFailed),
        (None, "oops", EngineFailed, EngineFailed),
    ],
)
def test_error_in_the_stream(
    code: Any, message: str, before: type[SingletreeError], after: type[SingletreeError]
) -> None:
    written = error_event(code, message)
    assert outcome([written])[4] is before
    assert outcome([event(), written])[:1] + outcome([event(), written])[4:5] == ([5], after)
    assert outcome([event() + written])[:1] + outcome([event() + written])[4:5] == ([5], after)
    assert message in outcome([event() + written])[5]
    assert outcome([event(finish_reason="stop"), written])[2:5] == ("stop", None, type(None))


def refusal(status: int, body: bytes, prompt_tokens: int, retry_after: str = "") -> SingletreeError:
    job = GenerationJob(range(prompt_tokens), Sampling(), "r1")
    return CompletionsWire("m").refusal(status, body, job, retry_after)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("bad_top_p", InvalidRequest, "top_p must be in (0, 1], got 2.0"),
        ("bad_seed", InvalidRequest, "9223372036854775807"),
        ("bad_structural_tag", InvalidRequest, "structural_tag"),
        ("overflow", ContextOverflow, f"{WINDOW + 1} tokens > {WINDOW} maximum"),
        ("model_gone", EngineUnfit, "gone"),
        ("engine_dead", EngineFailed, "EngineCore"),
        ("unauthorized", EngineUnfit, "--api-key"),
    ],
)
def test_recorded_refusal(name: str, kind: type[SingletreeError], says: str) -> None:
    exchange = Exchange.load(name)
    error = refusal(exchange.status, exchange.answer, prompt_tokens=WINDOW + 1)
    assert type(error) is kind
    assert says in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("name", "param"), [("bad_top_p", "top_p"), ("bad_seed", "seed"), ("bad_structural_tag", None)]
)
def test_a_refusal_names_the_field(name: str, param: str | None) -> None:
    error = refusal(400, Exchange.load(name).answer, prompt_tokens=1)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 64 tokens. However, you requested 70.",
        "The decoder prompt (length 68) is longer than the maximum model length of 64. Make sure that",
        "Input length (68) exceeds model's maximum context length (64).",
    ],
)
def test_each_error_for_a_prompt_that_is_too_long(message: str) -> None:
    error = refusal(400, json.dumps({"error": {"message": message}}).encode(), prompt_tokens=68)
    assert isinstance(error, ContextOverflow)
    assert (error.prompt_tokens, error.maximum) == (68, 64)


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize(
    ("header", "seconds"), [("", 2.0), ("7", 7.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 2.0)]
)
def test_overload_says_when_to_come_back(status: int, header: str, seconds: float) -> None:
    error = refusal(status, b"upstream is busy", prompt_tokens=1, retry_after=header)
    assert isinstance(error, Overloaded)
    assert error.retry_after == seconds
    assert "upstream is busy" in error.message


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe", b"<html>" * 1000, b'{"error": 3}', b'{"detail": "x"}', b"null"]
)
@pytest.mark.parametrize("status", [301, 400, 404, 422, 500, 502])
def test_an_error_body_may_be_anything(status: int, body: bytes) -> None:
    error = refusal(status, body, prompt_tokens=1)
    assert type(error) is {400: InvalidRequest, 422: InvalidRequest, 404: EngineUnfit}.get(
        status, EngineFailed
    )
    assert len(error.message) < 500


def encoded(sampling: Sampling, prompt: Sequence[int] = QUESTION, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(
        CompletionsWire("m").encode(GenerationJob(prompt, sampling, "r1", **more), max_tokens=100)
    )
    return body


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_request_is_still_the_one_that_was_recorded(name: str) -> None:
    scenario = SCENARIOS[name]
    limit = token_limit(len(scenario.prompt), scenario.sampling.max_tokens, WINDOW)
    job = GenerationJob(scenario.prompt, scenario.sampling, name, **scenario.more)
    sent = CompletionsWire("smollm2").encode(job, max_tokens=limit)
    assert json.loads(sent) == json.loads(Exchange.load(name).request)


def test_what_is_not_set_is_left_to_the_model() -> None:
    assert encoded(Sampling()) == {
        "model": "m",
        "prompt": list(QUESTION),
        "request_id": "r1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": 100,
    }


def test_zero_is_sent() -> None:
    written = encoded(Sampling(temperature=0.0, top_k=0, seed=0, presence_penalty=0.0, logprobs=0))
    assert [written[k] for k in ("temperature", "top_k", "seed", "presence_penalty", "logprobs")] == [0] * 5
    assert written["return_tokens_as_token_ids"] is True


def test_a_top_p_of_0_is_one_that_vllm_accepts() -> None:
    assert 0 < encoded(Sampling(top_p=0.0))["top_p"] < 1e-6


def test_stop_strings_are_not_the_engines() -> None:
    assert encoded(Sampling(stop=("x",))) == encoded(Sampling())


def test_prompt_may_be_any_sequence() -> None:
    assert encoded(Sampling(), range(3))["prompt"] == [0, 1, 2]
    assert encoded(Sampling(), bytearray(b"\x05\x06"))["prompt"] == [5, 6]


@pytest.mark.parametrize(
    ("constraint", "sent"),
    [
        (Constraint("json_schema", SCHEMA), {"json": SCHEMA}),
        (Constraint("json_schema", {}), {"json": {}}),
        (Constraint("json_schema", True), {"json": "true"}),
        (Constraint("regex", "a+"), {"regex": "a+"}),
        (Constraint("gbnf", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Constraint("lark", 'start: "a"'), {"grammar": 'start: "a"'}),
    ],
)
def test_constraints(constraint: Constraint, sent: dict[str, Any]) -> None:
    assert encoded(Sampling(), constraint=constraint)["structured_outputs"] == sent


def test_a_structural_tag_goes_as_text() -> None:
    sent = encoded(Sampling(), constraint=Constraint("structural_tag", STRUCTURAL_TAG))["structured_outputs"]
    assert json.loads(sent["structural_tag"]) == STRUCTURAL_TAG


def test_stop_tokens_and_priority_go_along() -> None:
    body = encoded(Sampling(), stop_token_ids=(OF, 2), priority=-1)
    assert (body["stop_token_ids"], body["priority"]) == ([OF, 2], -1)
