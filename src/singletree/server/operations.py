"""What each route does. A protocol's ``ROUTES`` name these by their keys in ``OPERATIONS``."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from singletree import __version__
from singletree.conversation import Request
from singletree.errors import InvalidRequest, MethodNotAllowed, Overloaded, Unauthorized
from singletree.protocols import hints, messages, models, responses_compact, tokenize
from singletree.server import compaction, pipeline, stored
from singletree.server.answer import Answer, Header
from singletree.server.aside import aside
from singletree.server.background import Job, Jobs
from singletree.server.body import read_body
from singletree.server.catalog import Catalog, Model
from singletree.server.choices import several
from singletree.server.config import REASONING_FIELDS, Config
from singletree.server.dispatch import wanted
from singletree.server.explaining import PATH as SESSIONS_PATH
from singletree.server.explaining import encode_session, encode_sessions, explaining, is_asked
from singletree.server.protocol import CHAT, COMPACT, RESPONSES, WireProtocol, speaking
from singletree.server.sessions import Sessions, session_key
from singletree.server.store import Store
from singletree.server.stored import Recent
from singletree.server.takeover import Places, place_of
from singletree.server.tracing import Trace, Tracing

JSON = "application/json"

_WARNING_BYTES = 1024


@dataclass(slots=True)
class Service:
    """What all operations share. ``closing`` is set once the server is on its way out."""

    config: Config
    catalog: Catalog
    tracing: Tracing
    places: Places = field(default_factory=Places)
    store: Store | None = None
    jobs: Jobs = field(default_factory=Jobs)
    closing: bool = False
    sessions: Sessions = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.config.session_memory)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. ``headers`` have lower-case names."""

    service: Service
    http: HttpRequest
    headers: Mapping[str, str]
    trace: Trace

    @property
    def protocol(self) -> WireProtocol:
        """The protocol that it speaks."""
        return speaking(self.http.url.path, self.headers)

    async def body(self) -> bytes:
        """Its body."""
        return await read_body(self.headers, self.http.receive, self.service.config.body_limit)

    def authorize(self) -> None:
        """Raises Unauthorized unless it brings one of the keys, if there are any."""
        keys = self.service.config.api_key
        if not keys:
            return
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        given = [self.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        if not any(given):
            raise Unauthorized("no API key: send it as x-api-key, or as Authorization: Bearer")
        # Header values are bytes, shown as Latin-1; what a client had spelled in UTF-8 comes out in pieces.
        spelled = [text for key in keys for text in (key, key.encode().decode("latin-1"))]
        # A sum, not any(): every comparison is made, so that time tells nothing.
        if not sum(hmac.compare_digest(one.encode(), key.encode()) for one in given for key in spelled):
            raise Unauthorized("the API key is wrong; send one that the server was started with (--api-key)")


def _input_tokens(tokens: int, original: int | None = None) -> bytes:
    return b'{"object":"response.input_tokens","input_tokens":%d}' % tokens


COUNTING: dict[
    str, tuple[Callable[[bytes, Mapping[str, str]], Request] | None, Callable[[int, int | None], bytes]]
] = {
    "/v1/messages/count_tokens": (messages.decode_count, messages.encode_count),
    "/v1/responses/input_tokens": (None, _input_tokens),
}
"""How the requests that only count are read (None: as those for a turn), and their answers written."""

Operation = Callable[[Call], Awaitable[ASGIApp]]


async def create(call: Call) -> ASGIApp:
    """One turn, streamed or whole."""
    body = await call.body()
    return await answer(call, body, await _read(call, body))


async def answer(call: Call, body: bytes, request: Request, recent: Recent | None = None) -> ASGIApp:
    """The turn that ``request`` asks for; ``recent`` remembers it for a connection.

    Raises:
        SingletreeError: it cannot be had.
    """
    service, protocol = call.service, call.protocol
    if service.closing:
        raise Overloaded("the server is shutting down; try again in a moment")
    _refuse_stored(request)
    request = hinted(call, request)
    model = service.catalog.get(request.model)
    session = session_key(call.headers, request)
    tools_of = partial(service.sessions.tools_of, session)
    generation = await aside(len(body), partial(pipeline.prepare, model, request, tools_of))
    generation = compaction.planned(generation)
    opened = service.sessions.open(session, model, generation.prompt)
    call.trace.goes_on(opened.step)
    keep = stored.keeper(service.store, request, call.trace.new_id, recent)
    follow = partial(service.sessions.close, opened, generation)
    answering = await aside(len(body) * (request.choices - 1), partial(several, generation))
    if keep is not None and request.extra.get("background"):
        return in_background(call, Job(generation, service.tracing, keep, follow))
    return Answer(
        protocol,
        answering,
        call.trace,
        headers=warned(
            [*generation.request.warnings, *generation.held.warnings, *_unseen_tools(model, request)]
        ),
        keep_alive_seconds=service.config.keep_alive_seconds,
        dispatch=wanted(service.config, call.headers),
        keep=keep,
        hold=partial(service.places.held, place_of(call.headers, request, call.trace.route, body)),
        follow=follow,
        tell=partial(explaining, opened.step, generation.known_cached) if _explains(call) else tuple,
    )


def in_background(call: Call, job: Job) -> ASGIApp:
    """A job that was begun: its events, or the response object as it is now."""
    call.service.jobs.add(job)
    if job.is_streamed:
        return StreamingResponse(job.log.read(0), media_type="text/event-stream")
    return Response(job.body(), media_type=JSON)


async def _read(call: Call, body: bytes) -> Request:
    if call.protocol in (RESPONSES, COMPACT):
        request = await read_response(call, body)
        return responses_compact.compacting(request) if call.protocol is COMPACT else request
    request = call.protocol.decode(body, call.headers)
    if call.protocol is not CHAT:
        return request
    fields = REASONING_FIELDS[call.service.config.reasoning_field]
    return replace(request, extra={"reasoning_fields": fields, **request.extra})


async def read_response(call: Call, body: bytes, recent: Recent | None = None) -> Request:
    """``body`` as a request for a response; ``recent`` remembers those of a connection."""
    summaries = partial(compaction.summaries_for, call.service.catalog)
    return await stored.read(call.service.store, body, call.headers, recent, summaries=summaries)


def _explains(call: Call) -> bool:
    return call.service.config.explain or is_asked(call.headers)


async def count_tokens(call: Call) -> ASGIApp:
    """How long the prompt of a request would be, exactly."""
    decode, encode = COUNTING[call.trace.route]
    body = await call.body()
    request = await _read(call, body) if decode is None else decode(body, call.headers)
    model = call.service.catalog.get(request.model)
    tools_of = partial(call.service.sessions.tools_of, session_key(call.headers, request))
    request, prompt = await aside(len(body), partial(pipeline.written, model, request, tools_of))
    whole = prompt
    if prompt.applied_edits:
        unedited = replace(request, context_edits=())
        whole = await aside(len(body), partial(pipeline.write_prompt, model, unedited, tools_of))
    original = len(whole.token_ids) if request.context_edits else None
    return Response(encode(len(prompt.token_ids), original), media_type=JSON)


async def list_models(call: Call) -> ASGIApp:
    """The models, in the shape that the client reads."""
    query = dict(call.http.query_params)
    style, known = models.style(call.headers, query), call.service.catalog.models
    # Codex looks its model up by the name it was given, whichever that is.
    infos = [model.info(name) for model in known for name in model.names[: None if style == "codex" else 1]]
    return Response(models.encode_models(infos, style, query), media_type=JSON)


async def get_model(call: Call) -> ASGIApp:
    """One model; all of them where a slash is all that was added to their path."""
    if not call.http.path_params["id"]:
        return await list_models(call)
    model = call.service.catalog.get(call.http.path_params["id"])
    style = models.style(call.headers, dict(call.http.query_params))
    return Response(models.encode_model(model.info(), style), media_type=JSON)


async def tokenize_text(call: Call) -> ASGIApp:
    """A text, or a conversation, as tokens."""
    sent = await call.body()
    wanted = tokenize.decode_tokenize(sent, call.headers)
    model = call.service.catalog.get(wanted.model)
    if wanted.chat is None:
        ids = await aside(len(sent), partial(model.tokenizer.encode, wanted.prompt or ""))
    else:
        write = partial(pipeline.write_prompt, model, wanted.chat)
        ids = (await aside(len(sent), write)).token_ids.tolist()
    texts = [model.tokenizer.decode([id]) for id in ids] if wanted.return_token_strs else None
    body = tokenize.encode_tokenize(ids, max_model_len=model.context_window, token_strs=texts)
    return Response(body, media_type=JSON)


async def detokenize(call: Call) -> ASGIApp:
    """Tokens as text."""
    wanted = tokenize.decode_detokenize(await call.body(), call.headers)
    model = call.service.catalog.get(wanted.model)
    known = model.tokenizer.vocabulary_size
    for i, token in enumerate(wanted.tokens):
        if not 0 <= token < known:
            raise InvalidRequest(
                f"tokens.{i} is {token}; this model's ids go from 0 to {known - 1}", param=f"tokens.{i}"
            )
    return Response(tokenize.encode_detokenize(model.tokenizer.decode(wanted.tokens)), media_type=JSON)


async def list_sessions(call: Call) -> ASGIApp:
    """The sessions of which something is kept."""
    return Response(encode_sessions(call.service.sessions), media_type=JSON)


async def get_session(call: Call) -> ASGIApp:
    """How the prompts of one session went on, with excerpts where they did not."""
    return Response(encode_session(call.service.sessions, call.http.path_params["id"]), media_type=JSON)


async def upgrade(call: Call) -> ASGIApp:
    """Codex asks for a WebSocket first, and falls back to HTTP at once when it reads 426."""
    if "upgrade" not in call.headers:
        raise MethodNotAllowed("GET /v1/responses is not offered; responses are not stored. Send POST")
    return Response(status_code=426, headers={"upgrade": "HTTP/1.1"})


async def health(call: Call) -> ASGIApp:
    """Whether requests are taken."""
    if call.service.closing:
        return Response(b'{"status":"closing"}', status_code=503, media_type=JSON)
    return Response(b'{"status":"ok"}', media_type=JSON)


async def metrics(call: Call) -> ASGIApp:
    """Prometheus."""
    tracing = call.service.tracing
    return Response(tracing.exposition(), media_type=tracing.content_type)


async def hello(call: Call) -> ASGIApp:
    """Harnesses look whether anybody is there."""
    return Response(f"singletree {__version__}\n", media_type="text/plain")


OPERATIONS: dict[str, Operation] = {
    "create": create,
    "count_tokens": count_tokens,
    "list_models": list_models,
    "get_model": get_model,
    "tokenize": tokenize_text,
    "detokenize": detokenize,
}

OWN_ROUTES: list[tuple[str, str, Operation]] = [
    ("GET", "/v1/responses", upgrade),
    ("GET", SESSIONS_PATH, list_sessions),
    ("GET", SESSIONS_PATH + "/{id:path}", get_session),
]
"""Routes that are no protocol's."""

OPEN_ROUTES: list[tuple[str, str, Operation]] = [
    ("GET", "/", hello),
    ("GET", "/api/hello", hello),
    ("GET", "/health", health),
    ("GET", "/metrics", metrics),
]
"""Routes that take no key."""


def _refuse_stored(request: Request) -> None:
    wanted = request.extra.get("stateful")
    if wanted:
        field = next(iter(wanted))
        raise InvalidRequest(f"{field}: this server stores no responses; send the whole input", param=field)


def _unseen_tools(model: Model, request: Request) -> list[str]:
    if model.template.reads.tools or not request.conversation.tools:
        return []
    return ["tools: the chat template of this model prints none, so the model does not see them"]


def hinted(call: Call, request: Request) -> Request:
    """``request`` with what its headers say for engines and traces, which the trace has from here on.

    Raises InvalidRequest for what means nothing.
    """
    said = hints.with_headers(request.hints, hints.HINTS, call.headers)
    agent = hints.with_headers(request.agent, hints.AGENT, call.headers)
    call.trace.asked(said, agent)
    return replace(request, hints=said, agent=agent)


def warned(warnings: list[str]) -> list[Header]:
    """The header that tells what was accepted and ignored."""
    if not warnings:
        return []
    text = "; ".join(warnings).encode("ascii", "replace")[:_WARNING_BYTES]
    return [(b"x-singletree-warning", bytes(b if 32 <= b < 127 else 32 for b in text))]
