"""What every real engine with eyes keeps, through the whole server: places, counts, caches and refusals of pictures.

The engines run ``tiny_vlm``, whose weights are made up: what it answers means nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.contract import collect
from engines.tiny_vlm import BEFORE, BEHIND, IDS, PAD, picture_length
from server.picture_model import PNG, block, picture
from server.serving import MODEL, Served, serving
from singletree import families
from singletree.conversation import Sampling
from singletree.engines.engine import Engine, GenerationJob, count_picture_tokens
from singletree.errors import InvalidRequest
from singletree.pictures import PromptPicture
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import load_chat_template
from singletree.prompts.tokenizer.tokenizer import load_tokenizer
from singletree.server.models.chat_format import find_eyes, tokenizer_for

MESSAGES = "/v1/messages"
SESSION = {"x-singletree-session": "s", "x-singletree-explain": "1"}
LONG = "The quick brown fox jumps over the lazy dog. " * 8
SMALL, WIDE = (112, 112), (224, 112)


class _Borrowed:
    """An engine that the server of one test uses and does not close."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """The test that started it closes it."""


@asynccontextmanager
async def seeing(engine: Engine, folder: Path) -> AsyncIterator[Served]:
    """The whole server over ``engine``, which runs the checkpoint in ``folder``."""
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(tokenizer)
    eyes, blindness = find_eyes(engine.info(), template, tokenizer)
    assert eyes is not None, blindness
    model: dict[str, Any] = {
        "tokenizer": tokenizer_for(eyes, tokenizer),
        "template": template,
        "family": families.get("plain"),
        "eyes": eyes,
        "layout": template.layout(tokenizer),
        "memory": TurnMemory(2**20),
    }
    window = engine.info().context_window
    async with serving(engine=_Borrowed(engine), context_window=window, **model) as served:
        yield served


def user(*content: Any) -> dict[str, Any]:
    """A message of texts and pictures."""
    blocks = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": "user", "content": blocks}


async def ask(served: Served, *messages: Any) -> Any:
    """The answer to a conversation."""
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": list(messages)}
    reply = await served.client.post(MESSAGES, body, SESSION)
    assert reply.status == 200, reply.json
    return reply


async def count(served: Served, *messages: Any) -> int:
    """What ``count_tokens`` says."""
    body = {"model": MODEL, "messages": list(messages)}
    counted = await served.client.post(f"{MESSAGES}/count_tokens", body)
    assert counted.status == 200, counted.json
    tokens: int = counted.json["input_tokens"]
    return tokens


def length(reply: Any) -> tuple[int, int]:
    """The prompt's length and how much of it was cached."""
    usage = reply.json["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    return usage["input_tokens"] + cached, cached


async def a_picture_is_counted_cached_and_compared(served: Served, granularity: int) -> None:
    """Counts are those that the engine reads, and a changed picture breaks the prompt at its place and not before.

    ``granularity``: of how many tokens a block of the engine's cache has.
    """
    salt = os.urandom(4).hex()
    red, blue = block(picture("red", size=SMALL)), block(picture("blue", size=WIDE))
    before = f"{salt} {LONG}"
    first = user(before, red, f"{LONG}What colour is it?")
    counted = await count(served, first)
    bare = await count(served, user(f"{before}{LONG}What colour is it?"))
    assert counted - bare == picture_length(*SMALL) + 2, "the picture, and the two tokens around it"
    answer = await ask(served, first)
    tokens, _ = length(answer)
    assert tokens == counted

    same = await ask(served, first)
    assert length(same)[0] == tokens
    assert length(same)[1] > tokens - 2 * granularity

    changed = await ask(served, user(before, blue, f"{LONG}What colour is it?"))
    place = int(changed.headers["x-singletree-matched-tokens"])
    whole, cached = length(changed)
    assert place - granularity < cached <= place, "the cache ends at the picture, and not before"
    assert whole == tokens + picture_length(*WIDE) - picture_length(*SMALL)
    assert changed.headers["x-singletree-course"] in ("broken", "first")

    turn = {"role": "assistant", "content": answer.json["content"]}
    went_on = [first, turn, user("And this? ", blue, "?")]
    counted = await count(served, *went_on)
    reply = await ask(served, *went_on)
    assert length(reply)[0] == counted
    assert length(reply)[1] > tokens - 2 * granularity
    assert reply.headers["x-singletree-course"] in ("appended", "back")


async def pictures_of_tool_results_are_counted_and_cached(served: Served, granularity: int) -> None:
    """A loop in which tools return pictures, two at once: each request finds the prompt of the one before."""
    salt = os.urandom(4).hex()
    green, grey = block(picture("green", size=SMALL)), block(picture("grey", size=WIDE))
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [green, grey]}
    first = user(f"{salt} {LONG}")
    messages = [first, {"role": "assistant", "content": [call]}, user(result, "What do they show?")]
    reply = await ask(served, *messages)
    tokens, _ = length(reply)
    assert tokens == await count(served, *messages)
    bare = [*messages[:2], user({**result, "content": []}, "What do they show?")]
    expected = picture_length(*SMALL) + picture_length(*WIDE) + 4
    assert tokens - await count(served, *bare) in range(expected, expected + 3), (
        "and at most a space between them"
    )

    messages += [{"role": "assistant", "content": reply.json["content"]}, user("Once more?", green)]
    again = await ask(served, *messages)
    whole, cached = length(again)
    assert whole == await count(served, *messages)
    assert cached > tokens - 2 * granularity


async def text_that_reads_like_a_placeholder_is_text(served: Served) -> None:
    """A file about chat templates, read beside a picture, is neither a picture nor the end of the session."""
    red = block(picture("red", size=SMALL))
    for forged in ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>"):
        await ask(served, user(red, f"What does {forged} mean?"))


async def wrong_counts_are_refused(engine: Engine) -> None:
    """A prompt with more or fewer placeholders than pictures never reaches the engine, which goes on."""
    head = [IDS["<|im_start|>"], *b"user"]

    def job(places: int, pictures: int) -> GenerationJob:
        ids = [*head, *(id for _ in range(places) for id in (BEFORE, PAD, BEHIND))]
        data = picture("red", size=SMALL)
        key = hashlib.sha256(data).hexdigest()
        sent = tuple(
            PromptPicture(len(head) + 1 + 3 * i, PAD, key, PNG, data, (BEFORE,), (BEHIND,))
            for i in range(pictures)
        )
        return GenerationJob([*ids, *b"?"], Sampling(max_tokens=2, temperature=0.0), "r", pictures=sent)

    for places, pictures in ((2, 1), (1, 2), (0, 1)):
        with pytest.raises(InvalidRequest, match="placeholders"):
            await collect(engine.generate(job(places, pictures)))
    (reported,) = [
        chunk.picture_tokens for chunk in await collect(engine.generate(job(2, 2))) if chunk.picture_tokens
    ]
    assert list(reported) == [picture_length(*SMALL)] * 2
    assert await count_picture_tokens(engine, job(1, 1).pictures[0]) == picture_length(*SMALL)
