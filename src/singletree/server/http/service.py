"""What the operations behind the routes share, the request that one of them answers, and threads for long work."""

from __future__ import annotations

import asyncio
import copy
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from singletree.conversation import Request
from singletree.errors import ForbiddenAddress, SingletreeError
from singletree.protocols import wire
from singletree.server.answers.client_link import StreamedAnswer
from singletree.server.answers.observer import (
    AnswerCapture,
    AnswerRecorder,
    Capture,
    Foresees,
    KnownResponses,
    MediaPreparer,
    Observer,
    OtherProcesses,
    RequestMedia,
    ResponseStore,
    SessionPlace,
)
from singletree.server.answers.request_body import BodyAdmission, read_body
from singletree.server.answers.response import Jobs, Lifecycle
from singletree.server.doors import open_door, open_door_in_thread
from singletree.server.models.catalog import Catalog
from singletree.server.sessions.request_headers import InFlight
from singletree.server.sessions.session_report import encode_session
from singletree.server.sessions.sessions import Opened, Sessions
from singletree.server.settings.api_keys import ApiKey, ApiKeys, Right
from singletree.server.settings.config import Config
from singletree.server.telemetry import Trace, Tracing
from singletree.server.turn.generation import Generation
from singletree.server.turn.protocol import ProtocolEntry, protocol_for

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Smallest number of bytes whose prompt is built in a thread. A cold prompt of 200,000 tokens takes 25 ms with the fast
encoder and 600 ms without it; a thread costs 0.1 to 0.6 ms."""


async def offload(size: int, work: Callable[[], T], *, waits: bool = False) -> T:
    """Return ``work()``, run in a thread when it processes at least ``LARGE_BYTES`` or ``waits`` for others."""
    return work() if size < LARGE_BYTES and not waits else await asyncio.to_thread(work)


@dataclass(slots=True)
class Service:
    """What the operations of one owner share: the server, and the memories in which they find what is the owner's.

    Attributes:
        owner: whose requests it is for; empty for a server with one owner, and for the operator, who sees the sessions
            of all.
        others: the other processes of the server; None where this is the only one.
        shutdown: set once new requests are refused, for all owners; ``admission`` is for all owners, too.
    """

    config: Config
    catalog: Catalog
    tracing: Tracing
    in_flight: InFlight = field(default_factory=InFlight)
    admission: BodyAdmission = field(default_factory=BodyAdmission)
    store: ResponseStore | None = None
    jobs: Jobs = field(default_factory=Jobs)
    others: OtherProcesses | None = None
    records: AnswerRecorder | None = None
    foresight: Foresees | None = field(init=False, default=None)
    budgets: CheckBudgets | None = field(init=False)
    inspector: Observer | None = field(init=False)
    capture: Capture | None = field(init=False)
    sessions: Sessions = field(init=False)
    media: MediaPreparer = field(init=False)
    keys: ApiKeys = field(init=False)
    owner: str = field(init=False, default="")
    shutdown: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _parts: dict[str, Service] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = ApiKeys(self.config)
        self.tracing.model_states = self.catalog.states
        self.sessions = Sessions(self.config.session_memory)
        config = self.config
        self.budgets = None
        if config.session_budget or config.subagent_budget or config.key_budget:
            self.budgets = open_door("budgets")(config)
        door = inspector_door(self.config)
        self.inspector = None if door is None else door.open(self.config)
        entry = capture_door(self.config)
        self.capture = None if entry is None else entry.open(self.config)
        self.tracing.costs = self.sessions.costs_here
        self.media = RequestMedia(self.config)
        self.tracing.waiting = self.catalog.waiting

    def of(self, owner: str) -> Service:
        """Return the service for the requests of one owner; itself for an empty name.

        Each memory has a part for the owner, so nothing that answers a request can look into those of others.
        """
        if not owner:
            return self
        part = self._parts.get(owner)
        if part is None:
            part = copy.copy(self)
            part.owner = owner
            part.catalog = self.catalog.of(owner)
            part.sessions = self.sessions.of(owner)
            part.in_flight = InFlight()
            part.store = None if self.store is None else self.store.of(owner)
            part.jobs = self.jobs.of(owner)
            part.foresight = None  # Names of sessions and tools are the owner's.
            part.inspector = None if self.inspector is None else self.inspector.of(owner)
            part.capture = None if self.capture is None else self.capture.of(owner)
            part.media = self.media.of(owner)
            part.others = None if self.others is None else self.others.of(owner, part.place)
            # Last: a part that could not be made whole would be that of all owners in some of its memories.
            self._parts[owner] = part
        return part

    async def close_foresight(self) -> None:
        for part in (self, *self._parts.values()):
            if part.foresight is not None:
                await part.foresight.close()

    @property
    def place(self) -> SessionPlace:
        return SessionPlace(self.sessions, self.inspector, self.in_flight)

    def session_report(self, key: str) -> bytes:
        """Return the report of a session of this process as JSON. Raises RouteNotFound when it is not in memory."""
        return encode_session(
            self.sessions, key, None if self.inspector is None else self.inspector.session_link
        )

    def describe_owners(self) -> list[str]:
        """Return lines for the user: whether keys are separate, and which engine does not keep them apart."""
        if not self.keys.owners:
            return []
        count = len(self.keys.owners)
        lines = [f"keys       {count}, each with a memory of its own; --share-between-keys gives them one"]
        for model in self.catalog.models:
            if not model.engine.info().salts:
                lines.append(
                    f"WARNING    the engine of {model.name} cannot keep the prompts of keys apart in its prefix cache: "
                    "by time and by cached tokens, one key can find out what prompts of others begin with"
                )
        return lines


CheckBudgets = Callable[[Service, Opened | None, Request, Mapping[str, str], Any], list[str]]
"""Checks a request by its place in its session, None for raw prompts, by its headers and by the budget of its key, and
returns warnings. Raises BudgetSpent, and InvalidRequest for the headers."""

OpenBudgets = Callable[[Config], CheckBudgets]


WEBSOCKET_PATH = "/v1/responses"
"""The path at which a client may open a WebSocket."""

AnswerSocket = Callable[[Service, SingletreeError | None, Scope, Receive, Send], Awaitable[None]]
"""Answers on a WebSocket, or refuses it with the error."""


@dataclass(slots=True)
class Call:
    """One HTTP request. ``headers`` have lower-case names.

    ``in_work`` is how many bytes of its body count as in work (``BodyAdmission``).
    """

    service: Service
    scope: Scope
    receive: Receive
    headers: Mapping[str, str]
    trace: Trace
    api: ProtocolEntry = field(init=False)
    key: ApiKey | None = field(init=False, default=None)
    in_work: int = 0

    def __post_init__(self) -> None:
        self.api = protocol_for(self.scope["path"], self.headers)

    @property
    def http(self) -> HttpRequest:
        return HttpRequest(self.scope, self.receive)

    async def body(self) -> bytes:
        """Read and decompress the request body; its work begins. Raises what ``read_body`` raises."""
        service = self.service
        body = await read_body(self.headers, self.receive, service.config.body_limit, service.admission)
        await self.begin_work(len(body))
        return body

    async def begin_work(self, size: int) -> None:
        """Wait until a body of ``size`` bytes can be worked on, a small one at once. Raises Overloaded."""
        if size >= LARGE_BYTES:
            await self.service.admission.enter(size)
            self.in_work += size

    def end_work(self) -> None:
        """End the work on the body: its generation begins, or it was refused."""
        if self.in_work:
            self.service.admission.leave(self.in_work)
            self.in_work = 0

    async def decode(self, body: bytes, decode: Callable[[bytes, Mapping[str, str]], T]) -> T:
        """Return ``decode(body, headers)``, in a thread where it takes long. Raises what ``decode`` raises."""
        work = partial(decode, body, self.headers)
        # A list of prompts takes far longer than its text; what other bodies hold is counted while it is decoded.
        if LARGE_BYTES <= len(body) < wire.BRIEF_BYTES and self.api.prompt != "prompt":
            with suppress(wire.Lengthy):
                return wire.decode_briefly(work)
        return await offload(len(body), work)

    def capture(self, generations: Sequence[Generation]) -> AnswerCapture | None:
        """Return what keeps the tokens of the answer, for training; None where nothing does."""
        capture = self.service.capture
        return None if capture is None else capture.begin(self.scope, self.trace.route, generations)

    def authorize(self, right: Right) -> None:
        """Check the key, if the server has keys for this; from then on ``service`` is that of its owner.

        Raises what ``ApiKeys.check`` raises.
        """
        service = self.service
        if right in service.keys.needed:
            self.key = service.keys.check(self.headers, right)
            self.service = service.of(self.key.owner)

    def admit(self) -> None:
        """Count a turn that the key asks for. Raises RateLimited."""
        if self.key is not None:
            self.key.admit()

    def authorize_reader(self, right: Right) -> None:
        """Check the key or, where the server has none for this, that the client is on this machine.

        Raises ForbiddenAddress to others, and as ``authorize``.
        """
        if right in self.service.keys.needed:
            self.authorize(right)
        elif not self._is_local():
            raise ForbiddenAddress

    def _is_local(self) -> bool:
        client = self.http.client
        try:
            address = ipaddress.ip_address("" if client is None else client.host.partition("%")[0])
        except ValueError:
            return False
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


StartJob = Callable[[Service, Lifecycle], StreamedAnswer | Response]
"""Begins a background response, and returns the answer to its request."""

ReadResponse = Callable[[Call, bytes, KnownResponses | None], Awaitable[Request]]
"""Decodes a request of Responses, with what it refers to; a connection brings its own responses."""

Operation = Callable[[Call], Awaitable[ASGIApp]]

ScopeName = Literal["api", "hello", "sessions", "captures", "open", "page", "inspector"]


@dataclass(frozen=True, slots=True)
class RouteScope:
    """Who may use a route.

    Attributes:
        right: the right that a request's API key needs, if the server has keys for it; None for a route without keys.
        shows_prompts: whether the answer has texts of prompts: without keys, the host name has to be a trusted one.
        is_api: whether the route also has the path prefixes that clients of other servers send (``app.plain_path``).
        meaning: in words, for the documentation.
    """

    meaning: str
    right: Right | None = None
    shows_prompts: bool = False
    is_api: bool = False


SCOPES: Mapping[ScopeName, RouteScope] = {
    "api": RouteScope("a client with an API key", "inference", is_api=True),
    "hello": RouteScope("anybody", is_api=True),
    "sessions": RouteScope(
        "a client with an API key; without keys, by a trusted host name", "sessions", shows_prompts=True
    ),
    "captures": RouteScope(
        "a client with a key of --capture-key, or of a name with the right capture; else as for sessions",
        "capture",
        shows_prompts=True,
    ),
    "open": RouteScope("anybody"),
    # The page has to load before it can send a key.
    "page": RouteScope("anybody; without keys, by a trusted host name", shows_prompts=True),
    # Its operations ask for the key themselves, and where there is none for a client on this machine.
    "inspector": RouteScope(
        "a client with an API key; without keys, on this machine by a trusted host name", shows_prompts=True
    ),
}


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One route. Its protocol, in whose form errors are, follows from the path (``turn.protocol``).

    Attributes:
        body: the type to which the body of a request is decoded; None where it has none, or any.
    """

    method: str
    path: str
    operation: Operation
    scope: ScopeName = "api"
    body: type[Struct] | None = None

    @property
    def summary(self) -> str:
        """Return what it does: the first sentence of its operation's description."""
        return (self.operation.__doc__ or "").partition("\n")[0].partition(". ")[0].rstrip(".")

    def loaded(self) -> RouteRow:
        """Return the row with its own operation and body, where these are loaded later: their doors are opened."""
        operation, body = self.operation, self.body
        if body is ProtocolBody:
            body = open_door(f"protocol {protocol_for(self.path, {}).name}").Body
        if isinstance(operation, LaterOperation):
            module = open_door(operation.feature)
            body = getattr(module, operation.body) if operation.body else body
            operation = getattr(module, operation.name)
        return replace(self, operation=operation, body=body)


