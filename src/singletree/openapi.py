"""The description of the API for programs (OpenAPI 3.1), made from the list of routes and the types of bodies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import NODEFAULT, Raw, Struct, structs
from starlette.responses import Response
from starlette.types import ASGIApp

from singletree import __version__
from singletree.server.http.route_table import routes_of
from singletree.server.http.routes import JSON
from singletree.server.http.service import SCOPES, Call, RouteRow


async def describe_routes(call: Call) -> ASGIApp:
    """Answer with the description of the API for programs (OpenAPI 3.1)."""
    return Response(
        await asyncio.to_thread(_encode_description, tuple(routes_of(call.service))), media_type=JSON
    )


@lru_cache(maxsize=4)
def _encode_description(rows: tuple[RouteRow, ...]) -> bytes:
    return msgspec.json.encode(describe_api(rows))


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
