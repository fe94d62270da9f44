"""``MessageReceiver`` on real sockets of ZMQ within this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from singletree.in_process.vllm_outputs import receive_cheaply


class Pipe:
    """A sender, and the socket of a client as vLLM makes it, before a loop runs."""

    def __init__(self, name: str) -> None:
        self._context = zmq.Context()
        self.sender = self._context.socket(zmq.PUSH)
        self.sender.bind(f"inproc://{name}")
        self.socket = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        self.socket.connect(f"inproc://{name}")
        self.resources = SimpleNamespace(output_socket=self.socket, output_queue_task=None)
        receive_cheaply(SimpleNamespace(resources=self.resources))

    def close(self) -> None:
        """Close both sockets."""
        self.socket.close(linger=0)
        self.sender.close(linger=0)
        self._context.term()


@pytest.fixture
def pipe(request: pytest.FixtureRequest) -> Iterator[Pipe]:
    made = Pipe(request.node.name)
    assert "recv_multipart" in vars(made.socket)
    yield made
    made.close()


async def receive(pipe: Pipe) -> list[bytes]:
    frames = await asyncio.wait_for(pipe.socket.recv_multipart(copy=False), 5)
    return [bytes(frame.buffer) for frame in frames]


async def test_every_message_is_received_once_and_in_order(pipe: Pipe) -> None:
    pipe.sender.send_multipart([b"early", b"frame"])
    assert await receive(pipe) == [b"early", b"frame"]
    for number in range(200):
        waiting = asyncio.create_task(receive(pipe))
        if number % 3:
            await asyncio.sleep(0)
        for part in range(number % 4 + 1):
            pipe.sender.send(b"%d %d" % (number, part))
        got = [await waiting, *[await receive(pipe) for _ in range(number % 4)]]
        assert got == [[b"%d %d" % (number, part)] for part in range(number % 4 + 1)]


async def test_what_comes_while_nobody_reads_is_kept_and_the_loop_rests(pipe: Pipe) -> None:
    pipe.sender.send(b"1")
    assert await receive(pipe) == [b"1"]
    pipe.sender.send(b"2")
    await asyncio.sleep(0.05)
    pipe.sender.send(b"3")
    await asyncio.sleep(0.05)
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1

    asyncio.get_running_loop().add_reader(pipe.socket.FD, count)
    await asyncio.sleep(0.05)
    assert turns == 0, "the descriptor is not readable any more"
    assert [await receive(pipe), await receive(pipe)] == [[b"2"], [b"3"]]


async def test_a_cancelled_reader_loses_nothing(pipe: Pipe) -> None:
    waiting = asyncio.create_task(receive(pipe))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    pipe.sender.send(b"1")
    assert await receive(pipe) == [b"1"]


async def test_closing_ends_the_reader(pipe: Pipe) -> None:
    waiting = asyncio.create_task(receive(pipe))
    await asyncio.sleep(0.01)
    descriptor = pipe.socket.FD
    pipe.socket.close(linger=0)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pipe.socket.closed
    assert not asyncio.get_running_loop().remove_reader(descriptor)


@pytest.mark.parametrize(
    "engine_core",
    [
        SimpleNamespace(),
        SimpleNamespace(resources=SimpleNamespace(output_socket=None, output_queue_task=None)),
        SimpleNamespace(resources=SimpleNamespace(output_socket=object(), output_queue_task=None)),
    ],
)
def test_another_client_is_left_as_it_is(engine_core: Any) -> None:
    receive_cheaply(engine_core)


def test_a_socket_that_is_read_already_is_left_as_it_is() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        receive_cheaply(
            SimpleNamespace(resources=SimpleNamespace(output_socket=socket, output_queue_task="running"))
        )
        assert "recv_multipart" not in vars(socket)
