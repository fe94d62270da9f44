"""KV events over real ZMQ sockets: live, repeated after a gap, and an engine that does not repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.test_kv_events import END, Followed, numbered

pytestmark = pytest.mark.engines  # opens sockets, and needs pyzmq

zmq = pytest.importorskip("zmq")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_events_come_live_and_missing_ones_again(tmp_path: Path) -> None:
    from singletree.engines.routing.event_subscriber import EventSubscriber

    context = pytest.importorskip("zmq.asyncio").Context()
    live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    live.bind(f"ipc://{tmp_path}/live")
    replay.bind(f"ipc://{tmp_path}/replay")
    asked: list[int] = []
    published = [numbered(number) for number in range(8)]

    async def repeat() -> None:
        while True:
            client, _, start = await replay.recv_multipart()
            asked.append(int.from_bytes(start, "big"))
            for frames in published[asked[-1] : shown]:
                await replay.send_multipart([client, b"", *frames])
            await replay.send_multipart([client, *END])

    shown = 3
    serving = asyncio.create_task(repeat())
    followed = Followed(can_replay=True)
    subscriber = EventSubscriber(followed.stream, f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")
    await until(lambda: followed.cache.blocks == 3 and followed.stream.synced)
    shown = 8
    while followed.cache.blocks < 8:  # until the subscription has reached the publisher
        await live.send_multipart(published[7])
        await asyncio.sleep(0.05)
    assert asked[0] == 0
    assert 3 in asked
    assert followed.stream.losses == 0
    await subscriber.close()
    serving.cancel()
    for socket in (live, replay):
        socket.close(0)
    context.term()


async def test_an_engine_that_does_not_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from singletree.engines.routing import event_subscriber

    monkeypatch.setattr(event_subscriber, "REPLAY_SECONDS", 0.05)
    followed = Followed(can_replay=True)
    subscriber = event_subscriber.EventSubscriber(
        followed.stream, f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/nobody"
    )
    await until(lambda: followed.stream.replay_from is None)
    await subscriber.close()


async def test_an_endpoint_that_is_none() -> None:
    from singletree.engines.routing.event_subscriber import EventSubscriber
    from singletree.errors import BadConfiguration

    with pytest.raises(BadConfiguration, match="is not a ZMQ endpoint"):
        EventSubscriber(Followed().stream, "nonsense")
