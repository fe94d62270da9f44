"""``WhileConnected``: whichever ends first, the work, the connection or the caller, the others end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from starlette.types import Receive

from singletree.server.answers.client_link import WhileConnected
from singletree.server.answers.request_body import ClientLeft

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    with WhileConnected(receive):
        return await work


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


async def test_work_that_gives_up_its_client_ends_as_if_the_client_had_left() -> None:
    client = WhileConnected(_Connection().receive)

    async def work() -> None:
        with client:
            asyncio.get_running_loop().call_soon(client.leave)
            asyncio.get_running_loop().call_soon(client.leave)
            await asyncio.Event().wait()

    with pytest.raises(ClientLeft):
        await work()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    client.leave()
    await _turn()


async def test_a_caller_that_is_cancelled_when_the_client_leaves_stays_cancelled() -> None:
    connection, work = _Connection(), _Endless()
    calling = asyncio.create_task(while_connected(connection.receive, work.run()))
    await _turn()
    connection.left.set()
    calling.cancel()
    await asyncio.wait({calling})
    assert calling.cancelled()
    assert work.has_ended


class _Reporter:
    """A server that reports a disconnected client by itself."""

    def __init__(self, *, is_connected: bool = True) -> None:
        self.leave: Callable[[], None] | None = None
        self._is_connected = is_connected

    def __call__(self, leave: Callable[[], None] | None) -> bool:
        self.leave = leave
        return self._is_connected

    async def receive(self) -> dict[str, Any]:
        raise AssertionError("nobody has to wait for the client")


async def test_a_server_that_reports_the_client_needs_no_task() -> None:
    reporter = _Reporter()

    async def work() -> None:
        with WhileConnected(reporter.receive, reporter):
            assert len(asyncio.all_tasks()) == 1
            assert reporter.leave is not None
            asyncio.get_running_loop().call_soon(reporter.leave)
            await asyncio.Event().wait()

    with pytest.raises(ClientLeft):
        await work()
    assert reporter.leave is None


async def test_work_for_a_client_that_has_left_already_does_not_begin() -> None:
    reporter = _Reporter(is_connected=False)
    with pytest.raises(ClientLeft), WhileConnected(reporter.receive, reporter):
        raise AssertionError("the work began")


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
