"""Run the server: load the model, listen, and shut down in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from singletree.engines.progress import Progress, no_progress
from singletree.engines.token_json import limit_texts
from singletree.errors import BadConfiguration
from singletree.protocols.wire import limit_known_values
from singletree.request_limits import configure, parse_limits
from singletree.server.answers.observer import (
    AnswerRecorder,
    LaterStore,
    OpenedStore,
    OpenStore,
    ResponseStore,
)
from singletree.server.doors import open_door, open_door_in_thread
from singletree.server.http.app import App
from singletree.server.http.http_server import MOST_CONNECTIONS, HttpServer
from singletree.server.http.service import Service
from singletree.server.models.catalog import load_models
from singletree.server.models.model_source import FindSource, find_model_source
from singletree.server.settings.config import Config
from singletree.server.telemetry import Tracing

MOST_THREADS = 8
"""Threads for long work: each that calls fastokens keeps a cache of words there, which grows to 100 MB."""

SWITCH_SECONDS = 0.001
"""How long a thread may keep the interpreter from the event loop, which takes it anew for each callback."""

_FLUSH_SECONDS = 2.0
"""Time for the last events of ended streams to be sent."""

_COLLECTOR_THRESHOLDS = (10_000, 10, 10)
"""How many objects are made before the collector runs, and how many of its runs before a longer one."""

_PROMPT_SHARE = 4
"""The part of the memory for requests that is for prompts as they were sent, whose text is shorter than messages."""

_CANNOT_LISTEN = {
    errno.EADDRINUSE: "the port is in use; stop the program that uses it, or give another --port",
    errno.EACCES: "ports below 1024 need privileges; give another --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; give another --host",
}


async def run_server(
    config: Config,
    report: Callable[[str], None],
    progress: Progress = no_progress,
    *,
    before_listening: Callable[[Service], Awaitable[None]] | None = None,
) -> bool:
    """Serve until the process receives SIGINT or SIGTERM; return whether the first signal was SIGINT, as of Ctrl-C.

    After the first signal the server is no longer ready (``/health/ready``), refuses new requests as overloaded, and
    gives running generations ``config.drain_seconds`` to finish; a second signal ends them at once. In both cases every
    stream gets its last event.

    Args:
        report: prints a line for the user, such as a step of the start.
        before_listening: called when all is loaded; for one of several processes that share the port, now chosen.

    Raises:
        BadConfiguration: a setting is wrong, or the port is in use.
        WeightsUnavailable, EngineFailed: the model cannot be loaded.
    """
    allow_open_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_THREADS, "work"))
    is_alone = before_listening is None
    address, port = choose_address(config.host, config.port) if is_alone else (config.host, config.port)
    service = await open_service(config, report, progress)
    for line in service.describe_owners():
        report(line)
    settle_memory()
    # A message beyond the limit of bodies is read, up to the same amount again: then the client gets to know why.
    server = HttpServer(
        App(service, address),
        websocket_limit=2 * config.body_limit if config.websockets else None,
        admission=service.admission,
    )
    if before_listening is not None:
        await before_listening(service)
    try:
        with stop_signals() as signalled:
            if (
                "inference" not in service.keys.needed
                and not ipaddress.ip_address(address.partition("%")[0]).is_loopback
            ):
                report(
                    f"WARNING    anyone who can connect to {address} can use the model; set a key with --api-key"
                )
            try:
                await server.listen(address, port, shared=not is_alone)
            except OSError as error:
                raise _cannot_listen(config.host, port, error) from None
            for line in describe_ready(config, port):
                report(line)
            for model in service.catalog.models:
                model.tokenizer.load_in_background()
            await signalled.acquire()
            service.shutdown.set()
            await _wait_until_idle(service.tracing, config.drain_seconds, signalled)
    finally:
        await close_service(service)
        await server.close()
    return signalled.first == signal.SIGINT


def describe_ready(config: Config, port: int) -> list[str]:
    """Return lines for the user when the server listens at ``port``: its URL, and the command to go on with."""
    processes = f" ({config.workers} processes)" if config.workers > 1 else ""
    # What listens on all addresses is reached from this machine by that of loopback.
    here = _in_url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host))
    is_default = (here, port) == (Config.host, Config.port)
    place = "" if is_default else f" --base-url http://{here}:{port}"
    key = "    (with a key in SINGLETREE_API_KEY)" if config.api_key or config.key_file else ""
    return [
        f"ready      http://{_in_url(config.host)}:{port}{processes}",
        f"next       singletree launch pi{place}{key}",
    ]


def settle_memory() -> None:
    """Keep the collector from walking through what was loaded again, and let it run as seldom as requests need.

    What a request leaves is freed without it, except for a few small objects of its parser.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


