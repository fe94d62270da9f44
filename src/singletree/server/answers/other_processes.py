"""What a process asks the other processes of the server (``processes``): sessions, jobs, what the inspector has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from singletree.protocols.answer import Frame
from singletree.server.answers.observer import Observer
from singletree.server.sessions.duplicate_requests import InFlight
from singletree.server.sessions.sessions import Sessions


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """Where one owner's sessions of this process are."""

    sessions: Sessions
    inspector: Observer | None
    in_flight: InFlight


class OtherProcesses(Protocol):
    """Asks the other processes for one owner. What no other process has is None."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the others that answer."""

    @property
    def count(self) -> int:
        """Return how many processes there are, with this one."""

    def of(self, owner: str, place: SessionPlace) -> OtherProcesses:
        """Return what asks for one owner, and receives what the others give in ``place``."""

    async def close(self) -> None:
        """Free everything."""

    async def fetch_session(self, key: str | None) -> None:
        """Take the session ``key`` over from the process that has it."""

    async def session_summaries(self) -> list[dict[str, Any]]:
        """Return the summaries of the sessions of the others."""

    async def session_report(self, key: str) -> bytes | None:
        """Return the report of a session of another process, as JSON."""

    async def ask_inspector(self, question: str, *arguments: Any) -> list[Any]:
        """Return what the inspectors of the others answer to ``question``."""

    def inspector_changes(self, number: int, silence_seconds: float) -> AsyncIterator[Any]:
        """Return an iterator of what changes in the process ``number``. It raises OSError or EOFError at its end."""

    async def job_body(self, id: str) -> bytes | None:
        """Return the background response ``id`` of another process."""

    async def job_events(self, id: str, start: int) -> AsyncIterator[list[Frame]] | None:
        """Return an iterator of the events of the background response ``id`` from index ``start`` on.

        None when no other process has it, or it is not streamed.
        """

    async def cancel_job(self, id: str) -> bytes | None:
        """Cancel the background response ``id``, and return it."""

    async def drop_job(self, id: str) -> None:
        """Cancel the background response ``id``, and forget its events."""


def numbered_path(path: Path, name: str) -> Path:
    """Return the file of the process ``name``: processes cannot share one, because a full file is renamed."""
    return path.with_name(f"{path.stem}-{name}{path.suffix}")
