"""What is said to llama.cpp's server and understood of its answers, without one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from singletree.conversation import Sampling
from singletree.engines.abilities import encode_grammar
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import ContextOverflow, EngineFailed, InvalidRequest, Overloaded
from singletree.llamacpp.wire import (
    StreamReader,
    decode_llamacpp_error,
    decode_tokenize_response,
    encode_llamacpp_request,
    encode_tokenize_request,
)

UNSAID = Sampling()


def body(sampling: Sampling = UNSAID, constraint: Constraint | None = None) -> dict[str, Any]:
    decoded = json.loads(
        encode_llamacpp_request(GenerationJob([5, 6], sampling, "r", constraint=constraint), limit=9)
    )
    assert isinstance(decoded, dict)
    return decoded


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(id: int, count: int, **more: Any) -> bytes:
    return event(index=0, content="x", tokens=[id], stop=False, tokens_predicted=count, **more)


def last(stop_type: str, **more: Any) -> bytes:
    return event(stop=True, stop_type=stop_type, tokens=[], tokens_predicted=0, **more)


PROGRESS = event(
    content="", tokens=[0], stop=False, tokens_predicted=0, prompt_progress={"cache": 7, "total": 9}
)


def read(
    *pieces: bytes, limit: int = 100, stops: tuple[int, ...] = (), logprobs: bool = False
) -> list[Chunk]:
    reader = StreamReader(limit, stops, logprobs=logprobs)
    chunks = [reader.take(reader.feed(piece)) for piece in pieces]
    return [chunk for chunk in chunks if chunk is not None]


def test_what_is_not_set_is_left_to_the_model() -> None:
    assert not body().keys() & {"temperature", "top_p", "top_k", "min_p", "seed", "n_probs", "repeat_last_n"}
    assert (body()["prompt"], body()["n_predict"]) == ([5, 6], 9)


def test_all_of_sampling_is_sent() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=4,
        logprobs=5,
        logit_bias={8: -2.0},
        ignore_eos=True,
    )
    encoded = body(sampling)
    expected = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repeat_penalty": 1.1,
        "repeat_last_n": 2 + 9,
        "seed": 4,
        "n_probs": 5,
        "logit_bias": [[8, -2.0]],
        "ignore_eos": True,
    }
    assert {key: encoded[key] for key in expected} == expected


@pytest.mark.parametrize("seed", [-1, 0xFFFFFFFF, 2**64 - 1, -(2**70)])
def test_no_seed_means_chance(seed: int) -> None:
    assert body(Sampling(seed=seed))["seed"] in range(0xFFFFFFFF)


def test_zero_alternatives_still_ask_for_the_token_itself() -> None:
    assert body(Sampling(logprobs=0))["n_probs"] == 1


def test_stop_strings_are_not_the_engines() -> None:
    assert "stop" not in body(Sampling(stop=("x",)))


def test_white_space_in_json_has_an_end() -> None:
    grammar = encode_grammar(Constraint("json_schema", {"type": "object"}))
    assert "whitespace_pattern" in grammar
    own = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    assert "whitespace_pattern" not in encode_grammar(Constraint("json_schema", own))


def test_a_slash_in_a_regex_does_not_end_it() -> None:
    assert encode_grammar(Constraint("regex", r"a/b\/c")).endswith(r"/a\/b\/c/")


@pytest.mark.parametrize("schema", [True, {}, {"type": "string"}])
def test_schemas_of_all_kinds_are_taken(schema: object) -> None:
    assert encode_grammar(Constraint("json_schema", schema)).startswith("%llguidance {}\nstart: %json ")


def test_a_complaint_fits_on_a_line() -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_grammar(Constraint("json_schema", {"type": "string", "pattern": "(?=x)"}))
    assert "\n" not in caught.value.message
    assert "start:" not in caught.value.message


def test_cached_tokens_come_first_and_the_tokens_of_progress_mean_nothing() -> None:
    assert read(PROGRESS, PROGRESS, token(3, 1)) == [Chunk([], cached_tokens=7), Chunk([3])]


def test_without_progress_the_last_event_reports_what_was_cached() -> None:
    chunks = read(token(3, 1), last("eos", timings={"cache_n": 4}))
    assert chunks == [Chunk([3]), Chunk([], "stop", 4)]


def test_what_comes_in_one_read_is_one_chunk() -> None:
    everything = PROGRESS + token(3, 1) + token(4, 2) + last("limit")
    assert read(everything) == [Chunk([3, 4], "length", 7)]


def test_every_cut_of_the_bytes_says_the_same() -> None:
    stream = PROGRESS + token(3, 1) + b":\n\n" + token(4, 2) + last("eos")
    for at in range(len(stream) + 1):
        chunks = read(stream[:at], stream[at:])
        assert [id for chunk in chunks for id in chunk.token_ids] == [3, 4]
        assert chunks[-1].finish == "stop"


@pytest.mark.parametrize(("stop_type", "finish"), [("eos", "stop"), ("word", "stop"), ("limit", "length")])
def test_why_it_ended(stop_type: str, finish: str) -> None:
    assert read(last(stop_type))[-1].finish == finish


def test_a_stop_token_ends_it_and_is_the_last() -> None:
    assert read(token(3, 1) + token(4, 2) + token(5, 3), stops=(4, 5)) == [Chunk([3, 4], "stop")]


def test_more_tokens_than_allowed_are_not_reported() -> None:
    assert read(token(3, 1), token(4, 2), limit=1) == [Chunk([3]), Chunk([], "length")]
    assert read(token(3, 1), token(4, 2), limit=1, stops=(4,)) == [Chunk([3]), Chunk([], "length")]


def test_tokens_that_were_not_reported_are_noticed() -> None:
    reader = StreamReader(100, (), logprobs=True)
    probability = {"id": 9, "logprob": -0.5, "top_logprobs": []}
    (first,) = reader.feed(token(3, 1))
    (second,) = reader.feed(token(9, 4, completion_probabilities=[probability]))
    assert (first.tokens_missing, second.tokens_missing) == (False, True)
    second.tokens = [7, 8, 9]
    chunk = reader.take([second])
    assert chunk == Chunk([7, 8, 9], logprobs=[[], [], [(9, -0.5)]])


def test_the_token_itself_comes_first_and_nothing_twice() -> None:
    top = [{"id": 5, "logprob": -0.1}, {"id": 3, "logprob": -2.0}, {"id": 6, "logprob": None}]
    probability = {"id": 3, "logprob": -2.0, "top_logprobs": top}
    (chunk,) = read(token(3, 1, completion_probabilities=[probability]), logprobs=True)
    assert chunk.logprobs == [[(3, -2.0), (5, -0.1)]]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}, EngineFailed),
        ({"code": 400, "message": "bad", "type": "invalid_request_error"}, InvalidRequest),
        ({"code": 503, "message": "loading", "type": "unavailable_error"}, Overloaded),
    ],
)
def test_errors_in_the_stream_and_before_it(error: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=str(error["message"])):
        read(event(error=error))
    assert type(decode_llamacpp_error(500, json.dumps({"error": error}).encode())) is kind


def test_an_overflow_has_its_numbers() -> None:
    error = {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 16000, "n_ctx": 8192}
    found = decode_llamacpp_error(400, json.dumps({"error": error}).encode())
    assert isinstance(found, ContextOverflow)
    assert (found.prompt_tokens, found.maximum) == (16000, 8192)


def test_nonsense_is_a_failure() -> None:
    assert isinstance(decode_llamacpp_error(502, b"<html>"), EngineFailed)
    with pytest.raises(EngineFailed):
        read(b"data: {nonsense\n\n")
    with pytest.raises(EngineFailed):
        decode_tokenize_response(b"<html>", "x")


def test_spelling_leaves_out_what_the_vocabulary_puts_before() -> None:
    pieces = [{"id": 1, "piece": " "}, {"id": 2, "piece": [240, 159]}, {"id": 3, "piece": [152, 128]}]
    assert decode_tokenize_response(json.dumps({"tokens": pieces}).encode(), "😀") == [2, 3]
    assert json.loads(encode_tokenize_request("😀"))["content"] == "😀"


def test_a_spelling_that_does_not_fit_is_taken_whole() -> None:
    pieces = [{"id": 4, "piece": "�"}, {"id": 5, "piece": "b"}]
    assert decode_tokenize_response(json.dumps({"tokens": pieces}).encode(), "�a") == [4, 5]
