"""What the server processes of one machine ask one another, so that each of them can answer for all.

A session moves to the process that gets its next request. A background response stays where it runs, and the others
pass its state and its events on.
"""

from __future__ import annotations

import asyncio
import copyreg
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from singletree.errors import RouteNotFound
from singletree.protocols.answer import Frame
from singletree.server.http.inspect_view import QUESTIONS, InspectView
from singletree.server.http.session_report import encode_session, summarize
from singletree.server.inspect.turn_documents import InspectedJson
from singletree.server.inspect.turn_record import Lanes
from singletree.server.peers import Peers
from singletree.server.sessions.break_causes import CAUSES, Cause
from singletree.server.sessions.duplicate_requests import RequestKey, is_repetition
from singletree.server.sessions.sessions import MovedSession

if TYPE_CHECKING:
    # The service has this module's class as an attribute.
    from singletree.server.http.routes import Service

_INSPECTOR_SECONDS = 5.0
"""How long a process may take to answer what it has of a session."""

_JOB_SECONDS = 10.0
"""How long a process may take to answer about a background response: one that is busy must not make it disappear."""


def _cause(name: str) -> Cause:
    return next(cause for cause in CAUSES if cause.name == name)


# A session has the causes of its breaks. The functions of their table cannot be pickled, so their names are.
copyreg.pickle(Cause, lambda cause: (_cause, (cause.name,)))


class OtherProcesses:
    """Answers the questions of the other processes from ``service``, and asks them.

    Args:
        service: what the requests of this process share.
        peers: the other processes.
    """

    def __init__(self, service: Service, peers: Peers) -> None:
        self._service = service
        self._peers = peers
        self._asking: set[asyncio.Task[None]] = set()
        in_flight, sessions = service.in_flight, service.sessions
        in_flight.repeat_elsewhere = self._cancel_repeated
        peers.answer("starts of a request", in_flight.starts)
        peers.answer("cancel a request", in_flight.cancel)
        peers.answer("take a session", self._take)
        peers.answer("list sessions", lambda: summarize(sessions))
        peers.answer("report a session", self._report)
        peers.answer("job", self._job)
        peers.answer("events of a job", self._events)
        peers.answer("cancel a job", self._cancel)
        peers.answer("drop a job", service.jobs.drop)
        if service.inspector is not None:
            service.inspector.process = peers.number
            view = InspectView(service)
            for question in QUESTIONS:
                peers.answer(f"inspector {question}", getattr(view, question))
            peers.answer("inspector changes", view.changes)

    async def start(self) -> None:
        """Answer questions from now on."""
        await self._peers.start()

    async def close(self) -> None:
        """Answer no further questions."""
        await self._peers.close()

    async def fetch_session(self, key: str | None) -> None:
        """Move the session ``key`` into this process, if others have it."""
        if key is None:
            return
        for moved, lanes in await self._peers.ask("take a session", key):
            if moved is not None:
                self._service.sessions.receive(moved)
            if lanes is not None and self._service.inspector is not None:
                self._service.inspector.receive_lanes(key, lanes)

    async def session_summaries(self) -> list[dict[str, Any]]:
        """Return the summaries of the sessions of the other processes."""
        return [each for listed in await self._peers.ask("list sessions") for each in listed]

    async def session_report(self, key: str) -> bytes | None:
        """Return the report of the session ``key`` as JSON; None when no other process has it."""
        report: bytes | None = _first(await self._peers.ask("report a session", key))
        return report

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the other processes."""
        return self._peers.others

    @property
    def count(self) -> int:
        """Return how many processes there are, with this one."""
        return len(self._peers.others) + 1

    async def ask_inspector(self, question: str, *arguments: Any) -> list[Any]:
        """Return what the inspectors of the other processes answer to ``question``, a method of ``InspectView``."""
        return await self._peers.ask(f"inspector {question}", *arguments, seconds=_INSPECTOR_SECONDS)

    def inspector_changes(self, number: int, silence_seconds: float) -> AsyncIterator[InspectedJson]:
        """Return an iterator of what changes in the process ``number``. It raises OSError or EOFError at its end."""
        return self._peers.stream(number, "inspector changes", silence_seconds)

    async def job_body(self, id: str) -> bytes | None:
        """Return the response object of the background response ``id``; None when no other process has it."""
        found: tuple[int, bytes, bool] | None = _first(await self._peers.ask("job", id, seconds=_JOB_SECONDS))
        return None if found is None else found[1]

    async def job_events(self, id: str, start: int) -> AsyncIterator[list[Frame]] | None:
        """Return an iterator of the events of the background response ``id`` from index ``start`` on.

        None when no other process has it, or it is not streamed.
        """
        found = _first(await self._peers.ask("job", id, seconds=_JOB_SECONDS))
        if found is None or not found[2]:
            return None
        return self._peers.stream(found[0], "events of a job", id, start)

    async def cancel_job(self, id: str) -> bytes | None:
        """Cancel the background response ``id`` and return its object; None when no other process has it."""
        body: bytes | None = _first(await self._peers.ask("cancel a job", id, seconds=_JOB_SECONDS))
        return body

    async def drop_job(self, id: str) -> None:
        """Cancel the background response ``id``, and forget its events."""
        await self.cancel_job(id)
        await self._peers.ask("drop a job", id, seconds=_JOB_SECONDS)

    def _cancel_repeated(self, identity: RequestKey) -> None:
        task = asyncio.get_running_loop().create_task(self._cancel_elsewhere(identity))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _cancel_elsewhere(self, identity: RequestKey) -> None:
        """Cancel the request of another process that ``identity``, which has just come, repeats."""
        elsewhere = await self._peers.ask("starts of a request", identity.digest)
        own = self._service.in_flight.starts(identity.digest)
        # Two equal requests ask about each other: only the one that came later may cancel the other.
        ages = [own[0] - start for starts in elsewhere for start in starts] if len(own) == 1 else []
        if is_repetition(identity, ages):
            await self._peers.ask("cancel a request", identity.digest)

    def _take(self, key: str) -> tuple[MovedSession | None, Lanes | None]:
        inspector = self._service.inspector
        return self._service.sessions.take(key), None if inspector is None else inspector.take_lanes(key)

    def _report(self, key: str) -> bytes | None:
        try:
            return encode_session(self._service.sessions, key, inspected=self._service.config.inspect)
        except RouteNotFound:
            return None

    def _job(self, id: str) -> tuple[int, bytes, bool] | None:
        job = self._service.jobs.get(id)
        return None if job is None else (self._peers.number, job.body(), job.is_streamed)

    async def _cancel(self, id: str) -> bytes | None:
        job = self._service.jobs.get(id)
        return None if job is None else await job.cancel()

    async def _events(self, id: str, start: int) -> AsyncIterator[list[Frame]]:
        job = self._service.jobs.get(id)
        if job is not None:
            async for frames in job.log.read(start):
                yield frames


def _first(answers: list[Any]) -> Any:
    return next((answer for answer in answers if answer is not None), None)
