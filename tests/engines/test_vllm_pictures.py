"""Pictures on vLLM, by its wire: bytes once, keys of ours, placeholders unexpanded."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from engines.contract import collect
from engines.vllm_memory import MemoryAnswer, MemoryTransport
from engines.vllm_recording import vllm_engine
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import EngineFailed, InvalidRequest
from singletree.pictures import PromptPicture
from singletree.remote.engine import RemoteEngine

PAD = 151655
RED, BLUE = b"\x89PNG red", b"\x89PNG blue"
EYES = (
    400,
    [b'{"error":{"message":"Cache miss for image at index 0 but data is not provided.","code":400}}', b""],
)


def sent(data: bytes, position: int) -> PromptPicture:
    return PromptPicture(position, PAD, data.hex().ljust(64, "0"), "image/png", data)


def job(*pictures: PromptPicture, sampling: Sampling = Sampling(max_tokens=8), **more: Any) -> GenerationJob:  # noqa: B008
    ids = [1] * 20
    for picture in pictures:
        ids[picture.position] = PAD
    return GenerationJob(ids, sampling, "r", (5,), pictures=pictures, **more)


def event(**fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"request_id": "r", "choices": [], **fields}).encode()


def answer(lengths: list[int], prompt: int = 20, cached: int | None = 3) -> MemoryAnswer:
    """As vLLM 0.32 writes it: the expanded prompt in the first event, the finish in the last with tokens."""
    expanded = [1] * (prompt - len(lengths) + sum(lengths))
    first = {"index": 0, "token_ids": [7], "finish_reason": None, "logprobs": None}
    last = {"index": 0, "token_ids": [8], "finish_reason": "stop", "logprobs": None}
    ranges = [{"offset": 2, "length": length} for length in lengths]
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
    return MemoryAnswer(
        200,
        [
            event(choices=[first], prompt_token_ids=expanded, mm_placeholders={"image": ranges}),
            event(choices=[last]),
            event(usage={"prompt_tokens": len(expanded), **details}),
            b"data: [DONE]\n\n",
        ],
    )


def missing() -> MemoryAnswer:
    status, body = EYES
    return MemoryAnswer(status, list(body))


async def started(*answers: MemoryAnswer) -> tuple[RemoteEngine, MemoryTransport]:
    transport = MemoryTransport(*answers)
    transport.eyes = (EYES[0], list(EYES[1]))
    transport.offers.add("/inference/v1/generate")
    engine = vllm_engine(transport=transport)
    await engine.start()
    return engine, transport


def urls(body: dict[str, Any]) -> list[str | None]:
    return [part["url"] for part in body["content_parts"]]


async def run(engine: RemoteEngine, job: GenerationJob) -> list[Chunk]:
    return await collect(engine.generate(job))


async def test_ids_are_sent_unexpanded_and_bytes_once() -> None:
    engine, transport = await started(answer([16]), answer([16, 4]))
    red, blue = sent(RED, 3), sent(BLUE, 9)
    chunks = await run(engine, job(red))
    again = await run(engine, job(red, blue))
    first, second = transport.bodies
    assert first["token_ids"][3] == PAD
    assert len(first["token_ids"]) == 20
    data = "data:image/png;base64," + base64.b64encode(RED).decode()
    part = {"type": "image_url", "url": data, "uuid": f"sha256:{red.key}"}
    assert first["content_parts"] == [part]
    assert first["sampling_params"] == {"max_tokens": 8, "stop_token_ids": [5], "detokenize": False}
    assert (first["stream"], first["return_token_ids"], first["output_mode"]) == (True, True, "tokens")
    assert urls(second)[0] is None, "vLLM has the first picture"
    assert urls(second)[1] is not None
    assert [id for chunk in chunks for id in chunk.token_ids] == [7, 8]
    assert [(c.prompt_tokens, c.picture_tokens) for c in chunks if c.prompt_tokens] == [(35, [16])]
    assert (chunks[-1].finish, chunks[-1].cached_tokens) == ("stop", 3)
    assert [(c.prompt_tokens, c.picture_tokens) for c in again if c.prompt_tokens] == [(38, [16, 4])]


async def test_a_picture_that_vllm_no_longer_has_is_sent_again() -> None:
    engine, transport = await started(answer([16]), missing(), answer([16]), answer([16]))
    for _ in range(3):
        chunks = await run(engine, job(sent(RED, 3)))
        assert chunks[-1].finish == "stop"
    assert [urls(body) == [None] for body in transport.bodies] == [False, True, False, True]


async def test_a_picture_that_is_refused_with_its_bytes_is_not_sent_for_ever() -> None:
    engine, transport = await started(missing())
    with pytest.raises(InvalidRequest, match="Cache miss"):
        await run(engine, job(sent(RED, 3)))
    assert len(transport.bodies) == 1
    assert not transport.answers


async def test_sampling_constraints_and_defaults_travel_as_sampling_params() -> None:
    engine, transport = await started(answer([16]))
    engine.complete(window=None, model_defaults={"temperature": 0.1, "top_p": 0.5})
    sampling = Sampling(max_tokens=3, temperature=0.7, logit_bias={5: -1.0}, bad_words=("no",))
    await run(engine, job(sent(RED, 3), sampling=sampling, constraint=Constraint("regex", "a+"), priority=-2))
    body = transport.bodies[0]
    assert body["priority"] == -2
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 0.5,
        "max_tokens": 3,
        "logit_bias": {"5": -1.0},
        "bad_words": ["no"],
        "stop_token_ids": [5],
        "structured_outputs": {"regex": "a+"},
        "detokenize": False,
    }


async def test_logprobs_have_the_form_of_all_engines() -> None:
    top = [{"token_id": 7, "logprob": -0.1, "rank": 1}, {"token_id": 9, "logprob": -2.0, "rank": 2}]
    logprobs = {"content": [{"token_id": 7, "logprob": -0.1, "rank": 1, "top_logprobs": top}]}
    choice = {"index": 0, "token_ids": [7], "finish_reason": "length", "logprobs": logprobs}
    body = [
        event(choices=[choice], prompt_token_ids=[1], mm_placeholders={"image": [{"offset": 0, "length": 1}]})
    ]
    engine, _ = await started(MemoryAnswer(200, [*body, b"data: [DONE]\n\n"]))
    chunks = await run(engine, job(sent(RED, 3), sampling=Sampling(max_tokens=1, logprobs=2)))
    rows = [row for chunk in chunks for row in chunk.logprobs or ()]
    assert [list(row) for row in rows] == [[(7, -0.1), (9, -2.0)]]


async def test_a_picture_is_counted_with_one_token_behind_it() -> None:
    engine, transport = await started(answer([16], prompt=1), answer([16]))
    assert await engine.count_picture_tokens(sent(RED, 3)) == 16
    assert transport.bodies[0]["token_ids"] == [PAD]
    assert transport.bodies[0]["sampling_params"]["max_tokens"] == 1
    await run(engine, job(sent(RED, 3)))
    assert urls(transport.bodies[1]) == [None], "counting sent the bytes"


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b"", "--enable-scale-out"),
        (400, b'{"error":{"message":"this is not a multimodal model"}}', "takes no pictures"),
        (200, b"{}", "takes no pictures"),
    ],
)
async def test_a_server_without_eyes_is_distinguished(status: int, body: bytes, reason: str) -> None:
    transport = MemoryTransport()
    if status != 404:
        transport.offers.add("/inference/v1/generate")
    transport.eyes = (status, [body, b""])
    engine = vllm_engine(transport=transport)
    await engine.start()
    assert engine.info().pictures is None
    assert reason in engine.info().blindness


async def test_an_error_in_the_stream_ends_the_generation() -> None:
    failed = event(error={"message": "the encoder died", "code": 500})
    engine, _ = await started(MemoryAnswer(200, [failed, b"data: [DONE]\n\n"]))
    with pytest.raises(EngineFailed, match="the encoder died"):
        await run(engine, job(sent(RED, 3)))
