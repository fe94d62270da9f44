"""One of the processes of a server with ``--workers``, and what the others may ask it.

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
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

from singletree.conversation import Conversation
from singletree.errors import RouteNotFound, SingletreeError
from singletree.processes.other_processes import PeerProcesses, Peers
from singletree.processes.shared_state import SharedState, share_state
from singletree.prompts.replay.turn_keys import Fingerprint
from singletree.protocols.answer import Frame
from singletree.server.answers.observer import numbered_path
from singletree.server.http.run import run_server
from singletree.server.http.service import Service, inspector_door
from singletree.server.sessions.session_report import summarize
from singletree.server.sessions.sessions import MovedSession
from singletree.server.settings.config import Config

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

    folder = config.shared_folder
    assert folder is not None

    async def before_listening(service: Service) -> None:
        share_state(service, state)
        peers = Peers(folder, number, config.workers)
        join_processes(service, peers)
        await peers.start()
        _send(loaded="")
        await orders.get()

    with closing(SharedState(folder / "shared.sqlite")) as state:
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


def join_processes(service: Service, peers: Peers) -> None:
    """Answer the questions of ``peers`` from ``service``, which asks them from now on."""
    service.others = PeerProcesses(peers, service.place)
    answers: dict[str, Callable[..., Any]] = {
        "starts of a request": lambda service, digest: service.in_flight.starts(digest),
        "cancel a request": lambda service, digest: service.in_flight.cancel(digest),
        "take a session": _take,
        "conversation of a prompt": _conversation,
        "list sessions": lambda service: summarize(service.sessions),
        "report a session": _report,
        "job": partial(_job, peers.number),
        "events of a job": _events,
        "cancel a job": _cancel,
        "drop a job": lambda service, id: service.jobs.drop(id),
    }
    door = inspector_door(service.config)
    if door is not None and service.inspector is not None:
        service.inspector.process = peers.number
        answers.update(door.questions)
    for question, answer in answers.items():
        peers.answer(question, partial(_answer, service, answer))


def _answer(service: Service, answer: Callable[..., Any], owner: str, *arguments: Any) -> Any:
    """Answer a question that another process asks for ``owner``, from what is the owner's here."""
    return answer(service.of(owner), *arguments)


def _take(service: Service, key: str) -> tuple[MovedSession | None, Any]:
    inspector = service.inspector
    return service.sessions.take(key), None if inspector is None else inspector.take_session(key)


def _conversation(service: Service, model: str, messages: tuple[Fingerprint, ...]) -> Conversation | None:
    models = (each for each in service.catalog.models if each.name == model)
    return next((each.kept_conversation(messages) for each in models), None)


def _report(service: Service, key: str) -> bytes | None:
    try:
        return service.session_report(key)
    except RouteNotFound:
        return None


def _job(process: int, service: Service, id: str) -> tuple[int, bytes, bool] | None:
    job = service.jobs.get(id)
    return None if job is None else (process, job.body(), job.is_streamed)


async def _cancel(service: Service, id: str) -> bytes | None:
    job = service.jobs.get(id)
    return None if job is None else await job.cancel()


async def _events(service: Service, id: str, start: int) -> AsyncIterator[list[Frame]]:
    job = service.jobs.get(id)
    if job is not None:
        async for frames in job.events(start):
            yield frames
