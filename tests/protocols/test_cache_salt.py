"""``cache_salt`` on every API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from singletree.conversation import Request
from singletree.errors import InvalidRequest
from singletree.protocols.chat import request as chat
from singletree.protocols.messages import request as messages
from singletree.protocols.openai.nvext import SALT_HEADER, cache_salt_of_header
from singletree.protocols.responses import request as responses
from singletree.raw_tokens import completions, generate

TURN = [{"role": "user", "content": "hi"}]
APIS: dict[str, tuple[Callable[..., Request], dict[str, Any]]] = {
    "chat": (chat.decode, {"messages": TURN}),
    "messages": (messages.decode, {"messages": TURN, "max_tokens": 9}),
    "responses": (responses.decode, {"input": "hi"}),
    "completions": (completions.decode, {"prompt": "hi"}),
    "generate": (generate.decode, {"token_ids": [1]}),
}
each_api = pytest.mark.parametrize("api", APIS)


def read(api: str, **more: Any) -> Request:
    decode, body = APIS[api]
    return decode(json.dumps({"model": "m", **body, **more}).encode())


@each_api
def test_the_field_is_taken(api: str) -> None:
    assert read(api).cache_salt == ""
    assert read(api, cache_salt=None).cache_salt == ""
    salted = read(api, cache_salt="tenant")
    assert salted.cache_salt == "tenant"
    assert not [warning for warning in salted.warnings if "cache_salt" in warning]


@each_api
@pytest.mark.parametrize("salt", [7, ["a"], "x" * 257])
def test_what_is_no_salt_is_refused(api: str, salt: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(api, cache_salt=salt)
    assert refusal.value.param == "cache_salt"


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_nvext_may_have_it(api: str) -> None:
    assert read(api, nvext={"cache_salt": "theirs"}).cache_salt == "theirs"
    assert read(api, cache_salt="own", nvext={"cache_salt": "theirs"}).cache_salt == "own"


def test_a_header_of_a_gateway() -> None:
    assert cache_salt_of_header({}) == ""
    assert cache_salt_of_header({SALT_HEADER: " tenant "}) == "tenant"
    with pytest.raises(InvalidRequest, match="257 characters"):
        cache_salt_of_header({SALT_HEADER: "x" * 257})
