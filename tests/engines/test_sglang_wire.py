"""``/generate`` of a real SGLang, replayed in both forms of its streams."""

from __future__ import annotations

import json

import pytest

from engines.contract import tokens_of
from engines.sglang_recording import SCENARIOS, load
from engines.vllm_memory import MemoryAnswer
from engines.vllm_recording import PARIS
from engines.wire_servers import DIALECTS, DialectTransport, started
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import InvalidRequest
from singletree.events import WeightVersion
from singletree.remote.sglang import SglangWire

FORMS = ("incremental", "cumulative")
TOKENS = {
    "answer": (PARIS, "stop"),
    "stop_token": (PARIS[:3], "stop"),
    "length": (PARIS[:5], "length"),
    "logprobs": (PARIS[:3], "length"),
    "prompt_logprobs": (PARIS[:2], "length"),
}


async def replay(form: str, name: str, step: int | None = None) -> list[Chunk]:
    """The chunks of a recorded answer, cut every ``step`` bytes; the request is checked, too."""
    exchange, scenario = load(form, name), SCENARIOS[name]
    answer = exchange.answer
    pieces = [answer] if step is None else [answer[i : i + step] for i in range(0, len(answer), step)]
    transport = DialectTransport(DIALECTS[f"sglang-{form}"], MemoryAnswer(exchange.status, [*pieces, b""]))
    engine = await started(transport)
    job = GenerationJob(scenario.prompt, scenario.sampling, name, **scenario.more)
    chunks = [chunk async for chunk in engine.generate(job)]
    streamed, recorded = transport.bodies[0], json.loads(exchange.request)
    assert {
        **streamed,
        "rid": "",
        "sampling_params": {**streamed["sampling_params"], "max_new_tokens": 0},
    } == {
        **recorded,
        "rid": "",
        "sampling_params": {**recorded["sampling_params"], "max_new_tokens": 0},
    }
    return chunks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", list(TOKENS))
@pytest.mark.parametrize("step", [None, 1, 100])
async def test_recorded_exchange(form: str, name: str, step: int | None) -> None:
    chunks = await replay(form, name, step)
    assert (tokens_of(chunks), chunks[-1].finish) == TOKENS[name]
    assert chunks[-1].cached_tokens is not None


def test_zeros_are_written_as_sglang_accepts_them() -> None:
    job = GenerationJob([5], Sampling(top_k=0, top_p=0.0, temperature=0.0), "zeros")
    written = json.loads(SglangWire().encode(job, max_tokens=1))["sampling_params"]
    assert (written["top_k"], written["temperature"]) == (-1, 0)
    assert 0 < written["top_p"] < 1e-6


@pytest.mark.parametrize("form", FORMS)
async def test_log_probabilities(form: str) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        chunks = await replay(form, name, 64)
        rows = [row for chunk in chunks for row in chunk.logprobs or ()]
        assert [row[0][0] for row in rows] == tokens_of(chunks)
    [scored] = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
    prompt = SCENARIOS["prompt_logprobs"].prompt
    assert not scored[0]
    assert [row[0][0] for row in scored[1:]] == list(prompt[1:])


@pytest.mark.parametrize("form", FORMS)
async def test_the_weights_of_an_answer_are_known(form: str) -> None:
    *rest, last = await replay(form, "answer", step=100)
    assert list(last.weight_versions) == [WeightVersion("default", 0, 8)]
    assert not any(chunk.weight_versions for chunk in rest)


@pytest.mark.parametrize("form", FORMS)
async def test_a_constraint_that_is_none_is_the_clients_fault(form: str) -> None:
    with pytest.raises(InvalidRequest, match="regex"):
        await replay(form, "bad_regex")


@pytest.mark.parametrize("form", FORMS)
async def test_a_constrained_answer(form: str) -> None:
    assert (await replay(form, "json_schema"))[-1].finish in ("stop", "length")
