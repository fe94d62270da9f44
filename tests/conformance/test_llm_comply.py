"""Judges of our Messages API that are not ours: the vendor's own schema, and the checker that brings it.

``llm-comply`` (a package, MIT) holds the OpenAPI description of each API and test cases that ask an endpoint and check
the answers. It is run here in memory: its requests go to the application, and every event and body of ours goes through
its schemas, which it does not do for this API's streams itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llm_comply
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from llm_comply.schema import SpecLoader
from llm_comply.tests.anthropic import ANTHROPIC_TESTS
from pydantic import BaseModel, TypeAdapter

from protocols.shapes import SHAPES, Shape, names
from protocols.test_messages_encode import body, stream
from server.memory import events
from server.serving import MODEL, serving
from singletree import errors
from singletree.protocols import messages
from singletree.testing.scripts import Script

from . import comply

pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\nIt is 555."
SCHEMAS = {
    "message_start": "MessageStartEvent",
    "content_block_start": "ContentBlockStartEvent",
    "content_block_delta": "ContentBlockDeltaEvent",
    "content_block_stop": "ContentBlockStopEvent",
    "message_delta": "MessageDeltaEvent",
    "message_stop": "MessageStopEvent",
    "error": "ErrorResponse",
}
TYPES: list[TypeAdapter[Any]] = [TypeAdapter(RawMessageStreamEvent), TypeAdapter(BetaRawMessageStreamEvent)]


@cache
def spec() -> SpecLoader:
    """The vendor's description of the API."""
    return SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / "anthropic.json"))


def wrong(name: str, value: Any) -> Iterator[str]:
    """What the schema of that name says against ``value``."""
    yield from (f"{name}: {error}" for error in spec().validate(value, name))


def wrong_events(streamed: bytes) -> list[str]:
    """What the schemas say against the events of a stream."""
    reported = [(name, data) for name, data in events(streamed) if name != "ping"]
    return [error for name, data in reported for error in wrong(SCHEMAS[name], data)]


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_every_event_and_body_is_the_schemas(shape: Shape) -> None:
    assert wrong_events(stream(shape)) == []
    assert list(wrong("Message", json.loads(body(shape)))) == []


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_every_event_is_one_of_the_sdks_types_without_coercion(shape: Shape) -> None:
    for name, data in events(stream(shape)):
        if name != "ping":
            for kind in TYPES:
                kind.validate_json(json.dumps(data), strict=True)


def unknown(value: Any) -> list[str]:
    """The fields that the SDK's types do not have, at any depth."""
    if isinstance(value, list):
        return [name for item in value for name in unknown(item)]
    if not isinstance(value, BaseModel):
        return []
    inside = [name for field in type(value).model_fields for name in unknown(getattr(value, field))]
    return [*(value.model_extra or ()), *inside]


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_there_is_no_field_that_the_api_does_not_have(shape: Shape) -> None:
    streamed = [data for name, data in events(stream(shape)) if name != "ping"]
    bodies: tuple[type[BaseModel], ...] = (Message, BetaMessage)
    for kind, whole in zip(TYPES, bodies, strict=True):
        assert [unknown(kind.validate_python(data)) for data in streamed] == [[]] * len(streamed)
        assert unknown(whole.model_validate_json(body(shape))) == []


def test_a_field_that_nobody_knows_is_found() -> None:
    data = {"type": "content_block_stop", "index": 0, "odd": 1}
    assert unknown(TYPES[0].validate_python(data)) == ["odd"]


FAILURES = [
    errors.InvalidRequest("x"),
    errors.Unauthorized("x"),
    errors.ModelNotFound("x"),
    errors.EngineFailed("x"),
]


@pytest.mark.parametrize("error", [*FAILURES, errors.Overloaded("x"), errors.Superseded()])
def test_every_error_is_the_schemas(error: errors.SingletreeError) -> None:
    _, shown = messages.encode_error(error, request_id="req_1")
    assert list(wrong("ErrorResponse", json.loads(shown))) == []


async def test_an_error_in_the_stream_models_and_counts_are_the_schemas() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    asked = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "[[script:s]]"}]}
    async with serving({"s": Script("abc", fail_after=2)}) as served:
        broken = await served.client.post("/v1/messages", asked | {"stream": True})
        counted = await served.client.post("/v1/messages/count_tokens", asked)
        listed = await served.client.get("/v1/models", headers)
        one = await served.client.get(f"/v1/models/{MODEL}", headers)
    assert events(broken.body)[-1][0] == "error"
    assert wrong_events(broken.body) == []
    assert list(wrong("CountMessageTokensResponse", counted.json)) == []
    assert list(wrong("ListResponse_ModelInfo_", listed.json)) == []
    assert list(wrong("ModelInfo", one.json)) == []


@pytest.mark.parametrize("case", ANTHROPIC_TESTS, ids=[case.id for case in ANTHROPIC_TESTS])
async def test_the_checkers_own_cases(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says = {"anth-tool-calling": CALL, "anth-thinking-display": THOUGHT}.get(case.id, "Hello there, Alice.")
    async with serving({"s": says}) as served:
        await comply.check(case, spec(), served, monkeypatch, "messages")
