"""Ask the other server processes of this machine, so that each of them can answer for all.

A session moves to the process that gets its next request. A background response stays where it runs, and the others
pass its state and its events on. ``served_process`` has the answers.

Each process listens on a Unix socket in a folder that only their user can read. A question is a name and arguments,
which are pickled: both ends are the same program. A process that does not answer in time is left out, so that no
request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any

from singletree.conversation import Conversation
from singletree.prompts.replay.turn_keys import Fingerprint
from singletree.protocols.answer import Frame
from singletree.server.answers.observer import SessionPlace
from singletree.server.sessions.request_headers import RequestKey, is_repetition

LOG = logging.getLogger(__name__)

Answer = Callable[..., Any]
"""Answers a question: returns a value, or an async iterator for ``stream``."""

WAIT_SECONDS = 0.5
"""How long an answer may take; a process whose event loop is busy answers late."""
_INSPECTOR_SECONDS = 5.0
"""How long a process may take to answer what it has of a session."""
_JOB_SECONDS = 10.0
"""How long a process may take to answer about a background response or a conversation: one that is busy must not make
it disappear."""

_LENGTH_BYTES = 8


class Peers:
    """The other processes of a server of ``count`` processes; ``number`` is that of this one, from 1.

    ``folder`` has the sockets; only this user may read it.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self.number = number
        self.others = tuple(each for each in range(1, count + 1) if each != number)
        self._folder = folder
        self._answers: dict[str, Answer] = {}
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Future[None]] = set()

    def answer(self, question: str, answer: Answer) -> None:
        """Register what answers ``question``: a function, a coroutine function or an async generator function."""
        self._answers[question] = answer

    async def start(self) -> None:
        path = self._path(self.number)
        path.unlink(missing_ok=True)  # that of a process that died
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for answering in self._answering:
            answering.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        with suppress(OSError):
            os.unlink(self._path(self.number))

    async def ask(self, question: str, *arguments: Any, seconds: float = WAIT_SECONDS) -> list[Any]:
        """Return the answers of the other processes; those that do not answer within ``seconds`` are left out."""
        if not self.others:
            return []
        asked = [asyncio.ensure_future(self._one(each, question, arguments)) for each in self.others]
        done, late = await asyncio.wait(asked, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [task.result() for task in asked if task in done and task.exception() is None]

    async def stream(self, number: int, question: str, *arguments: Any) -> AsyncIterator[Any]:
        """Yield the values with which the process ``number`` answers. Raises OSError or EOFError when it ends early."""
        reader, writer = await asyncio.open_unix_connection(self._path(number))
        with closing(writer):
            await _send(writer, (question, arguments))
            while (value := await _receive(reader)) is not None:
                yield value[0]

    async def _one(self, number: int, question: str, arguments: Iterable[Any]) -> Any:
        async with aclosing(self.stream(number, question, *arguments)) as values:  # type: ignore[type-var]
            async for value in values:
                return value
        raise EOFError

    def _path(self, number: int) -> Path:
        return self._folder / f"process-{number}.sock"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, EOFError):
            question, arguments = await _receive(reader)
            answering = asyncio.ensure_future(self._reply(writer, question, arguments))
            leaving = asyncio.ensure_future(reader.read(1))
            self._answering.add(answering)
            try:
                # A process that has left does not need the rest of an answer.
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._answering.discard(answering)
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _reply(self, writer: asyncio.StreamWriter, question: str, arguments: Iterable[Any]) -> None:
        try:
            answer = self._answers[question](*arguments)
            if hasattr(answer, "__aiter__"):
                async with aclosing(answer) as values:
                    async for value in values:
                        await _send(writer, (value,))
            else:
                value = await answer if isinstance(answer, Awaitable) else answer
                await _send(writer, (value,))
            await _send(writer, None)
        except OSError:
            pass
        except Exception:
            LOG.exception("the question %r of another process failed", question)


async def _send(writer: asyncio.StreamWriter, value: Any) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return pickle.loads(await reader.readexactly(length))


