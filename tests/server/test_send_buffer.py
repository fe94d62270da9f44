"""The buffer between generations and the writer: it joins what is ready, and every producer waits for room."""

from __future__ import annotations

import asyncio

from singletree.protocols.answer import Frame
from singletree.server.answers.stream import SendBuffer

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


async def _waiting(buffer: SendBuffer) -> asyncio.Task[list[Frame]]:
    taking = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    return taking


async def test_frames_are_written_without_the_consumer() -> None:
    written: list[list[Frame]] = []
    buffer = SendBuffer()

    def write(frames: list[Frame]) -> bool:
        written.append(frames)
        return True

    taking = await _waiting(buffer)
    buffer.write_through = write
    for _ in range(2):
        assert buffer.put_through([FRAME])
    assert buffer.put_through([])
    assert written == [[FRAME], [FRAME]]
    assert not taking.done()
    buffer.close()
    assert await taking == []


async def test_frames_keep_their_order_where_the_consumer_was_woken() -> None:
    buffer, written = SendBuffer(), list[Frame]()
    taking = await _waiting(buffer)

    def write(frames: list[Frame]) -> bool:
        written.extend(frames)
        return True

    buffer.write_through = write
    buffer.put_through([("", b"1")])
    buffer.put([("", b"2")])
    buffer.put_through([("", b"3")])
    assert await taking == [("", b"2"), ("", b"3")]
    assert written == [("", b"1")]


async def test_the_consumer_writes_what_the_transport_does_not_take_at_once() -> None:
    buffer, offered = SendBuffer(full_bytes=15), list[list[Frame]]()
    taking = await _waiting(buffer)

    def refuse(frames: list[Frame]) -> bool:
        offered.append(frames)
        return False

    buffer.write_through = refuse
    assert buffer.put_through([FRAME])
    assert not buffer.put_through([FRAME])
    assert buffer.is_full
    assert await taking == [FRAME, FRAME]
    assert len(offered) == 1
    assert not buffer.is_full


async def test_the_end_comes_with_the_last_frames() -> None:
    buffer = SendBuffer()
    buffer.put([FRAME])
    assert await buffer.take() == [FRAME]
    assert not buffer.is_over
    buffer.put([FRAME])
    buffer.close()
    assert await buffer.take() == [FRAME]
    assert buffer.is_over
