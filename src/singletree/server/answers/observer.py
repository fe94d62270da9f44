"""What records an answer: its record, which the request file, the spans and the inspector read, and the interfaces of
what follows turns from outside of them (the inspector, the capture for training).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Scope

from singletree.events import Finished, FinishReason
from singletree.protocols.answer import EventEncoder
from singletree.server.sessions.sessions import Opened
from singletree.server.sessions.step import Step
from singletree.server.telemetry.tracing import Trace
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
