"""What the core knows of the packages that record answers, follow turns from outside of them, store responses, read
pictures and documents, and ask the other processes of the server. Each is behind a door; most requests need none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, Protocol

from starlette.types import Scope

from singletree.conversation import Conversation, Document, Image, Request, ToolResult, Turn
from singletree.events import Finished, FinishReason
from singletree.prompts.replay.turn_keys import Fingerprint
from singletree.protocols.answer import EncodedResponse, EventEncoder, Frame
from singletree.request_options import References, StoredItems
from singletree.server.doors import open_door_in_thread
from singletree.server.models.chat_format import ChatFormat
from singletree.server.sessions.request_headers import InFlight
from singletree.server.sessions.sessions import Opened, Sessions
from singletree.server.sessions.step import Step
from singletree.server.settings.config import Config
from singletree.server.telemetry import Trace
from singletree.server.turn.generation import Generation
from singletree.server.turn.protocol import WireProtocol

INSPECT_HEADER = b"x-singletree-inspect"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it arrived: its id and times (``trace``), its headers (with lower-case names) and its body."""

    trace: Trace
    protocol: WireProtocol
    headers: Mapping[str, str]
    body: bytes

    @property
    def protocol_name(self) -> str:
        return getattr(self.protocol, "__name__", "").rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One answer of a session at its end, made once for everything that records it.

    Attributes:
        id: of the answer.
        trace: has the id of the request, its times and its error.
        generations: the first one stands for the answer.
        step: the place in the session.
        finished: why the answer ended, and the token counts of all generations.
    """

    id: str
    trace: Trace
    generations: Sequence[Generation]
    step: Step
    finished: Finished


class AnswerRecorder(Protocol):
    """Takes a record of each answer that has a session, for a file or an export (``records``)."""

    def add(self, answer: AnswerRecord) -> None:
        """Record an answer at its end. Never waits."""

    def close(self) -> None:
        """Write what waits; nothing may be added after that."""


class TurnObserver(Protocol):
    """Follows one turn."""

    @property
    def id(self) -> str:
        """Return its id, by which later prompts refer to the turn."""

    @property
    def link(self) -> str:
        """Return the link to its page, relative to the server."""

    def start(self) -> None:
        """Record that the engine is asked."""

    def encoder(self, encoder: EventEncoder, choice: int) -> EventEncoder:
        """Return ``encoder`` for the choice with this index, with what it makes recorded."""

    def body(self, data: bytes, tokens: Sequence[object]) -> None:
        """Record an answer that is not streamed, and the tokens of the first choice if the client asked for them."""

    def supersede(self) -> None:
        """Record that the client has sent the request again."""

    def settle(self, generation: Generation) -> None:
        """Record the generated tokens, before the next request of the session can come."""

    def close(self, record: AnswerRecord) -> None:
        """Record the end of the answer."""


class Observer(Protocol):
    """Follows the turns of one process, whose number, from 1, is ``process``."""

    process: int

    def of(self, owner: str) -> Observer:
        """Return what the requests of ``owner`` see of it."""

    def begin(self, arrival: Arrival, generation: Generation, opened: Opened) -> TurnObserver:
        """Record the start of a turn, whose prompt is written, and follow it."""

    def session_link(self, key: str, owner: str) -> str:
        """Return the link to the page of a session, relative to the server."""

    def take_session(self, key: str) -> Any:
        """Return what goes with a session to another process, which can be pickled; None for nothing."""

    def receive_session(self, key: str, taken: Any) -> None:
        """Go on with what another process had of a session."""


class Foresees(Protocol):
    """Keeps what the sessions of one owner will do next (``foresight``)."""

    def begin(self, opened: Opened, generation: Generation) -> None:
        """Note that a request has come, whose prompt is written, and give its generation the outlook."""

    def end(self, step: Step, generation: Generation, reason: FinishReason) -> None:
        """Note the end of a turn, and read the next prompt ahead if its request asks for that."""

    async def close(self) -> None:
        """End what is read ahead."""


class AnswerCapture(Protocol):
    """Keeps the tokens of one answer."""

    def start(self, answer: str) -> None:
        """Record the prompts of the answer with this id, before the engine is asked."""

    async def finish(self, choice: int, end: Finished) -> None:
        """Keep what was generated for a choice, whose answer does not end before this returns."""

    def close(self, reason: FinishReason) -> None:
        """Record that the answer is over, however it ended: choices that are not finished were cut."""


class Capture(Protocol):
    """Keeps the tokens of sessions, so that models can be trained on them."""

    def of(self, owner: str) -> Capture:
        """Return what the requests of ``owner`` see of it."""

    def enter(self, scope: Scope, path: str) -> tuple[Scope, str]:
        """Return the scope and the path of a request without the session that its path or its API key names."""

    def begin(self, scope: Scope, route: str, generations: Sequence[Generation]) -> AnswerCapture | None:
        """Return what keeps the answer to a request; None for one that belongs to no captured session."""

    def close(self) -> None:
        """Write what waits."""


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

    async def kept_conversation(self, model: str, messages: tuple[Fingerprint, ...]) -> Conversation | None:
        """Return what ``Model.kept_conversation`` returns in another process."""

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


KeepResponse = Callable[[EncodedResponse], None]
"""Gets a finished response and stores it."""


class KnownResponses(Protocol):
    """Responses and conversations that a request can continue, and where its own response is kept."""

    async def look_up(self, named: References) -> StoredItems:
        """Return what a request refers to. Raises PreviousResponseNotFound, or NotStored for a conversation."""

    def keeper(self, request: Request, generation: Generation | None) -> KeepResponse:
        """Return the function that keeps the response to ``request``, with all that ``generation`` has."""


class ResponseStore(Protocol):
    """The store of responses and conversations of a server."""

    async def opened(self) -> KnownResponses | None:
        """Return the open store; None where it cannot be used."""

    def of(self, owner: str) -> ResponseStore:
        """Return what the owner has in the store."""

    async def settled(self) -> None:
        """Wait until other processes can find what was put, for a second at most."""

    def close(self) -> None: ...


class OpenedStore(ResponseStore, KnownResponses, Protocol):
    """A store that is open."""

    def of(self, owner: str) -> OpenedStore: ...


OpenStore = Callable[[Config], OpenedStore | None]
"""Opens the store that a configuration names; None, with a warning, where its default cannot be used."""

OpenConnection = Callable[[Any], KnownResponses]
"""Makes the memory of one connection for its responses, beside the open store of the server, or beside None."""


class LaterStore:
    """A store that ``open`` opens when a request needs it for the first time."""

    def __init__(self, open: Callable[[], Awaitable[OpenedStore | None]]) -> None:
        self._open = open
        self._opening: asyncio.Future[OpenedStore | None] | None = None

    async def opened(self) -> OpenedStore | None:
        if (store := self._opened_now()) is not None:
            return store
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    def of(self, owner: str) -> LaterStore:
        async def part() -> OpenedStore | None:
            whole = await self.opened()
            return None if whole is None else whole.of(owner)

        return LaterStore(part)

    async def settled(self) -> None:
        if (store := self._opened_now()) is not None:
            await store.settled()

    def close(self) -> None:
        if (store := self._opened_now()) is not None:
            store.close()

    def _opened_now(self) -> OpenedStore | None:
        opening = self._opening
        is_open = opening is not None and opening.done() and opening.exception() is None
        return opening.result() if opening is not None and is_open else None


class MediaPreparer(Protocol):
    """Makes the pictures and documents of requests ready for a model."""

    def of(self, owner: str) -> MediaPreparer:
        """Return what reads the requests of one owner: what was fetched for others is not found by its URL."""

    async def read(self, request: Request, chat_format: ChatFormat) -> Request:
        """Return ``request`` with its pictures checked; itself where it has neither pictures nor documents.

        Raises:
            InvalidRequest: a picture in a user's message cannot be used, or there are too many.
        """


OpenMedia = Callable[[Config], MediaPreparer]


@dataclass(frozen=True, slots=True)
class RequestMedia:
    """Reads nothing where a request has no pictures or documents; else what ``MediaPreparer`` promises."""

    config: Config
    owner: str = ""
    _opened: dict[str, MediaPreparer] = field(default_factory=dict)

    def of(self, owner: str) -> MediaPreparer:
        return replace(self, owner=owner)

    async def read(self, request: Request, chat_format: ChatFormat) -> Request:
        if not _may_hold_media(request.conversation.turns):
            return request
        open_media: OpenMedia = await open_door_in_thread("media")
        opened = self._opened
        if self.owner not in opened:
            whole = opened[""] if "" in opened else opened.setdefault("", open_media(self.config))
            opened.setdefault(self.owner, whole.of(self.owner))
        return await opened[self.owner].read(request, chat_format)


def _may_hold_media(turns: Iterable[Turn]) -> bool:
    """Return whether the conversation has parts other than text and calls: without Python code for each turn."""
    parts = list(chain.from_iterable(map(attrgetter("parts"), turns)))
    kinds = list(map(type, parts))
    results = compress(parts, map(is_, kinds, repeat(ToolResult)))
    inner = map(type, chain.from_iterable(map(attrgetter("parts"), results)))
    return any(issubclass(kind, Image | Document) for kind in {*kinds, *inner})
