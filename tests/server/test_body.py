"""Compressed request bodies: read whole, capped before and after, and never expanded past the cap."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from random import Random
from threading import get_ident

import brotli
import pytest
import zstandard
from starlette.types import Message

from singletree.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding
from singletree.server.answers import request_body
from singletree.server.answers.request_body import read_body

Compress = Callable[[bytes], bytes]

COMPRESSED: dict[str, Compress] = {
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "br": brotli.compress,
}

each_encoding = pytest.mark.parametrize(("name", "compress"), COMPRESSED.items(), ids=COMPRESSED)
PLAIN = b'{"model": "m", "input": "' + bytes(range(97, 123)) * 9000 + b'"}'


async def read(
    body: bytes,
    encoding: str,
    limit: int = 2**20,
    piece: int = 50_000,
    admission: request_body.BodyAdmission | None = None,
) -> bytes:
    pieces = [body[at : at + piece] for at in range(0, len(body), piece)] or [b""]
    messages: list[Message] = [{"type": "http.request", "body": each, "more_body": True} for each in pieces]
    messages[-1]["more_body"] = False

    async def receive() -> Message:
        return messages.pop(0)

    return await read_body({"content-encoding": encoding}, receive, limit, admission)


@each_encoding
async def test_it_is_what_was_compressed(name: str, compress: Compress) -> None:  # C31
    assert await read(compress(PLAIN), name) == PLAIN
    assert await read(compress(b""), name) == b""
    assert await read(b"", name) == b""
    assert await read(compress(PLAIN), name, limit=len(PLAIN)) == PLAIN


@each_encoding
async def test_the_cap_holds_before_and_after(name: str, compress: Compress) -> None:  # C31
    with pytest.raises(BodyTooLarge):
        await read(compress(PLAIN), name, limit=len(PLAIN) - 1)
    with pytest.raises(BodyTooLarge):
        await read(compress(PLAIN), name, limit=100)


async def test_a_client_that_asks_before_it_sends_too_much_is_refused_at_once() -> None:
    async def receive() -> Message:
        raise AssertionError("it was told to go on")

    with pytest.raises(BodyTooLarge):
        await read_body({"expect": "100-continue", "content-length": "101"}, receive, 100)


@each_encoding
async def test_a_bomb_does_not_go_off(name: str, compress: Compress) -> None:  # C31
    bomb = compress(bytes(32 * 2**20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            await read(bomb, name, limit=2**20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20


@each_encoding
async def test_what_is_damaged_or_cut_is_refused_or_short(name: str, compress: Compress) -> None:
    whole = compress(PLAIN)
    for cut in (*range(1, 30), len(whole) // 2, len(whole) - 1):
        with suppress(InvalidRequest):
            assert PLAIN.startswith(await read(whole[:cut], name))
    with pytest.raises(InvalidRequest):
        await read(b"\xff" * 40, name)


async def test_many_members_cost_no_more_than_a_few() -> None:
    few = gzip.compress(PLAIN[:100]) + gzip.compress(b"") * 100 + gzip.compress(PLAIN[100:])
    assert await read(few, "gzip") == PLAIN
    with pytest.raises(InvalidRequest):
        await read(gzip.compress(b"") * 20_000, "gzip")


async def test_the_error_for_an_unknown_encoding_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedEncoding, match="gzip, x-gzip, zstd"):
        await read(b"{}", "lzma")


@each_encoding
async def test_several_encodings_are_refused_before_the_body_is_read(name: str, compress: Compress) -> None:
    with pytest.raises(UnsupportedEncoding, match="has 2 encodings; compress the body once"):
        await read(compress(compress(PLAIN)), f"{name}, {name.upper()}")
    assert await read(compress(PLAIN), f"identity, {name}") == PLAIN


@each_encoding
async def test_a_ratio_beyond_the_limit_is_refused(
    name: str, compress: Compress, set_limits: Callable[..., None]
) -> None:
    packed = compress(bytes(4 * 2**20))
    with pytest.raises(BodyTooLarge, match=r"less than a part in 100 of its size.*--limit compression_ratio"):
        await read(packed, name, limit=2**26)
    set_limits(compression_ratio=10**6)
    assert len(await read(packed, name, limit=2**26)) == 4 * 2**20


@each_encoding
async def test_a_body_is_decompressed_in_a_thread(
    name: str, compress: Compress, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    real = request_body._DECODERS[name]

    def decompress(body: bytes, limit: int) -> bytes:
        threads.append(get_ident())
        return real(body, limit)

    monkeypatch.setitem(request_body._DECODERS, name, decompress)
    random = Random(1).randbytes(10_000)
    assert await read(compress(random), name) == random
    assert await read(compress(b"short"), name) == b"short"
    assert [each == get_ident() for each in threads] == [False, True]
    threads.clear()
    assert await read(compress(b"long" * 250_000), name, limit=2**26) == b"long" * 250_000
    assert threads.pop() != get_ident(), "many that are small until they are decompressed hold up nobody"
    assert len(threads) <= 1
    threads.clear()
    admission, running = request_body.BodyAdmission(), 0

    def alone(body: bytes, limit: int) -> bytes:
        nonlocal running
        if limit > 2**16:
            running += 1
            assert running == 1
            time.sleep(0.01)
            running -= 1
        return decompress(body, limit)

    monkeypatch.setitem(request_body._DECODERS, name, alone)
    many = [read(compress(b"long" * 250_000), name, limit=2**26, admission=admission) for _ in range(5)]
    assert await asyncio.gather(*many) == [b"long" * 250_000] * 5
