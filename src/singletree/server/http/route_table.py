"""All routes of the server, in one list: method, path, operation, who may ask, and what the body is decoded to.

To add a route, write its operation (`routes.py`, `raw_tokens/routes.py` …) and add it here; `docs/routes.md` and
``/openapi.json`` (``openapi``) follow. The inspector and the capture add their own routes where they are on.
"""

from __future__ import annotations

from collections.abc import Sequence

from singletree.server.http import routes
from singletree.server.http.service import (
    LaterOperation,
    ProtocolBody,
    RouteEntry,
    RouteRow,
    ScopeName,
    Service,
    capture_door,
    inspector_door,
)
from singletree.server.sessions import PATH as SESSIONS
from singletree.server.turn.protocol import MESSAGES, protocol_for


def _rows(scope: ScopeName, entries: Sequence[RouteEntry]) -> list[RouteRow]:
    return [RouteRow(entry[0], entry[1], entry[2], scope, *entry[3:]) for entry in entries]


_RAW, _STORED = LaterOperation("raw tokens"), LaterOperation("routes of stored responses")
_FORKS, _DESCRIPTION = LaterOperation("session forks"), LaterOperation("description of the API")
_RESPONSE, _CONVERSATION = "/v1/responses/{id}", "/v1/conversations/{id}"

ROUTES: Sequence[RouteRow] = [
    *_rows(
        "api",
        [
            ("POST", "/v1/messages", routes.create, ProtocolBody),
            ("POST", "/v1/messages/count_tokens", routes.count_tokens, ProtocolBody),
            ("POST", "/v1/chat/completions", routes.create, ProtocolBody),
            ("POST", "/v1/responses", routes.create, ProtocolBody),
            ("GET", "/v1/responses", routes.refuse_upgrade),
            ("POST", "/v1/responses/input_tokens", routes.count_tokens, ProtocolBody),
            ("POST", "/v1/responses/compact", routes.create, ProtocolBody),
            ("GET", _RESPONSE, _STORED),
            ("DELETE", _RESPONSE, _STORED),
            ("POST", f"{_RESPONSE}/cancel", _STORED),
            ("GET", f"{_RESPONSE}/input_items", _STORED),
            ("POST", "/v1/conversations", _STORED),
            ("GET", _CONVERSATION, _STORED),
            ("POST", _CONVERSATION, _STORED),
            ("DELETE", _CONVERSATION, _STORED),
            ("GET", f"{_CONVERSATION}/items", _STORED),
            ("POST", f"{_CONVERSATION}/items", _STORED),
            ("GET", f"{_CONVERSATION}/items/{{item}}", _STORED),
            ("DELETE", f"{_CONVERSATION}/items/{{item}}", _STORED),
            ("POST", "/v1/completions", _RAW),
            ("POST", "/inference/v1/generate", _RAW),
            ("GET", "/v1/models", routes.list_models),
            ("GET", "/v1/models/{id:path}", routes.get_model),
            ("POST", "/v1/tokenize", _RAW),
            ("POST", "/v1/detokenize", _RAW),
            ("POST", "/tokenize", _RAW),
            ("POST", "/detokenize", _RAW),
        ],
    ),
    # Harnesses look whether a server is there, below whatever base URL they have.
    *_rows("hello", [("GET", "/", routes.hello), ("GET", "/api/hello", routes.hello)]),
    *_rows(
        "inspector",
        [
            ("GET", f"{SESSIONS}/{{id:path}}/turns", _FORKS),
            ("POST", f"{SESSIONS}/{{id:path}}/fork", _FORKS),
            ("GET", "/v1/singletree/moves", _FORKS),
            ("POST", "/v1/singletree/moves", _FORKS),
        ],
    ),
    *_rows(
        "sessions",
        [("GET", SESSIONS, routes.list_sessions), ("GET", f"{SESSIONS}/{{id:path}}", routes.get_session)],
    ),
    *_rows(
        "open",
        [
            ("GET", "/health", routes.health),
            ("GET", "/health/ready", routes.health),
            ("GET", "/health/live", routes.live),
            ("GET", "/version", routes.version),
            ("GET", "/openapi.json", _DESCRIPTION),
            ("GET", "/metrics", routes.metrics),
        ],
    ),
]

_INSPECTOR_OFF = _rows(
    "page", [("GET", path, routes.inspector_is_off) for path in ("/inspect", "/inspect/{rest:path}")]
)


def routes_of(service: Service) -> list[RouteRow]:
    """Return the routes of a server with the settings of ``service``."""
    anthropic, door = service.config.enable_anthropic_api, inspector_door(service.config)
    capture = capture_door(service.config)
    return [
        *(row for row in ROUTES if anthropic or protocol_for(row.path, {}) is not MESSAGES),
        *(_INSPECTOR_OFF if door is None else door.routes),
        *(() if capture is None else capture.routes),
    ]
