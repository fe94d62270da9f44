"""Where the server enters the capture (``server.doors``): its routes, in the form of rllm-model-gateway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.types import ASGIApp

from singletree.errors import InvalidRequest, NotPermitted, RouteNotFound
from singletree.owners import OWNER_END, owned_id
from singletree.protocols.wire import decode_body, dump
from singletree.server.http.routes import JSON
from singletree.server.http.service import Call, RoutedDoor, RouteRow
from singletree.server.ids import new_id
from singletree.server.settings.api_keys import NOBODY
from singletree.training.capture import SESSION_NAME, SessionCapture, open_capture
from singletree.training.exports import TraceForm, count_trained, find_form, rllm_documents, session_name
from singletree.training.graph import SessionGraph, read_session
from singletree.training.records import SessionComplete
from singletree.training.session_files import read_first_line
from singletree.training.weights import WeightsEngine


class NewSession(Struct):
    """The body of ``POST /sessions``."""

    session_id: str | None = None
    metadata: dict[str, Any] = {}


class SessionEnd(Struct):
    """The body of ``POST /sessions/{id}/complete``: ``terminal`` is the id of the answer that was scored."""

    reward: float | None = None
    terminal: str = ""
    metadata: dict[str, Any] = {}


class NewWeights(Struct):
    """The body of ``POST /update_weight_version``, as vLLM and SGLang have it."""

    new_version: Annotated[str, Meta(min_length=1, max_length=128)]


def _capture(call: Call) -> SessionCapture:
    return cast(SessionCapture, call.service.capture)


def _known_name(call: Call, name: str) -> str:
    """Return ``name``. One with an owner is that of a session of an API key, for those who may read all of them."""
    owner, _, own = name.rpartition(OWNER_END)
    is_known = not owner or owner in _owners(call)
    if not is_known or not re.fullmatch(SESSION_NAME, own):
        raise InvalidRequest(
            f"the session name {name[:128]!a} is not one: use letters, digits, '.', '_' and '-', at most 128",
            param="session_id",
        )
    return name


def _owners(call: Call) -> Sequence[str]:
    """Return the owners whose captures the operator may read: all, where capture is a right of its own."""
    config, key = call.service.config, call.key
    is_apart = bool(config.capture_key or config.key_file)
    return call.service.keys.owners if is_apart and key is not None and "admin" in key.rights else ()


async def _graph(call: Call, name: str) -> SessionGraph:
    """Read a session, after all that was written so far. Raises RouteNotFound where it is not there."""
    path = _capture(call).path(_known_name(call, name))
    await _capture(call).run(name, lambda file: None)
    if not path.exists():
        raise RouteNotFound(f"there is no session {name}")
    return await asyncio.to_thread(read_session, path)


def _information(name: str, graph: SessionGraph) -> bytes:
    head = graph.head
    return dump(
        {
            "session_id": name,
            "trace_count": sum(call.end is not None for call in graph.calls.values()),
            "created_at": None if head is None else head.at,
            "metadata": {} if head is None else head.metadata,
            "capture": count_trained(graph),
        }
    )


def _listed(folder: Path, owners: Sequence[str], since: float, limit: int | None) -> bytes:
    found = [
        {"session_id": owned_id(owner, path.stem), "created_at": head.at, "metadata": head.metadata}
        for owner in owners
        for path in (folder / owner).glob("*.jsonl")
        if (head := read_first_line(path)) is not None and head.at >= since
    ]
    found.sort(key=lambda one: (one["created_at"], one["session_id"]))
    return dump(found[:limit])


def _traces(graph: SessionGraph, form: TraceForm, since: float, limit: int | None) -> bytes:
    return dump([each for each in form(graph) if each.get("timestamp", since) >= since][:limit])


async def _answer(make: Callable[[], bytes]) -> Response:
    return Response(await asyncio.to_thread(make), media_type=JSON)


async def create_session(call: Call) -> ASGIApp:
    """Create a session, whose calls have the base URL that is returned."""
    body = await call.body()
    new = decode_body(body, NewSession) if body else NewSession()
    name = _known_name(call, new.session_id or new_id("session-"))
    path = _capture(call).path(name)
    await _capture(call).run(name, lambda file: file.create(new.metadata))
    return Response(dump({"session_id": name, "url": f"/sessions/{path.stem}/v1"}), media_type=JSON)


async def list_captured_sessions(call: Call) -> ASGIApp:
    """List the captured sessions."""
    listed = partial(_listed, _capture(call).folder, (NOBODY, *_owners(call)), *_range(call))
    return await _answer(listed)


async def get_captured_session(call: Call) -> ASGIApp:
    """Answer what a session has, how much of it can be trained on, and what may be missing."""
    name = call.http.path_params["id"]
    graph = await _graph(call, name)
    return await _answer(partial(_information, name, graph))


async def delete_captured_session(call: Call) -> ASGIApp:
    """Delete a session."""
    name = call.http.path_params["id"]
    graph = await _graph(call, name)
    _capture(call).path(name).unlink(missing_ok=True)
    return Response(dump({"deleted": len(graph.calls)}), media_type=JSON)


async def list_traces(call: Call) -> ASGIApp:
    """Answer with the calls of a session, or with its trajectories in the form that the query names."""
    graph = await _graph(call, call.http.path_params["id"])
    form = find_form(call.http.query_params.get("form", "rllm"))
    return await _answer(partial(_traces, graph, form, *_range(call)))


async def get_trace(call: Call) -> ASGIApp:
    """Answer with one call of a session."""
    id = call.http.path_params["id"]
    graph = await _graph(call, id.partition(":")[0])

    def found() -> bytes:
        for document in rllm_documents(graph):
            if document["trace_id"] == id.rpartition(OWNER_END)[2]:
                return dump(document)
        raise RouteNotFound(f"there is no trace {id[:128]!a}")

    return await _answer(found)


async def complete_session(call: Call) -> ASGIApp:
    """Complete a session, with its reward and the answer that was scored."""
    name, body = call.http.path_params["id"], await call.body()
    end = decode_body(body, SessionEnd) if body else SessionEnd()
    graph = await _graph(call, name)
    if end.terminal and end.terminal not in graph.calls:
        raise InvalidRequest(
            f"terminal is {end.terminal[:128]!a}, which is no answer of the session {session_name(graph)}",
            param="terminal",
        )
    line = SessionComplete(at=0.0, calls=0, reward=end.reward, terminal=end.terminal, metadata=end.metadata)
    await _capture(call).run(name, lambda file: file.complete(line))
    return await get_captured_session(call)


async def flush_captures(call: Call) -> ASGIApp:
    """Answer when all that was captured so far is written."""
    await _capture(call).run("flush", lambda file: None)
    return Response(b'{"status":"flushed"}', media_type=JSON)


async def pause_generation(call: Call) -> ASGIApp:
    """Let no generation of a model begin, and wait until none runs: ``mode`` is ``wait``, ``abort`` or ``keep``."""
    await (await _weights(call)).pause(call.http.query_params.get("mode", "wait"))
    return await describe_weights(call)


async def resume_generation(call: Call) -> ASGIApp:
    """Let the generations of a model begin and go on after a pause."""
    await (await _weights(call)).resume()
    return await describe_weights(call)


async def update_weight_version(call: Call) -> ASGIApp:
    """Name the weights that the engine of a model has from now on."""
    await (await _weights(call)).name_weights(decode_body(await call.body(), NewWeights).new_version)
    return await describe_weights(call)


async def describe_weights(call: Call) -> ASGIApp:
    """Answer which weights a model has, whether it is paused, and how many generations run."""
    return Response(dump((await _weights(call)).state()), media_type=JSON)


async def _weights(call: Call) -> WeightsEngine:
    """Return the engine of the model that the query names. Raises NotPermitted for a key that has not all sessions."""
    if call.service.owner:
        raise NotPermitted("the weights are those of all API keys; use a key of --capture-key")
    if call.service.others is not None:
        raise InvalidRequest("with --workers weights cannot be changed; start one process")
    model = await call.service.catalog.ready(call.http.query_params.get("model", ""))
    return cast(WeightsEngine, model.engine)


def _range(call: Call) -> tuple[float, int | None]:
    query: Mapping[str, str] = call.http.query_params
    try:
        limit = query.get("limit")
        return float(query.get("since", 0.0)), None if limit is None else max(0, int(limit))
    except ValueError:
        raise InvalidRequest("since and limit have to be numbers") from None


CAPTURE_ROUTES: Sequence[RouteRow] = [
    RouteRow("POST", "/sessions", create_session, "captures", NewSession),
    RouteRow("GET", "/sessions", list_captured_sessions, "captures"),
    RouteRow("GET", "/sessions/{id}", get_captured_session, "captures"),
    RouteRow("DELETE", "/sessions/{id}", delete_captured_session, "captures"),
    RouteRow("GET", "/sessions/{id}/traces", list_traces, "captures"),
    RouteRow("POST", "/sessions/{id}/complete", complete_session, "captures", SessionEnd),
    RouteRow("GET", "/traces/{id}", get_trace, "captures"),
    RouteRow("POST", "/admin/flush", flush_captures, "captures"),
    RouteRow("POST", "/pause", pause_generation, "captures"),
    RouteRow("POST", "/resume", resume_generation, "captures"),
    RouteRow("POST", "/update_weight_version", update_weight_version, "captures", NewWeights),
    RouteRow("GET", "/weight_info", describe_weights, "captures"),
    RouteRow("GET", "/is_paused", describe_weights, "captures"),
]

DOOR = RoutedDoor(open_capture, CAPTURE_ROUTES)
