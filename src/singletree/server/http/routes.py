"""The operations behind the routes. A protocol's ``ROUTES`` name them by their keys in ``OPERATIONS``."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope

from singletree import __version__
from singletree.conversation import Request
from singletree.errors import InvalidRequest, MethodNotAllowed, Overloaded, Unauthorized
from singletree.prompts.prompt_writer import Prompt
from singletree.protocols import messages, models, tokenize
from singletree.protocols.responses import compact
from singletree.protocols.responses.output import INCLUDE_REASONING
from singletree.server.answers.background_jobs import Job, Jobs, JobStream
from singletree.server.answers.choices import Choices, fan_out
from singletree.server.answers.frame_sinks import ResponseHeader
from singletree.server.answers.lifecycle import Lifecycle, SessionStep, arrival_of
from singletree.server.answers.request_body import read_body
from singletree.server.answers.request_records import RequestRecords
from singletree.server.answers.response import TurnResponse
from singletree.server.answers.speculative_prefill import SpeculativePrefills
from singletree.server.answers.tool_dispatch import dispatch_options
from singletree.server.answers.tracing import Trace, Tracing
from singletree.server.http.offload import LARGE_BYTES, offload
from singletree.server.http.peer_questions import OtherProcesses
from singletree.server.http.request_hints import with_hints
from singletree.server.http.session_report import PATH as SESSIONS_PATH
from singletree.server.http.session_report import encode_session, encode_summaries, summarize
from singletree.server.inspect.inspector import Inspector
from singletree.server.models.catalog import Model
from singletree.server.models.config import Config
from singletree.server.models.served_models import Catalog
from singletree.server.pictures.reader import MediaReader, media_limits
from singletree.server.sessions.duplicate_requests import InFlight, request_key
from singletree.server.sessions.report_headers import wants_report
from singletree.server.sessions.session_names import session_key
from singletree.server.sessions.sessions import Sessions
from singletree.server.storage import response_state
from singletree.server.storage.response_store import Store
from singletree.server.turn import compaction, pipeline
from singletree.server.turn.generation import Generation
from singletree.server.turn.picture_tokens import exact_length
from singletree.server.turn.prompt import fit_prompt, prompt_work, write_prompt
from singletree.server.turn.protocol import COMPACT, RESPONSES, WireProtocol, protocol_for

JSON = "application/json"

_WARNING_BYTES = 1024


@dataclass(slots=True)
class Service:
    """What all operations share.

    Attributes:
        closing: true once the server is shutting down.
        others: the other processes of the server; None where this is the only one.
    """

    config: Config
    catalog: Catalog
    tracing: Tracing
    in_flight: InFlight = field(default_factory=InFlight)
    store: Store | None = None
    jobs: Jobs = field(default_factory=Jobs)
    prefills: SpeculativePrefills = field(default_factory=SpeculativePrefills)
    closing: bool = False
    others: OtherProcesses | None = None
    records: RequestRecords | None = None
    inspector: Inspector | None = field(init=False)
    sessions: Sessions = field(init=False)
    media: MediaReader = field(init=False)

    def __post_init__(self) -> None:
        self.tracing.model_states = self.catalog.states
        self.sessions = Sessions(self.config.session_memory)
        size, texts = self.config.inspect_size, self.config.inspect_content
        self.inspector = Inspector(size, keeps_texts=texts) if self.config.inspect else None
        self.media = MediaReader(media_limits(self.config))
        self.tracing.waiting = self.catalog.waiting


@dataclass(slots=True)
class Call:
    """One HTTP request. ``headers`` have lower-case names.

    Attributes:
        scope, receive: the request, as ASGI defines it.
        protocol: the wire protocol of the request.
    """

    service: Service
    scope: Scope
    receive: Receive
    headers: Mapping[str, str]
    trace: Trace
    protocol: WireProtocol = field(init=False)

    def __post_init__(self) -> None:
        self.protocol = protocol_for(self.scope["path"], self.headers)

    @property
    def http(self) -> HttpRequest:
        """Return the request with its query, path parameters and URL."""
        return HttpRequest(self.scope, self.receive)

    async def body(self) -> bytes:
        """Read and decompress the request body. Raises what ``read_body`` raises."""
        return await read_body(self.headers, self.receive, self.service.config.body_limit)

    def authorize(self) -> None:
        """Check the API key, if the server has keys.

        Raises:
            Unauthorized: the request has no key, or a wrong one.
        """
        keys = self.service.config.api_key
        if not keys:
            return
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        given = [self.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        if not any(given):
            raise Unauthorized("no API key: send it as x-api-key, or as Authorization: Bearer")
        # Header values are bytes, decoded as Latin-1: a key that the client sent as UTF-8 has to be compared so, too.
        accepted = [text for key in keys for text in (key, key.encode().decode("latin-1"))]
        # A sum, not any(): all comparisons are made, so that the time taken reveals nothing about the keys.
        if not sum(hmac.compare_digest(one.encode(), key.encode()) for one in given for key in accepted):
            raise Unauthorized(
                "the API key is wrong; send a key that the server was started with (--api-key)"
            )


def _input_tokens(tokens: int, original: int | None = None) -> bytes:
    return b'{"object":"response.input_tokens","input_tokens":%d}' % tokens


COUNTING: dict[
    str, tuple[Callable[[bytes, Mapping[str, str]], Request] | None, Callable[[int, int | None], bytes]]
] = {
    "/v1/messages/count_tokens": (messages.decode_count, messages.encode_count),
    "/v1/responses/input_tokens": (None, _input_tokens),
}
"""For the routes that only count tokens: the decoder (None: that of a normal request) and the encoder of the answer."""

Operation = Callable[[Call], Awaitable[ASGIApp]]


async def create(call: Call) -> ASGIApp:
    """Answer a request for one turn, streamed or as one body."""
    body = await call.body()
    return await answer_turn(call, body, await _read(call, body))


async def answer_turn(
    call: Call, body: bytes, request: Request, recent: response_state.ConnectionResponses | None = None
) -> TurnResponse | JobStream | Response:
    """Prepare the turn that ``request`` asks for, and return the ASGI application that answers with it.

    Args:
        body: the request body.
        request: the decoded body.
        recent: keeps the response for its connection.

    Raises:
        SingletreeError: the request is wrong, or the server cannot answer it now.
    """
    service, protocol = call.service, call.protocol
    if service.closing:
        raise Overloaded("the server is shutting down; try again in a moment")
    call.trace.accepted()
    _refuse_stored(request)
    request = with_hints(request, call.headers, protocol=protocol, config=service.config, trace=call.trace)
    model, session = await service.catalog.ready(request.model), request.session
    await _fetch_session(call, session)
    request = await service.media.read(request, model)
    tools_of = partial(service.sessions.tools_of, session, model.name)
    prepare = partial(pipeline.prepare, model, request, tools_of)
    generation = await offload(_work(model, request, body), prepare, waits=recall_waits(model))
    generation = compaction.with_compaction(generation)
    opened = service.sessions.open(session, model, generation.prompt)
    service.prefills.cancel(opened.step.session)
    call.trace.record_step(opened.step)
    if request.options.compared_answer:
        _compare_answers(service, generation, request.options.compared_answer)
    keep = response_state.response_keeper(service.store, request, recent, generation)
    generations = [generation]
    if request.choices > 1:
        generations = await offload(len(body) * (request.choices - 1), partial(fan_out, generation))
    warnings = [
        *generation.request.warnings,
        *generation.constraints.warnings,
        *_unseen_tools(model, request),
    ]
    inspection = None
    if service.inspector is not None:
        arrival = arrival_of(call.trace, protocol, call.headers, body)
        inspection = service.inspector.begin(arrival, generation, opened)
    explains = service.config.explain or wants_report(call.headers)
    step = SessionStep(service.sessions, opened, explains, inspection=inspection)
    choices = Choices(protocol, generations, call.trace.new_id, keep=keep, inspection=inspection)
    choices.settle = _settle(service, step, choices)
    lifecycle = Lifecycle(
        choices,
        call.trace,
        headers=warning_headers(warnings),
        in_flight=service.in_flight,
        key=request_key(call.headers, call.trace.route, body),
        session=step,
        prefills=service.prefills,
        records=service.records,
    )
    if keep is not None and request.options.stored_state.background:
        return _start_job(service, lifecycle)
    return respond(call, lifecycle)


def _settle(service: Service, step: SessionStep, choices: Choices) -> Callable[[], Awaitable[None]] | None:
    """Return what makes an answer known to other processes before its client has all of it; None without others.

    The next request may come to another process at once: it has to find the session and the response.
    """
    if service.others is None and service.config.store_url is None:
        return None

    async def settle() -> None:
        if choices.first.ended is not None:
            step.close(choices)
        if service.store is not None:
            await service.store.settled()

    return settle


def _compare_answers(service: Service, generation: Generation, earlier: str) -> None:
    """Report how the prompt compares with that of the answer with the id ``earlier``."""
    request = generation.request
    found = service.sessions.compare_with(earlier, generation.model, generation.prompt)
    report = replace(request.prompt_report, cache_diagnosis=found)
    generation.request = replace(request, prompt_report=report)


def respond(call: Call, lifecycle: Lifecycle) -> TurnResponse:
    """Return the ASGI application that sends the answer of ``lifecycle``, as flags and headers ask."""
    config = call.service.config
    return TurnResponse(
        lifecycle,
        keep_alive_seconds=config.keep_alive_seconds,
        dispatch=dispatch_options(config, call.headers),
    )


def _start_job(service: Service, lifecycle: Lifecycle) -> JobStream | Response:
    """Start a background job, and answer with its events or with the response object in its present state."""
    job = Job(lifecycle, service.tracing)
    service.jobs.add(job)
    return JobStream(job.log.read(0)) if job.is_streamed else Response(job.body(), media_type=JSON)


async def _read(call: Call, body: bytes) -> Request:
    protocol = call.protocol
    if protocol not in (RESPONSES, COMPACT):
        return protocol.decode(body, call.headers)
    request = await read_response(call, body)
    return compact.compaction_request(request) if protocol is COMPACT else request


async def read_response(
    call: Call, body: bytes, recent: response_state.ConnectionResponses | None = None
) -> Request:
    """Decode ``body`` as a Responses request.

    Args:
        recent: the responses of the request's connection.

    Raises:
        InvalidRequest, NotStored: as ``response_state.read``.
    """
    catalog = call.service.catalog
    if catalog.loads_later:
        # A summary in the request is opened with the keys of its model, while the request is decoded.
        await catalog.ready(models.requested_model(body))
    summaries = partial(compaction.summary_opener, catalog)
    request = await response_state.read_request(
        call.service.store, body, call.headers, recent, summaries=summaries
    )
    if not call.service.config.raw_reasoning:
        return request
    include = (*request.options.include, INCLUDE_REASONING)
    return replace(request, options=replace(request.options, include=include))


async def _fetch_session(call: Call, key: str | None) -> None:
    """Move the session ``key`` into this process, if another process has it."""
    if call.service.others is not None:
        await call.service.others.fetch_session(key)


def recall_waits(model: Model) -> bool:
    """Return whether writing a prompt for ``model`` may wait for another machine."""
    return model.memory is not None and model.memory.waits


def _work(model: Model, request: Request, body: bytes) -> int:
    """Return about how many bytes the prompt of a request takes work for; of a short one, all of its bytes."""
    return len(body) if len(body) < LARGE_BYTES else prompt_work(model, request, len(body))


async def count_tokens(call: Call) -> ASGIApp:
    """Answer with the exact number of tokens in the prompt of a request."""
    decode, encode = COUNTING[call.trace.route]
    body = await call.body()
    request = await _read(call, body) if decode is None else decode(body, call.headers)
    model = await call.service.catalog.ready(request.model)
    session = session_key(call.headers, request)
    await _fetch_session(call, session)
    tools_of = partial(call.service.sessions.tools_of, session, model.name)
    request = await call.service.media.read(request, model)
    waits = recall_waits(model)
    fit = partial(fit_prompt, model, request, tools_of)
    request, prompt = await offload(_work(model, request, body), fit, waits=waits)
    whole = prompt
    if prompt.applied_edits:
        unedited = replace(request, context_edits=())
        whole = await offload(len(body), partial(write_prompt, model, unedited, tools_of), waits=waits)
    original = await _exact_length(model, whole) if request.context_edits else None
    return Response(encode(await _exact_length(model, prompt), original), media_type=JSON)


async def _exact_length(model: Model, prompt: Prompt) -> int:
    return await exact_length(model.eyes, model.engine, len(prompt.token_ids), prompt.pictures)


async def list_models(call: Call) -> ASGIApp:
    """List the models in the format that the client reads."""
    query = dict(call.http.query_params)
    style, known = models.style(call.headers, query), call.service.catalog.listed
    # Codex looks its model up by the name in its configuration, which may be any name of the model.
    infos = [model.info(name) for model in known for name in model.names[: None if style == "codex" else 1]]
    return Response(models.encode_models(infos, style, query), media_type=JSON)


async def get_model(call: Call) -> ASGIApp:
    """Answer with one model; with all of them when the path ends behind the slash."""
    if not call.http.path_params["id"]:
        return await list_models(call)
    model = call.service.catalog.listed_model(call.http.path_params["id"])
    style = models.style(call.headers, dict(call.http.query_params))
    return Response(models.encode_model(model.info(), style), media_type=JSON)


async def tokenize_text(call: Call) -> ASGIApp:
    """Tokenize a text, or the prompt of a conversation."""
    sent = await call.body()
    request = tokenize.decode_tokenize(sent, call.headers)
    model = await call.service.catalog.ready(request.model)
    if request.chat is None:
        ids = await offload(len(sent), partial(model.tokenizer.encode, request.prompt or ""))
    else:
        write = partial(write_prompt, model, await call.service.media.read(request.chat, model))
        ids = (await offload(len(sent), write, waits=recall_waits(model))).token_ids.tolist()
    texts = [model.tokenizer.decode([id]) for id in ids] if request.return_token_strs else None
    body = tokenize.encode_tokenize(ids, max_model_len=model.context_window, token_strs=texts)
    return Response(body, media_type=JSON)


async def detokenize(call: Call) -> ASGIApp:
    """Decode token ids to text. Raises InvalidRequest for an id outside the vocabulary."""
    request = tokenize.decode_detokenize(await call.body(), call.headers)
    model = await call.service.catalog.ready(request.model)
    known = model.tokenizer.vocabulary_size
    for i, token in enumerate(request.tokens):
        if not 0 <= token < known:
            raise InvalidRequest(
                f"tokens.{i} is {token}; this model's ids go from 0 to {known - 1}", param=f"tokens.{i}"
            )
    return Response(tokenize.encode_detokenize(model.tokenizer.decode(request.tokens)), media_type=JSON)


async def list_sessions(call: Call) -> ASGIApp:
    """List the sessions in memory."""
    others = call.service.others
    elsewhere = [] if others is None else await others.session_summaries()
    return Response(encode_summaries([*summarize(call.service.sessions), *elsewhere]), media_type=JSON)


async def get_session(call: Call) -> ASGIApp:
    """Report how the prompts of one session continue one another, with excerpts at the breaks."""
    service, key = call.service, call.http.path_params["id"]
    elsewhere = None
    if service.others is not None and service.sessions.get(key) is None:
        elsewhere = await service.others.session_report(key)
    report = elsewhere or encode_session(service.sessions, key, inspected=service.config.inspect)
    return Response(report, media_type=JSON)


async def refuse_upgrade(call: Call) -> ASGIApp:
    """Refuse a WebSocket upgrade with status 426: Codex tries a WebSocket first, and then falls back to HTTP at once.

    Raises MethodNotAllowed for an ordinary GET.
    """
    if "upgrade" not in call.headers:
        raise MethodNotAllowed("GET /v1/responses is not supported: responses are not stored; send POST")
    return Response(status_code=426, headers={"upgrade": "HTTP/1.1"})


async def health(call: Call) -> ASGIApp:
    """Answer whether the server accepts requests: status 200, or 503 while it shuts down."""
    if call.service.closing:
        return Response(b'{"status":"closing"}', status_code=503, media_type=JSON)
    return Response(b'{"status":"ok"}', media_type=JSON)


async def live(call: Call) -> ASGIApp:
    """Answer that the process runs, also while it shuts down."""
    return Response(b'{"status":"ok"}', media_type=JSON)


async def version(call: Call) -> ASGIApp:
    """Answer with the version, in vLLM's format."""
    return Response(b'{"version":"%b"}' % __version__.encode(), media_type=JSON)


