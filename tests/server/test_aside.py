"""A long prompt is written beside the event loop: whoever asks meanwhile is answered meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from singletree.prompts.prompt_writer import Prompt
from singletree.raw_tokens import routes as raw_routes
from singletree.server.http import routes
from singletree.server.http.service import LARGE_BYTES
from singletree.server.turn import prompt

from .serving import body, serving

PATIENCE = 5.0
LONG = "a long file " * (LARGE_BYTES // 12 + 1)


@pytest.mark.parametrize(
    "path",
    ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/messages/count_tokens", "/tokenize"],
)
async def test_others_are_answered_while_a_long_prompt_is_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # C41
    write, begun, answered = prompt.write_prompt, threading.Event(), threading.Event()

    def hold(model: Any, request: Any, *more: Any, **settings: Any) -> Prompt:
        if len(request.conversation.turns[0].text) > LARGE_BYTES:
            begun.set()
            assert answered.wait(PATIENCE), "the event loop waits for the long prompt"
        return write(model, request, *more, **settings)

    for module in (prompt, routes, raw_routes):
        monkeypatch.setattr(module, "write_prompt", hold)
    async with serving({"s": "Fine."}, context_window=1 << 20) as served:
        long = asyncio.create_task(served.client.post(path, _asking(path, f"{LONG} [[script:s]]")))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        short = await served.client.post(path, _asking(path, "[[script:s]]"))
        answered.set()
        assert (short.status, (await long).status) == (200, 200)


def _asking(path: str, prompt: str) -> dict[str, Any]:
    kind = {"/tokenize": "/v1/chat/completions"}.get(path, path.removesuffix("/count_tokens"))
    asked = body(kind, prompt)
    if path.endswith("/count_tokens"):
        del asked["max_tokens"]
    return asked


async def test_a_short_prompt_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write, threads = prompt.write_prompt, []

    def watch(*given: Any, **settings: Any) -> Prompt:
        threads.append(threading.current_thread())
        return write(*given, **settings)

    monkeypatch.setattr(prompt, "write_prompt", watch)
    async with serving({"s": "Fine."}) as served:
        await served.client.post("/v1/messages", body("/v1/messages", "[[script:s]]"))
    assert threads == [threading.current_thread()]


async def test_what_refuses_a_long_prompt_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:  # C43
    async with serving({}) as served:
        reply = await served.client.post("/v1/messages", body("/v1/messages", LONG))
    assert reply.status == 400
    assert b"prompt is too long" in reply.body