class ProtocolBody(Struct):
    """Stands for the body of the protocol, which is loaded later (``RouteRow.loaded``)."""


@dataclass(frozen=True, slots=True)
class LaterOperation:
    """An operation of a feature that is always on: the function ``name`` of the module behind its door, and the type
    ``body`` there. The first request loads it, in a thread.
    """

    feature: str
    name: str
    body: str = ""

    async def __call__(self, call: Call) -> ASGIApp:
        module = await open_door_in_thread(self.feature)
        operation: Operation = getattr(module, self.name)
        return await operation(call)


@dataclass(frozen=True, slots=True)
class RoutedDoor:
    """A feature with routes, as its package offers it (``server.doors``).

    Attributes:
        open: makes what follows the turns of this process: an ``Observer``, or a ``Capture``.
        routes: those that the feature adds.
        questions: what other processes may ask it, by name: functions of the service and of the question's arguments.
    """

    open: Callable[[Config], Any]
    routes: Sequence[RouteRow]
    questions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def inspector_door(config: Config) -> RoutedDoor | None:
    """Return the inspector's door; None where it is off."""
    return open_door("inspector") if config.inspect else None


def capture_door(config: Config) -> RoutedDoor | None:
    """Return the door of the capture for training; None where it is off."""
    return None if config.capture is None else open_door("capture")
