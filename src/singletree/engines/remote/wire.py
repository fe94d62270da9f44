"""What an engine on a running server consists of: a server that is looked up, and wires that carry generations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from singletree.engines.abilities import EngineAbilities
from singletree.engines.engine import Chunk, GenerationJob, StopKind
from singletree.errors import SingletreeError
from singletree.pictures import PromptPicture

GetPage = Callable[[str], Awaitable[tuple[int, bytes]]]
"""Fetch a path: status and body. Raises EngineFailed when there is no answer."""


class Lookup(NamedTuple):
    """A question to the server that a reader needs answered before it can go on: a POST of ``body`` to ``path``."""

    path: str
    body: bytes


class WireReader(Protocol):
    """Decodes the answer to one generation, whose bytes may be cut anywhere. No I/O.

    After each ``feed`` that returned no list, answer ``lookup`` with ``resolve`` while there is one, pass the chunk
    on, then check ``failure`` (raise it after the chunk was passed on: generated tokens stay valid) and ``done``.
    """

    @property
    def failure(self) -> SingletreeError | None:
        """The error that the answer reports or contains."""

    @property
    def done(self) -> bool:
        """Whether nothing follows: the last chunk was returned, or ``failure`` is set."""

    @property
    def cut(self) -> bool:
        """Whether the server still generates although ``done``: the connection has to be closed."""

    @property
    def lookup(self) -> Lookup | None:
        """What to ask the server before the next ``feed``."""

    def feed(self, data: bytes) -> list[int] | Chunk | None:
        """Return what ``data`` completed.

        That is a list of tokens where there is nothing else, as nearly always; it may be empty. A chunk has more than
        tokens. None: there is no chunk yet, but maybe ``lookup`` or ``failure``.
        """

    def resolve(self, status: int, body: bytes) -> Chunk | None:
        """Take the answer to ``lookup`` and return what ``feed`` could not."""

    def close(self, unfinished: SingletreeError | StopKind | None = None) -> Chunk | None:
        """Return the last chunk at the end of the answer, or None with ``failure`` set.

        ``unfinished`` is the outcome if the server has sent no finish reason; None stands for the failure that the
        answer ended too early.
        """


class Wire(Protocol):
    """One endpoint for generations: how requests and answers look. No I/O."""

    @property
    def path(self) -> str:
        """The path that generations are posted to."""

    @property
    def abilities(self) -> EngineAbilities:
        """What the endpoint can do."""

    def accepts(self, job: GenerationJob) -> bool:
        """Return whether this endpoint can serve the job; the next wire of the server is asked otherwise."""

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
        """Encode the request; ``max_tokens`` replaces the one of ``job.sampling``. Raises InvalidRequest."""

    def headers(self, job: GenerationJob) -> Mapping[str, str]:
        """Return what the request needs as headers beside its body."""

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        """Return the reader of the answer."""

    def refusal(self, status: int, body: bytes, job: GenerationJob, retry_after: str) -> SingletreeError:
        """Return the error for an answer whose ``status`` is not 200; ``retry_after`` is the header of that name."""

    def accepted(self, job: GenerationJob) -> None:
        """Note that the server has taken the request: what it keeps of it need not be sent again."""

    def resends(self, job: GenerationJob, refusal: SingletreeError) -> bool:
        """Return whether ``encode`` now gives a request with what the server no longer has."""

    def uncounted(self, job: GenerationJob) -> Sequence[PromptPicture]:
        """Return the pictures whose lengths have to be found out first, because the answer has only their sum."""

    def first_answer_seconds(self, job: GenerationJob) -> float | None:
        """Return for how long the answer may not begin, in seconds; None for no limit but that of every silence."""

    def encode_picture_probe(self) -> bytes | None:
        """Encode a request that only a model with eyes understands; None for an endpoint that takes no pictures."""

    def blindness(self, refusal: SingletreeError | None) -> str | None:
        """Return why the model takes no pictures, and the cure; None if it takes them.

        ``refusal`` is the answer to the picture probe; None if the server accepted it, or there is no probe.
        """


class DefaultWire:
    """What most wires do: the server keeps nothing of a request, answers in time, and reports each picture's length."""

    def uncounted(self, job: GenerationJob) -> Sequence[PromptPicture]:
        """Return nothing."""
        return ()

    def headers(self, job: GenerationJob) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    def first_answer_seconds(self, job: GenerationJob) -> float | None:
        """Return None."""
        return None

    def accepted(self, job: GenerationJob) -> None:
        """Do nothing."""

    def resends(self, job: GenerationJob, refusal: SingletreeError) -> bool:
        """Return False."""
        return False

    def encode_picture_probe(self) -> bytes | None:
        """Return None."""
        return None


class WireWithoutPictures(DefaultWire):
    """What a wire does whose endpoint takes no pictures."""

    def blindness(self, refusal: SingletreeError | None) -> str | None:
        """Return an empty string: there is no cure."""
        return ""


@dataclass(frozen=True, slots=True)
class ServerOffer:
    """What a server serves.

    Attributes:
        name: the model's name there.
        wires: the endpoints to try, the best first; at start-up those before the first that works are dropped.
        window: longest prompt and answer together, in tokens; None when the server does not report it.
        slots: how many generations run at once; None when the server does not report it.
        details: more facts, for people to read.
        checkpoint: the server's name for the checkpoint, a path or a hub id; None when it does not report it.
        losses: path of a wire -> what is lost without it and the cure, for the log.
    """

    name: str
    wires: Sequence[Wire]
    window: int | None = None
    slots: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    losses: Mapping[str, str] = field(default_factory=dict)


class Server(Protocol):
    """One kind of inference server."""

    @property
    def title(self) -> str:
        """Its name, for messages."""

    @property
    def hint(self) -> str:
        """How to start it so that singletree can use it, for messages."""

    async def look_up(self, url: str, get: GetPage, model: str | None) -> ServerOffer:
        """Find out what the server at ``url`` serves; ``model`` is the wanted name, None for the first.

        Raises EngineFailed when it is not ready, BadConfiguration when it refuses the key, does not serve the model
        or is of another kind.
        """
