"""A turn comes back by its tokens on a server that has never seen it, from the capsules that its client carries."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from singletree import families
from singletree.conversation import Conversation, Reasoning, Text, Turn
from singletree.events import Event, Markup, ReasoningDelta
from singletree.parsing.parser import parse
from singletree.prompts.replay.splicing import splice
from singletree.prompts.replay.turn_keys import HistoryDigests
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt
from singletree.prompts.tokenizer.encode_prompt import TextSpan
from singletree.server.capsules import PREFIX
from singletree.server.ids import TurnCallIds
from singletree.server.turn.decoder import TurnDecoder
from singletree.server.turn.recorder import TurnRecorder
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .carrying import (
    INTERLEAVED,
    LAYOUT,
    MODEL_OUTPUT,
    MUTATIONS,
    ONE,
    PATHS,
    THOUGHT,
    Client,
    Items,
    capsules,
    carried,
    kept_in,
    last_prompt,
    moved,
    server,
    without_words,
)
from .serving import TOKENIZER, model


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("kind", MODEL_OUTPUT)
async def test_a_turn_that_was_not_streamed_comes_back_whole(
    path: str, mutate: Callable[[Items], Items], kind: str
) -> None:  # C3 C34
    tokens, kept, _ = await moved(path, MODEL_OUTPUT[kind], mutate, stream=False)
    assert kept == tokens


def without_text(items: Items) -> Items:
    """``content: null``."""
    return [item for item in items if item["type"] not in ("text", "message")]


def echoing(items: Items) -> Items:
    """Each thought once more as words, as Copilot CLI gives them back."""
    echoes: Items = []
    for item in items:
        text = item.get("thinking") or "".join(part["text"] for part in item.get("content") or ())
        echo = (
            {"type": "text", "text": text}
            if item["type"] == "thinking"
            else {"type": "message", "role": "assistant", "content": text}
        )
        echoes += [item, echo] if item["type"] in ("thinking", "reasoning") and text else [item]
    return echoes


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mutate", [without_text, echoing], ids=lambda m: m.__name__)
@pytest.mark.parametrize("kind", MODEL_OUTPUT)
async def test_a_sealed_turn_that_comes_back_in_part_is_whole(
    path: str, mutate: Callable[[Items], Items], kind: str
) -> None:  # C3 C34
    tokens, kept, _ = await moved(path, MODEL_OUTPUT[kind], mutate, stream=False)
    assert kept == tokens


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("kind", MODEL_OUTPUT)
@pytest.mark.parametrize("chunk", [1, 7, 10_000])
async def test_a_streamed_turn_comes_back_whole(
    path: str, mutate: Callable[[Items], Items], kind: str, chunk: int
) -> None:  # C3 C34
    """However many tokens the engine gives at once, a capsule ends with its thought, and the last with the turn."""
    tokens, kept, prompt = await moved(path, Script(MODEL_OUTPUT[kind], chunk=chunk), mutate, stream=True)
    assert kept == tokens, prompt


async def test_the_rest_of_a_streamed_turn_is_whole_where_its_spelling_comes_back() -> None:
    """Codex gives arguments back as they were: then nothing at all is lost."""
    as_printed = ONE.replace('get_weather",  ', 'get_weather", ')
    tokens, kept, _ = await moved("/v1/responses", as_printed, without_words, stream=True)
    assert kept == tokens


@pytest.mark.parametrize("path", PATHS)
async def test_while_the_memory_lives_a_sealed_turn_comes_back_whole(path: str) -> None:
    client = Client(path, "[[script:a,b]] How is it?", stream=True)
    async with server({"a": INTERLEAVED, "b": "Fine."}) as served:
        items = await client.ask(served)
        before = last_prompt(served)
        client.take(without_words(items))
        await client.ask(served)
        generated = TOKENIZER.encode(INTERLEAVED)
        assert kept_in(last_prompt(served), before, generated) == len(generated)


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_session_goes_from_replica_to_replica(path: str) -> None:
    scripts: dict[str, str | Script] = {
        "a": ONE,
        "b": INTERLEAVED,
        "c": ONE.replace("check", "look"),
        "d": "Fine.",
    }
    client = Client(path, "[[script:a,b,c,d]] How is it?", stream=False)
    prompts = []
    for _ in range(4):
        async with server(scripts) as served:
            client.take(without_words(await client.ask(served)))
            prompts.append(last_prompt(served))
    for before, after, output in zip(prompts, prompts[1:], scripts.values(), strict=False):
        generated = TOKENIZER.encode(str(output))
        assert kept_in(after, before, generated) == len(generated)


@pytest.mark.parametrize("path", PATHS)
async def test_a_capsule_leaves_before_its_thought_is_over_for_the_client(path: str) -> None:
    client = Client(path, "[[script:a]] How is it?", stream=True)
    async with server({"a": INTERLEAVED}) as served:
        items = await client.ask(served)
    assert [bool(carried([item])) for item in items] == [True, False, False, True, False, True]
    assert all(c.startswith(PREFIX) for c in carried(items))


async def test_hidden_thoughts_carry_their_capsule() -> None:
    client = Client("/v1/messages", "[[script:a,b]] How is it?", stream=True)
    async with server({"a": ONE, "b": "Fine."}) as served:
        items = await client.ask(served, thinking={"type": "adaptive", "display": "omitted"})
    assert items[0]["thinking"] == ""
    client.take(items)
    async with server({"a": ONE, "b": "Fine."}) as served:
        await client.ask(served)
        assert THOUGHT in TOKENIZER.decode(last_prompt(served))


async def test_a_turn_that_a_stop_string_cut_is_sealed_as_far_as_it_was_written() -> None:
    client = Client("/v1/messages", "[[script:a]] How is it?", stream=False)
    async with server({"a": ONE}) as served:
        behind = await client.ask(served, stop_sequences=["check"])
    span = capsules().open(carried(behind)[0])
    assert span is not None
    assert TOKENIZER.decode(span.token_ids) == THOUGHT
    assert not span.is_last


@pytest.mark.parametrize("path", PATHS)
async def test_a_sealed_thought_of_an_earlier_loop_comes_back_from_the_memory_too(path: str) -> None:
    client = Client(path, "[[script:a,b]] How is it?", stream=True)
    async with server({"a": ONE, "b": "Fine."}) as served:
        client.take(without_words(await client.ask(served)))
        before = last_prompt(served)
        client.messages.append({"role": "user", "content": "And now?"})
        await client.ask(served)
        generated = TOKENIZER.encode(ONE)
        assert kept_in(last_prompt(served), before, generated) == len(generated)


@pytest.mark.parametrize(
    ("ends", "kept"), [("</think>", "\n\nYes."), ("</think>\n\n", "Yes."), ("</think>\n", "\nYes.")]
)
def test_the_white_space_behind_a_beginning_is_there_once(ends: str, kept: str) -> None:
    """A token may hold the closer and what follows it."""
    turn = Turn("assistant", (Reasoning("\nHm.\n"),))
    known = GeneratedTurn(turn, GenerationPrompt("<|im_start|>assistant\n"), array("I", [7]), ending=ends)
    text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n"
    generated = (Turn("user", (Text("x"),)), replace(turn, parts=(*turn.parts, Text("Yes."))))
    assert LAYOUT is not None

    def read(text: str, opened: str) -> Turn:
        return parse(families.get("qwen3"), text, (), opened)

    head, token_ids, rest = splice(text, generated, {1: known}, LAYOUT, read).pieces
    assert token_ids == array("I", [7])
    assert isinstance(head, TextSpan)
    assert isinstance(rest, TextSpan)
    assert rest.text_in(text) == f"{kept}<|im_end|>\n"
    assert head.text_in(text).endswith("assistant\n")


class GivenEvents:
    """A parser that makes one event of each token, whatever it is."""

    in_reasoning = True

    def __init__(self, events: list[Event]) -> None:
        self._events = iter(events)

    def continues(self, text: str) -> bool:
        return False

    def feed(self, text: str, special: bool = False) -> list[Event]:
        return [next(self._events)]

    def close(self) -> list[Event]:
        return []


def test_spans_are_counted_as_clients_see_them() -> None:
    """A thought without a word is none, to the encoders as to the recorder."""
    pieces: list[Event] = [
        ReasoningDelta("", ""),
        Markup("</think>"),
        ReasoningDelta("Hm.", "Hm."),
        Markup("</think>"),
    ]
    decoder = TurnDecoder(GivenEvents(pieces), TOKENIZER.new_detokenizer(), TurnCallIds(Conversation(())))
    recorder = TurnRecorder(
        model(EngineByHand(), capsules=capsules()),
        GenerationPrompt(),
        [],
        HistoryDigests(()),
        TurnCallIds(Conversation(())),
        (),
        decoder.turn,
    )
    for token_id in range(len(pieces)):
        decoder.turn.token_ids.append(token_id)
        decoder.feed([token_id])
    span = capsules().open(recorder.seal(0))
    assert span is not None
    assert list(span.token_ids) == [0, 1, 2, 3]
    assert recorder.seal(1) == ""
