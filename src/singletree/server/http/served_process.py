"""One of the processes of a server with ``--workers``, as ``worker_processes`` starts it.

Its settings come from standard input, which stays open as long as the parent lives. It reports lines of JSON on
standard output: ``line`` for the user, ``loaded``, and ``failed`` with the kind of the error and its ``message``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import sys
from dataclasses import replace
from functools import partial
from threading import Thread

from singletree.errors import SingletreeError
from singletree.server.answers.record_file import numbered_path
from singletree.server.http.peer_questions import OtherProcesses
from singletree.server.http.routes import Service
from singletree.server.http.run import run_server
from singletree.server.models.config import Config
from singletree.server.peers import Peers

_OUTPUT = 1


def main() -> None:
    """Serve until SIGTERM, or until the parent has died."""
    import uvloop

    config, number = _read_settings()
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s [{number}] %(message)s",
        stream=sys.stderr,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # until the server has its own handler
    try:
        uvloop.run(_serve(config, number))
    except SingletreeError as error:
        _send(failed=type(error).__name__, message=error.message)
        sys.exit(1)


async def _serve(config: Config, number: int) -> None:
    orders: asyncio.Queue[str] = asyncio.Queue()
    Thread(target=_read_orders, args=(asyncio.get_running_loop(), orders), daemon=True).start()

    async def before_listening(service: Service) -> None:
        assert config.shared_folder is not None
        service.others = OtherProcesses(service, Peers(config.shared_folder, number, config.workers))
        await service.others.start()
        _send(loaded="")
        await orders.get()

    await run_server(config, lambda line: _send(line=line), before_listening=before_listening)


def _read_settings() -> tuple[Config, int]:
    length = int.from_bytes(_read_exactly(8), "big")
    config, number = pickle.loads(_read_exactly(length))
    path = config.trace_path
    if path is not None:
        limit = max(1, config.trace_limit // config.workers)
        config = replace(config, trace_path=numbered_path(path, str(number)), trace_limit=limit)
    return config, number


def _read_exactly(length: int) -> bytes:
    """Read from standard input without a buffer: the rest is read by a thread, later."""
    data = b""
    while len(data) < length:
        some = os.read(sys.stdin.fileno(), length - len(data))
        if not some:
            sys.exit(1)
        data += some
    return data


def _read_orders(loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[str]) -> None:
    for line in iter(partial(os.read, sys.stdin.fileno(), 64), b""):
        loop.call_soon_threadsafe(orders.put_nowait, line.decode())
    os.kill(os.getpid(), signal.SIGTERM)


def _send(**message: str) -> None:
    # The parent may be gone: then this process is about to end.
    try:
        os.write(_OUTPUT, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        logging.getLogger(__name__).warning("the process that started this one has ended")
