"""All routes of the server, in one list: method, path, operation, who may ask, and what the body is decoded to.

To add a route, write its operation (`routes.py`, `raw_tokens/routes.py` …) and add it here; `docs/routes.md` and
``/openapi.json`` follow: the description of the API for programs (OpenAPI 3.1), made from this list and the types of
bodies. The inspector and the capture add their own routes where they are on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import NODEFAULT, Raw, Struct, structs
from starlette.responses import Response
from starlette.types import ASGIApp

from singletree import __version__
from singletree.protocols.chat.request import ChatBody
from singletree.protocols.messages.request import MessagesBody
from singletree.protocols.responses.request import ResponsesBody
from singletree.server.http import routes
from singletree.server.http.routes import JSON
from singletree.server.http.service import (
    SCOPES,
    Call,
    LaterOperation,
    RouteEntry,
    RouteRow,
    ScopeName,
    Service,
    capture_door,
    inspector_door,
)
from singletree.server.sessions.session_report import PATH as SESSIONS
from singletree.server.turn.protocol import MESSAGES, protocol_for


def _rows(scope: ScopeName, entries: Sequence[RouteEntry]) -> list[RouteRow]:
    return [RouteRow(entry[0], entry[1], entry[2], scope, *entry[3:]) for entry in entries]


async def describe_routes(call: Call) -> ASGIApp:
    """Answer with the description of the API for programs (OpenAPI 3.1)."""
    return Response(
        await asyncio.to_thread(_encode_description, tuple(routes_of(call.service))), media_type=JSON
    )


@lru_cache(maxsize=4)
def _encode_description(rows: tuple[RouteRow, ...]) -> bytes:
    return msgspec.json.encode(describe_api(rows))


_RAW, _STORED = LaterOperation("raw tokens"), LaterOperation("routes of stored responses")
_FORKS = LaterOperation("session forks")
_RESPONSE, _CONVERSATION = "/v1/responses/{id}", "/v1/conversations/{id}"

ROUTES: Sequence[RouteRow] = [
    *_rows(
        "api",
        [
            ("POST", "/v1/messages", routes.create, MessagesBody),
            ("POST", "/v1/messages/count_tokens", routes.count_tokens, MessagesBody),
            ("POST", "/v1/chat/completions", routes.create, ChatBody),
            ("POST", "/v1/responses", routes.create, ResponsesBody),
            ("GET", "/v1/responses", routes.refuse_upgrade),
            ("POST", "/v1/responses/input_tokens", routes.count_tokens, ResponsesBody),
            ("POST", "/v1/responses/compact", routes.create, ResponsesBody),
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
            ("GET", "/openapi.json", describe_routes),
            ("GET", "/metrics", routes.metrics),
        ],
    ),
]

_INSPECTOR_OFF = _rows(
    "page",
    [("GET", path, routes.inspector_is_off) for path in ("/inspect", "/inspect/{rest:path}")],
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


_SCHEMAS = "#/components/schemas/"
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")
_ANY = {"type": "object"}
_TEXTS = frozenset({"/", "/api/hello", "/metrics"})
"""Routes whose answers are plain text."""


def describe_api(rows: Iterable[RouteRow]) -> dict[str, Any]:
    """Return the OpenAPI description of ``rows`` as a JSON value.

    Bodies of requests are described by the types that they are decoded to. What a type leaves to a decoder of ours,
    such as the blocks of a message, is any JSON value there. Answers are described by the vendors' own references.
    """
    rows = [row.loaded() for row in rows]
    kinds = {row.body: _without_raw_defaults(row.body) for row in rows if row.body is not None}
    schemas, components = msgspec.json.schema_components(kinds.values(), ref_template=f"{_SCHEMAS}{{name}}")
    bodies = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        path = _PARAMETER.sub(r"{\1}", row.path)
        paths.setdefault(path, {})[row.method.lower()] = _operation(
            row, None if row.body is None else bodies[row.body]
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "singletree", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(row: RouteRow, body: dict[str, Any] | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": row.summary,
        "operationId": re.sub(r"\W+", "_", f"{row.method.lower()}{row.path}").strip("_"),
        "responses": {
            "200": {
                "description": "the answer",
                "content": {"text/plain" if row.path in _TEXTS else "application/json": {"schema": {}}},
            },
            "default": {
                "description": "an error, in the form of the protocol",
                "content": {"application/json": {"schema": _ANY}},
            },
        },
    }
    if row.body is not None and any(field.name == "stream" for field in structs.fields(row.body)):
        described["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    if names := _PARAMETER.findall(row.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if SCOPES[row.scope].right is not None:
        described["security"] = [{"bearer": []}, {"key": []}]
    return described


def _without_raw_defaults(kind: type[Struct]) -> type[Struct]:
    """Return a type with the fields of ``kind``. JSON that is kept as it came has no default that a schema can hold."""
    fields: list[Any] = []
    for each in structs.fields(kind):
        if each.required:
            fields.append((each.encode_name, each.type))
        elif each.default is NODEFAULT:
            fields.append((each.encode_name, each.type, msgspec.field(default_factory=each.default_factory)))
        else:
            fields.append(
                (each.encode_name, each.type, None if isinstance(each.default, Raw) else each.default)
            )
    return msgspec.defstruct(kind.__name__, fields, kw_only=True)
