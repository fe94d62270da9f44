"""The buffer between generations and the writer: it joins what is ready, and every producer waits for room."""

from __future__ import annotations

import asyncio

import pytest

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


async def _waiting(buffer: SendBuffer) -> asyncio.Task[list[Frame]]:
    taking = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    return taking


async def test_frames_of_one_turn_of_the_loop_are_written_together_without_the_consumer() -> None:
    written: list[tuple[int, list[Frame]]] = []
    buffers = [SendBuffer() for _ in range(3)]
    tasks = [await _waiting(buffer) for buffer in buffers]
    for number, buffer in enumerate(buffers):
        buffer.write_through = lambda frames, number=number: written.append((number, frames))
    for buffer in (*buffers, *buffers):
        buffer.put_through([FRAME])
    assert written == []
    await asyncio.sleep(0)
    assert written == [(number, [FRAME, FRAME]) for number in range(3)]
    assert not any(task.done() for task in tasks)
    for task, buffer in zip(tasks, buffers, strict=True):
        buffer.close()
        assert await task == []


async def test_frames_keep_their_order_where_the_consumer_was_woken() -> None:
    buffer, written = SendBuffer(), list[Frame]()
    taking = await _waiting(buffer)
    buffer.write_through = lambda frames: written.extend(frames)
    buffer.put_through([("", b"1")])
    buffer.put([("", b"2")])
    buffer.put_through([("", b"3")])
    assert await taking == [("", b"1"), ("", b"2"), ("", b"3")]
    assert written == []


async def test_a_write_that_has_to_wait_is_awaited_before_the_next() -> None:
    buffer, room = SendBuffer(full_bytes=15), asyncio.get_running_loop().create_future()
    taking = await _waiting(buffer)
    buffer.write_through = lambda frames: room
    buffer.put_through([FRAME])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    buffer.put_through([FRAME])
    buffer.put_through([FRAME])
    await asyncio.sleep(0)
    assert buffer.is_full
    assert not taking.done()
    room.set_result(None)
    assert await taking == [FRAME, FRAME]


async def test_a_write_that_fails_fails_at_the_consumer() -> None:
    buffer = SendBuffer()
    taking = await _waiting(buffer)

    def fail(frames: list[Frame]) -> None:
        raise OSError("gone")

    buffer.write_through = fail
    buffer.put_through([FRAME])
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="gone"):
        await asyncio.wait_for(taking, 1)
