"""The sums of receipts are what the engine itself has counted, to the token: ``make engines``.

vLLM counts in its metrics; embedded llama.cpp logs at the end of each generation what it has read and written.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines import real_vllm
from engines.small_model import small_model
from engines.tool_loop import DIALECTS, play_tool_loop, served
from server import memory
from singletree.engines.engine import Engine
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.remote.engine import RemoteEngine
from singletree.remote.vllm.server import VllmServer

pytestmark = pytest.mark.engines

CHAT, SESSIONS = "/v1/chat/completions", "/v1/singletree/sessions"
SECONDS = 300
_LOGGED = re.compile(r"(prompt eval|  eval) time = .*? / +(\d+) tokens")

_BEHIND = 32
"""Most tokens that an engine writes behind a forced call."""

Counts = tuple[int, int]
"""Tokens of prompts that were read, and tokens that were generated, since they were asked for last."""


@asynccontextmanager
async def vllm(capture: pytest.CaptureFixture[str]) -> AsyncIterator[tuple[Engine, Callable[[], Counts]]]:
    with real_vllm.running("--enable-scale-out", max_model_len=4096) as server:
        engine = RemoteEngine(VllmServer(), server.url, slots=2)
        await engine.start()  # which asks for a token
        known = _metrics(server.url)

        def counted() -> Counts:
            before, known[:] = [*known], _metrics(server.url)
            prompt, cached, generated = (new - old for new, old in zip(known, before, strict=True))
            return prompt - cached, generated

        yield engine, counted
        await engine.close()


def _metrics(url: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as reply:
        page = reply.read().decode()
    names = ("prompt_tokens", "prefix_cache_hits", "generation_tokens")
    found = (re.search(rf"^vllm:{name}_total\{{.*\}} (\S+)$", page, re.M) for name in names)
    return [int(float(each[1])) if each else 0 for each in found]


@asynccontextmanager
async def llamacpp(capture: pytest.CaptureFixture[str]) -> AsyncIterator[tuple[Engine, Callable[[], Counts]]]:
    engine = LlamaCppEngine(small_model(), slots=2, context_window=4096, threads=1, verbose=True)
    await engine.start()
    capture.readouterr()

    def counted() -> Counts:
        logged = _LOGGED.findall(capture.readouterr().err)
        read, generated = (
            sum(int(tokens) for each, tokens in logged if each == kind) for kind in ("prompt eval", "  eval")
        )
        return read, generated

    yield engine, counted
    await engine.close()


@pytest.mark.parametrize("running", [vllm, llamacpp], ids=["vllm", "llamacpp"])
async def test_the_sums_are_what_the_engine_has_counted(
    running: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what an engine writes behind a forced call, until it hears that the turn is over: that is no answer."""
    monkeypatch.setattr(memory, "PATIENCE_SECONDS", SECONDS)  # the machine may be busy
    async with running(capfd) as (engine, counted), served(engine) as client:

        async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
            reply = await client.post(path, body, {"x-singletree-session": path})
            return reply.status, reply.body

        async def summed() -> tuple[Any, Counts]:
            await asyncio.sleep(1)  # The engine counts at the end of its step.
            [sums] = (await client.get(SESSIONS)).json["keys"].values()
            return sums, counted()

        messages = [
            {"role": "system", "content": ""},
            {"role": "user", "content": "Tell me about Paris."},
        ]
        for who in ("a guide", "a guide", "a poet", "a poet"):
            messages[0]["content"] = "Hello. " * 20 + f"You are {who}. " * 40
            asked = {"model": real_vllm.MODEL, "temperature": 0, "max_tokens": 20, "messages": messages}
            status, reply = await post(CHAT, asked)
            assert status == 200, reply
            messages += [json.loads(reply)["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        words, (read, generated) = await summed()
        for dialect in DIALECTS:
            begin = [{"role": "user", "content": f"{dialect.path}: how is the weather in Paris?"}]
            await play_tool_loop(post, dialect, 3, begin)
        sums, (read_later, generated_later) = await summed()
    print(f"the engine read {read} + {read_later} and wrote {generated} + {generated_later} tokens")
    print(f"receipts: {words}, {sums}")
    assert (words["turns"], sums["turns"], sums["unreported_tokens"]) == (4, 13, 0)
    assert words["reread_by_fault"]["harness"] > 0
    assert words["new_tokens"] + words["reread_tokens"] == read
    assert sums["new_tokens"] + sums["reread_tokens"] == read + read_later
    assert words["generated_tokens"] == generated
    assert 0 <= generated_later - (sums["generated_tokens"] - words["generated_tokens"]) <= 9 * _BEHIND
