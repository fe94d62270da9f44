"""The application in memory as an endpoint under check, and servers with one fault made of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from server.memory import Client, Exchange, scope
from server.serving import MODEL, TEMPLATE, TOKENIZER, serving
from singletree.checking import stream_checks
from singletree.checking.contract import Result, choose, run_all
from singletree.checking.endpoint import Arriving, Endpoint
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config
from singletree.stored_responses.store import Store

KEYS = ("first-key", "second-key")


@dataclass(frozen=True)
class Ask:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body; empty if it is none that is plain JSON."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def with_json(self, value: object) -> Ask:
        return replace(self, body=json.dumps(value).encode())


class Given:
    """An answer that is there as a whole."""

    def __init__(self, status: int, body: bytes | dict[str, Any]) -> None:
        self.status = status
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()

    def read(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        pass


Send = Callable[[Ask], Arriving]
Fault = Callable[[Ask, Send], Arriving]


class _Arriving:
    def __init__(self, exchange: Exchange, task: asyncio.Task[None], loop: asyncio.AbstractEventLoop) -> None:
        assert exchange.status is not None
        self.status = exchange.status
        self._exchange, self._task, self._loop = exchange, task, loop
        self._ended = False

    def read(self) -> bytes:
        if self._ended:
            return b""
        data = asyncio.run_coroutine_threadsafe(self._exchange.read(), self._loop).result(60)
        self._ended = data is None
        return data or b""

    def close(self) -> None:
        async def leave() -> None:
            self._exchange.leave()
            await asyncio.wait_for(self._task, 30)

        asyncio.run_coroutine_threadsafe(leave(), self._loop).result(60)


class InMemoryConnector:
    """Carries requests to an application that runs in another thread's loop, through a fault."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, fault: Fault | None = None) -> None:
        self._client, self._loop, self._fault = client, loop, fault

    def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Arriving:
        ask = Ask(method, path, headers, body)
        return self._fault(ask, self._send) if self._fault else self._send(ask)

    def _send(self, ask: Ask) -> Arriving:
        async def start() -> _Arriving:
            exchange = Exchange(ask.body)
            task = self._client.ask(exchange, scope(ask.method, ask.path, ask.headers, ask.body))
            await asyncio.wait_for(exchange.started.wait(), 30)
            return _Arriving(exchange, task, self._loop)

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(60)


@asynccontextmanager
async def checked(
    fault: Fault | None = None, config: Config | None = None, **settings: Any
) -> AsyncIterator[Endpoint]:
    """The endpoint of a server in memory, with ``fault``; ``settings`` are the model's."""
    config = config or Config(api_key=KEYS)
    given = {
        "memory": TurnMemory(2**22),
        "context_window": 40_000,
        "layout": TEMPLATE.layout(TOKENIZER),
        **settings,
    }
    async with serving(config=config, **given) as served:
        served.service.store = store = Store(None, 2**24)
        connector = InMemoryConnector(served.client, asyncio.get_running_loop(), fault)
        yield Endpoint(connector, *KEYS, model=MODEL)
        store.close()


async def results(endpoint: Endpoint, protocol: str = "", check: str = "") -> list[Result]:
    """What comes of one check or of all, on one protocol or on all."""

    def run() -> list[Result]:
        endpoint.discover()
        endpoint.protocols = tuple(p for p in endpoint.protocols if protocol in ("", p.name))
        return list(run_all(choose([check] if check else [], []), endpoint, 300))

    stream_checks.PACE = 0.001
    return await asyncio.to_thread(run)
