"""Starting and stopping, with the HTTP server and its sockets stood in for."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from singletree import request_limits
from singletree.engines.token_json import _token_texts, limit_texts
from singletree.errors import BadConfiguration
from singletree.protocols import wire
from singletree.server.http import run
from singletree.server.http.run import choose_address
from singletree.server.settings.config import Config

from .memory import Client, events
from .serving import body


class Listener:
    """Stands in for the HTTP server: remembers its application and whether it was stopped."""

    last: Listener
    fault: OSError | None = None

    def __init__(self, app: Any, **settings: Any) -> None:
        self.app, self.settings = app, settings
        self.address: tuple[str, int, bool] | None = None
        self.stopped = False
        Listener.last = self

    async def listen(self, address: str, port: int, *, shared: bool) -> int:
        """Listen, unless it cannot."""
        if self.fault is not None:
            raise self.fault
        self.address = (address, port, shared)
        return port

    async def close(self) -> None:
        """Stop."""
        self.stopped = True


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


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "settle_memory", lambda: None)  # It is for a process that only serves.
    monkeypatch.setattr(run, "HttpServer", Listener)
    monkeypatch.setattr(run, "choose_address", partial(choose_address, make_socket=Probe))  # type: ignore[arg-type]
    monkeypatch.setattr(Listener, "fault", None)


async def started(config: Config) -> tuple[asyncio.Task[bool], Client]:
    """A server that says it is ready, and a client of it."""
    lines: list[str] = []
    ready = asyncio.Event()

    def log_line(line: str) -> None:
        lines.append(line)
        if line.startswith("ready"):
            ready.set()

    serving = asyncio.create_task(run.run_server(config, log_line))
    await asyncio.wait({serving, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    return serving, Client(Listener.last.app)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_idle_server_stops_at_once(number: int) -> None:
    serving, client = await started(Config(engine="scripted", port=0, drain_seconds=60))
    assert Listener.last.address == ("127.0.0.1", 4321, False)
    assert (await client.get("/health")).status == 200
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(serving, 5) is (number == signal.SIGINT)
    assert Listener.last.stopped


async def test_the_memory_for_requests_is_divided() -> None:
    serving, _ = await started(Config(engine="scripted", port=0, request_memory=4_000_000))
    try:
        assert (wire._KNOWN._limit, _token_texts._limit) == (3_000_000, 1_000_000)
    finally:
        wire.limit_known_values(96 * 2**20)
        limit_texts(32 * 2**20)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 5)


async def test_a_server_has_the_limits_of_its_configuration(set_limits: Callable[..., None]) -> None:
    set_limits()
    serving, _ = await started(Config(engine="scripted", port=0, limit=("stop_strings=5",)))
    try:
        assert request_limits.current().stop_strings == 5
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 5)


ASKED = body("/v1/messages", "[[gen:1000:1:0.02]]", stream=True) | {"model": "scripted"}


@pytest.mark.parametrize(("grace", "signals"), [(0.05, 1), (60, 2)])
async def test_streams_get_their_end(grace: float, signals: int) -> None:
    serving, client = await started(Config(engine="scripted", drain_seconds=grace))
    async with client.open("POST", "/v1/messages", ASKED) as (exchange, _):
        await exchange.read()
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
        streamed = events(await exchange.rest())
        assert (await client.get("/health")).status == 503
    await asyncio.wait_for(serving, 5)
    assert streamed[-1][0] == "error"
    assert "closed" in streamed[-1][1]["error"]["message"]


async def test_a_generation_may_finish() -> None:
    serving, client = await started(Config(engine="scripted", drain_seconds=60))
    asked = ASKED | {"max_tokens": 5}
    async with client.open("POST", "/v1/messages", asked) as (exchange, _):
        await exchange.read()
        os.kill(os.getpid(), signal.SIGTERM)
        streamed = events(await exchange.rest())
    await asyncio.wait_for(serving, 5)
    assert streamed[-1][0] == "message_stop"


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
        streamed = events(await exchange.rest())
    await asyncio.wait_for(serving, 5)
    assert streamed[-1][0] == "message_stop"


async def test_a_port_that_is_taken_while_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "fault", OSError(errno.EADDRINUSE, "in use"))
    with pytest.raises(BadConfiguration, match=r"127\.0\.0\.1:8000: the port is in use"):
        await asyncio.wait_for(run.run_server(Config(engine="scripted"), lambda line: None), 5)
    assert Listener.last.stopped


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
    ("config", "port", "following"),
    [
        (Config(), 8000, ""),
        (Config(), 4321, " --base-url http://127.0.0.1:4321"),
        (Config(host="0.0.0.0"), 8000, ""),
        (Config(host="::"), 8000, " --base-url http://[::1]:8000"),
        (Config(host="10.0.0.5"), 8000, " --base-url http://10.0.0.5:8000"),
        (Config(api_key=("secret",)), 8000, "    (with a key in SINGLETREE_API_KEY)"),
    ],
)
def test_the_next_command_is_printed_when_the_server_is_ready(
    config: Config, port: int, following: str
) -> None:
    ready, following_line = run.describe_ready(config, port)
    assert ready.startswith("ready      http://")
    assert following_line == f"next       singletree launch pi{following}"


async def test_the_next_command_is_the_last_line_of_the_start() -> None:
    lines: list[str] = []
    serving = asyncio.create_task(run.run_server(Config(engine="scripted", port=0), lines.append))
    while not any(line.startswith("ready") for line in lines):
        await asyncio.wait({serving}, timeout=0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 5)
    assert lines[-2:] == [
        "ready      http://127.0.0.1:4321",
        "next       singletree launch pi --base-url http://127.0.0.1:4321",
    ]


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("0.0.0.0", (), True), ("::", (), True), ("0.0.0.0", ("key",), False), ("127.0.0.1", (), False)],
)
async def test_an_open_port_is_reported(host: str, keys: tuple[str, ...], warned: bool) -> None:
    lines: list[str] = []
    config = Config(engine="scripted", host=host, port=0, api_key=keys)
    serving = asyncio.create_task(run.run_server(config, lines.append))
    while not any(line.startswith("ready") for line in lines):
        await asyncio.wait({serving}, timeout=0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 5)
    assert any("--api-key" in line for line in lines) is warned


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((1024, 4096), 4096), ((1024, -1), 131_072), ((-1, -1), None), ((4096, 4096), None)],
)
def test_the_limit_of_open_files_is_raised(
    limits: tuple[int, int], raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    lines: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: lines.append(wanted))
    run.allow_open_files()
    assert lines == ([] if raised is None else [(raised, limits[1])])


async def test_few_threads_do_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast encoder keeps a cache for each thread that calls it, on a machine with many processors, too."""
    used: set[int] = set()

    def work() -> None:
        used.add(threading.get_ident())
        time.sleep(0.01)

    async def opened(*_: object) -> None:
        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4 * run.MOST_THREADS)))
        raise BadConfiguration("seen")

    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(run, "open_service", opened)
    with pytest.raises(BadConfiguration, match="seen"):
        await run.run_server(Config(port=0), print)
    assert len(used) == run.MOST_THREADS


async def test_a_thread_leaves_the_interpreter_to_the_loop_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes it anew for each callback, and would wait 5 ms each time beside the thread of a long prompt."""
    found: list[float] = []

    async def opened(*_: object) -> None:
        found.append(sys.getswitchinterval())
        raise BadConfiguration("seen")

    monkeypatch.setattr(run, "open_service", opened)
    before = sys.getswitchinterval()
    try:
        with pytest.raises(BadConfiguration, match="seen"):
            await run.run_server(Config(port=0), print)
    finally:
        sys.setswitchinterval(before)
    assert found == [pytest.approx(run.SWITCH_SECONDS)]
    assert run.SWITCH_SECONDS <= 0.001