class PeerProcesses:
    """Asks the other processes for one owner; see ``OtherProcesses``. What they give is received in ``place``.

    What no other process has is None.
    """

    def __init__(self, peers: Peers, place: SessionPlace, owner: str = "") -> None:
        self._peers = peers
        self._place = place
        self._owner = owner
        self._asking: set[asyncio.Task[None]] = set()
        place.in_flight.repeat_elsewhere = self._cancel_repeated

    def of(self, owner: str, place: SessionPlace) -> PeerProcesses:
        return PeerProcesses(self._peers, place, owner)

    async def _ask(self, question: str, *arguments: Any, seconds: float = WAIT_SECONDS) -> list[Any]:
        return await self._peers.ask(question, self._owner, *arguments, seconds=seconds)

    def _stream(self, number: int, question: str, *arguments: Any) -> AsyncIterator[Any]:
        return self._peers.stream(number, question, self._owner, *arguments)

    async def close(self) -> None:
        await self._peers.close()

    async def fetch_session(self, key: str | None) -> None:
        if key is None:
            return
        for moved, inspected in await self._ask("take a session", key):
            if moved is not None:
                self._place.sessions.receive(moved)
            if inspected is not None and self._place.inspector is not None:
                self._place.inspector.receive_session(key, inspected)

    async def kept_conversation(self, model: str, messages: tuple[Fingerprint, ...]) -> Conversation | None:
        asked = self._ask("conversation of a prompt", model, messages, seconds=_JOB_SECONDS)
        found: Conversation | None = _first(await asked)
        return found

    async def session_summaries(self) -> list[dict[str, Any]]:
        return [each for listed in await self._ask("list sessions") for each in listed]

    async def session_report(self, key: str) -> bytes | None:
        report: bytes | None = _first(await self._ask("report a session", key))
        return report

    @property
    def numbers(self) -> tuple[int, ...]:
        return self._peers.others

    @property
    def count(self) -> int:
        return len(self._peers.others) + 1

    async def ask_inspector(self, question: str, *arguments: Any) -> list[Any]:
        return await self._ask(f"inspector {question}", *arguments, seconds=_INSPECTOR_SECONDS)

    def inspector_changes(self, number: int, silence_seconds: float) -> AsyncIterator[Any]:
        return self._stream(number, "inspector changes", silence_seconds)

    async def job_body(self, id: str) -> bytes | None:
        found: tuple[int, bytes, bool] | None = _first(await self._ask("job", id, seconds=_JOB_SECONDS))
        return None if found is None else found[1]

    async def job_events(self, id: str, start: int) -> AsyncIterator[list[Frame]] | None:
        found = _first(await self._ask("job", id, seconds=_JOB_SECONDS))
        if found is None or not found[2]:
            return None
        return self._stream(found[0], "events of a job", id, start)

    async def cancel_job(self, id: str) -> bytes | None:
        body: bytes | None = _first(await self._ask("cancel a job", id, seconds=_JOB_SECONDS))
        return body

    async def drop_job(self, id: str) -> None:
        await self.cancel_job(id)
        await self._ask("drop a job", id, seconds=_JOB_SECONDS)

    def _cancel_repeated(self, identity: RequestKey) -> None:
        task = asyncio.get_running_loop().create_task(self._cancel_elsewhere(identity))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _cancel_elsewhere(self, identity: RequestKey) -> None:
        """Cancel the request of another process that ``identity``, which has just come, repeats."""
        elsewhere = await self._ask("starts of a request", identity.digest)
        own = self._place.in_flight.starts(identity.digest)
        # Two equal requests ask about each other: only the one that came later may cancel the other.
        ages = [own[0] - start for starts in elsewhere for start in starts] if len(own) == 1 else []
        if is_repetition(identity, ages):
            await self._ask("cancel a request", identity.digest)


def _first(answers: list[Any]) -> Any:
    return next((answer for answer in answers if answer is not None), None)
