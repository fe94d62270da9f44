"""Pictures on a real vLLM: ``SINGLETREE_VLM_URL`` is a server with eyes and ``--enable-scale-out``,
``SINGLETREE_VLM_FOLDER`` the folder of its tokenizer, ``SINGLETREE_VLM_TEMPLATE`` the file of its chat template.

A model of two layers with made-up weights does: what is tested is places, keys, caches and counts.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.vllm_recording import vllm_engine
from server.picture_model import block, picture
from server.serving import MODEL, Served, serving
from singletree import families
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import load_chat_template
from singletree.prompts.tokenizer.tokenizer import load_tokenizer
from singletree.server.models.eyes import find_eyes

URL = os.environ.get("SINGLETREE_VLM_URL", "")
_FILE = os.environ.get("SINGLETREE_VLM_TEMPLATE")
TEMPLATE = Path(_FILE).read_text() if _FILE else None
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not URL, reason="SINGLETREE_VLM_URL names no vLLM server with eyes"),
]
MESSAGES = "/v1/messages"
SESSION = {"x-singletree-session": "s", "x-singletree-explain": "1"}
BLOCK = 128
"""vLLM caches whole blocks of so many tokens on a CPU."""
LONG = "The quick brown fox jumps over the lazy dog. " * 40


@asynccontextmanager
async def real() -> AsyncIterator[Served]:
    engine = vllm_engine(URL)
    await engine.start()
    tokenizer = load_tokenizer(Path(os.environ["SINGLETREE_VLM_FOLDER"]))
    template = load_chat_template(tokenizer, TEMPLATE)
    eyes, blindness = find_eyes(engine.info(), template, tokenizer)
    assert eyes is not None, blindness
    window = engine.info().context_window
    model: dict[str, Any] = {
        "tokenizer": tokenizer,
        "template": template,
        "family": families.get("plain"),
        "eyes": eyes,
        "layout": template.layout(tokenizer),
        "memory": TurnMemory(2**20),
    }
    async with serving(engine=engine, context_window=window, **model) as served:
        yield served


def asked(*messages: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": list(messages)}


def user(*content: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": c} if isinstance(c, str) else c for c in content],
    }


def length(reply: Any) -> tuple[int, int]:
    """The prompt's length and how much of it was cached."""
    usage = reply.json["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    return usage["input_tokens"] + cached, cached


async def test_pictures_are_read_cached_and_counted() -> None:
    salt = os.urandom(4).hex()
    red, blue = block(picture("red", size=(112, 112))), block(picture("blue", size=(224, 112)))
    before = f"{salt} {LONG}"
    first = user(before, red, LONG + "What colour is it?")
    async with real() as served:
        counted = await served.client.post(f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": [first]})
        assert counted.status == 200, counted.json
        answer = await served.client.post(MESSAGES, asked(first), SESSION)
        assert answer.status == 200, answer.json
        tokens, _ = length(answer)
        assert counted.json["input_tokens"] == tokens
        bare = user(before, LONG + "What colour is it?")
        without = await served.client.post(f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": [bare]})
        assert tokens - without.json["input_tokens"] in (17, 18, 19), "16 tokens, and two around them"

        same = await served.client.post(MESSAGES, asked(first), SESSION)
        assert length(same)[1] > tokens - 2 * BLOCK

        other = await served.client.post(
            MESSAGES, asked(user(before, blue, LONG + "What colour is it?")), SESSION
        )
        place = int(other.headers["x-singletree-matched-tokens"])
        whole, cached = length(other)
        assert place - BLOCK < cached <= place, "the cache ends at the picture, and not before"
        assert whole == tokens + 16, "twice as wide"

        turn = {"role": "assistant", "content": answer.json["content"]}
        went_on = await served.client.post(
            MESSAGES, asked(first, turn, user("And this? ", blue, "?")), SESSION
        )
        assert went_on.status == 200
        assert length(went_on)[1] > tokens - 2 * BLOCK
        assert went_on.headers["x-singletree-course"] in ("appended", "back")
