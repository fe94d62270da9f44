"""Texts far beyond the window: refused by their characters, before any of them is tokenized."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from singletree.prompts.tokenizer.encoder import SegmentEncoder
from singletree.stored_responses.store import Store

from .serving import serving

LONG = "x" * (16 * 8192 + 1)
MESSAGES = [{"role": "user", "content": LONG}]
CLEARING = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG * 4}], "max_tokens": 9, **CLEARING}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses", {"input": LONG, "truncation": "auto"}),
    ("/v1/completions", {"prompt": LONG}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": MESSAGES}),
]


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of characters of the longest text that was encoded."""
    found, real = [0], SegmentEncoder._encode

    def encode(self: SegmentEncoder, text: str) -> array[int]:
        found[0] = max(found[0], len(text))
        return real(self, text)

    monkeypatch.setattr(SegmentEncoder, "_encode", encode)
    return found


@pytest.mark.parametrize(("path", "sent"), REQUESTS)
async def test_a_long_text_is_refused_without_being_tokenized(
    path: str, sent: dict[str, Any], longest: list[int]
) -> None:
    async with serving() as served:
        served.model.tokenizer._first.encode = served.model.tokenizer._first._encode
        answer = await served.client.post(path, {"model": "alias", **sent})
    assert answer.status == 400, answer
    message = answer.json["error"]["message"]
    assert "--limit characters_per_token" in message
    assert "about" in message
    assert longest[0] < 2000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/v1/responses"])
async def test_a_text_that_is_longer_yet_is_refused_without_being_rendered(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("singletree.server.turn.prompt.write_prompt")
    text = LONG * 4 + "x" * 4
    sent = {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
    async with serving() as served:
        answer = await served.client.post(path, {"model": "alias", **sent})
    assert answer.status == 400, answer
    assert "--limit characters_per_token" in answer.json["error"]["message"]


async def test_the_limit_can_be_raised(set_limits: Callable[..., None]) -> None:
    set_limits(characters_per_token=17)
    async with serving() as served:
        answer = await served.client.post("/v1/chat/completions", {"model": "alias", "messages": MESSAGES})
    assert answer.status == 400
    assert "about" not in answer.json["error"]["message"]  # each byte is a token of this model


async def test_truncation_cuts_what_is_too_long_to_be_tokenized(longest: list[int]) -> None:
    turns = [
        {"role": "user", "content": "The task."},
        {"role": "assistant", "content": "x" * 200_000},
        {"role": "user", "content": "x" * 200_000},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "[[echo:fits]]"},
    ]
    async with serving() as served:
        served.model.tokenizer._first.encode = served.model.tokenizer._first._encode
        sent = {"model": "alias", "input": turns, "truncation": "auto"}
        answer = await served.client.post("/v1/responses", sent)
    assert answer.status == 200, answer
    assert "fits" in str(answer.json["output"])
    assert longest[0] < 2000


async def test_a_body_that_is_short_enough_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("singletree.server.turn.prompt.conversation_characters")
    async with serving() as served:
        sent = {"model": "alias", "messages": [{"role": "user", "content": "x" * 1000}]}
        assert (await served.client.post("/v1/chat/completions", sent)).status == 200


async def test_stored_items_count(longest: list[int], tmp_path: Path) -> None:
    async with serving() as served:
        served.model.tokenizer._first.encode = served.model.tokenizer._first._encode
        served.service.store = Store(tmp_path / "responses.sqlite", 2**30)
        items = [{"type": "message", "role": "user", "content": "x" * 80_000}] * 2
        made = await served.client.post("/v1/conversations", {"items": items})
        sent = {"model": "alias", "input": "x", "conversation": made.json["id"]}
        answer = await served.client.post("/v1/responses", sent)
        served.service.store.close()
    assert answer.status == 400, answer
    assert "--limit characters_per_token" in answer.json["error"]["message"]
    assert longest[0] < 2000
