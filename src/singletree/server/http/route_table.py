"""All routes of the server, in one list: method, path, operation, who may ask, and what the body is decoded to.

To add a route, write its operation (`routes.py`, `raw_tokens/routes.py` …) and add it here; `docs/routes.md` and
``/openapi.json`` (``openapi``) follow. The inspector and the capture add their own routes where they are on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from singletree.server.http import routes
from singletree.server.http.service import (
    LaterOperation,
    ProtocolBody,
    RouteRow,
    Service,
    capture_door,
    inspector_door,
)
from singletree.server.sessions import PATH as SESSIONS
from singletree.server.turn.protocol import MESSAGES, protocol_for

_raw, _stored = partial(LaterOperation, "raw tokens"), partial(LaterOperation, "routes of stored responses")
_forks = partial(LaterOperation, "session forks")
_RESPONSE, _CONVERSATION = "/v1/responses/{id}", "/v1/conversations/{id}"

ROUTES: Sequence[RouteRow] = [
    RouteRow("POST", "/v1/messages", routes.create, body=ProtocolBody),
    RouteRow("POST", "/v1/messages/count_tokens", routes.count_tokens, body=ProtocolBody),
    RouteRow("POST", "/v1/chat/completions", routes.create, body=ProtocolBody),
    RouteRow("POST", "/v1/responses", routes.create, body=ProtocolBody),
    RouteRow("GET", "/v1/responses", routes.refuse_upgrade),
    RouteRow("POST", "/v1/responses/input_tokens", routes.count_tokens, body=ProtocolBody),
    RouteRow("POST", "/v1/responses/compact", routes.create, body=ProtocolBody),
    RouteRow("GET", _RESPONSE, _stored("get_response")),
    RouteRow("DELETE", _RESPONSE, _stored("delete_response")),
    RouteRow("POST", f"{_RESPONSE}/cancel", _stored("cancel_response")),
    RouteRow("GET", f"{_RESPONSE}/input_items", _stored("list_input_items")),
    RouteRow("POST", "/v1/conversations", _stored("create_conversation", "NewConversation")),
    RouteRow("GET", _CONVERSATION, _stored("get_conversation")),
    RouteRow("POST", _CONVERSATION, _stored("update_conversation", "Metadata")),
    RouteRow("DELETE", _CONVERSATION, _stored("delete_conversation")),
    RouteRow("GET", f"{_CONVERSATION}/items", _stored("list_items")),
    RouteRow("POST", f"{_CONVERSATION}/items", _stored("create_items", "NewItems")),
    RouteRow("GET", f"{_CONVERSATION}/items/{{item}}", _stored("get_item")),
    RouteRow("DELETE", f"{_CONVERSATION}/items/{{item}}", _stored("delete_item")),
    RouteRow("POST", "/v1/completions", _raw("complete"), body=ProtocolBody),
    RouteRow("POST", "/inference/v1/generate", _raw("complete"), body=ProtocolBody),
    RouteRow("GET", "/v1/models", routes.list_models),
    RouteRow("GET", "/v1/models/{id:path}", routes.get_model),
    RouteRow("POST", "/v1/tokenize", _raw("tokenize_text", "TokenizeBody")),
    RouteRow("POST", "/v1/detokenize", _raw("detokenize", "DetokenizeBody")),
    RouteRow("POST", "/tokenize", _raw("tokenize_text", "TokenizeBody")),
    RouteRow("POST", "/detokenize", _raw("detokenize", "DetokenizeBody")),
    # Harnesses look whether a server is there, below whatever base URL they have.
    RouteRow("GET", "/", routes.hello, "hello"),
    RouteRow("GET", "/api/hello", routes.hello, "hello"),
    RouteRow("GET", f"{SESSIONS}/{{id:path}}/turns", _forks("get_turns"), "inspector"),
    RouteRow("POST", f"{SESSIONS}/{{id:path}}/fork", _forks("fork_session", "ForkBody"), "inspector"),
    RouteRow("GET", "/v1/singletree/moves", _forks("list_moves"), "inspector"),
    RouteRow("POST", "/v1/singletree/moves", _forks("move_requests", "NewMove"), "inspector"),
    RouteRow("GET", SESSIONS, routes.list_sessions, "sessions"),
    RouteRow("GET", f"{SESSIONS}/{{id:path}}", routes.get_session, "sessions"),
    RouteRow("GET", "/health", routes.health, "open"),
    RouteRow("GET", "/health/ready", routes.health, "open"),
    RouteRow("GET", "/health/live", routes.live, "open"),
    RouteRow("GET", "/version", routes.version, "open"),
    RouteRow("GET", "/openapi.json", LaterOperation("description of the API", "describe_routes"), "open"),
    RouteRow("GET", "/metrics", routes.metrics, "open"),
]

_INSPECTOR_OFF = [
    RouteRow("GET", path, routes.inspector_is_off, "page") for path in ("/inspect", "/inspect/{rest:path}")
]


def routes_of(service: Service) -> list[RouteRow]:
    """Return the routes of a server with the settings of ``service``."""
    anthropic, door = service.config.enable_anthropic_api, inspector_door(service.config)
    capture = capture_door(service.config)
    return [
        *(row for row in ROUTES if anthropic or protocol_for(row.path, {}) is not MESSAGES),
        *(_INSPECTOR_OFF if door is None else door.routes),
        *(() if capture is None else capture.routes),
    ]
