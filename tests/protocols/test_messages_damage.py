"""Bodies with something wrong in them: read, or refused in words; never anything else."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singletree.errors import InvalidRequest
from singletree.protocols import messages

from .test_messages_decode import BASH, CLAUDE_CODE, assistant, text, user

RICH = CLAUDE_CODE | {
    "tool_choice": {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9, "display": "updates"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["x"],
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 5,
    "tools": [*CLAUDE_CODE["tools"], BASH | {"strict": True}, {"type": "web_search_20250305", "name": "w"}],
    "messages": [
        *CLAUDE_CODE["messages"],
        user(
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR"}},
            {
                "type": "document",
                "title": "T",
                "source": {"type": "text", "media_type": "text/plain", "data": "d"},
            },
            {"type": "document", "source": {"type": "content", "content": [text("c")]}},
            {"type": "search_result", "source": "s", "title": "t", "content": [text("f")]},
            {"type": "tool_result", "tool_use_id": "i", "content": [text("r")], "is_error": True},
        ),
        assistant(
            {"type": "redacted_thinking", "data": "E"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": [1]}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"url": "u"}]},
            {"type": "compaction", "content": "c"},
        ),
        {
            "role": "system",
            "content": [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": BASH}}],
            "output_config": {"effort": "low"},
        },
    ],
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in inner for p in places(child, (*path, key)))]


ODD: list[Any] = [None, True, 0, -1, 2**70, 1e300, "", "x", "\u0000", [], [[]], {}, {"type": "text"}, ["x"]]
ALL_PLACES = places(RICH)[1:]


def opened(path: tuple[Any, ...]) -> tuple[Any, Any]:
    """A copy of the body, and in it what holds the end of ``path``."""
    body = copy.deepcopy(RICH)
    inside: Any = body
    for key in path[:-1]:
        inside = inside[key]
    return body, inside


def accepts_or_refuses(body: bytes) -> None:
    """Nothing else is raised."""
    for decode in (messages.decode, messages.decode_count):
        with suppress(InvalidRequest):
            decode(body)


def test_the_rich_body_is_accepted() -> None:
    assert len(messages.decode(json.dumps(RICH).encode()).conversation.turns) == 13


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_any_value_anywhere_is_accepted_or_refused(value: Any) -> None:  # C36 C44
    for path in ALL_PLACES:
        body, inside = opened(path)
        inside[path[-1]] = value
        accepts_or_refuses(json.dumps(body).encode())


def test_any_field_may_be_missing() -> None:
    for path in ALL_PLACES:
        body, inside = opened(path)
        del inside[path[-1]]
        accepts_or_refuses(json.dumps(body).encode())


@settings(max_examples=300)
@given(st.data())
def test_damaged_bytes_are_accepted_or_refused(data: st.DataObject) -> None:
    whole = json.dumps(RICH).encode()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 20)))
    accepts_or_refuses(whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:])


def test_every_truncation_is_refused() -> None:
    whole = json.dumps(RICH).encode()
    for length in range(0, len(whole), 7):
        with pytest.raises(InvalidRequest):
            messages.decode(whole[:length])
