"""Runs the server: loads the model, listens, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server

from singletree.engines.progress import Progress, quiet
from singletree.engines.weights import cache_folder
from singletree.errors import BadConfiguration, EngineFailed
from singletree.server import catalog
from singletree.server.app import App
from singletree.server.config import Config
from singletree.server.operations import Service
from singletree.server.store import Store
from singletree.server.tracing import Tracing

_LAST_WORDS_SECONDS = 2.0
"""How long the ends of broken streams may take to get out."""

_LISTENING_STEP_SECONDS = 0.01
_LISTENING_SECONDS = 5.0
"""How long to look whether the port is open; where nobody may connect to it from here, it is called ready then."""

_CANNOT_LISTEN = {
    errno.EADDRINUSE: "the port is in use; stop what listens there, or give another --port",
    errno.EACCES: "ports below 1024 need privileges; give another --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; give another --host",
}


async def serve(config: Config, say: Callable[[str], None], progress: Progress = quiet) -> None:
    """Serve until the process is told to stop.

    The first signal lets running generations finish for ``config.shutdown_seconds``, a second one ends them
    at once; either way every stream gets its end.

    Raises:
        BadConfiguration: a setting is wrong, or the port is taken.
        WeightsUnavailable, EngineFailed: the model cannot be had.
    """
    address, port = choose_address(config.host, config.port)
    loaded = await catalog.load(config, say, progress)
    store = Store(config.store_path or cache_folder() / "responses.sqlite", config.store_limit)
    service = Service(config, loaded, Tracing(), store=store if config.store else None)
    server = Server(
        App(service),
        address=address,
        port=port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=config.websockets,
        log_enabled=False,
        backlog=1024,
    )
    listening = asyncio.create_task(server.serve())
    try:
        with _signals() as signalled:
            if not config.api_key and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                say(f"WARNING    whoever reaches {address} may use the model; ask for a key with --api-key")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(listens(address, port, listening), _LISTENING_SECONDS)
            say(f"ready      http://{_in_url(config.host)}:{port}")
            await _first(listening, signalled)
            service.closing = True
            await _idle(service.tracing, config.shutdown_seconds, signalled)
    finally:
        service.closing = True
        await loaded.close()
        await _idle(service.tracing, _LAST_WORDS_SECONDS)
        await service.jobs.close()
        store.close()
        server.stop()  # type: ignore[no-untyped-call]
        await asyncio.gather(listening, return_exceptions=True)


def choose_address(
    host: str, port: int, *, make_socket: Callable[..., socket.socket] = socket.socket
) -> tuple[str, int]:
    """The address and port to listen on, a free one for port 0.

    Granian listens with SO_REUSEPORT, so it would share a port with whoever has it.

    Raises:
        BadConfiguration: nobody can listen there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise BadConfiguration(f"--host {host!r} is no address of this machine; 127.0.0.1 is one") from None
    with make_socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            reason = _CANNOT_LISTEN.get(error.errno or 0, error.strerror)
            raise BadConfiguration(f"cannot listen on {_in_url(host)}:{port}: {reason}") from None
        name = probe.getsockname()
    return str(name[0]), int(name[1])


async def listens(
    address: str,
    port: int,
    listening: asyncio.Task[None],
    *,
    connect: Callable[..., Awaitable[tuple[Any, asyncio.StreamWriter]]] = asyncio.open_connection,
) -> None:
    """Until the port takes connections, or ``listening`` has ended: who waits for "ready" connects at once."""
    while not listening.done():
        with contextlib.suppress(OSError):
            _, writer = await connect(address, port)
            writer.close()
            return
        await asyncio.sleep(_LISTENING_STEP_SECONDS)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Semaphore]:
    """A semaphore that every interrupt or termination signal releases once."""
    loop, signalled = asyncio.get_running_loop(), asyncio.Semaphore(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.release)
    try:
        yield signalled
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _first(listening: asyncio.Task[None], signalled: asyncio.Semaphore) -> None:
    """Until a signal comes. Raises EngineFailed when the HTTP server ends by itself."""
    waiting = asyncio.create_task(signalled.acquire())
    await asyncio.wait({waiting, listening}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if listening.done():
        raise EngineFailed(
            "the HTTP server ended by itself; start singletree again"
        ) from listening.exception()


async def _idle(tracing: Tracing, seconds: float, signalled: asyncio.Semaphore | None = None) -> None:
    """Until nothing is generated any more, ``seconds`` have passed, or another signal comes."""
    end = asyncio.get_running_loop().time() + seconds
    while tracing.running and asyncio.get_running_loop().time() < end:
        if signalled is not None and not signalled.locked():
            return
        await asyncio.sleep(0.02)
