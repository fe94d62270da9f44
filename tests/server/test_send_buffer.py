"""The buffer between generations and the writer: it joins what is ready, and every producer waits for room."""

from __future__ import annotations

import asyncio

from singletree.protocols.answer import Frame
from singletree.server.answers.send_buffer import SendBuffer

FRAME: Frame = ("", b"0123456789")


async def test_all_frames_that_are_ready_are_taken_at_once() -> None:
    buffer = SendBuffer()
    buffer.put([FRAME])
    buffer.put([])
    buffer.put([FRAME, ("ping", b"{}")])
    assert await buffer.take() == [FRAME, FRAME, ("ping", b"{}")]
    buffer.close()
    assert await buffer.take() == []


async def test_several_producers_wait_for_room_and_all_go_on() -> None:
    buffer = SendBuffer(full_bytes=20)

    async def produce() -> None:
        for _ in range(5):
            buffer.put([FRAME])
            if buffer.is_full:
                await buffer.room()

    tasks = [asyncio.create_task(produce()) for _ in range(3)]
    taken = 0
    while taken < 15:
        frames = await asyncio.wait_for(buffer.take(), 1)
        assert len(frames) <= 4, "each of the three puts at most one frame where there is no room"
        taken += len(frames)
    await asyncio.wait_for(asyncio.gather(*tasks), 1)


async def test_a_producer_that_is_cancelled_does_not_wake_the_others() -> None:
    buffer = SendBuffer(full_bytes=1)
    buffer.put([FRAME])
    first, second = (asyncio.create_task(buffer.room()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not second.done()
    await buffer.take()
    await asyncio.wait_for(second, 1)