OpenRecords = Callable[[Config], AnswerRecorder]


def _open_records(config: Config) -> AnswerRecorder | None:
    """Return what takes the records of requests, for --trace-path and --otel; None where neither is set.

    Raises BadConfiguration where the file cannot be written, or OpenTelemetry is not installed.
    """
    if config.trace_path is None and not config.otel:
        return None
    open_records: OpenRecords = open_door("records")
    return open_records(config)


def allow_open_files() -> None:
    """Raise the limit of open files of this process as far as the system allows: a stream takes one or two.

    A shell often starts programs with a limit of 1,024.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MOST_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def open_service(
    config: Config,
    report: Callable[[str], None],
    progress: Progress = no_progress,
    *,
    find_source: FindSource = find_model_source,
) -> Service:
    """Open the store and what takes the records of requests, load the models and start their engines.

    Raises:
        BadConfiguration: a setting is wrong.
        WeightsUnavailable, EngineFailed: no model could be loaded.
    """
    configure(parse_limits(config.limit))
    limit_texts(config.request_memory // _PROMPT_SHARE)
    limit_known_values(config.request_memory - config.request_memory // _PROMPT_SHARE)
    records = _open_records(config)
    store = LaterStore(partial(_open_store, config)) if config.store else None
    try:
        if store is not None and (config.store_path or config.store_url):
            await store.opened()
        loaded = await load_models(config, report, progress, find_source)
    except BaseException:
        _close_files(store, records)
        raise
    return Service(config, loaded, Tracing(), store=store, records=records)


async def close_service(service: Service) -> None:
    """Refuse new requests, stop the engines, let ended streams send their last events, and free everything."""
    service.shutdown.set()
    await service.catalog.close()
    await _wait_until_idle(service.tracing, _FLUSH_SECONDS)
    await service.close_foresight()
    await service.jobs.close()
    if service.others is not None:
        await service.others.close()
    if service.capture is not None:
        service.capture.close()
    _close_files(service.store, service.records)


def _close_files(store: ResponseStore | None, records: AnswerRecorder | None) -> None:
    if store is not None:
        store.close()
    if records is not None:
        records.close()


async def _open_store(config: Config) -> OpenedStore | None:
    open: OpenStore = await open_door_in_thread("stored responses")
    return await asyncio.to_thread(open, config)


def choose_address(
    host: str, port: int, *, make_socket: Callable[..., socket.socket] = socket.socket
) -> tuple[str, int]:
    """Return the address and port to listen on, with a free port for port 0.

    The port is tried before the model is loaded. Processes that share a port listen with SO_REUSEPORT: without a try
    they would also share one that another program uses. Raises BadConfiguration where the server cannot listen there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise BadConfiguration(
            f"--host {host!r} is not an address of this machine; use for example 127.0.0.1"
        ) from None
    with make_socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _cannot_listen(host, port, error) from None
        name = probe.getsockname()
    return str(name[0]), int(name[1])


def _cannot_listen(host: str, port: int, error: OSError) -> BadConfiguration:
    reason = _CANNOT_LISTEN.get(error.errno or 0, error.strerror)
    return BadConfiguration(f"cannot listen on {_in_url(host)}:{port}: {reason}")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class StopSignals(asyncio.Semaphore):
    """A semaphore that every SIGINT or SIGTERM releases once; ``first`` is the first that came."""

    def __init__(self) -> None:
        super().__init__(0)
        self.first: signal.Signals | None = None

    def take(self, number: signal.Signals) -> None:
        self.first = self.first or number
        self.release()


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Yield the signals to stop that come from now on."""
    loop, signalled = asyncio.get_running_loop(), StopSignals()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.take, number)
    try:
        yield signalled
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _wait_until_idle(
    tracing: Tracing, seconds: float, signalled: asyncio.Semaphore | None = None
) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while tracing.running and asyncio.get_running_loop().time() < end:
        if signalled is not None and not signalled.locked():
            return
        await asyncio.sleep(0.02)
