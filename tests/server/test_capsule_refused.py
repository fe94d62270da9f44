"""What is no capsule, or not of this turn, or contradicts what came beside it, brings nothing in and breaks nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, repeat

import pytest

from singletree.server.capsules import Capsules
from singletree.testing.scripts import Script

from .carrying import (
    INTERLEAVED,
    ONE,
    PATHS,
    Client,
    Items,
    capsules,
    carried,
    last_prompt,
    moved,
    server,
    without_words,
)
from .serving import MODEL, TOKENIZER


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "sealing",
    [capsules(b"o" * 32), capsules(of=b"another model"), capsules(b"o" * 32, strict=True)],
    ids=["other key", "other model", "other key, strict"],
)
async def test_what_another_server_sealed_is_ignored(path: str, sealing: Capsules) -> None:  # C34 C37
    _, _, prompt = await moved(path, ONE, without_words, stream=True, sealing=sealing)
    assert "I need the weather." not in prompt
    assert "Let me check." in prompt


FOREIGN = ["EqQBCkgIARABGAIiQL0Zx8l3", "erased", "gAAAAABo-_0=", "\ud83d\ude00", "singletree1.x"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("foreign", FOREIGN)
async def test_no_carried_word_makes_a_request_fail(path: str, foreign: str) -> None:  # C34 C37
    client = Client(path, "[[script:a,b]] How is it?", stream=False)
    async with server({"a": ONE, "b": "Fine."}) as served:
        items = [
            item | {name: foreign for name in ("signature", "encrypted_content") if name in item}
            for item in await client.ask(served)
        ]
    client.take(items)
    async with server({"a": ONE, "b": "Fine."}) as served:
        await client.ask(served)
        assert "I need the weather." in TOKENIZER.decode(last_prompt(served))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strict", [False, True])
async def test_a_changed_capsule_is_ignored_or_refused(path: str, strict: bool) -> None:  # C34
    client = Client(path, "[[script:a,b]] How is it?", stream=False)
    async with server({"a": ONE, "b": "Fine."}) as served:
        items = await client.ask(served)
    [whole] = carried(items)
    changed = whole[:60] + ("A" if whole[60] != "A" else "B") + whole[61:]
    field = "signature" if client.is_messages else "encrypted_content"
    client.take(without_words([i | {field: changed} if field in i else i for i in items]))
    async with server({"a": ONE, "b": "Fine."}, capsules(strict=strict)) as served:
        if not strict:
            await client.ask(served)
            assert "I need the weather." not in TOKENIZER.decode(last_prompt(served))
            return
        given = {
            "model": MODEL,
            "max_tokens": 9,
            "messages" if client.is_messages else "input": client.messages,
        }
        refused = await served.client.post(path, given)
    assert refused.status == 400
    error = refused.json["error"]
    assert error["type"] == "invalid_request_error"
    assert f"invalid {field}" in error["message"]
    assert "unchanged, or leave it out" in error["message"]


def reworded(items: Items) -> Items:
    """The user changed what the model thought."""
    return json.loads(json.dumps(items).replace("the weather", "the time"))  # type: ignore[no-any-return]


def retold(items: Items) -> Items:
    """And here what it said, in a turn whose thought came back sealed only."""
    return json.loads(json.dumps(without_words(items)).replace("Let me check", "No"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", PATHS)
async def test_an_edited_turn_stays_edited(path: str) -> None:
    _, _, prompt = await moved(path, ONE, reworded, stream=False)
    assert "I need the time." in prompt
    assert "I need the weather." not in prompt
    _, _, prompt = await moved(path, ONE, retold, stream=False)
    assert "No." in prompt
    assert "Let me check." not in prompt


@pytest.mark.parametrize("path", PATHS)
async def test_a_capsule_of_another_turn_brings_nothing_in_that_was_not_written(path: str) -> None:
    """Text and calls of the turn to which it was glued contradict it."""
    client = Client(path, "[[script:a,b]] How is it?", stream=False)
    scripts: dict[str, str | Script] = {
        "a": ONE,
        "b": ONE.replace("Let me check", "Wait").replace("need", "want"),
    }
    async with server(scripts) as served:
        first = await client.ask(served)
        client.take(first)
        second = await client.ask(served)
    [glued] = carried(first)
    client.take(
        without_words([i | {k: glued for k in ("signature", "encrypted_content") if k in i} for i in second])
    )
    async with server({"a": ONE, "b": "Fine."}) as served:
        await client.ask(served)
        turn = (
            TOKENIZER.decode(last_prompt(served))
            .rpartition("Sunny.")[0]
            .rpartition("<|im_start|>assistant")[2]
        )
    assert "Wait." in turn
    assert "I need the weather." not in turn


@pytest.mark.parametrize("path", PATHS)
async def test_a_chain_with_a_gap_goes_as_far_as_it_holds(path: str) -> None:
    client = Client(path, "[[script:a,b]] How is it?", stream=True)
    async with server({"a": INTERLEAVED, "b": "Fine."}) as served:
        items = await client.ask(served)
    numbers = count()
    fields = ("signature", "encrypted_content")
    client.take([i | {k: "" for k in fields if k in i and next(numbers)} for i in items])
    async with server({"a": INTERLEAVED, "b": "Fine."}) as served:
        await client.ask(served)
        prompt = TOKENIZER.decode(last_prompt(served))
    assert "I need the weather." in prompt
    assert "Now the other." in prompt


async def test_without_capsules_signatures_are_empty() -> None:
    for path in PATHS:
        client = Client(path, "[[script:a]] How is it?", stream=False)
        async with server({"a": ONE}, capsules=None) as served:
            assert carried(await client.ask(served)) == []


def only(numbers: set[int], items: Items, others: Iterator[str]) -> Items:
    """``items`` without words of reasoning, and other capsules in all but those with these numbers."""
    carriers = count()
    return [
        item
        | {
            k: next(others)
            for k in ("signature", "encrypted_content")
            if item.get(k) and next(carriers) not in numbers
        }
        for item in without_words(items)
    ]


@pytest.mark.parametrize("path", PATHS)
async def test_what_has_no_beginning_is_no_turn(path: str) -> None:
    client = Client(path, "[[script:a,b]] How is it?", stream=True)
    async with server({"a": INTERLEAVED, "b": "Fine."}) as served:
        items = await client.ask(served)
    client.take(only({1}, items, repeat("")))
    async with server({"a": INTERLEAVED, "b": "Fine."}) as served:
        await client.ask(served)
        prompt = TOKENIZER.decode(last_prompt(served))
    assert "Now the other." not in prompt
    assert "Checking." in prompt


@pytest.mark.parametrize("path", PATHS)
async def test_the_spans_of_two_turns_are_no_chain(path: str) -> None:
    scripts: dict[str, str | Script] = {
        "a": INTERLEAVED,
        "b": INTERLEAVED.replace("Now the other", "This is hers"),
    }
    client = Client(path, "[[script:a,b]] How is it?", stream=True)
    async with server(scripts) as served:
        mine = await client.ask(served)
        client.take(mine)
        others = carried(await client.ask(served))
    client.messages = client.messages[:1]
    client.take(only({0}, mine, iter(others[1:])))
    async with server(scripts) as served:
        await client.ask(served)
        prompt = TOKENIZER.decode(last_prompt(served))
    assert "I need the weather." in prompt
    assert "This is hers." not in prompt


def gone_on(items: Items) -> Items:
    """The user wrote something behind what the model said."""
    return json.loads(json.dumps(items).replace("Let me check.", "Let me check. Or not."))  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_added_to_a_turn_stays(path: str, stream: bool) -> None:
    _, _, prompt = await moved(path, ONE, gone_on, stream=stream)
    assert "Let me check. Or not." in prompt
    assert "I need the weather." in prompt
