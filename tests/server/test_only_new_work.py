"""A turn costs what is new in it: nothing that a conversation had before is encoded, read or serialised again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from singletree.lru import LruCache
from singletree.parsing.parser import parse
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template import chat_template
from singletree.server.turn import round_trip

from .serving import TOKENIZER, Served, serving
from .test_replay import LAYOUT, MODEL_OUTPUT, ask, results

TURNS = 12
LONG = "a line of a file\n" * 200


def _watched(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def watched(*given: Any) -> Any:
        note(*given)
        return function(*given)

    return watched


class Counted:
    """How much work each turn was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clear()
        encoder, added = TOKENIZER._later, TOKENIZER._added
        monkeypatch.setattr(encoder, "encode", _watched(encoder.encode, self._encoded))
        monkeypatch.setattr(added, "guard", _watched(added.guard, self._guarded))
        monkeypatch.setattr(round_trip, "parse", _watched(parse, self._read))
        monkeypatch.setattr(
            chat_template, "printed_list", _watched(chat_template.printed_list, self._printed)
        )

    def _encoded(self, text: str) -> None:
        self.encoded += len(text)

    def _guarded(self, text: str) -> None:
        self.guarded += len(text)

    def _read(self, *_: Any) -> None:
        self.read += 1

    def _printed(self, _: Any) -> None:
        self.tool_lists += 1

    def clear(self) -> None:
        """Before the next turn."""
        self.encoded = self.guarded = self.read = self.tool_lists = 0


async def _turn(served: Served, messages: list[dict[str, Any]], number: int) -> None:
    blocks = await ask(served, messages)
    reported = results(blocks)
    for result in reported["content"]:
        result["content"] = f"{number} {LONG} [[script:a]]"
    messages += [{"role": "assistant", "content": blocks}, reported]


@pytest.mark.parametrize("is_fast", [False, True])
async def test_a_turn_costs_what_is_new(monkeypatch: pytest.MonkeyPatch, *, is_fast: bool) -> None:  # C7 C41
    monkeypatch.setattr(TOKENIZER._later, "is_fast", is_fast)
    monkeypatch.setattr(TOKENIZER, "_encoded", LruCache(2**20))  # Another test may have made it fast.
    first = {"role": "user", "content": f"[[script:a]] Begin. {LONG}"}
    messages = [first]
    counted = Counted(monkeypatch)
    async with serving(
        {"a": MODEL_OUTPUT}, memory=TurnMemory(2**20), layout=LAYOUT, context_window=1 << 20
    ) as served:
        for number in range(TURNS):
            counted.clear()
            await _turn(served, messages, number)
            if not number:
                continue
            new = len(LONG) + 2 * len(MODEL_OUTPUT) + 200
            # With a fast encoder, what came one turn before is encoded again: to keep its ids would take as long.
            assert counted.encoded <= new * (1 + is_fast)
            assert counted.guarded <= new
            assert counted.read <= 2, "the turn that came back first, and no other"
            assert counted.tool_lists == 0
