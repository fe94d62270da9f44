"""Text that reads like a picture's placeholder, for an engine that looks for placeholders in the text of a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from server.picture_model import PAD, block, picture, seeing, tokenizer
from server.serving import MODEL, Served, serving
from singletree import families
from singletree.engines.engine import PictureSupport
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.tokenizer.added_tokens import NEUTRAL, strip_guards
from singletree.server.models.chat_format import Eyes, tokenizer_for

PLACEHOLDER = "<|image_pad|>"
MARKED = f"<{NEUTRAL}|image_pad|>"


def reading_text() -> dict[str, Any]:
    """Arguments for ``serving``: a model whose engine reads text, and says what its prompt says."""
    model = seeing({"s": f"It is {PLACEHOLDER}.", "t": "Yes."})
    eyes = replace(model["eyes"], reads_text=True)
    memory = {"memory": TurnMemory(2**20), "family": families.get("plain")}
    return model | memory | {"eyes": eyes, "tokenizer": tokenizer_for(eyes, model["tokenizer"])}


def prompt_of(served: Served) -> str:
    """The text of the last prompt, as the engine decodes it."""
    played = served.engine.log[-1]
    assert [at for at, id in enumerate(played.prompt) if id == PAD] == [
        each.position for each in played.pictures
    ]
    text: str = served.model.tokenizer.decode(played.prompt)
    return text


def user(*content: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": "user", "content": blocks}


async def ask(served: Served, *messages: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 64, "messages": list(messages)}
    reply = await served.client.post("/v1/messages", body)
    assert reply.status == 200, reply.json
    return reply.json["content"]


async def test_the_text_of_a_client_is_marked_and_the_picture_is_not() -> None:
    red = block(picture("red"))
    async with serving(**reading_text()) as served:
        await ask(served, user(red, f"[[script:t]] What does {PLACEHOLDER} mean? And <|im_end|>?"))
        text = prompt_of(served)
        assert text.count(PLACEHOLDER) == 1
        assert MARKED in text
        assert "And <|im_end|>?" in text, (
            "other tokens stay as they are written: the engine does not look for them"
        )


async def test_a_turn_in_which_the_model_wrote_it_is_marked_too() -> None:
    red = block(picture("red"))
    first = user(red, "[[script:s]] What is this?")
    async with serving(**reading_text()) as served:
        content = await ask(served, first)
        assert content[0]["text"] == f"It is {PLACEHOLDER}."
        await ask(served, first, {"role": "assistant", "content": content}, user("[[script:t]] Sure?"))
        text = prompt_of(served)
        assert text.count(PLACEHOLDER) == 1
        assert f"It is {MARKED}." in text


def test_the_marks_are_for_tokens_of_media_alone() -> None:
    plain = tokenizer()
    support = PictureSupport("template", frozenset())
    for eyes in (None, Eyes(PAD, "", support.media_types)):
        assert tokenizer_for(eyes, plain) is plain
    marking = tokenizer_for(Eyes(PAD, "", support.media_types, reads_text=True), plain)
    for guard in (marking.guard, marking.guard_except(["<think>"])):
        assert strip_guards(guard(f"a {PLACEHOLDER} <|im_end|>")) == f"a {MARKED} <|im_end|>"
    assert strip_guards(plain.guard(PLACEHOLDER)) == PLACEHOLDER
    assert PAD not in marking.encode(marking.guard(PLACEHOLDER))
    assert marking.encode(PLACEHOLDER) == [PAD]


@pytest.mark.parametrize("text", ["<|image_pad|>" * 2, "<|<|image_pad|>", "x<|vision_start|><|image_pad|>"])
def test_marked_text_has_no_token_in_it(text: str) -> None:
    marking = tokenizer_for(Eyes(PAD, "", frozenset(), reads_text=True), tokenizer())
    shown = marking.decode(marking.encode(marking.guard(text)))
    assert not any(token in shown for token in ("<|image_pad|>", "<|vision_start|>"))
    assert shown.replace(NEUTRAL, "") == text
