"""``HttpTransport``: requests, answers, the reuse of connections, and every way that one ends."""

from __future__ import annotations

import asyncio
import json
import ssl
import warnings
from collections.abc import AsyncIterator, Callable

import pytest

from engines.http_bench import END, STREAM, Bench, Wire, chunked, hangs_up, head, read, read_all, says, whole
from engines.vllm_memory import ending, event
from engines.vllm_recording import PARIS, QUESTION, Exchange, vllm_engine
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.errors import EngineFailed
from singletree.remote.transport import ConnectionLost, Pieces, StreamedResponse, ask


@pytest.fixture(autouse=True)
async def no_warnings() -> AsyncIterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


async def test_get() -> None:
    async with Bench(says(whole(200, b'{"version": "1"}')), api_key="secret") as bench:
        assert await bench.transport.get("/version") == (200, b'{"version": "1"}')
        line, headers, _ = bench.wires[0].requests()[0]
    assert line == b"GET /version HTTP/1.1"
    assert headers[b"authorization"] == b"Bearer secret"
    assert headers[b"accept-encoding"] == b"identity"


async def test_post_sends_the_body_as_it_is() -> None:
    async with Bench(says(STREAM, END)) as bench:
        await read_all(bench, b'{"prompt":[1]}')
        line, headers, body = bench.wires[0].requests()[0]
    assert (line, body) == (b"POST /v1/completions HTTP/1.1", b'{"prompt":[1]}')
    assert headers[b"content-type"] == b"application/json"
    assert b"authorization" not in headers


async def test_a_very_long_prompt_goes_out_whole_and_without_complaint() -> None:
    body = json.dumps({"prompt": list(range(300_000))}).encode()
    async with Bench(says(STREAM, END)) as bench:
        await read_all(bench, body)
        assert bench.wires[0].requests()[0][2] == body


async def test_pieces_come_as_they_arrive() -> None:
    async with Bench(says(STREAM)) as bench:
        answer = await bench.post()
        for piece in (b"data: 1\n\n", b"data: 2\n\n"):
            bench.wires[0].receive(chunked(piece))
            assert await read(answer) == piece
        bench.wires[0].receive(END)
        assert await read(answer) == b""


async def test_status_and_retry_after() -> None:
    async with Bench(says(whole(503, b"busy", retry_after="4"))) as bench:
        answer = await bench.post()
        assert (answer.status, answer.retry_after, await read(answer)) == (503, "4", b"busy")


async def test_a_finished_answer_leaves_its_connection_in_use() -> None:
    async with Bench(says(STREAM, chunked(b"a"), END), says(STREAM, chunked(b"b"), END)) as bench:
        for expected in (b"a", b"b"):
            answer = await bench.post()
            assert await read(answer) == expected
            answer.finish()
            answer.close()
        assert len(bench.wires) == 1


async def test_a_client_that_keeps_no_connection() -> None:
    async with Bench(says(whole(200, b"a")), says(whole(200, b"b")), keep_alive=False) as bench:
        for expected in (b"a", b"b"):
            assert await ask(bench.transport, "/x", b"{}") == (200, expected)
        assert len(bench.wires) == 2
        assert all(wire.requests()[0][1][b"connection"] == b"close" for wire in bench.wires)


async def test_pieces_are_yielded_until_the_end() -> None:
    async with Bench(says(STREAM, chunked(b"a"))) as bench:
        answer = await bench.post()
        found = []
        async for piece in Pieces(answer):
            found.append(piece)
            bench.wires[0].receive(chunked(b"b"), END) if piece == b"a" else None
        assert found == [b"a", b"b"]


async def test_closing_an_unfinished_answer_hangs_up() -> None:  # C40
    async with Bench(says(STREAM, chunked(b"a"))) as bench:
        answer = await bench.post()
        waiting = asyncio.create_task(_twice(answer))
        await asyncio.sleep(0)
        answer.close()
        with pytest.raises(ConnectionLost, match="broke"):
            await waiting
        await asyncio.sleep(0)
        assert bench.wires[0].is_closing()


async def _twice(answer: StreamedResponse) -> None:
    await read(answer)
    await read(answer)


async def test_closing_an_answer_that_has_not_begun_hangs_up() -> None:
    async with Bench(says()) as bench:
        answer = bench.transport.post("/v1/completions", b"{}")
        beginning = asyncio.create_task(answer.begin())
        await bench.heard.wait()
        answer.close()
        with pytest.raises(ConnectionLost, match="broke"):
            await beginning
        await asyncio.sleep(0)
        assert bench.wires[0].is_closing()


