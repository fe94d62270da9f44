"""Pictures on engines in process, over stand-ins: what they get, what they report, and what is refused before."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from engines.contract import collect
from engines.fake_sglang import FakeSglang, fake_sglang_engine
from engines.fake_vllm import WINDOW, FakeAsyncLLM, fake_engine
from engines.test_vllm_pictures import BLUE, PAD, RED, job, sent
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk
from singletree.errors import ContextOverflow, EngineFailed, EngineUnfit, InvalidRequest
from singletree.in_process import sglang_engine as in_process
from singletree.pictures import PromptPicture


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def read(chunks: list[Chunk]) -> list[Any]:
    return [(chunk.prompt_tokens, chunk.picture_tokens) for chunk in chunks if chunk.prompt_tokens]


def uuid(picture: PromptPicture) -> str:
    return f"sha256:{picture.key}"


RED_PICTURE, BLUE_PICTURE = sent(RED, 3), sent(BLUE, 9)


@pytest.fixture
def llm() -> FakeAsyncLLM:
    llm = FakeAsyncLLM(sees=True)
    llm.picture_lengths = {uuid(RED_PICTURE): 16, uuid(BLUE_PICTURE): 4}
    return llm


async def test_vllm_gets_ids_and_bytes_once_and_reports_lengths(llm: FakeAsyncLLM) -> None:
    engine = fake_engine(llm)
    await engine.start()
    assert engine.info().pictures is not None
    first = await collect(engine.generate(job(RED_PICTURE)))
    second = await collect(engine.generate(job(RED_PICTURE, BLUE_PICTURE)))
    assert read(first) == [(35, [16])]
    assert read(second) == [(38, [16, 4])]
    once, again = llm.rendered
    assert len(once["prompt_token_ids"]) == 20, "one placeholder a picture"
    assert once["pictures"] == [(uuid(RED_PICTURE), RED)]
    assert again["pictures"] == [(uuid(RED_PICTURE), None), (uuid(BLUE_PICTURE), BLUE)]
    await engine.close()


async def test_vllm_gets_the_bytes_again_when_it_lost_them(llm: FakeAsyncLLM) -> None:
    engine = fake_engine(llm)
    await engine.start()
    await collect(engine.generate(job(RED_PICTURE)))
    llm.lost_pictures.add(uuid(RED_PICTURE))
    assert read(await collect(engine.generate(job(RED_PICTURE)))) == [(35, [16])]
    llm.drifted = True  # vLLM's own processes disagree about what they have
    assert read(await collect(engine.generate(job(RED_PICTURE)))) == [(35, [16])]
    assert [data is None for each in llm.rendered for _, data in each["pictures"]] == [
        *(False, True, False),
        *(True, False),
    ]
    await engine.close()


async def test_a_disagreement_that_stays_ends_the_generation(llm: FakeAsyncLLM) -> None:
    class Lossy(FakeAsyncLLM):
        async def add_request(self, request_id: str, prompt: Any, params: Any, **more: Any) -> Any:
            self.drifted = prompt["type"] == "multimodal"
            return await super().add_request(request_id, prompt, params, **more)

    lossy = Lossy(sees=True)
    lossy.picture_lengths = llm.picture_lengths
    engine = fake_engine(lossy)
    await engine.start()
    with pytest.raises(EngineFailed, match="error"):
        await collect(engine.generate(job(RED_PICTURE)))
    assert len(lossy.rendered) == 2
    await engine.close()


async def test_vllm_counts_without_a_generation(llm: FakeAsyncLLM) -> None:
    engine = fake_engine(llm)
    await engine.start()
    asked = len(llm.asked)
    assert await engine.count_picture_tokens(RED_PICTURE) == 16
    assert len(llm.asked) == asked
    assert llm.rendered[-1] == {
        "prompt_token_ids": [PAD],
        "pictures": [(uuid(RED_PICTURE), RED)],
        "counts_only": True,
    }
    await collect(engine.generate(job(RED_PICTURE)))
    assert llm.rendered[-1]["pictures"] == [(uuid(RED_PICTURE), RED)], "counting has not stored it"
    await engine.close()


async def test_vllm_has_no_room_for_a_picture_that_is_too_long(llm: FakeAsyncLLM) -> None:
    llm.picture_lengths[uuid(RED_PICTURE)] = WINDOW
    engine = fake_engine(llm)
    await engine.start()
    with pytest.raises(ContextOverflow):
        await collect(engine.generate(job(RED_PICTURE)))
    llm.picture_lengths[uuid(RED_PICTURE)] = WINDOW - 23  # 19 tokens around it, and 4 more
    await collect(engine.generate(job(RED_PICTURE)))
    assert llm.asked[-1]["params"]["max_tokens"] == 4
    await engine.close()


@pytest.fixture
def sglang() -> FakeSglang:
    engine = FakeSglang(sees=True)
    engine.picture_lengths = {url(RED): 16, url(BLUE): 4}
    return engine


async def test_sglang_gets_data_urls_and_reports_lengths(sglang: FakeSglang) -> None:
    engine = fake_sglang_engine(sglang)
    await engine.start()
    assert engine.info().pictures is not None
    assert read(await collect(engine.generate(job(RED_PICTURE)))) == [(35, [16])]
    assert sglang.asked[-1]["image_data"] == [url(RED)]
    assert sglang.asked[-1]["mm_content_hashes"][0].startswith("sha256:")
    assert len(sglang.asked[-1]["input_ids"]) == 20
    assert read(await collect(engine.generate(job(RED_PICTURE, BLUE_PICTURE)))) == [(38, [16, 4])]
    assert await engine.count_picture_tokens(BLUE_PICTURE) == 4
    await engine.close()


async def test_two_new_pictures_are_counted_one_by_one(sglang: FakeSglang) -> None:
    engine = fake_sglang_engine(sglang)
    await engine.start()
    before = len(sglang.asked)
    assert read(await collect(engine.generate(job(RED_PICTURE, BLUE_PICTURE)))) == [(38, [16, 4])]
    assert [len(each["image_data"]) for each in sglang.asked[before:]] == [1, 1, 2]
    await engine.close()


async def test_nothing_is_sent_after_an_abort_while_pictures_are_counted(
    sglang: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_sglang_engine(sglang)
    await engine.start()
    before = len(sglang.asked)
    asked = job(RED_PICTURE, BLUE_PICTURE)

    async def aborted(picture: PromptPicture) -> int:
        await engine.abort(asked.request_id)
        return 16

    monkeypatch.setattr(engine, "count_picture_tokens", aborted)
    assert [chunk.finish for chunk in await collect(engine.generate(asked))] == ["cancelled"]
    assert sglang.asked[before:] == []
    await engine.close()


async def test_a_picture_that_sglang_does_not_see_is_an_error(sglang: FakeSglang) -> None:
    sglang.picture_lengths[url(RED)] = 0
    engine = fake_sglang_engine(sglang)
    await engine.start()
    with pytest.raises(EngineUnfit, match="read none of the 1 pictures"):
        await collect(engine.generate(job(RED_PICTURE)))
    await engine.close()


async def test_an_answer_that_never_begins_ends(sglang: FakeSglang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "FIRST_ANSWER_SECONDS", 0.0)
    engine = fake_sglang_engine(sglang)
    await engine.start()
    with pytest.raises(EngineFailed, match="did not begin to answer"):
        await collect(engine.generate(job(RED_PICTURE)))
    await engine.close()


@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_what_cannot_be_sent_is_refused(name: str, llm: FakeAsyncLLM, sglang: FakeSglang) -> None:
    engine: Any = fake_engine(llm) if name == "vllm" else fake_sglang_engine(sglang)
    await engine.start()
    two_places = job(RED_PICTURE)
    two_places.prompt_token_ids[9] = PAD  # type: ignore[index]
    with pytest.raises(InvalidRequest, match="2 placeholders for 1 pictures"):
        await collect(engine.generate(two_places))
    with pytest.raises(InvalidRequest, match="log-probabilities"):
        await collect(engine.generate(job(RED_PICTURE, sampling=Sampling(max_tokens=2, prompt_logprobs=0))))
    await engine.close()


@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_a_model_without_eyes_takes_none(name: str) -> None:
    engine: Any = fake_engine() if name == "vllm" else fake_sglang_engine()
    await engine.start()
    assert engine.info().pictures is None
    assert engine.info().blindness
    with pytest.raises(InvalidRequest, match="takes no pictures"):
        await collect(engine.generate(job(RED_PICTURE)))
    with pytest.raises(EngineUnfit):
        await engine.count_picture_tokens(RED_PICTURE)
    await engine.close()
