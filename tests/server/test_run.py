"""Starting and stopping, with the HTTP server and its sockets stood in for."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from functools import partial
from typing import Any

import pytest

from singletree.errors import BadConfiguration, EngineFailed
from singletree.server.http import run
from singletree.server.http.run import choose_address, wait_until_listening
from singletree.server.models.config import Config

from .memory import Client, events
from .serving import body


class Listener:
    """Stands in for Granian: remembers its application and whether it was stopped."""

    last: Listener
    fault: Exception | None = None

    def __init__(self, app: Any, **settings: Any) -> None:
        self.app, self.settings = app, settings
        self.stopped = asyncio.Event()
        Listener.last = self

    async def serve(self) -> None:
        """Until it is stopped."""
        if self.fault is not None:
            raise self.fault
        await self.stopped.wait()

    def stop(self) -> None:
        """Stop."""
        self.stopped.set()


class Probe:
    """Stands in for a socket that can, or cannot, be bound."""

    fault: OSError | None = None

    def __init__(self, *kind: int) -> None:
        self.address: tuple[str, int] = ("", 0)

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to close."""

    def setsockopt(self, *option: int) -> None:
        """Nothing to set."""

    def bind(self, address: tuple[str, int]) -> None:
        """Bound, unless it cannot be."""
        if self.fault is not None:
            raise self.fault
        self.address = (address[0], address[1] or 4321)

    def getsockname(self) -> tuple[str, int]:
        """Where."""
        return self.address


class Door:
    """Stands in for a connection, which is refused at first."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals, self.closed = refusals, 0

    async def __call__(self, address: str, port: int) -> tuple[None, Any]:
        """Somebody connects."""
        self.refusals -= 1
        if self.refusals >= 0:
            raise ConnectionRefusedError
        return None, self

    def close(self) -> None:
        """It was only a look."""
        self.closed += 1


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Server", Listener)
    monkeypatch.setattr(run, "choose_address", partial(choose_address, make_socket=Probe))  # type: ignore[arg-type]
    monkeypatch.setattr(run, "wait_until_listening", partial(wait_until_listening, connect=Door()))
    monkeypatch.setattr(Listener, "fault", None)


async def started(config: Config) -> tuple[asyncio.Task[None], Client]:
    """A server that says it is ready, and a client of it."""
    said: list[str] = []
    ready = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("ready"):
            ready.set()

    serving = asyncio.create_task(run.run_server(config, say))
    await asyncio.wait({serving, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    return serving, Client(Listener.last.app)


async def test_ready_means_that_connections_are_taken() -> None:
    serving, door = asyncio.create_task(asyncio.sleep(5)), Door(refusals=2)
    looking = asyncio.create_task(wait_until_listening("127.0.0.1", 4321, serving, connect=door))
    await asyncio.sleep(0)
    assert not looking.done()
    await asyncio.wait_for(looking, 5)
    assert (door.refusals, door.closed) == (-1, 1)
    serving.cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_idle_server_stops_at_once(number: int) -> None:
    serving, client = await started(Config(engine="scripted", port=0, drain_seconds=60))
    assert Listener.last.settings["port"] == 4321
    assert (await client.get("/health")).status == 200
    os.kill(os.getpid(), number)
    await asyncio.wait_for(serving, 5)
    assert Listener.last.stopped.is_set()


ASKED = body("/v1/messages", "[[gen:1000:1:0.02]]", stream=True) | {"model": "scripted"}


@pytest.mark.parametrize(("grace", "signals"), [(0.05, 1), (60, 2)])
async def test_streams_get_their_end(grace: float, signals: int) -> None:
    serving, client = await started(Config(engine="scripted", drain_seconds=grace))
    async with client.open("POST", "/v1/messages", ASKED) as (exchange, _):
        await exchange.read()
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
        said = events(await exchange.rest())
        assert (await client.get("/health")).status == 503
    await asyncio.wait_for(serving, 5)
    assert said[-1][0] == "error"
    assert "closed" in said[-1][1]["error"]["message"]


async def test_a_generation_may_finish() -> None:
    serving, client = await started(Config(engine="scripted", drain_seconds=60))
    asked = ASKED | {"max_tokens": 5}
    async with client.open("POST", "/v1/messages", asked) as (exchange, _):
        await exchange.read()
        os.kill(os.getpid(), signal.SIGTERM)
        said = events(await exchange.rest())
    await asyncio.wait_for(serving, 5)
    assert said[-1][0] == "message_stop"


async def test_while_streams_end_nothing_new_begins() -> None:
    serving, client = await started(Config(engine="scripted", drain_seconds=60))
    assert (await client.get("/health/ready")).status == 200
    asked = ASKED | {"max_tokens": 30}
    async with client.open("POST", "/v1/messages", asked) as (exchange, _):
        await exchange.read()
        os.kill(os.getpid(), signal.SIGTERM)
        while (await client.get("/health/ready")).status == 200:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await client.get("/health/live")).status == 200
        for path, status in (("/v1/messages", 529), ("/v1/chat/completions", 503), ("/v1/responses", 503)):
            refused = await client.post(path, body(path, "x") | {"model": "scripted"})
            assert (refused.status, int(refused.headers["retry-after"]) > 0) == (status, True)
        said = events(await exchange.rest())
    await asyncio.wait_for(serving, 5)
    assert said[-1][0] == "message_stop"


async def test_an_http_server_that_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "fault", RuntimeError("socket"))
    serving, _ = await started(Config(engine="scripted"))
    with pytest.raises(EngineFailed, match="stopped unexpectedly"):
        await asyncio.wait_for(serving, 5)


CANNOT = [
    (errno.EADDRINUSE, "in use"),
    (errno.EACCES, "privileges"),
    (errno.EADDRNOTAVAIL, "no such address"),
]


@pytest.mark.parametrize(("number", "says"), CANNOT)
async def test_where_nobody_can_listen(number: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "fault", OSError(number, os.strerror(number)))
    with pytest.raises(BadConfiguration, match=f"127.0.0.1:8000: .*{says}"):
        run.choose_address("127.0.0.1", 8000)


def test_a_host_that_is_none() -> None:
    too_long = "x" * 64 + ".example"
    with pytest.raises(BadConfiguration, match="--host 'xxx"):
        run.choose_address(too_long, 8000)


def test_addresses() -> None:
    assert run.choose_address("127.0.0.1", 0) == ("127.0.0.1", 4321)
    assert run.choose_address("::1", 80) == ("::1", 80)


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("0.0.0.0", (), True), ("::", (), True), ("0.0.0.0", ("key",), False), ("127.0.0.1", (), False)],
)
async def test_an_open_door_is_said(host: str, keys: tuple[str, ...], warned: bool) -> None:
    said: list[str] = []
    config = Config(engine="scripted", host=host, port=0, api_key=keys)
    serving = asyncio.create_task(run.run_server(config, said.append))
    while not said or not said[-1].startswith("ready"):
        await asyncio.wait({serving}, timeout=0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 5)
    assert any("--api-key" in line for line in said) is warned


async def test_more_streams_than_a_backlog_are_served() -> None:
    serving, _ = await started(Config(engine="scripted", port=0))
    assert Listener.last.settings["backpressure"] >= 20_000, "Granian's default is the backlog's number"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 5)


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((1024, 4096), 4096), ((1024, -1), 131_072), ((-1, -1), None), ((4096, 4096), None)],
)
def test_the_limit_of_open_files_is_raised(
    limits: tuple[int, int], raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: said.append(wanted))
    run.allow_open_files()
    assert said == ([] if raised is None else [(raised, limits[1])])
