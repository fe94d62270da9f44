"""``/inference/v1/generate`` of a real vLLM, replayed: the same answers as at ``/v1/completions``."""

from __future__ import annotations

import json

import pytest

from engines.test_vllm_wire import as_chunk
from engines.vllm_memory import MemoryAnswer, MemoryTransport, outcome, started, tokens
from engines.vllm_recording import GENERATE_STREAMS, SCENARIOS, STREAMS, Exchange
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.events import WeightVersion
from singletree.remote.sglang import SglangWire
from singletree.remote.vllm.server import GenerateReader, GenerateWire
from singletree.remote.vllm.wire import CompletionsWire

PATH = "/inference/v1/generate"


class GenerateTransport(MemoryTransport):
    """A vLLM that offers the better endpoint; what is asked at start-up is answered by a recording."""

    def __init__(self, *answers: MemoryAnswer | Exception) -> None:
        super().__init__(*answers)
        self.offers = {PATH}
        self.probe = MemoryAnswer(body=[Exchange.load("generate_length").answer])


@pytest.mark.parametrize("name", GENERATE_STREAMS)
async def test_recorded_exchange(name: str) -> None:
    exchange, scenario = Exchange.load(f"generate_{name}"), SCENARIOS[name]
    assert exchange.line == f"POST {PATH}"
    transport = GenerateTransport(MemoryAnswer(exchange.status, [exchange.answer, b""]))
    engine = await started(transport)
    expected, finish, cached, failure = STREAMS[name]
    chunks, error = await outcome(engine, scenario.prompt, scenario.sampling, name, **scenario.more)
    assert type(error) is (failure or type(None))
    if chunks:
        assert chunks[-1].finish == finish
        assert (chunks[-1].cached_tokens is None) == (cached is None)
    assert expected is None or tokens(chunks) == expected
    assert transport.bodies == [json.loads(exchange.request)]


@pytest.mark.parametrize("name", [name for name in GENERATE_STREAMS if STREAMS[name][3] is None])
def test_recorded_stream_cut_anywhere(name: str) -> None:
    answer = Exchange.load(f"generate_{name}").answer
    whole = _read([answer])
    assert whole[0]
    for cut in range(1, len(answer), 3):
        assert _read([answer[:cut], answer[cut:]]) == whole


def _read(pieces: list[bytes]) -> tuple[list[int], str | None]:
    reader = GenerateReader(16, 512)
    chunks = [chunk for piece in pieces if (chunk := as_chunk(reader.feed(piece))) is not None]
    assert reader.failure is None
    return tokens(chunks), chunks[-1].finish


def test_log_probabilities_have_the_token_first() -> None:
    reader = GenerateReader(16, 512)
    chunk = as_chunk(reader.feed(Exchange.load("generate_logprobs").answer))
    assert chunk is not None
    rows = chunk.logprobs or ()
    assert [row[0][0] for row in rows] == list(chunk.token_ids)
    assert all(len(row) == len({token for token, _ in row}) == 2 for row in rows)


def test_the_weights_of_an_answer_are_known() -> None:
    chunk = as_chunk(GenerateReader(16, 512).feed(Exchange.load("generate_answer").answer))
    assert chunk is not None
    assert list(chunk.weight_versions) == [WeightVersion("default", 0, 8)]
    assert chunk.routed_experts is None


def test_routed_experts_are_those_of_the_last_event() -> None:
    events = [
        {"choices": [{"token_ids": [5]}]},
        {"choices": [{"token_ids": [6], "finish_reason": "stop", "routed_experts": "TlVNUFk="}]},
    ]
    lines = [b"data: %b\n\n" % json.dumps(event).encode() for event in events]
    reader = GenerateReader(16, 512)
    first, last = (as_chunk(reader.feed(data)) for data in (lines[0], lines[1] + b"data: [DONE]\n\n"))
    assert first is not None
    assert last is not None
    assert (first.routed_experts, last.routed_experts) == (None, "TlVNUFk=")


@pytest.mark.parametrize(
    ("session", "header"), [("", ""), ("a/b#1", "a/b#1"), ("zwei\r\nZeilen ü", "zwei%0D%0AZeilen%20%C3%BC")]
)
def test_the_session_is_named_to_vllm(session: str, header: str) -> None:
    job = GenerationJob([1], Sampling(), "r", session=session)
    assert GenerateWire("m").headers(job) == ({"X-Session-ID": header} if session else {})
    body = json.loads(CompletionsWire("m").encode(job, max_tokens=1))
    assert body.get("session_id", "") == session
    assert CompletionsWire("m").headers(job) == {}


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_a_cache_salt_is_sent_to_every_endpoint(salt: str) -> None:
    job = GenerationJob([1], Sampling(), "r", cache_salt=salt)
    sent = [
        GenerateWire("m").encode(job, max_tokens=4),
        CompletionsWire("m").encode(job, max_tokens=4),
        SglangWire().encode(job, max_tokens=4),
    ]
    fields = [("cache_salt", salt), ("cache_salt", salt), ("extra_key", salt)]
    for body, (name, value) in zip(map(json.loads, sent), fields, strict=True):
        assert body.get(name, "") == value
