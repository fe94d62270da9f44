"""``while_connected``: whichever ends first, the work, the connection or the caller, the others end with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from singletree.server.answers.disconnect import while_connected
from singletree.server.answers.request_body import ClientLeft


class _Connection:
    """A client that leaves when ``left`` is set."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.waits = 0

    async def receive(self) -> dict[str, Any]:
        self.waits += 1
        try:
            await self.left.wait()
        finally:
            self.waits -= 1
        return {"type": "http.disconnect"}


class _Endless:
    """Work that ends only when it is cancelled, and takes some turns of the loop for it."""

    def __init__(self) -> None:
        self.has_ended = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await _turn()
            self.has_ended = True


async def _turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_result_comes_back_and_nothing_waits_for_the_client_any_more() -> None:
    connection = _Connection()

    async def work() -> int:
        await _turn()
        return 3

    assert await while_connected(connection.receive, work()) == 3
    await _turn()
    assert connection.waits == 0
    assert len(asyncio.all_tasks()) == 1


async def test_work_that_the_client_leaves_ends_before_the_caller_goes_on() -> None:
    connection, work = _Connection(), _Endless()
    asyncio.get_running_loop().call_later(0.01, connection.left.set)
    with pytest.raises(ClientLeft):
        await while_connected(connection.receive, work.run())
    assert work.has_ended


async def test_an_error_on_the_way_out_does_not_hide_that_the_client_left() -> None:
    connection = _Connection()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("on the way out")

    asyncio.get_running_loop().call_later(0.01, connection.left.set)
    with pytest.raises(ClientLeft):
        await while_connected(connection.receive, work())


async def test_work_that_cancels_itself_ends_as_if_the_client_had_left() -> None:
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    with pytest.raises(ClientLeft):
        await while_connected(_Connection().receive, work())


async def test_an_error_of_the_work_passes_through() -> None:
    async def work() -> None:
        await _turn()
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await while_connected(_Connection().receive, work())


async def test_a_caller_that_is_cancelled_ends_the_work_and_stays_cancelled() -> None:
    connection, work = _Connection(), _Endless()
    calling = asyncio.create_task(while_connected(connection.receive, work.run()))
    await _turn()
    calling.cancel()
    await asyncio.wait({calling})
    assert calling.cancelled()
    assert work.has_ended
    await _turn()
    assert connection.waits == 0


async def test_a_connection_that_fails_counts_as_closed() -> None:
    async def receive() -> dict[str, Any]:
        raise OSError("broken")

    with pytest.raises(ClientLeft):
        await while_connected(receive, _Endless().run())
