"""Saves, restores and erases what a slot of llama.cpp holds (``POST /slots/{id}?action=…``).

llama.cpp does so between two batches, when the slot is idle; for a slot at work it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec


class _SavedAnswer(msgspec.Struct):
    n_saved: int
    n_written: int = 0


@dataclass(frozen=True, slots=True)
class SavedState:
    """What was saved: the number of its tokens, and the size of its file in bytes."""

    tokens: int
    size: int


class SlotActions:
    """The actions of one running llama.cpp process. All raise OSError if llama.cpp refuses or has ended.

    Args:
        session: reaches llama.cpp.
        url: where it answers, without a path.
        folder: the only folder whose files it saves and restores.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, folder: Path) -> None:
        self.folder = folder
        self._session = session
        self._url = url

    async def save(self, slot: int, name: str) -> SavedState:
        """Save the state of a slot as the file ``name``."""
        body = await self._act(slot, "save", name)
        try:
            answer = msgspec.json.decode(body, type=_SavedAnswer)
        except msgspec.DecodeError as error:
            raise OSError(f"llama.cpp sent a malformed answer: {error}") from error
        return SavedState(answer.n_saved, answer.n_written)

    async def restore(self, slot: int, name: str) -> None:
        """Put the state that was saved as ``name`` into a slot. If it fails, the slot is empty."""
        await self._act(slot, "restore", name)

    async def erase(self, slot: int) -> None:
        """Make a slot empty."""
        await self._act(slot, "erase")

    async def _act(self, slot: int, action: str, name: str = "") -> bytes:
        body = {"filename": name} if name else {}
        try:
            async with self._session.post(f"{self._url}/slots/{slot}?action={action}", json=body) as answer:
                content = await answer.read()
        except aiohttp.ClientError as error:
            raise OSError(f"the connection broke ({type(error).__name__})") from error
        if answer.status != 200:
            raise OSError(f"llama.cpp answered {content.decode(errors='replace')}")
        return content
