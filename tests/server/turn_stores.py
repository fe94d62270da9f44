"""Turns for the tests of shared turn stores."""

from __future__ import annotations

from array import array

from singletree.conversation import Reasoning, Text, ToolCall, Turn
from singletree.prompts.replay.generation_prompt import GenerationPrompt
from singletree.prompts.replay.history_digests import HistoryDigests
from singletree.prompts.replay.turn_memory import GeneratedTurn


def generated(text: str, *, call: str = "", digest: str = "", reasoning: str = "Hm.") -> GeneratedTurn:
    """Return a turn that was generated: a text, or a call with a server's id."""
    parts = (Reasoning(reasoning), ToolCall("get", '{"a":1}', call) if call else Text(text))
    opening = GenerationPrompt("<A>", "<think>\n", "<E><A><think>\n", "0")
    return GeneratedTurn(Turn("assistant", parts), opening, array("I", list(text.encode())), digest)


def conversation(*turns: GeneratedTurn) -> tuple[list[Turn], HistoryDigests]:
    """Return a conversation with these turns as a client sends it back, and the digests of its histories."""
    came: list[Turn] = []
    for each in turns:
        came += [Turn("user", (Text("Go on."),)), each.turn]
    return came, HistoryDigests(came)
