"""Where the server enters the inspector (``server.doors``): its page, the answers that the page asks for, and a
session as one HTML file: the page, its style and those answers, with nothing loaded from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from singletree import __version__
from singletree.errors import InvalidRequest, RouteNotFound
from singletree.inspector.inspector import PAGE, Inspector
from singletree.inspector.turn_documents import InspectedJson
from singletree.inspector.turn_record import known_session_id
from singletree.inspector.view import QUESTIONS, InspectFeed, InspectView, WholeView
from singletree.protocols.wire import dump
from singletree.server.http.routes import JSON
from singletree.server.http.service import Call, Operation, RoutedDoor, RouteRow, Service

FORMAT = 1
_FOLDER = files("singletree.inspector") / "page"
_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "woff2": "font/woff2",
}

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
"""The content security policy of the page: what it loads comes from the server that served it."""

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def page_file(name: str) -> tuple[bytes, str]:
    """Return a file of the page and its media type. Raises RouteNotFound where there is none of this name."""
    media_type = _MEDIA_TYPES.get(name.rpartition(".")[2])
    if media_type is not None and "/" not in name and "\\" not in name and not name.startswith("."):
        file = _FOLDER / name
        if file.is_file():
            return file.read_bytes(), media_type
    raise RouteNotFound(f"the inspector has no file {name[:128]!a}")


def export_html(session: str, answers: Mapping[str, Any], *, with_texts: bool) -> bytes:
    """Return the page with the answers that it would get from the API, by their paths."""
    script, style = (page_file(name)[0].decode() for name in ("inspector.js", "inspector.css"))
    data = {
        "version": FORMAT,
        "made_at": round(time.time(), 3),
        "with_texts": with_texts,
        "session": session,
        "answers": answers,
    }
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Session {session}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="app"></div>\n'
        f'<script type="application/json" id="singletree-export">{embed_json(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode()


def embed_json(value: Any) -> str:
    """Return ``value`` as JSON that no text in it can end: a browser finds no tag in it."""
    return dump(value).decode().translate(_ESCAPES)


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


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


def _allow(call: Call) -> Inspector:
    """Return the inspector to a client that may ask. Raises as ``Call.authorize_reader``."""
    call.authorize_reader("inspect")
    inspector = call.service.inspector
    assert isinstance(inspector, Inspector)
    return inspector


def _view(call: Call) -> WholeView:
    _allow(call)
    return WholeView(call.service)


def _json(value: InspectedJson) -> Response:
    return Response(dump(value), media_type=JSON, headers=_API_HEADERS)


async def inspector_page(call: Call) -> ASGIApp:
    """Answer with the page."""
    return _file("index.html")


async def inspector_file(call: Call) -> ASGIApp:
    """Answer with a file that the page loads."""
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
    view, query = _view(call), call.http.query_params
    summaries, answered = await view.summaries()
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
    return _json(await _view(call).session(call.http.path_params["id"]))


async def inspected_turn(call: Call) -> ASGIApp:
    """Answer with one turn, token by token and event by event."""
    return _json(await _view(call).turn(call.http.path_params["id"]))


async def inspected_prompt(call: Call) -> ASGIApp:
    """Answer with the prompt of a turn."""
    return _json(await _view(call).prompt(call.http.path_params["id"]))


async def inspected_prompt_tokens(call: Call) -> ASGIApp:
    """Answer with tokens of the prompt of a turn."""
    view, query = _view(call), call.http.query_params
    start = _number(query, "start", 0, 0, 10**9)
    end = min(_number(query, "end", start + 500, 0, 10**9), start + _MOST_TOKENS)
    return _json(await view.tokens(call.http.path_params["id"], start, end))


async def inspected_difference(call: Call) -> ASGIApp:
    """Answer with the difference of two turns."""
    view = _view(call)
    ids = [call.http.query_params.get(name, "") for name in ("a", "b")]
    if not all(ids):
        raise InvalidRequest("a and b are missing; give the ids of two turns or sessions", param="a")
    return _json(await view.difference(*ids))


async def exported_session(call: Call) -> ASGIApp:
    """Answer with a session as one HTML file."""
    inspector = _allow(call)
    query = call.http.query_params
    id = known_session_id(query.get("session", ""), call.service.owner)
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
    return InspectFeed(call.service, None if not session else known_session_id(session, call.service.owner))


async def unknown_inspector_path(call: Call) -> ASGIApp:
    """Refuse other paths."""
    raise RouteNotFound(f"the path {ascii(call.http.url.path[:128])[1:-1]} does not exist")


def _ask(path: str, operation: Operation) -> RouteRow:
    return RouteRow("GET", f"{API}/{path}", operation, "inspector")


INSPECT_ROUTES: Sequence[RouteRow] = [
    RouteRow("GET", PAGE, inspector_page, "page"),
    RouteRow("GET", f"{PAGE}/", inspector_page, "page"),
    RouteRow("GET", f"{PAGE}/page/{{name}}", inspector_file, "page"),
    _ask("server", inspector_state),
    _ask("sessions", inspected_sessions),
    _ask("sessions/{id}", inspected_session),
    _ask("turns/{id}", inspected_turn),
    _ask("turns/{id}/prompt", inspected_prompt),
    _ask("turns/{id}/prompt/tokens", inspected_prompt_tokens),
    _ask("difference", inspected_difference),
    _ask("export", exported_session),
    _ask("events", inspector_events),
    RouteRow("GET", f"{PAGE}/{{rest:path}}", unknown_inspector_path, "page"),
]


def _answer(question: str, service: Service, *arguments: Any) -> Any:
    return getattr(InspectView(service), question)(*arguments)


DOOR = RoutedDoor(
    lambda config: Inspector(config.inspect_size, keeps_texts=config.inspect_content),
    INSPECT_ROUTES,
    {f"inspector {question}": partial(_answer, question) for question in (*QUESTIONS, "changes")},
)
