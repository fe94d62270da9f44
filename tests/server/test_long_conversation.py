"""A conversation that is longer than the turn memory: what is kept of it is its head."""

from __future__ import annotations

from itertools import pairwise

import pytest

from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.testing.scripts import Script

from .serving import TOKENIZER, serving
from .test_replay import LAYOUT, PATHS, Session, prompts

TURNS = 12
CALL = '<tool_call>\n{"name": "get_weather",  "arguments": {"city":"Paris %d",   "days":3}}\n</tool_call>'


def output(number: int) -> str:
    return f"<think>\nThought {number}.\n</think>\n\nLet me check {number}.\n{CALL % number}"


async def in_place(path: str, limit: int) -> tuple[list[bool], int]:
    """Play a tool loop. Return of each turn whether the last prompt holds its tokens, and all before them; and the
    size of the turns in memory, in bytes.
    """
    names = [f"s{number}" for number in range(TURNS)]
    scripts: dict[str, str | Script] = {name: output(number) for number, name in enumerate(names)}
    memory = TurnMemory(limit)
    async with serving({**scripts, "end": "Fine."}, memory=memory, layout=LAYOUT) as served:
        session = Session(served, path)
        session.ask(f"[[script:{','.join(names)},end]] How is it?")
        for _ in names:
            await session.go_on()
            assert memory.bytes <= limit
        await session.send(session.messages)
        written_prompts = prompts(served)
    for before, after in pairwise(written_prompts):
        shared = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        assert shared == len(before), "no prompt breaks inside the one before"
    whole = [
        [*prompt, *TOKENIZER.encode(output(number))] for number, prompt in enumerate(written_prompts[:TURNS])
    ]
    return [written_prompts[-1][: len(each)] == each for each in whole], memory.bytes


@pytest.mark.parametrize("path", PATHS)
async def test_the_head_of_a_long_conversation_stays(path: str) -> None:
    """With room for half of the turns, the first half stands by its tokens; none of them is lost later."""
    enough = 2**20
    whole, memory_of_all = await in_place(path, enough)
    assert all(whole)
    half, _ = await in_place(path, memory_of_all // 2)
    kept = half.index(False)
    assert 0.3 * TURNS <= kept <= 0.8 * TURNS
    assert half == [True] * kept + [False] * (TURNS - kept)
