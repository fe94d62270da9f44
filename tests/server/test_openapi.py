"""``/openapi.json``: every route is in it, its schemas are valid, and requests that the server takes fit them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from singletree.openapi import describe_api
from singletree.server.http.route_table import ROUTES

from .serving import MODEL, serving

TEXT = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 5, "messages": TEXT, "stream": False},
    "/v1/chat/completions": {"messages": TEXT, "temperature": 0.5},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


def described() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json.dumps(describe_api(ROUTES)))
    return value


def validator(path: str, value: dict[str, Any]) -> Draft202012Validator:
    body = value["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**body, "components": value["components"]})


async def test_the_server_describes_its_routes() -> None:
    async with serving() as served:
        reply = await served.client.get("/openapi.json")
        assert reply.status == 200
        listed = {(method.upper(), path) for path, each in reply.json["paths"].items() for method in each}
    expected = {(row.method, row.path.replace(":path", "")) for row in ROUTES}
    assert expected <= listed
    assert listed - expected == {("GET", "/inspect"), ("GET", "/inspect/{rest}")}


def test_the_schemas_are_valid_and_complete() -> None:
    value = described()
    schemas = value["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    references = {part.partition('"')[0] for part in json.dumps(value).split('"#/components/schemas/')[1:]}
    assert references == set(schemas)


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_is_answered_fits_its_schema(path: str) -> None:
    body = {"model": MODEL, **BODIES[path]}
    fits = validator(path, described())
    assert [error.message for error in fits.iter_errors(body)] == []
    assert list(fits.iter_errors({**body, next(iter(BODIES[path])): 5.5})), "a wrong type does not fit"
    async with serving() as served:
        assert (await served.client.post(path, body)).status == 200
