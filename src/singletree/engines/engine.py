"""The interface that every inference engine implements: token ids in, token ids out; and the outlook of a turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from singletree.conversation import Sampling
from singletree.errors import ContextOverflow, EngineUnfit, InvalidRequest
from singletree.events import WeightVersion
from singletree.pictures import PromptPicture

OVERDUE_SECONDS = 600.0
"""A conversation that is later than this behind its expected time is no longer expected."""

SOON_SECONDS = 2.0
"""A conversation that ended without a call a moment ago counts as idle for so long: nothing else is known of it."""

ONCE = 16.0
"""A conversation of one turn counts as idle for so many times as long: most of those are never continued, such as
requests for a title, and sub-agents that their harness does not name."""


def _ignore() -> None:
    return None


class Outlook:
    """What one conversation will do next. It goes with the conversation from turn to turn.

    The server changes it at the end of a turn and when the next one begins; an engine keeps it with the state of the
    conversation, and reads it when it has to give a state up.

    Attributes:
        goes_on: whether it has had more than one turn.
        is_running: whether a turn of it runs, so that nobody knows yet what follows.
        returns_at: when its next request is expected, on the clock of ``time.monotonic``: calls of tools went out. None
            where nothing is expected.
        tools, since: the tools whose calls are out, and since when; for the server.
        is_over: whether nobody will continue it: its sub-agent ended, or its client has rewritten it.
        is_pinned: whether its harness asks to keep it.
        changed: called after a turn ended; set by the engine that holds the state.
    """

    __slots__ = ("changed", "goes_on", "is_over", "is_pinned", "is_running", "returns_at", "since", "tools")

    def __init__(self, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        self.is_running = True
        self.returns_at: float | None = None
        self.tools: tuple[str, ...] = ()
        self.since = 0.0
        self.is_over = False
        self.is_pinned = False
        self.changed: Callable[[], object] = _ignore

    def may_return_by(self, until: float) -> bool:
        """Return whether its next request may come before a time, so that its place is kept until then."""
        if self.is_running:
            return True
        due = self.returns_at
        return not self.is_over and (self.goes_on if due is None else due <= until)


Worth = tuple[int, float]
"""How much a state is needed; the least goes first."""


def worth(outlook: Outlook | None, used: float, now: float) -> Worth:
    """Return how much the state of a conversation is needed.

    First go those that are over, then those that wait for a person, the idlest first, then those whose calls are out,
    the one that comes back last first, and at last what a harness has pinned.

    Args:
        outlook: None where nothing is known: then what was used longest ago goes first.
        used: when the state was used last.
    """
    if outlook is None:
        return 1, used - now
    if outlook.is_over:
        return 0, used - now
    if outlook.is_pinned:
        return 3, used - now
    due = outlook.returns_at
    if due is not None and now - due < OVERDUE_SECONDS:
        return 2, -abs(due - now)
    return 1, (used - now - SOON_SECONDS) * (1.0 if outlook.goes_on else ONCE)


__all__ = ["Chunk", "Constraint", "Engine", "EngineInfo", "PictureSupport"]

StopKind = Literal["stop", "length", "cancelled"]
ConstraintKind = Literal["gbnf", "lark", "regex", "json_schema", "structural_tag"]

LogprobKind = Literal["raw", "scaled", "unknown"]
LogprobRow = Sequence[tuple[int, float]]
"""(token id, natural-log probability) of a token and of its alternatives, the token itself first. Empty: unknown."""


@dataclass(frozen=True, slots=True)
class Route:
    """Which of several engines a generation was sent to, and why.

    Attributes:
        worker: the name of the engine; empty where there is only one.
        predicted_cached_tokens: how many tokens of the prompt were expected in its prefix cache; None if not predicted.
        reason: why this engine, in a few words.
        failovers: how many engines failed the generation before.
        waited_seconds: how long it waited for a place on any engine.
    """

    worker: str
    predicted_cached_tokens: int | None = None
    reason: str = ""
    failovers: int = 0
    waited_seconds: float = 0.0


@dataclass(slots=True)
class Chunk:
    """One step of a generation. Treat it as immutable: an engine may yield the same object twice.

    Attributes:
        token_ids: the new tokens. May be empty: in a first chunk that only reports ``cached_tokens``, and in the last
            one. The token that ended the turn is included when the engine reports it.
        finish: set on the last chunk only: ``stop`` (an end token), ``length`` or ``cancelled``.
        cached_tokens: how many prompt tokens were in the prefix cache; None until the engine reports it.
        logprobs: one row for each new token, no id twice in a row; None when not requested.
        prompt_logprobs: the same for all tokens of the prompt, in one chunk, before or with the first new tokens.
            The row of the first prompt token is empty.
        prompt_tokens: how many tokens the engine read as the prompt, with its pictures expanded; None until it reports
            them, and for a prompt without pictures.
        picture_tokens: how many of them are each picture's, in the order of ``GenerationJob.pictures``; None where the
            engine does not report them.
        route: which of several engines generates, or that the generation waited for a place; in the first chunk of
            each engine, None in the others.
        weight_versions: which tokens of the generation came from which weights; in the last chunk, empty where the
            engine does not report it.
        routed_experts: the experts that each token was routed to, an ``.npy`` file in base64; in the last chunk, None
            where the engine does not report it.
    """

    token_ids: Sequence[int]
    finish: StopKind | None = None
    cached_tokens: int | None = None
    logprobs: Sequence[LogprobRow] | None = None
    prompt_logprobs: Sequence[LogprobRow] | None = None
    prompt_tokens: int | None = None
    picture_tokens: Sequence[int] | None = None
    route: Route | None = None
    weight_versions: Sequence[WeightVersion] = ()
    routed_experts: str | None = None


@dataclass(frozen=True, slots=True)
class PictureSupport:
    """How an engine takes pictures.

    Attributes:
        place: what stands in the prompt for a picture. ``template``: the token that the model's chat template prints
            for one. ``mark``: a mark in the text of a message, which the engine replaces by the picture and by all that
            the model expects around it.
        media_types: the formats that it decodes; pictures of others are converted.
        reads_text: whether it looks for the places of pictures in the text of the token ids. Text that only reads
            like a placeholder must not be in a prompt then.
    """

    place: Literal["template", "mark"]
    media_types: frozenset[str]
    reads_text: bool = False


@dataclass(frozen=True, slots=True)
class KvPublisher:
    """Where an engine publishes its KV events: what is stored in and removed from its prefix cache.

    Attributes:
        events: the ZMQ endpoint of the events.
        replay: the ZMQ endpoint that repeats missed ones; empty for none.
    """

    events: str
    replay: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Name, limits and abilities of an engine.

    Attributes:
        name: the model's name.
        context_window: longest prompt and answer together, in tokens.
        slots: how many generations run at once.
        details: more facts about the engine, for people to read.
        constraints: the kinds of ``Constraint`` that it supports, the best supported first.
        returns_prompt_logprobs: whether it supports ``Sampling.prompt_logprobs``.
        resumable: whether its output depends on the prompt alone, so that it can continue a turn that another
            engine began.
        optional_sampling: the fields of ``Sampling`` that it supports although not every engine does: of
            ``min_tokens``, ``bad_words`` and ``allowed_token_ids``.
        pictures: how it takes pictures; None if it takes none.
        blindness: why it takes none, and the cure; empty where there is nothing more to know.
        checkpoint: the name of the checkpoint on the engine's own server, a path or a hub id; None if it has none.
        kv_publisher: where it publishes its KV events; None if it publishes none, or does not report where.
        logprobs: what its log-probabilities are of by default: the model's own distribution (``raw``), or the one after
            the temperature (``scaled``).
        streams_every_id: whether each generated token id is streamed; otherwise some are recovered from the text.
        salts: whether its prefix cache keeps prompts of different ``GenerationJob.cache_salt`` apart.
        has_special_tags: whether its LLGuidance takes every added token of the form ``<…>`` as a special one, which no
            text in a grammar matches. It does so where it reads the tokenizer of Hugging Face.
        reads_outlooks: whether ``GenerationJob.outlook`` has an effect.
        started_at: since when it runs, or has been connected, in unix seconds: its prefix cache was empty then. 0 where
            that is not known.
    """

    name: str
    context_window: int
    slots: int = 1
    details: Mapping[str, Any] | None = None
    constraints: tuple[ConstraintKind, ...] = ()
    returns_prompt_logprobs: bool = False
    resumable: bool = False
    optional_sampling: frozenset[str] = frozenset()
    checkpoint: str | None = None
    pictures: PictureSupport | None = None
    blindness: str = ""
    kv_publisher: KvPublisher | None = None
    salts: bool = False
    logprobs: LogprobKind = "unknown"
    streams_every_id: bool = True
    has_special_tags: bool = False
    reads_outlooks: bool = False
    started_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the generated tokens must match.

    Attributes:
        kind: ``gbnf`` (llama.cpp grammar), ``lark``, ``regex``, ``json_schema`` or ``structural_tag``.
        value: the text of the grammar, or the schema or structural tag as a JSON value. In ``lark`` special tokens
            are written by name (``<|im_end|>``) or id (``<[2]>``), the notation of llguidance.
        lark: the same grammar in Lark, for a ``gbnf`` or ``structural_tag``: a turn that another engine continues is
            checked by it. Empty if it cannot be written so.
    """

    kind: ConstraintKind
    value: Any
    lark: str = ""

    def as_text(self) -> str:
        """Return the value as text: a schema or structural tag as JSON."""
        return self.value if isinstance(self.value, str) else msgspec.json.encode(self.value).decode()


Deliver = Callable[[Sequence[int]], bool]
"""Takes the tokens of a chunk that has nothing but tokens, and returns whether the next ones may come the same way."""


class GenerationJob(msgspec.Struct, frozen=True):
    """One generation that an engine is asked for.

    A struct and no dataclass: several are made for each request, and a frozen dataclass sets each field by a call.

    Attributes:
        prompt_token_ids: the whole prompt.
        sampling: how to choose tokens. The engine does not read ``sampling.stop`` (strings): the pipeline searches
            the text for them.
        request_id: names the generation for ``Engine.abort`` and in logs.
        stop_token_ids: tokens that end the generation.
        constraint: the grammar that the generated tokens must match, or None.
        priority: where requests wait for the engine, the lowest goes first.
        pictures: the pictures of the prompt, in their order, each with one placeholder.
        session: the client's own key of its session, for engines that keep a session in one place; empty if unknown.
        is_subagent: whether a sub-agent of the client sent it: main agents go first, where an engine is full.
        cache_salt: keeps tenants apart: prompts share the prefix cache only with prompts of the same salt.
        expected_tokens: how many tokens the client expects to be generated; None if unknown.
        latency_sensitivity: higher for a generation that somebody waits for; None if unknown.
        outlook: what its conversation will do next, for an engine that gives states up (``EngineInfo.reads_outlooks``).
        deliver: takes tokens without a switch of tasks, which costs more than all the rest of a token; None for none.
            An engine need not use it. One that does yields the first chunk that has tokens, and each chunk that
            reports anything else. It calls ``deliver`` only while its next chunk is awaited, and not again after it
            returned False, before it has yielded a chunk: an empty one, if there is no other. It never raises.
    """

    prompt_token_ids: Sequence[int]
    sampling: Sampling
    request_id: str
    stop_token_ids: Sequence[int] = ()
    constraint: Constraint | None = None
    priority: int = 0
    pictures: tuple[PromptPicture, ...] = ()
    session: str = ""
    is_subagent: bool = False
    cache_salt: str = ""
    expected_tokens: int | None = None
    latency_sensitivity: float | None = None
    outlook: Outlook | None = None
    deliver: Deliver | None = None


def token_limit(prompt_tokens: int, max_tokens: int | None, window: int) -> int:
    """Return how many tokens may follow the prompt: ``max_tokens``, or fewer where the window ends.

    Raises ContextOverflow when not one token fits, InvalidRequest for an empty prompt.
    """
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty: it must have at least one token")
    room = window - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, window)
    return room if max_tokens is None else max(0, min(max_tokens, room))


class Engine(Protocol):
    """An inference engine. One instance serves many generations at once."""

    async def start(self) -> None:
        """Load the model or connect to the server. Raises WeightsUnavailable, BadConfiguration or EngineFailed."""

    async def close(self) -> None:
        """Free everything. Safe to call twice; generations in flight end with EngineFailed."""

    def info(self) -> EngineInfo:
        """Return name, limits and abilities; valid after ``start``."""

    def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate the tokens of one job, in chunks; exactly one chunk, the last, has ``finish``.

        Closing the generator (``aclose``) frees the engine at once, as ``abort`` does. Raises EngineFailed at any
        time, and before the first chunk Overloaded, ContextOverflow when the prompt is too long for the engine, and
        InvalidRequest for a constraint that the engine does not support.
        """

    async def abort(self, request_id: str) -> None:
        """End the generation of that id with a last chunk ``cancelled``; ignore unknown ids."""


@runtime_checkable
class PictureCounter(Protocol):
    """An engine that takes pictures: one whose ``EngineInfo.pictures`` is set."""

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return how many tokens of a prompt the picture takes, by the engine's own processor.

        Raises what ``Engine.generate`` raises.
        """


WeightStep = Literal["hold", "continue", "name"]


@runtime_checkable
class WeightHolder(Protocol):
    """An engine that takes part when a trainer changes its weights."""

    async def change_weights(self, step: WeightStep, version: str = "") -> None:
        """Hold all generations, continue them, or name the new weights. Raises EngineUnfit, EngineFailed."""


async def change_weights(engine: Engine, step: WeightStep, version: str = "") -> None:
    """Let ``engine`` do ``step``; raises EngineUnfit if it cannot."""
    if not isinstance(engine, WeightHolder):
        raise EngineUnfit("an engine of this kind cannot hold its generations")
    await engine.change_weights(step, version)


async def count_picture_tokens(engine: Engine, picture: PromptPicture) -> int:
    """Return what ``engine`` counts for the picture; raises EngineUnfit if it takes no pictures."""
    if not isinstance(engine, PictureCounter):
        raise EngineUnfit("the engine takes no pictures")
    return await engine.count_picture_tokens(picture)
