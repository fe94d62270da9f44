"""What further harnesses make of a turn before they send it back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from uuid import uuid4

from singletree.checking.returned_turns import (
    Mutation,
    ReturnedBlock,
    TurnProtocol,
    WireBody,
    as_given,
    calls_last,
    compact_arguments,
    joined_thoughts,
    no_thoughts,
    rewritten,
    trimmed,
)

MODEL = "model"
"""The name of the model in requests; a caller puts another one in its place."""


def request_of(
    protocol: TurnProtocol, asked: str, turns: Sequence[WireBody], tools: Sequence[tuple[str, str, WireBody]]
) -> WireBody:
    """A request with one question and the turns since."""
    return {
        "model": MODEL,
        protocol.history: [{"role": "user", "content": asked}, *turns],
        "tools": [protocol.tool(*tool) for tool in tools],
        **protocol.settings,
    }


def sorted_arguments(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Arguments parsed and written again with sorted keys."""
    return rewritten(blocks, sort_keys=True)


def plain_ids(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Ids of letters and digits only."""
    return [replace(block, id="".join(filter(str.isalnum, block.id))) for block in blocks]


MUTATIONS: tuple[Mutation, ...] = (
    as_given,
    calls_last,
    trimmed,
    joined_thoughts,
    no_thoughts,
    compact_arguments,
    sorted_arguments,
    plain_ids,
)


def written_by_javascript(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Arguments as JavaScript writes them: ``-0.0`` is ``0``, ``3.0`` is ``3``."""
    return [replace(b, text=b.text.replace("-0.0", "0").replace("3.0", "3")) for b in blocks]


def first_thought(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """The first thought only (Copilot CLI)."""
    return _with_thoughts(blocks, _thoughts(blocks)[:1])


def last_thought(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """The last thought only (Grok Build, Haystack)."""
    return _with_thoughts(blocks, _thoughts(blocks)[-1:])


def no_words(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """``content: null`` where there are calls (CrewAI, Semantic Kernel, Agno)."""
    return [block for block in blocks if block.kind != "text"] if _calls(blocks) else blocks


def calls_alone(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Neither thoughts nor words where there are calls."""
    return _calls(blocks) or blocks


def thoughts_as_words(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Reasoning given back as text (AutoGen)."""
    return [replace(block, kind="text" if block.kind == "thought" else block.kind) for block in blocks]


def echoed_thoughts(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Each thought once more as text (Copilot CLI on Responses)."""
    return [
        each
        for block in blocks
        for each in ([block, replace(block, kind="text")] if block.kind == "thought" else [block])
    ]


def tagged_thoughts(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Reasoning in the content, between tags and with line breaks of the harness's own."""
    return [
        ReturnedBlock("text", f"<think>\n\n{block.text}\n\n</think>\n\n")
        if block.kind == "thought"
        else block
        for block in blocks
    ]


def words_and_calls_apart(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Words and calls as two messages (goose, Open Interpreter)."""
    calls, rest = _calls(blocks), [block for block in blocks if block.kind != "call"]
    return [*rest, ReturnedBlock("end"), *calls] if calls and rest else blocks


def a_message_each(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Each block as a message of its own."""
    return [each for block in blocks for each in (block, ReturnedBlock("end"))][:-1]


def calls_one_by_one(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """A message for each call, with its result behind it."""
    calls = _calls(blocks)
    rest = [block for block in blocks if block.kind != "call"]
    return (
        [*rest, *[each for call in calls for each in (call, ReturnedBlock("results"))][:-1]]
        if calls
        else blocks
    )


def one_call(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """The second call left out, and its result (gptme)."""
    return [block for block in blocks if block.kind != "call" or block in _calls(blocks)[:1]]


def numbered_ids(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Calls numbered in each turn, without thoughts (Open Interpreter)."""
    calls = _calls(blocks)
    return no_thoughts([replace(b, id=f"call_{calls.index(b)}") if b in calls else b for b in blocks])


def nine_characters(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Ids as gateways to Mistral's API make them, without thoughts."""
    return no_thoughts(_with_ids(blocks, lambda id: sha256(id.encode()).hexdigest()[:9]))


def cut_ids(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """The beginning of each id, which several calls share, without thoughts."""
    return no_thoughts(_with_ids(blocks, lambda id: id[:9]))


def new_ids(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Random ids, without thoughts (LiteLLM and other gateways)."""
    return no_thoughts(_with_ids(blocks, lambda _: f"call_{uuid4().hex[:24]}"))


def new_ids_one_by_one(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Random ids, and a message for each call."""
    return calls_one_by_one(new_ids(blocks))


def one_new_id(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """Random ids, and only the first call."""
    return one_call(new_ids(blocks))


RENAMING: tuple[Mutation, ...] = (
    numbered_ids,
    nine_characters,
    cut_ids,
    new_ids,
    new_ids_one_by_one,
    one_new_id,
)
"""What clients do that give calls other ids, and return no reasoning."""

HABITS: tuple[Mutation, ...] = (
    *RENAMING,
    written_by_javascript,
    first_thought,
    last_thought,
    no_words,
    calls_alone,
    thoughts_as_words,
    echoed_thoughts,
    tagged_thoughts,
    words_and_calls_apart,
    a_message_each,
    calls_one_by_one,
    one_call,
)
"""What further clients do: they give a turn back in part, or in several messages."""


def _thoughts(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return [block for block in blocks if block.kind == "thought"]


def _calls(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return [block for block in blocks if block.kind == "call"]


def _with_thoughts(blocks: list[ReturnedBlock], kept: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return [block for block in blocks if block.kind != "thought" or any(block is each for each in kept)]


def _with_ids(blocks: list[ReturnedBlock], change: Callable[[str], str]) -> list[ReturnedBlock]:
    return [replace(block, id=change(block.id)) if block.kind == "call" else block for block in blocks]


EDIT = "by hand"


def edited(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """A turn that somebody changed: it is to come back as changed."""
    last = blocks[-1]
    if last.kind != "call":
        return [*blocks[:-1], replace(last, text=f"{last.text} {EDIT}")]
    arguments = json.loads(last.text or "{}") | {"note": EDIT}
    return [*blocks[:-1], replace(last, text=json.dumps(arguments))]
