"""A turn that a stop string cut comes back by its tokens, as far as its text was kept."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from singletree import families
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.turn.recorder import tokens_of_text
from singletree.testing import byte_model
from singletree.testing.scripted_engine import ScriptedEngine

from .forging import speech, vocabulary
from .serving import MODEL, Served, serving

CHAT = "/v1/chat/completions"
THOUGHT = "<think>\nI look  first.\n</think>\n\n"
TOKENS = {f"<|im_{word}|>": True for word in ("start", "end")} | dict.fromkeys(
    ("<think>", "</think>", "\nObservation", " it.\n", "say it"), False
)
TOKENIZER = vocabulary(TOKENS, "<|im_end|>")


async def ask(served: Served, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    reply = await served.client.post(CHAT, {"model": MODEL, "messages": messages, **more})
    assert reply.status == 200, reply.body
    return dict(reply.json["choices"][0])


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("Action: ls\nObservation: none", "\nObservation:", "Action: ls"),
        ("Action: ls\nObservation: none", "Observation:", "Action: ls\n"),
        ("Read it.\nObserve", "\nOb", "Read it."),
        ("Café 👍 END", " END", "Café 👍"),
    ],
)
async def test_the_text_before_the_stop_string_keeps_its_tokens(
    text: str, stop: str, kept: str, carries: bool
) -> None:
    """ReAct agents and smolagents; where the text ends inside a token, that token alone is written anew."""
    spoken = speech(TOKENIZER, byte_model.CHAT_TEMPLATE, families.get("qwen3"))
    output = THOUGHT + text
    engine = ScriptedEngine(
        TOKENIZER.encode,
        TOKENIZER.decode,
        {},
        end_token_id=TOKENIZER.added_tokens["<|im_end|>"],
        default=output,
    )
    given: dict[str, Any] = {"tokenizer": TOKENIZER, "template": spoken.template, "layout": spoken.layout}
    async with serving(engine=engine, memory=TurnMemory(2**20), **given) as served:
        first = {"role": "user", "content": "How is it?"}
        choice = await ask(served, [first], stop=[stop])
        message = (
            choice["message"] if carries else {"role": "assistant", "content": choice["message"]["content"]}
        )
        assert (choice["message"]["content"] or "").strip() == kept.strip()
        await ask(served, [first, message, {"role": "user", "content": "Observation: none"}])
        one, two = (list(record.prompt_token_ids) for record in served.engine.log)
    generated, text = TOKENIZER.encode(output), THOUGHT + kept
    sizes = range(len(generated), 0, -1)
    whole = next(size for size in sizes if text.startswith(TOKENIZER.decode(generated[:size])))
    assert two[: len(one) + whole] == one + generated[:whole]
    assert TOKENIZER.decode(two).startswith(f"{TOKENIZER.decode(one)}{text}<|im_end|>")


def test_a_token_that_the_end_cuts_is_encoded_anew() -> None:
    token_ids = array("I", TOKENIZER.encode("I say it"))
    assert tokens_of_text(TOKENIZER, token_ids, "I say it") == token_ids
    assert tokens_of_text(TOKENIZER, token_ids, "I ") == token_ids[:-1]
    cut = tokens_of_text(TOKENIZER, token_ids, "I say")
    assert cut == array("I", [*token_ids[:-1], *TOKENIZER.encode("say")])
    assert tokens_of_text(TOKENIZER, token_ids, "I see") is None
    assert tokens_of_text(TOKENIZER, token_ids, "") is None
