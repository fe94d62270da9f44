"""The routes of the inspector: its page, and the answers that the page asks for."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from singletree import __version__
from singletree.errors import ForbiddenAddress, InvalidRequest, RouteNotFound
from singletree.protocols.wire import dump
from singletree.server.http.inspect_feed import InspectFeed
from singletree.server.http.inspect_view import WholeView
from singletree.server.http.routes import JSON, Call, Operation
from singletree.server.inspect.export import PAGE_POLICY, export_html, page_file
from singletree.server.inspect.inspector import Inspector
from singletree.server.inspect.links import PAGE
from singletree.server.inspect.turn_documents import InspectedJson
from singletree.server.inspect.turn_record import known_session_id

API = f"{PAGE}/api"
_MOST_SESSIONS = 1000
_MOST_TOKENS = 5000
_PAGE_HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_API_HEADERS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def _inspector(call: Call) -> Inspector:
    """Return the inspector. Raises RouteNotFound where it is off."""
    inspector = call.service.inspector
    if inspector is None:
        raise RouteNotFound(
            "the inspector is off; start the server with `singletree serve --inspect` (and --inspect-content to keep "
            "texts)"
        )
    return inspector


def _allow(call: Call) -> Inspector:
    """Return the inspector to a client that may ask: one with the key or, where there is no key, on this machine.

    Raises:
        RouteNotFound: the inspector is off.
        Unauthorized, ForbiddenAddress: the client may not ask.
    """
    inspector = _inspector(call)
    if call.service.config.api_key:
        call.authorize()
    elif not _is_local(call):
        raise ForbiddenAddress
    return inspector


def _is_local(call: Call) -> bool:
    client = call.http.client
    try:
        address = ipaddress.ip_address("" if client is None else client.host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _json(value: InspectedJson) -> Response:
    return Response(dump(value), media_type=JSON, headers=_API_HEADERS)


async def inspector_page(call: Call) -> ASGIApp:
    """Answer with the page."""
    _inspector(call)
    return _file("index.html")


async def inspector_file(call: Call) -> ASGIApp:
    """Answer with a file that the page loads."""
    _inspector(call)
    return _file(call.http.path_params["name"])


def _file(name: str) -> Response:
    data, media_type = page_file(name)
    return Response(data, headers={**_PAGE_HEADERS, "content-type": media_type})


async def inspector_state(call: Call) -> ASGIApp:
    """Answer with what the inspector keeps, and how much."""
    return _json(await _description(call, _allow(call)))


async def _description(call: Call, inspector: Inspector) -> InspectedJson:
    return {
        "version": __version__,
        "content": inspector.keeps_texts,
        "limit_bytes": inspector.limit,
        **await WholeView(call.service).usage(),
        "models": [name for name, _ in call.service.catalog.states()],
        "started_at": inspector.started,
        "now": time.time(),
    }


async def inspected_sessions(call: Call) -> ASGIApp:
    """Answer with the summaries of sessions, filtered as the query asks."""
    _allow(call)
    query = call.http.query_params
    summaries, answered = await WholeView(call.service).summaries()
    chosen = [each for each in summaries if _matches(each, query)]
    shown = chosen[: _number(query, "limit", 200, 1, _MOST_SESSIONS)]
    return _json(_session_list(summaries, chosen, shown) | answered)


def _session_list(
    summaries: Iterable[InspectedJson], chosen: list[InspectedJson], shown: list[InspectedJson]
) -> InspectedJson:
    return {
        "sessions": shown,
        "total": len(chosen),
        "shown": len(shown),
        "models": sorted({model for each in summaries for model in each["models"]}),
        "harnesses": sorted({each["harness"] for each in summaries if each["harness"]}),
    }


def _matches(summary: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    wanted = query.get("q", "").strip().casefold()
    words = (summary[name] or "" for name in ("id", "key", "harness", "client", "model"))
    return (
        (not wanted or any(wanted in word.casefold() for word in words))
        and query.get("model", "") in ("", *summary["models"])
        and query.get("harness", "") in ("", summary["harness"])
        and (not _flag(query, "live") or summary["is_live"])
        and (not _flag(query, "broken") or summary["breaks"] > 0)
        and (not _flag(query, "errors") or summary["errors"] > 0)
    )


def _flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "") in ("1", "true", "yes")


def _number(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    given = query.get(name, "")
    if not given:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 12 and low <= int(given) <= high):
        raise InvalidRequest(f"{name} is {given[:40]!a}; give a number from {low} to {high}", param=name)
    return int(given)


async def inspected_session(call: Call) -> ASGIApp:
    """Answer with one session and its turns."""
    _allow(call)
    return _json(await WholeView(call.service).session(call.http.path_params["id"]))


async def inspected_turn(call: Call) -> ASGIApp:
    """Answer with one turn, token by token and event by event."""
    _allow(call)
    return _json(await WholeView(call.service).turn(call.http.path_params["id"]))


async def inspected_prompt(call: Call) -> ASGIApp:
    """Answer with the prompt of a turn."""
    _allow(call)
    return _json(await WholeView(call.service).prompt(call.http.path_params["id"]))


async def inspected_prompt_tokens(call: Call) -> ASGIApp:
    """Answer with tokens of the prompt of a turn."""
    _allow(call)
    query = call.http.query_params
    start = _number(query, "start", 0, 0, 10**9)
    end = min(_number(query, "end", start + 500, 0, 10**9), start + _MOST_TOKENS)
    return _json(await WholeView(call.service).tokens(call.http.path_params["id"], start, end))


async def inspected_difference(call: Call) -> ASGIApp:
    """Answer with the difference of two turns."""
    _allow(call)
    ids = [call.http.query_params.get(name, "") for name in ("a", "b")]
    if not all(ids):
        raise InvalidRequest("a and b are missing; give the ids of two turns or sessions", param="a")
    return _json(await WholeView(call.service).difference(*ids))


async def exported_session(call: Call) -> ASGIApp:
    """Answer with a session as one HTML file."""
    inspector = _allow(call)
    query = call.http.query_params
    id = known_session_id(query.get("session", ""))
    texts = inspector.keeps_texts and query.get("texts", "1") not in ("0", "false", "no")
    answers = await _export_answers(call, inspector, id, texts=texts)
    headers = {
        **_API_HEADERS,
        "content-disposition": f'attachment; filename="singletree-{id}.html"',
        "content-security-policy": "sandbox",
    }
    document = await asyncio.to_thread(export_html, id, answers, with_texts=texts)
    return Response(document, media_type="text/html; charset=utf-8", headers=headers)


async def _export_answers(call: Call, inspector: Inspector, id: str, *, texts: bool) -> dict[str, Any]:
    """Return the answers of the API that the page of the session ``id`` needs, by their paths."""
    view = WholeView(call.service)
    session = await view.session(id, texts=texts)
    summary, counts = (
        session["session"],
        {name: session[name] for name in ("processes", "processes_answered")},
    )
    lasts = {lane["turns"][-1] for lane in session["lanes"]}
    answers: dict[str, Any] = {
        f"{API}/server": {**await _description(call, inspector), "content": texts},
        f"{API}/sessions": _session_list([summary], [summary], [summary]) | counts,
        f"{API}/sessions/{id}": session,
    }
    for turn in session["turns"]:
        try:
            answers[f"{API}/turns/{turn['id']}"] = await view.turn(turn["id"], texts=texts)
            prompt = await view.prompt(turn["id"], texts=texts)
        except RouteNotFound:
            continue  # it was dropped meanwhile, or its process is busy
        if turn["id"] not in lasts and prompt["compared_with"] is not None:
            _without_kept_texts(prompt)
        answers[f"{API}/turns/{turn['id']}/prompt"] = prompt
    return answers


def _without_kept_texts(prompt: InspectedJson) -> None:
    """Remove the texts that the earlier prompt has as well: each prompt of a session repeats those before it."""
    for span in prompt["spans"] or ():
        if span["kind"] == "kept" and span["text"] is not None:
            span["text"], span["same_as"] = None, prompt["compared_with"]
    if prompt["request"] is not None and prompt["request"]["kept"]:
        prompt["request"] = {**prompt["request"], "kept": False, "body": None}


async def inspector_events(call: Call) -> ASGIApp:
    """Answer with the stream of what changes."""
    _allow(call)
    session = call.http.query_params.get("session")
    return InspectFeed(call.service, None if not session else known_session_id(session))


async def unknown_inspector_path(call: Call) -> ASGIApp:
    """Refuse other paths: with the cure where the inspector is off."""
    _inspector(call)
    raise RouteNotFound(f"the path {ascii(call.http.url.path[:128])[1:-1]} does not exist")


INSPECT_ROUTES: list[tuple[str, str, Operation]] = [
    ("GET", PAGE, inspector_page),
    ("GET", f"{PAGE}/", inspector_page),
    ("GET", f"{PAGE}/page/{{name}}", inspector_file),
    ("GET", f"{API}/server", inspector_state),
    ("GET", f"{API}/sessions", inspected_sessions),
    ("GET", f"{API}/sessions/{{id}}", inspected_session),
    ("GET", f"{API}/turns/{{id}}", inspected_turn),
    ("GET", f"{API}/turns/{{id}}/prompt", inspected_prompt),
    ("GET", f"{API}/turns/{{id}}/prompt/tokens", inspected_prompt_tokens),
    ("GET", f"{API}/difference", inspected_difference),
    ("GET", f"{API}/export", exported_session),
    ("GET", f"{API}/events", inspector_events),
    ("GET", f"{PAGE}/{{rest:path}}", unknown_inspector_path),
]
"""The routes of the inspector. They check the key and the client's address themselves."""