async def test_closing_an_answer_whose_connection_is_not_open_sends_nothing() -> None:
    async with Bench() as bench:
        answer = bench.transport.post("/v1/completions", b"{}")
        beginning = asyncio.create_task(answer.begin())
        await asyncio.sleep(0)
        answer.close()
        with pytest.raises(ConnectionLost, match="broke"):
            await beginning
        await asyncio.sleep(0.01)
        assert not bench.wires


@pytest.mark.parametrize(
    "script",
    [hangs_up(), hangs_up(head(200)[:9]), says(b"this is not HTTP\r\n\r\n")],
    ids=["nothing", "half a head", "no HTTP"],
)
async def test_a_server_that_breaks_off_before_its_answer(script: Callable[[Wire], None]) -> None:  # C39
    async with Bench(script) as bench:
        with pytest.raises(ConnectionLost, match="broke"):
            await bench.post()
    async with Bench(script, script) as bench:
        with pytest.raises(ConnectionLost, match="broke"):
            await bench.transport.get("/version")


async def test_a_server_that_breaks_off_in_the_midst() -> None:
    async with Bench(says(STREAM, chunked(b"a"))) as bench:
        answer = await bench.post()
        assert await read(answer) == b"a"
        bench.wires[0].drop(ConnectionResetError())
        with pytest.raises(ConnectionLost, match="broke"):
            await read(answer)
        answer.close()


async def test_a_server_that_goes_silent() -> None:
    async with Bench(says(STREAM, chunked(b"a")), read_timeout=0.01) as bench:
        answer = await bench.post()
        assert await read(answer) == b"a"
        with pytest.raises(ConnectionLost, match="sent nothing for too long"):
            await read(answer)
        answer.close()


async def test_a_server_that_never_answers() -> None:
    async with Bench(says(), read_timeout=0.01) as bench:
        with pytest.raises(ConnectionLost, match="sent nothing for too long"):
            await bench.post()


@pytest.mark.parametrize(
    "refusal",
    [
        ConnectionRefusedError(111, "refused"),
        TimeoutError("slow"),
        ssl.SSLError("expired"),
        UnicodeError("name"),
    ],
)
async def test_a_server_that_is_not_there(refusal: Exception) -> None:
    async with Bench() as bench:
        bench.refuses = refusal
        with pytest.raises(ConnectionLost, match="cannot be reached"):
            await bench.transport.get("/version")
        with pytest.raises(ConnectionLost, match="cannot be reached"):
            await bench.post()


async def test_finish_never_raises() -> None:
    async with Bench(says(STREAM, chunked(b"a"))) as bench:
        answer = await bench.post()
        bench.wires[0].drop(ConnectionResetError())
        answer.finish()


async def test_before_open_and_after_close() -> None:
    bench = Bench()
    with pytest.raises(ConnectionLost, match="not started"):
        await bench.transport.get("/version")
    await bench.transport.open()
    await bench.transport.close()
    await bench.transport.close()
    with pytest.raises(ConnectionLost, match="not started, or closed"):
        await bench.post()


async def test_a_slow_reader_slows_the_server() -> None:
    async with Bench(says(STREAM)) as bench:
        answer = await bench.post()
        (wire,) = bench.wires
        sent = 0
        while not wire.paused and sent < 100:
            wire.receive(chunked(b"x" * 65536))
            sent += 1
        assert wire.paused
        got = 0
        while got < sent * 65536:
            got += len(await read(answer))
        assert not wire.paused
        answer.close()


async def test_engine_over_http() -> None:
    models, version, answer = (Exchange.load(name).answer for name in ("models", "version", "answer"))
    script = (
        says(whole(200, models)),
        says(whole(200, version)),
        says(whole(404, b"")),  # the size of its cache is hidden
        says(STREAM, chunked(event([7], "length")), chunked(ending()), END),
        says(whole(404, b"{}")),  # it is asked whether it takes pictures
        says(STREAM, *(chunked(answer[i : i + 100]) for i in range(0, len(answer), 100)), END),
        says(STREAM, chunked(event([1]) + event([2], "stop")), chunked(ending()), END),
        hangs_up(STREAM, chunked(event([1]))),
    )
    bench = Bench(*script)
    engine = vllm_engine(transport=bench.transport)
    await engine.start()
    for expected in (PARIS, [1, 2]):
        stream = engine.generate(GenerationJob(QUESTION, Sampling(), "r1"))
        assert [t async for c in stream for t in c.token_ids] == expected
    assert len(bench.wires) == 1
    with pytest.raises(EngineFailed, match="broke"):
        assert [c async for c in engine.generate(GenerationJob(QUESTION, Sampling(), "r1"))]
    await engine.close()
