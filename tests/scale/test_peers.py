"""Questions between processes: answers, streams of answers, and processes that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from singletree.processes.other_processes import Peers

pytestmark = pytest.mark.scale


@asynccontextmanager
async def started(folder: Path, count: int) -> AsyncIterator[list[Peers]]:
    peers = [Peers(folder, number, count) for number in range(1, count + 1)]
    for each in peers:
        await each.start()
    try:
        yield peers
    finally:
        for each in peers:
            await each.close()


async def _double(value: int) -> int:
    return 2 * value


async def test_every_other_process_answers(tmp_path: Path) -> None:
    async with started(tmp_path, 3) as peers:
        for each in peers:
            each.answer("number", lambda each=each: each.number)
            each.answer("double", _double)
        assert await peers[1].ask("number") == [1, 3]
        assert await peers[0].ask("double", 4) == [8, 8]
        assert await peers[0].ask("nothing that is known") == []


async def test_one_that_is_late_or_dead_is_left_out(tmp_path: Path) -> None:
    async with started(tmp_path, 3) as peers:
        ended = asyncio.Event()

        async def never() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        peers[1].answer("wait", never)
        peers[2].answer("wait", lambda: "here")
        assert await peers[0].ask("wait", seconds=0.2) == ["here"]
        await asyncio.wait_for(ended.wait(), 10)  # it stops when nobody waits for the answer
        await peers[2].close()
        assert await peers[0].ask("wait", seconds=0.2) == []


async def test_values_come_one_by_one(tmp_path: Path) -> None:
    async with started(tmp_path, 2) as peers:
        more = asyncio.Event()

        async def count(to: int) -> AsyncIterator[int]:
            for number in range(to):
                yield number
                await more.wait()

        peers[1].answer("count", count)
        values = peers[0].stream(2, "count", 3)
        assert await anext(values) == 0
        more.set()
        assert [value async for value in values] == [1, 2]


async def test_a_process_that_starts_again_has_its_socket(tmp_path: Path) -> None:
    async with started(tmp_path, 2) as peers:
        again = Peers(tmp_path, 2, 2)
        again.answer("who", lambda: "the new one")
        await again.start()
        assert await peers[0].ask("who") == ["the new one"]
        await again.close()


async def test_a_process_that_ends_ends_its_streams(tmp_path: Path) -> None:
    async with started(tmp_path, 2) as peers:

        async def endless() -> AsyncIterator[int]:
            while True:
                yield 1
                await asyncio.sleep(0.01)

        peers[1].answer("count", endless)
        values = peers[0].stream(2, "count")
        assert await anext(values) == 1
        await peers[1].close()

        async def rest() -> None:
            while True:
                await anext(values)

        with pytest.raises((EOFError, OSError)):
            await asyncio.wait_for(rest(), 10)
