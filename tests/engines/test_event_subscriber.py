"""KV events over real ZMQ sockets: live, repeated after a gap, and an engine that does not repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.routing_jobs import QuietEngine, workers
from engines.test_kv_events import END, Followed, numbered

pytestmark = pytest.mark.engines  # opens sockets, and needs pyzmq

zmq = pytest.importorskip("zmq")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_events_come_live_and_missing_ones_again(tmp_path: Path) -> None:
    from singletree.routing.event_subscriber import EventSubscriber

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
    from singletree.routing import event_subscriber

    monkeypatch.setattr(event_subscriber, "REPLAY_SECONDS", 0.05)
    followed = Followed(can_replay=True)
    subscriber = event_subscriber.EventSubscriber(
        followed.stream, f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/nobody"
    )
    await until(lambda: followed.stream.replay_from is None)
    await subscriber.close()


async def publish_until(socket: Any, frames: list[bytes], holds: Callable[[], bool]) -> None:
    """Publish a message again and again: a subscription takes a while to reach the publisher."""
    async with asyncio.timeout(10):
        while not holds():
            await socket.send_multipart(frames)
            await asyncio.sleep(0.02)


async def test_an_engine_that_runs_elsewhere_is_followed_there(tmp_path: Path) -> None:
    """An engine reports where it publishes, goes down, and comes back in another place with an empty cache."""
    from singletree.engines.engine import KvPublisher
    from singletree.routing.kv_policy import KvAwarePolicy

    context = pytest.importorskip("zmq.asyncio").Context()
    here, there = context.socket(zmq.PUB), context.socket(zmq.PUB)
    places = [KvPublisher(f"ipc://{tmp_path}/{name}") for name in ("here", "there")]
    for socket, place in zip((here, there), places, strict=True):
        socket.bind(place.events)
    pool = workers(2)
    engine = pool[0].engine
    assert isinstance(engine, QuietEngine)
    engine.kv_publisher = places[0]
    policy = KvAwarePolicy("m")
    await policy.start(pool)
    cache = policy.cache_of(pool[0])
    assert cache.events is not None
    events = cache.events
    await publish_until(here, numbered(0), lambda: events.blocks == 1)
    policy.worker_lost(pool[0])  # it is down, and reports what it reported last
    assert events.blocks == 0
    engine.kv_publisher = places[1]
    policy.worker_lost(pool[0])  # it is up again
    await publish_until(there, numbered(0), lambda: events.blocks == 1)
    await here.send_multipart(numbered(1))
    await there.send_multipart(numbered(2))
    await until(lambda: cache.stream is not None and cache.stream.losses == 1)
    assert policy.cache_of(pool[1]).subscriber is None
    await policy.close()
    for socket in (here, there):
        socket.close(0)
    context.term()


async def test_an_endpoint_that_is_none() -> None:
    from singletree.errors import BadConfiguration
    from singletree.routing.event_subscriber import EventSubscriber

    with pytest.raises(BadConfiguration, match="is not a ZMQ endpoint"):
        EventSubscriber(Followed().stream, "nonsense")
