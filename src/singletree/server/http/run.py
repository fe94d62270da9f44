"""Run the server: load the model, listen, and shut down in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

from singletree.engines.remote.token_json import limit_texts
from singletree.engines.weights.progress import Progress, no_progress
from singletree.engines.weights.resolve import cache_folder
from singletree.errors import BadConfiguration
from singletree.protocols.wire import limit_known_values
from singletree.server.answers.record_file import RecordFile
from singletree.server.answers.record_queue import RecordQueue, RecordSink
from singletree.server.answers.request_records import RequestRecords
from singletree.server.answers.tracing import Tracing
from singletree.server.http.app import App
from singletree.server.http.http_server import MOST_CONNECTIONS, HttpServer
from singletree.server.http.routes import Service
from singletree.server.models.config import Config
from singletree.server.models.loaders import FindSource, find_model_source
from singletree.server.models.served_models import load_models
from singletree.server.storage.response_store import Store

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
) -> None:
    """Serve until the process receives SIGINT or SIGTERM.

    After the first signal the server is no longer ready (``/health/ready``), refuses new requests as overloaded, and
    gives running generations ``config.drain_seconds`` to finish; a second signal ends them at once. In both cases every
    stream gets its last event.

    Args:
        report: prints a line for the user, such as a step of the start.
        progress: reports downloads.
        before_listening: called when all is loaded; for one of several processes that share the port, which has been
            chosen and tried.

    Raises:
        BadConfiguration: a setting is wrong, or the port is in use.
        WeightsUnavailable, EngineFailed: the model cannot be loaded.
    """
    allow_open_files()
    is_alone = before_listening is None
    address, port = choose_address(config.host, config.port) if is_alone else (config.host, config.port)
    service = await open_service(config, report, progress)
    settle_memory()
    # A message beyond the limit of bodies is read, up to the same amount again: then the client gets to know why.
    server = HttpServer(
        App(service, address), websocket_limit=2 * config.body_limit if config.websockets else None
    )
    if before_listening is not None:
        await before_listening(service)
    try:
        with stop_signals() as signalled:
            if not config.api_key and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                report(
                    f"WARNING    anyone who can connect to {address} can use the model; set a key with --api-key"
                )
            try:
                await server.listen(address, port, shared=not is_alone)
            except OSError as error:
                raise _cannot_listen(config.host, port, error) from None
            report(f"ready      http://{_in_url(config.host)}:{port}")
            for model in service.catalog.models:
                model.tokenizer.load_in_background()
            await signalled.acquire()
            service.closing = True
            await _wait_until_idle(service.tracing, config.drain_seconds, signalled)
    finally:
        await close_service(service)
        await server.close()


def settle_memory() -> None:
    """Keep the collector from walking through what was loaded again, and let it run as seldom as requests need.

    What a request leaves is freed without it, except for a few small objects of its parser.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


def record_sinks(config: Config) -> list[RecordSink]:
    """Return what takes the records of requests: the file of ``--trace-path``, and the export of ``--otel``.

    Raises:
        BadConfiguration: the file cannot be written, or OpenTelemetry is not installed.
    """
    sinks: list[RecordSink] = []
    if config.trace_path is not None:
        sinks.append(RecordFile(config.trace_path, config.trace_limit))
    if config.otel:
        try:
            from singletree.server.answers import span_export
        except ImportError:
            raise BadConfiguration(
                "--otel: OpenTelemetry is not installed; pip install 'singletree[otel]'"
            ) from None
        sinks.append(
            span_export.SpanExport(span_export.find_exporter(), content=span_export.exports_content())
        )
    return sinks


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

    Args:
        report: takes a line for the user, such as a step of the start.
        progress: reports downloads.
        find_source: finds each model and its engines.

    Raises:
        BadConfiguration: a setting is wrong.
        WeightsUnavailable, EngineFailed: no model could be loaded.
    """
    limit_texts(config.request_memory // _PROMPT_SHARE)
    limit_known_values(config.request_memory - config.request_memory // _PROMPT_SHARE)
    sinks = record_sinks(config)
    records = RequestRecords(RecordQueue(*sinks)) if sinks else None
    store = _open_store(config) if config.store else None
    try:
        loaded = await load_models(config, report, progress, find_source)
    except BaseException:
        _close_files(store, records)
        raise
    return Service(config, loaded, Tracing(), store=store, records=records)


async def close_service(service: Service) -> None:
    """Refuse new requests, stop the engines, let ended streams send their last events, and free everything."""
    service.closing = True
    await service.catalog.close()
    await _wait_until_idle(service.tracing, _FLUSH_SECONDS)
    await service.prefills.close()
    await service.jobs.close()
    if service.others is not None:
        await service.others.close()
    _close_files(service.store, service.records)


def _close_files(store: Store | None, records: RequestRecords | None) -> None:
    if store is not None:
        store.close()
    if records is not None:
        records.close()


def _open_store(config: Config) -> Store:
    """Return the store of responses that ``config`` names. Raises BadConfiguration for a wrong URL."""
    if config.store_url is None:
        return Store(config.store_path or cache_folder() / "responses.sqlite", config.store_limit)
    from singletree.server.storage.postgres import PostgresDatabase

    return Store(PostgresDatabase(config.store_url), config.store_limit)


def choose_address(
    host: str, port: int, *, make_socket: Callable[..., socket.socket] = socket.socket
) -> tuple[str, int]:
    """Return the address and port to listen on, with a free port for port 0.

    The port is tried before the model is loaded. Processes that share a port listen with SO_REUSEPORT: without a try
    they would also share one that another program uses.

    Args:
        make_socket: opens the socket that tries the port.

    Raises:
        BadConfiguration: the server cannot listen there.
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


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Semaphore]:
    """Yield a semaphore that every SIGINT or SIGTERM releases once."""
    loop, signalled = asyncio.get_running_loop(), asyncio.Semaphore(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.release)
    try:
        yield signalled
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _wait_until_idle(
    tracing: Tracing, seconds: float, signalled: asyncio.Semaphore | None = None
) -> None:
    """Wait until no generation runs, ``seconds`` have passed, or another signal comes."""
    end = asyncio.get_running_loop().time() + seconds
    while tracing.running and asyncio.get_running_loop().time() < end:
        if signalled is not None and not signalled.locked():
            return
        await asyncio.sleep(0.02)
