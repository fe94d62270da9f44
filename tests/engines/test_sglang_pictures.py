"""Pictures on a SGLang server, by its wire: recordings of SGLang 0.5.23 replayed, and what it must never get."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from engines.contract import collect
from engines.sglang_recording import PICTURE_SCENARIOS, WIRE
from engines.test_vllm_pictures import BLUE, RED, job, sent
from engines.tiny_vlm import BEFORE, BEHIND, PAD
from engines.vllm_memory import MemoryAnswer
from engines.vllm_recording import Exchange, greedy
from engines.wire_servers import DIALECTS, DONE, DialectTransport, frame, started
from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import EngineFailed, EngineUnfit, InvalidRequest
from singletree.pictures import PromptPicture
from singletree.remote.engine import RemoteEngine
from singletree.remote.sglang import SglangWire

EYES = {"has_image_understanding": True}


def transport(*answers: MemoryAnswer, description: Any = EYES) -> DialectTransport:
    dialect = DIALECTS["sglang-incremental"]
    return DialectTransport(replace(dialect, pages={**dialect.pages, "/model_info": description}), *answers)


def answer(read: int, images: int | None) -> MemoryAnswer:
    """As SGLang writes it: the counts are in every event."""
    counts = {"prompt_tokens": read, "cached_tokens": 3} | ({"image_tokens": images} if images else {})
    first = {"output_ids": [7], "meta_info": {"completion_tokens": 1, "finish_reason": None, **counts}}
    last = {
        "output_ids": [8],
        "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "stop", "matched": 8}, **counts},
    }
    return MemoryAnswer(200, [frame(first), frame(last), DONE, b""])


def read(chunks: Sequence[Chunk]) -> list[Any]:
    return [(chunk.prompt_tokens, chunk.picture_tokens) for chunk in chunks if chunk.prompt_tokens]


def recorded_job(exchange: Exchange, name: str) -> GenerationJob:
    """The job whose request was recorded."""
    asked = json.loads(exchange.request)
    images = [base64.b64decode(url.partition(",")[2]) for url in asked["image_data"]]
    places = [at for at, id in enumerate(asked["input_ids"]) if id == PAD]
    pictures = tuple(
        PromptPicture(place, PAD, hashlib.sha256(data).hexdigest(), "image/png", data, (BEFORE,), (BEHIND,))
        for place, data in zip(places, images, strict=True)
    )
    return GenerationJob(asked["input_ids"], greedy(2), name, pictures=pictures)


async def test_recorded_exchanges() -> None:
    exchanges = {name: Exchange.load(name, WIRE) for name in PICTURE_SCENARIOS}
    answers = [MemoryAnswer(each.status, [each.answer, b""]) for each in exchanges.values()]
    description = json.loads(Exchange.load("model_info", WIRE).answer)
    wire = transport(*answers, description=description)
    engine = await started(wire)
    assert engine.info().pictures is not None
    found: dict[str, Any] = {}
    for name, exchange in exchanges.items():
        wanted = recorded_job(exchange, name)
        try:
            chunks = await collect(engine.generate(wanted))
            found[name] = (read(chunks), chunks[-1].finish, chunks[-1].cached_tokens)
        except InvalidRequest as refused:
            found[name] = refused.message
        body, recorded = wire.bodies[-1], json.loads(exchange.request)
        assert {**body, "rid": ""} == {**recorded, "rid": ""}
    lengths = {name: len(json.loads(each.request)["input_ids"]) for name, each in exchanges.items()}
    one, two = lengths["picture"], lengths["two_pictures"]
    assert found["picture"] == ([(one + 15, [16])], "length", 0)
    assert found["picture_again"][0] == [(one + 15, [16])]
    assert found["picture_again"][2] >= 16
    assert found["picture_changed"] == ([(one + 15, [16])], "length", 0), "the cache ends before the picture"
    assert found["two_pictures"][:2] == ([(two + 30, [16, 16])], "length")
    assert "Could not decode" in found["picture_damaged"]


async def test_ids_are_unexpanded_and_hashes_are_those_of_the_bytes() -> None:
    wire = transport(answer(35, 16))
    engine = await started(wire)
    converted = replace(sent(RED, 3), key="a" * 64)  # the client sent other bytes, which were converted
    assert read(await collect(engine.generate(job(converted)))) == [(35, [16])]
    (body,) = wire.bodies
    assert len(body["input_ids"]) == 20
    assert body["image_data"] == ["data:image/png;base64," + base64.b64encode(RED).decode()]
    assert body["mm_content_hashes"] == ["sha256:" + hashlib.sha256(RED).hexdigest()]
    assert "mm_hashes" not in body


async def test_two_new_pictures_are_counted_one_by_one() -> None:
    wire = transport(answer(18, 16), answer(6, 4), answer(38, 20), answer(38, 20), answer(18, 16))
    engine = await started(wire)
    red, blue = (replace(each, before=(1,), behind=(2,)) for each in (sent(RED, 3), sent(BLUE, 9)))
    for _ in range(2):
        assert read(await collect(engine.generate(job(red, blue)))) == [(38, [16, 4])]
    assert [len(body["image_data"]) for body in wire.bodies] == [1, 1, 2, 2]
    assert wire.bodies[0]["input_ids"] == [1, 151655, 2], "as the template prints it around a picture"
    assert await engine.count_picture_tokens(red) == 16


@pytest.mark.parametrize("places", [(3,), (3, 9, 12)])
async def test_a_wrong_number_of_placeholders_is_not_sent(places: tuple[int, ...]) -> None:
    wire = transport()
    engine = await started(wire)
    wrong = job(sent(RED, 3), sent(BLUE, 9))
    ids = [151655 if at in places else 1 for at in range(20)]
    with pytest.raises(InvalidRequest, match=f"{len(places)} placeholders for 2 pictures"):
        await collect(engine.generate(structs.replace(wrong, prompt_token_ids=ids)))
    with pytest.raises(InvalidRequest, match="log-probabilities"):
        await collect(engine.generate(structs.replace(wrong, sampling=greedy(2, prompt_logprobs=0))))
    assert wire.bodies == []


async def test_an_answer_that_does_not_begin_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SglangWire, "first_answer_seconds", lambda self, job: 0.0 if job.pictures else None)
    silent = MemoryAnswer(200, [])
    engine = await started(transport(silent))
    with pytest.raises(EngineFailed, match="did not begin to answer"):
        await collect(engine.generate(job(sent(RED, 3))))
    assert silent.closed


async def test_pictures_that_sglang_does_not_read_are_an_error() -> None:
    engine = await started(transport(answer(20, None)))
    with pytest.raises(EngineUnfit, match="read none of the 1 pictures"):
        await collect(engine.generate(job(sent(RED, 3))))


@pytest.mark.parametrize("description", [{}, {"has_image_understanding": False}, [1], None])
async def test_a_server_without_eyes_is_distinguished(description: Any) -> None:
    wire = transport(description=description)
    engine: RemoteEngine = await started(wire)
    assert engine.info().pictures is None
    assert "--enable-multimodal" in engine.info().blindness
    with pytest.raises(EngineUnfit, match="takes no pictures"):
        await engine.count_picture_tokens(sent(RED, 3))
