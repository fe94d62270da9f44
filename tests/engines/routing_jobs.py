"""Jobs, workers and recordings for the tests of routing."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from singletree.conversation import Sampling
from singletree.engines.engine import Engine, EngineInfo, GenerationJob, KvPublisher
from singletree.engines.workers import Worker

RECORDED = Path(__file__).parent / "kv_events"

Value = TypeVar("Value")


class QuietEngine:
    """An engine that only reports the size of its cache, and where it publishes its KV events."""

    kv_publisher: KvPublisher | None = None

    def __init__(self, **details: Any) -> None:
        self.details = details

    def info(self) -> EngineInfo:
        return EngineInfo("quiet", 1 << 20, details=self.details, kv_publisher=self.kv_publisher)


def workers(count: int, **details: Any) -> list[Worker]:
    return [Worker(f"http://engine-{n}", cast(Engine, QuietEngine(**details))) for n in range(count)]


def job(tokens: Sequence[int], session: str = "", **more: Any) -> GenerationJob:
    return GenerationJob(tokens, Sampling(max_tokens=100), "r", session=session, **more)


def now(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(Value, done.value)
    raise AssertionError("it waits")


def recorded(engine: str) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.msgpack.decode((RECORDED / f"{engine}.msgpack").read_bytes())
    return value


def all_frames(recording: dict[str, Any]) -> Iterator[list[bytes]]:
    for step in recording["steps"]:
        yield from step["frames"]
