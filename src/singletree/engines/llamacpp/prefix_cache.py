"""Saves prompts that llama.cpp has read to disk, and restores them after a restart.

llama.cpp's server saves the KV cache of one slot to a file and restores it (``POST /slots/{id}?action=save``). It does
so between two batches, and only when the slot is idle; for a slot at work it waits. So the engine saves when nothing
runs, and restores into a slot that is idle.

llama.cpp moves what idle slots hold into its own memory cache whenever a request starts (``cache_idle_slots``). So
a slot can be saved from the end of its generation until the next request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import aiohttp
import msgspec

from singletree.engines.llamacpp.prefix_files import PrefixFiles, SavedPrefix, common_tokens, pack_ids

_LOG = logging.getLogger(__name__)

LEAST_TOKENS = 512
"""Fewer tokens are neither saved nor restored: to read them takes seconds at most."""

_GROWTH = 2  # A conversation is saved again when it has grown by 1/2, so that all saves are 3 times its size at most.
_QUIET_SECONDS = 0.2
_PAUSE_RATIO = 20.0  # Saving takes at most 1/20 of the time.
_SETTLE_SECONDS = 2.0
_SETTLE_STEP = 0.02
_RECENT_PROMPTS = 64


class _SavedAnswer(msgspec.Struct):
    n_saved: int


class _Slot(msgspec.Struct):
    id: int
    is_processing: bool


@dataclass(frozen=True, slots=True)
class PrefixLimits:
    """What the cache must know of the engine.

    Attributes:
        bytes_per_token: size of a token in the KV cache; None if unknown.
        memory_tokens: how many tokens llama.cpp itself keeps, in slots and in its memory cache.
    """

    bytes_per_token: int | None
    memory_tokens: int


class PrefixCache:
    """Decides what is saved and what is restored, for one running llama.cpp process.

    Attributes:
        lock: held while a state is saved or restored; a request starts only when it is free.

    Args:
        files: the saved states; shared with the process that ran before.
        limits: sizes of the engine.
        url: where llama.cpp answers, without a path.
        running: returns how many requests have been sent to llama.cpp and may still have a slot.
    """

    def __init__(
        self, files: PrefixFiles, limits: PrefixLimits, url: str, running: Callable[[], int]
    ) -> None:
        self.lock = asyncio.Lock()
        self._files = files
        self._limits = limits
        self._url = url
        self._running = running
        self._recent: deque[bytes] = deque(maxlen=_RECENT_PROMPTS)
        self._held: dict[int, tuple[bytes, int]] = {}
        self._saving: asyncio.Task[None] | None = None
        self._next_save = 0.0

    async def restore(self, session: aiohttp.ClientSession, prompt: Sequence[int], room: int) -> int | None:
        """Restore the saved state that is worth most for a prompt. The caller holds ``lock`` and sends the prompt next.

        Args:
            session: reaches llama.cpp.
            prompt: the token ids of the prompt.
            room: how many tokens of the KV cache are free, or reserved for this request.

        Returns:
            The slot that the state is in now, which the request must name; None if nothing was restored.
        """
        packed = pack_ids(prompt)
        slot = None
        if (found := self._files.longest(packed, room)) is not None:
            saved, common = found
            gain = common - self._tokens_in_memory(packed)
            if gain >= LEAST_TOKENS:
                slot = await self._restore(session, saved, gain)
        self._held.clear()
        return slot

    def _tokens_in_memory(self, packed: bytes) -> int:
        """Return how many tokens of a prompt llama.cpp should have in memory."""
        best, left = 0, self._limits.memory_tokens
        for recent in self._recent:
            left -= len(recent) // 4
            if left < 0:
                break
            best = max(best, common_tokens(recent, packed))
        return best

    async def _restore(self, session: aiohttp.ClientSession, saved: SavedPrefix, gain: int) -> int | None:
        try:
            slot = await self._idle_slot(session)
            if slot is None or gain - self._held_tokens(slot) < LEAST_TOKENS:
                return None
            if not await asyncio.to_thread(self._files.is_intact, saved):
                _LOG.warning("a saved prefix was damaged or removed, and is not used: %s", saved.path)
                return None
            began = monotonic()
            status = await self._act(session, slot, "restore", saved.path.name)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            _LOG.warning("a saved prefix could not be restored: %s", error)
            return None
        if isinstance(status, str):
            _LOG.warning("llama.cpp could not restore a saved prefix: %s", status)
            return None
        _LOG.info("restored %d tokens from disk in %.0f ms", saved.tokens, (monotonic() - began) * 1000)
        return slot

    def _held_tokens(self, slot: int) -> int:
        return len(self._held[slot][0]) // 4 if slot in self._held else 0

    async def _idle_slot(self, session: aiohttp.ClientSession) -> int | None:
        """Return the idle slot that holds least; None if there is none.

        A request that was sent may not have its slot yet, and would then wait for what is done to that slot or the
        other way round. So every request that runs must be seen at work first.
        """
        end = monotonic() + _SETTLE_SECONDS
        while monotonic() < end:
            async with session.get(f"{self._url}/slots") as answer:
                slots = msgspec.json.decode(await answer.read(), type=list[_Slot])
            idle = [slot.id for slot in slots if not slot.is_processing]
            if len(slots) - len(idle) >= self._running():
                return min(idle, key=self._held_tokens, default=None)
            await asyncio.sleep(_SETTLE_STEP)
        return None

    async def _act(self, session: aiohttp.ClientSession, slot: int, action: str, name: str) -> bytes | str:
        """Return llama.cpp's answer, or as text the reason for its refusal."""
        url = f"{self._url}/slots/{slot}?action={action}"
        async with session.post(url, json={"filename": name}) as answer:
            body = await answer.read()
            return body if answer.status == 200 else body.decode(errors="replace")

    def turn_ended(
        self,
        session: aiohttp.ClientSession,
        slot: int | None,
        prompt: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        """Note what a slot holds after a generation has ended, and save it soon if that is worthwhile."""
        # The last token of an answer is sampled, and not yet in the cache.
        packed = pack_ids([*prompt, *generated[:-1]])
        self._recent.appendleft(packed)
        if slot is None or not self._is_worthwhile(packed):
            return
        self._held[slot] = packed, len(prompt)
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_when_quiet(session))

    def _is_worthwhile(self, packed: bytes) -> bool:
        tokens = len(packed) // 4
        size = tokens * (self._limits.bytes_per_token or 0)
        found = self._files.longest(packed, float("inf"))
        covered = found[1] if found is not None else 0
        return tokens - covered >= max(LEAST_TOKENS, covered // _GROWTH) and self._files.has_room(size)

    async def _save_when_quiet(self, session: aiohttp.ClientSession) -> None:
        """Save what idle slots hold. If a request has come meanwhile, the end of its turn is the next occasion."""
        await asyncio.sleep(max(_QUIET_SECONDS, self._next_save - monotonic()))
        async with self.lock:
            for slot, (packed, prompt_tokens) in list(self._held.items()):
                if self._running():
                    return
                began = monotonic()
                if self._is_worthwhile(packed):
                    await self._save(session, slot, packed, prompt_tokens)
                self._held.pop(slot, None)
                self._next_save = monotonic() + (monotonic() - began) * _PAUSE_RATIO

    async def _save(
        self, session: aiohttp.ClientSession, slot: int, packed: bytes, prompt_tokens: int
    ) -> None:
        name = self._files.new_part()
        try:
            answer = await self._act(session, slot, "save", name)
            if isinstance(answer, str):
                raise OSError(f"llama.cpp answered {answer}")
            saved = msgspec.json.decode(answer, type=_SavedAnswer).n_saved
            # Where the ids of an answer are not known exactly, those of the prompt are.
            ids = packed if saved * 4 == len(packed) else packed[: min(saved, prompt_tokens) * 4]
            if len(ids) // 4 >= LEAST_TOKENS:
                await asyncio.shield(asyncio.to_thread(self._files.add, name, ids))
                _LOG.info("saved %d tokens to disk", saved)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            _LOG.warning("a prefix could not be saved: %s", error)
        finally:
            self._files.drop_part(name)

    async def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for a save that is due, then end it."""
        if self._saving is not None:
            await asyncio.wait({self._saving}, timeout=seconds)
            self._saving.cancel()
            await asyncio.wait({self._saving})
