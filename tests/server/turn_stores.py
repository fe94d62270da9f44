"""Turns for the tests of turn stores, and the memory of a process with a file of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from singletree.conversation import Reasoning, Text, ToolCall, Turn
from singletree.prompts.replay.turn_keys import HistoryDigests
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt
from singletree.turn_stores.store import SqliteTurnStore
from singletree.turn_stores.stored_memory import StoredTurnMemory

from .carrying import capsules


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


def memory_in(path: Path, limit: int = 2**20, owners: Sequence[str] = (), **sealing: Any) -> StoredTurnMemory:
    """Return the memory of a server with one process and ``--turn-memory-path``."""
    store = SqliteTurnStore(path, limit)
    memory = StoredTurnMemory(limit, store, capsules(**sealing))
    with closing(store.most_needed()) as turns:
        memory.load(turns, owners)
    return memory