async def metrics(call: Call) -> ASGIApp:
    """Answer with the metrics in the Prometheus text format."""
    tracing = call.service.tracing
    return Response(tracing.exposition(), media_type=tracing.content_type)


async def hello(call: Call) -> ASGIApp:
    """Answer with name and version: harnesses check whether a server is there."""
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
    ("GET", "/v1/responses", refuse_upgrade),
    ("GET", SESSIONS_PATH, list_sessions),
    ("GET", SESSIONS_PATH + "/{id:path}", get_session),
]
"""Routes that belong to no wire protocol."""

OPEN_ROUTES: list[tuple[str, str, Operation]] = [
    ("GET", "/", hello),
    ("GET", "/api/hello", hello),
    ("GET", "/health", health),
    ("GET", "/health/ready", health),
    ("GET", "/health/live", live),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
]
"""Routes that need no API key."""


def _refuse_stored(request: Request) -> None:
    fields = request.options.stored_state.unresolved
    if fields:
        field = next(iter(fields))
        raise InvalidRequest(
            f"{field}: this server does not store responses; send the whole input", param=field
        )


def _unseen_tools(model: Model, request: Request) -> list[str]:
    if model.template.capabilities.tools or not request.conversation.tools:
        return []
    return ["tools: the chat template of this model does not print tools, so the model does not see them"]


def warning_headers(warnings: list[str]) -> list[ResponseHeader]:
    """Return the header that lists ``warnings``: what was accepted but ignored. No header without warnings."""
    if not warnings:
        return []
    text = "; ".join(warnings).encode("ascii", "replace")[:_WARNING_BYTES]
    return [(b"x-singletree-warning", bytes(b if 32 <= b < 127 else 32 for b in text))]
