"""Two judges of Responses that are not ours: the OpenResponses schema, and the types of the official SDK.

The schema is the OpenAPI description of https://www.openresponses.org that ``llm-comply`` brings along; each event has
one of its own there. The SDK's types are read strictly: nothing is coerced, and a field that they do not know is wrong.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_args

import llm_comply
from llm_comply.schema import SpecLoader
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from openai.types.responses.response_reasoning_text_delta_event import ResponseReasoningTextDeltaEvent
from openai.types.responses.response_reasoning_text_done_event import ResponseReasoningTextDoneEvent
from pydantic import BaseModel, TypeAdapter
from pydantic import ValidationError as WrongType

Json = dict[str, Any]

# The OpenResponses schema has these under another name than the API that it describes.
_RENAMED = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
# Fields that one of the two has, or the native API shows, and the SDK's types do not.
_UNTYPED = {
    "Response": {"store", "presence_penalty", "frequency_penalty"},
    "ResponseCustomToolCall": {"status"},
    "Logprob": {"bytes"},
    "LogprobTopLogprob": {"bytes"},
}
# Codes of failures that Codex acts on (`context_length_exceeded` ends a turn for good), and the SDK does not list.
_UNLISTED_CODES = ("context_length_exceeded",)
# Of events that clients ask for by a header of ours.
_ASIDES = ("response.tool_call_dispatch", "response.reasoning_dispatch")


def wrong_event(event: Mapping[str, Any]) -> list[str]:
    """What the judges say against an event of a stream."""
    kind = event["type"]
    if kind in _ASIDES:
        return []
    if kind not in _sdk_events():
        return [f"the SDK knows no event {kind}"]
    reported = [*_wrong_type(_sdk_events()[kind], event)]
    schema = _event_schemas().get(_RENAMED.get(kind, kind))
    if schema is not None:
        reported += _wrong_value(
            schema, _in_the_words_of_the_schema({**event, "type": _RENAMED.get(kind, kind)})
        )
    elif not kind.startswith("response.custom_tool_call_input."):
        reported.append(f"the schema knows no event {kind}")
    return reported


def wrong_response(response: Mapping[str, Any]) -> list[str]:
    """What they say against a response object."""
    value = _in_the_words_of_the_schema(response)
    return [*_wrong_type(_adapter(Response), response), *_wrong_value("ResponseResource", value)]


def forget() -> None:
    """Forget what was judged."""
    _wrong_json.cache_clear()
    _wrong_typed.cache_clear()


def wrong_stored(item: Mapping[str, Any]) -> list[str]:
    """What the SDK's types say against an item that is listed."""
    return wrong_as(ResponseItem, item)


def wrong_as(kind: Any, value: Mapping[str, Any]) -> list[str]:
    """What they say against a value that should be of the SDK's type ``kind``."""
    return list(_wrong_type(_adapter(kind), value))


def _in_the_words_of_the_schema(value: Any) -> Any:
    """``value`` without what the schema has no word for: it knows functions only, and the API has more.

    A schema of ``text.format`` has to be null there, and be what was asked for in the SDK's types.
    """
    if not isinstance(value, Mapping):
        return value
    fields = {name: _in_the_words_of_the_schema(inner) for name, inner in value.items()}
    if isinstance(fields.get("item"), dict) and fields["item"]["type"] not in _items():
        fields["item"] = None
    if "output" in fields and "tools" in fields:
        fields["output"] = [item for item in fields["output"] if item["type"] in _items()]
        fields["tools"] = [tool for tool in fields["tools"] if tool["type"] == "function"]
        fields["tool_choice"] = _choice(fields["tool_choice"])
        if fields["text"]["format"]["type"] == "json_schema":
            fields["text"] = {**fields["text"], "format": {**fields["text"]["format"], "schema": None}}
    return fields


def _choice(choice: Any) -> Any:
    if isinstance(choice, str) or choice["type"] == "function":
        return choice
    if choice["type"] != "allowed_tools":
        return "required"
    return {**choice, "tools": [tool for tool in choice["tools"] if tool["type"] == "function"]}


@cache
def _spec() -> SpecLoader:
    return SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / "openresponses.json"))


def _types(name: str) -> list[str]:
    found: list[str] = _spec().get_schema(name)["properties"]["type"]["enum"]
    return found


@cache
def _event_schemas() -> dict[str, str]:
    """The name of each event's schema."""
    names = [name for name in _spec().schema_names if name.endswith("StreamingEvent")]
    return {kind: name for name in names for kind in _types(name)}


@cache
def _items() -> frozenset[str]:
    """The types of the items that the schema knows."""
    names = [one["$ref"].rpartition("/")[2] for one in _spec().get_schema("ItemField")["oneOf"]]
    return frozenset(kind for name in names for kind in _types(name))


def _wrong_value(name: str, value: Any) -> Sequence[str]:
    return _wrong_json(name, json.dumps(value))


@lru_cache(4096)
def _wrong_json(name: str, value: str) -> Sequence[str]:
    """What the schema says. Most events are those of a stream that was judged before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of how llm-comply resolves references
        return [f"{name}: {error[:2000]}" for error in _spec().validate(json.loads(value), name)]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _sdk_events() -> dict[str, TypeAdapter[Any]]:
    known = [*get_args(get_args(ResponseStreamEvent)[0])]
    known += [ResponseReasoningTextDeltaEvent, ResponseReasoningTextDoneEvent]
    return {get_args(kind.model_fields["type"].annotation)[0]: TypeAdapter(kind) for kind in known}


def _wrong_type(adapter: TypeAdapter[Any], value: Any) -> Sequence[str]:
    return _wrong_typed(adapter, json.dumps(_with_listed_codes(value)))


@lru_cache(4096)
def _wrong_typed(adapter: TypeAdapter[Any], value: str) -> Sequence[str]:
    try:
        read = adapter.validate_json(value, strict=True)
    except WrongType as error:
        return [str(error)[:2000]]
    return list(_unknown(read, ""))


def _with_listed_codes(value: Mapping[str, Any]) -> Mapping[str, Any]:
    response = value.get("response", value)
    error = response.get("error")
    if not error or error["code"] not in _UNLISTED_CODES:
        return value
    listed = {**response, "error": {**error, "code": "server_error"}}
    return {**value, "response": listed} if "response" in value else listed


def _unknown(value: Any, at: str) -> Iterator[str]:
    """The fields that the SDK's types do not have."""
    if isinstance(value, BaseModel):
        for name in (value.model_extra or {}).keys() - _UNTYPED.get(type(value).__name__, set()):
            yield f"{at}.{name}: the SDK's {type(value).__name__} has no such field"
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{at}.{name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _unknown(inner, f"{at}.{i}")
