"""The operations behind the routes: turns, counts, models, sessions, health."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from singletree import __version__
from singletree.conversation import Request
from singletree.errors import InvalidRequest, MethodNotAllowed, Overloaded, RouteNotFound
from singletree.prompts.prompt_writer import Prompt
from singletree.protocols import models
from singletree.protocols.openai import nvext
from singletree.server.answers.choices import REASONING_HEADER, TOOL_HEADER, Choices, DispatchOptions, fan_out
from singletree.server.answers.client_link import ResponseHeader, StreamedAnswer
from singletree.server.answers.observer import Arrival, KnownResponses
from singletree.server.answers.response import Lifecycle, SessionStep, TurnResponse
from singletree.server.doors import open_door_in_thread
from singletree.server.http.service import (
    LARGE_BYTES,
    Call,
    OpenBudgets,
    ReadResponse,
    Service,
    StartJob,
    offload,
)
from singletree.server.models.chat_format import exact_length
from singletree.server.models.model import Model
from singletree.server.sessions.divergence import wait_for_explanations
from singletree.server.sessions.request_headers import (
    BUDGET_HEADERS,
    flag_of,
    identify,
    is_subagent,
    request_key,
    session_key,
)
from singletree.server.sessions.session_report import (
    EXPLAIN_HEADER,
    RECEIPT_HEADER,
    encode_summaries,
    summarize,
)
from singletree.server.sessions.sessions import Opened
from singletree.server.settings.config import REASONING_FIELD_NAMES, Config
from singletree.server.turn import complete_calls, pipeline
from singletree.server.turn.constraints import loads_package, may_restrict
from singletree.server.turn.generation import Generation, WithCompaction
from singletree.server.turn.prompt import fit_prompt, prompt_work, refuse_long_conversation, write_prompt
from singletree.server.turn.protocol import CHAT, COMPACT, RESPONSES

JSON = "application/json"

_WARNING_BYTES = 1024
_UNSEEN_TOOLS = "tools: the chat template of this model does not print tools, so the model does not see them"

_LARGE_CONSTRAINT = 4096
"""Bytes of a request from which its constraint is built in a thread."""
_USUAL_FIELD = "reasoning_content"
"""The value of ``--reasoning-field`` that Chat Completions uses where a request has none set."""


async def create(call: Call) -> ASGIApp:
    """Answer a request for one turn, streamed or as one body."""
    body = await call.body()
    return await answer_turn(call, body, await _read(call, body, (await call.api.load()).decode))


async def answer_turn(
    call: Call, body: bytes, request: Request, recent: KnownResponses | None = None, *, size: int = 0
) -> StreamedAnswer | Response:
    """Prepare the turn that ``request``, the decoded ``body``, asks for, and return what answers with it.

    ``recent`` keeps the response for its connection; ``size`` is about how many bytes the conversation has where that
    is more than the body. Raises SingletreeError where the request is wrong, or cannot be answered now.
    """
    service, protocol = call.service, await call.api.load()
    if service.shutdown.is_set():
        raise Overloaded("the server is shutting down; try again in a moment")
    call.admit()
    call.trace.accepted()
    if field := next(iter(request.options.stored_state.unresolved), None):
        raise InvalidRequest(
            f"{field}: this server does not store responses; send the whole input", param=field
        )
    request = with_hints(request, call)
    model, request = await service.catalog.ready_for(request)
    session = request.session
    await fetch_session(call, session)
    request = await service.media.read(request, model)
    tools_of = partial(service.sessions.tools_of, session, model.name)
    prepare = partial(pipeline.prepare, model, request, tools_of)
    waits = recall_waits(model) or loads_package(request)
    generation = await offload(_work(model, request, max(size, len(body))), prepare, waits=waits)
    if request.options.compacts:
        with_compaction: WithCompaction = await open_door_in_thread("compaction")
        generation = with_compaction(generation)
    opened = service.sessions.open(session, model, generation.prompt, request.cache_salt)
    warnings = await check_budgets(call, opened, request)
    await _foresee(service, opened, generation)
    call.trace.record_step(opened.step)
    if request.options.compared_answer:
        await wait_for_explanations()
        _compare_answers(service, generation, request.options.compared_answer)
    state, known = request.options.stored_state, recent
    if known is None and (state.store or state.conversation_id is not None):
        known = None if service.store is None else await service.store.opened()
    keep = None if known is None else known.keeper(request, generation)
    generations = [generation]
    if request.choices > 1:
        generations = await offload(len(body) * (request.choices - 1), partial(fan_out, generation))
    warnings += (*generation.request.warnings, *generation.constraints.warnings)
    if request.conversation.tools and not model.template.capabilities.tools:
        warnings.append(_UNSEEN_TOOLS)
    inspection = None
    if service.inspector is not None:
        arrival = Arrival(call.trace, protocol, call.headers, body)
        inspection = service.inspector.begin(arrival, generation, opened)
    explains = service.config.explain or flag_of(call.headers, EXPLAIN_HEADER, False)
    step = SessionStep(service.sessions, opened, explains)
    choices = Choices(protocol, generations, call.trace.new_id, keep=keep, inspection=inspection)
    choices.capture = call.capture(generations)
    lifecycle = Lifecycle(
        choices,
        call.trace,
        headers=warning_headers(warnings),
        in_flight=service.in_flight,
        key=request_key(call.headers, call.trace.route, body),
        session=step,
        foresight=service.foresight,
        records=service.records,
        warnings=warnings,
        in_usage=RECEIPT_HEADER in call.headers and flag_of(call.headers, RECEIPT_HEADER, False),
    )
    choices.settle = _settle(service, step, lifecycle)
    if keep is not None and state.background:
        start: StartJob = await open_door_in_thread("background responses")
        return start(service, lifecycle)
    return respond(call, lifecycle)


async def check_budgets(call: Call, opened: Opened | None, request: Request) -> list[str]:
    """Check a request against the budgets that it counts for, if there are any, and return warnings for its client.

    ``opened`` is its place in its session, None for raw prompts. Raises BudgetSpent, and InvalidRequest for a header.
    """
    service = call.service
    of_key = None if call.key is None else call.key.budget
    if service.budgets is None:
        if of_key is None and BUDGET_HEADERS.isdisjoint(call.headers):
            return []
        open_budgets: OpenBudgets = await open_door_in_thread("budgets")
        service.budgets = open_budgets(service.config)
    return service.budgets(service, opened, request, call.headers, of_key)


async def _foresee(service: Service, opened: Opened, generation: Generation) -> None:
    """Note that a session has come back, where an engine reads what it will do next or its prompts are read ahead."""
    if service.foresight is None:
        reads = service.config.foresight and generation.model.reads_outlooks
        if not reads and not generation.request.hints.speculative_prefill:
            return
        foresees = await open_door_in_thread("foresight")
        if service.foresight is None:  # another request may have opened it meanwhile
            service.foresight = foresees()
    service.foresight.begin(opened, generation)


def _settle(
    service: Service, step: SessionStep, lifecycle: Lifecycle
) -> Callable[[], Awaitable[None]] | None:
    """Return what makes an answer known to other processes before its client has all of it; None without others.

    The next request may come to another process at once: it has to find the session, its cost and the response.
    """
    if service.others is None and service.config.store_url is None:
        return None

    async def settle() -> None:
        generations = lifecycle.choices.generations
        if generations[0].ended is not None:
            step.close(lifecycle.choices)
        if all(each.ended is not None for each in generations):
            lifecycle.charge(step)
        if service.store is not None:
            await service.store.settled()

    return settle


def _compare_answers(service: Service, generation: Generation, earlier: str) -> None:
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


def dispatch_options(config: Config, headers: Mapping[str, str]) -> DispatchOptions:
    """Return the side events chosen by the request's headers (``1`` or ``0``), else by the server's flags.

    Args:
        headers: names in lower case.
    """
    return DispatchOptions(
        flag_of(headers, TOOL_HEADER, config.enable_streaming_tool_dispatch),
        flag_of(headers, REASONING_HEADER, config.enable_streaming_reasoning_dispatch),
    )


async def _read(call: Call, body: bytes, decode: Callable[[bytes, Mapping[str, str]], Request]) -> Request:
    if call.api not in (RESPONSES, COMPACT):
        return await call.decode(body, decode)
    read: ReadResponse = await open_door_in_thread("requests of Responses")
    return await read(call, body, None)


async def fetch_session(call: Call, key: str | None) -> None:
    """Take the session ``key`` over from another process that has it."""
    if call.service.others is not None:
        await call.service.others.fetch_session(key)


def recall_waits(model: Model) -> bool:
    """Return whether writing a prompt for ``model`` may wait for another machine."""
    return model.memory is not None and model.memory.waits


def _work(model: Model, request: Request, size: int) -> int:
    """Return about how many of the ``size`` bytes of a request its prompt takes work for; of a short one, all of them.

    A constraint takes more work for a byte than a prompt, and nothing of it is known from the last request. Raises
    ContextOverflow where the conversation is so long that it is not worked on.
    """
    if size >= LARGE_BYTES:
        refuse_long_conversation(model, request)
    if size > _LARGE_CONSTRAINT and may_restrict(request):
        return LARGE_BYTES
    return size if size < LARGE_BYTES else prompt_work(model, request, size)


async def count_tokens(call: Call) -> ASGIApp:
    """Answer with the exact number of tokens in the prompt of a request."""
    body = await call.body()
    protocol: Any = await call.api.load()
    request = await _read(call, body, getattr(protocol, "decode_count", protocol.decode))
    session = session_key(call.headers, request)
    model, request = await call.service.catalog.ready_for(replace(request, session=session))
    await fetch_session(call, session)
    tools_of = partial(call.service.sessions.tools_of, session, model.name)
    request = await call.service.media.read(request, model)
    waits = recall_waits(model)
    fit = partial(fit_prompt, model, request, tools_of)
    request, prompt = await offload(_work(model, request, len(body)), fit, waits=waits)
    whole = prompt
    if prompt.applied_edits:
        unedited = replace(request, context_edits=())
        whole = await offload(len(body), partial(write_prompt, model, unedited, tools_of), waits=waits)
    original = await _exact_length(model, whole) if request.context_edits else None
    tokens = await _exact_length(model, prompt)
    return Response(protocol.encode_count(tokens, original), media_type=JSON)


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


async def list_sessions(call: Call) -> ASGIApp:
    """List the sessions in memory."""
    others = call.service.others
    sessions, elsewhere = call.service.sessions, [] if others is None else await others.session_summaries()
    summaries = encode_summaries([*summarize(sessions), *elsewhere], sessions.key_costs())
    return Response(summaries, media_type=JSON)


async def get_session(call: Call) -> ASGIApp:
    """Report how the prompts of one session continue one another, with excerpts at the breaks."""
    service, key = call.service, call.http.path_params["id"]
    elsewhere = None
    if service.others is not None and service.sessions.get(key) is None:
        elsewhere = await service.others.session_report(key)
    return Response(elsewhere or service.session_report(key), media_type=JSON)


async def refuse_upgrade(call: Call) -> ASGIApp:
    """Open a WebSocket for turns; with --no-websockets refuse it with status 426, and Codex falls back to HTTP at once.

    A WebSocket is opened before it comes here. Raises MethodNotAllowed for an ordinary GET.
    """
    if "upgrade" not in call.headers:
        raise MethodNotAllowed("GET /v1/responses is not supported: send POST, or GET /v1/responses/{id}")
    return Response(status_code=426, headers={"upgrade": "HTTP/1.1"})


async def health(call: Call) -> ASGIApp:
    """Answer whether the server accepts requests: status 200, or 503 while it shuts down."""
    if call.service.shutdown.is_set():
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


async def inspector_is_off(call: Call) -> ASGIApp:
    """Refuse a path of the inspector, with the cure."""
    raise RouteNotFound(
        "the inspector is off; start the server with `singletree serve --inspect` (and --inspect-content to keep texts)"
    )


def warning_headers(warnings: list[str]) -> list[ResponseHeader]:
    """Return the header that lists ``warnings``: what was accepted but ignored. No header without warnings."""
    if not warnings:
        return []
    text = "; ".join(warnings).encode("ascii", "replace")[:_WARNING_BYTES]
    return [(b"x-singletree-warning", bytes(b if 32 <= b < 127 else 32 for b in text))]


def with_hints(request: Request, call: Call) -> Request:
    """Return ``request`` with what its headers set, and the configured reasoning fields where it does not show its own.

    The trace gets the hints and the agent's context. Raises InvalidRequest for a header with a wrong value.
    """
    options, headers, config = request.options, nvext.with_agent_hint(call.headers), call.service.config
    if options.reasoning_fields is None and call.api is CHAT and config.reasoning_field != _USUAL_FIELD:
        options = replace(options, reasoning_fields=REASONING_FIELD_NAMES[config.reasoning_field])
    hints = nvext.with_headers(request.hints, nvext.HINTS, headers)
    agent = nvext.with_headers(request.agent, nvext.AGENT, headers)
    if is_subagent(headers, agent) != agent.is_subagent:
        agent = replace(agent, is_subagent=not agent.is_subagent)
    call.trace.record_hints(hints, agent)
    agent, session = identify(headers, agent, request.session)
    wanted: dict[str, Any] = {
        "hints": hints,
        "agent": agent,
        "cache_salt": nvext.cache_salt_of_header(headers) or request.cache_salt,
        "session": session,
        "live_arguments": flag_of(headers, complete_calls.HEADER, config.live_arguments),
        "options": options,
    }
    changed = {name: value for name, value in wanted.items() if value is not getattr(request, name)}
    # A copy takes longer than all of the above.
    return replace(request, **changed) if changed else request
