"""Saves what llama.cpp has read to disk after each turn, and restores it after a restart.

llama.cpp copies a slot between two batches, into a folder in memory. A thread writes the copy to the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from pathlib import Path
from time import monotonic

from singletree.llamacpp.admission import Admission
from singletree.llamacpp.parking import MEMORY_FOLDER
from singletree.llamacpp.prefix_files import PrefixFiles
from singletree.llamacpp.process import LlamaProcess
from singletree.llamacpp.slots import HeldState, SlotActions
from singletree.llamacpp.state_files import StateSeal, read_state_origin

_LOG = logging.getLogger(__name__)

LEAST_TOKENS = 512
"""Fewer tokens are neither saved nor restored: to read them takes seconds at most."""

LEAST_NEW_TOKENS = 64
"""A state that is on the disk but for fewer tokens is not saved again."""

# Each save writes the whole state, so a session of N turns writes N/2 times its size. That much is written at once,
# and no more than that on average: the life of a disk is counted in bytes.
_BYTES_PER_SECOND = 20e6
_BURST_SECONDS = 60.0

_LONGEST_DELAY = 10.0  # A server that is never idle saves all the same; other generations wait for the copy.
_LOOK_SECONDS = 0.2


class PrefixFolder:
    """The folder of ``--prefix-cache-path``, as the processes of one engine use it one after the other.

    Raises BadConfiguration for a key that is too short.
    """

    def __init__(self, folder: Path, limit: int, key: str | None) -> None:
        self.folder = folder
        self._limit = limit
        self._seal = StateSeal(key) if key else None
        self._files: PrefixFiles | None = None

    async def open(
        self,
        model: Path,
        process: LlamaProcess,
        actions: SlotActions,
        token_bytes: int | None,
        admission: Admission,
    ) -> PrefixCache | None:
        """Return the cache for a process that has started; None, with a warning, if it cannot be used."""
        try:
            if self._seal is not None and MEMORY_FOLDER not in actions.folder.parents:
                raise OSError(f"llama.cpp reads plain files, and {MEMORY_FOLDER} has no room for them")
            if self._files is None:
                settings = (model, process.version, process.state_settings)
                origin = await asyncio.to_thread(read_state_origin, *settings)
                opening = (self.folder, self._limit, origin, self._seal)
                self._files = await asyncio.to_thread(PrefixFiles, *opening)
        except OSError as error:
            _LOG.warning("saved states in %s cannot be used: %s", self.folder, error)
            return None
        return PrefixCache(self._files, actions, token_bytes, admission)


class PrefixCache:
    """Decides what is saved and what is restored, for one running llama.cpp process.

    Args:
        files: the saved states; shared with the process that ran before.
        bytes_per_token: size of a token in the KV cache; None if unknown.
        admission: lends the slots whose state is saved.
    """

    def __init__(
        self, files: PrefixFiles, actions: SlotActions, bytes_per_token: int | None, admission: Admission
    ) -> None:
        self._files = files
        self._actions = actions
        self._bytes_per_token = bytes_per_token or 0
        self._admission = admission
        self._due: dict[int, float] = {}
        self._turn = asyncio.Event()
        self._saving: asyncio.Task[None] | None = None
        self._writing: set[asyncio.Task[None]] = set()
        self._next_save = 0.0
        self._closing = False

    def known(self, packed_ids: bytes) -> int:
        found = self._files.longest(packed_ids, float("inf"))
        return found[1] if found is not None else 0

    async def restore(self, slot: int, packed_ids: bytes, found: int, room: int) -> int:
        """Restore the saved state that has most of a prompt; see ``ParkedStates.restore``."""
        best = self._files.longest(packed_ids, room)
        if best is None or best[1] - found < LEAST_TOKENS:
            return found
        saved, common = best
        try:
            began = monotonic()
            placed = await asyncio.to_thread(self._files.place, saved, self._actions.folder)
        except (OSError, ValueError) as error:
            _LOG.warning("a saved state is not used, and its prompt is read: %s: %s", saved.path, error)
            return found
        try:
            await self._actions.restore(slot, placed.name)
        except OSError as error:
            _LOG.warning("a saved state could not be restored, and its prompt is read: %s", error)
            return 0
        finally:
            placed.unlink(missing_ok=True)
        _LOG.info("restored %d tokens from disk in %.0f ms", saved.tokens, (monotonic() - began) * 1000)
        return common

    def turn_ended(self, slot: int) -> None:
        self._due.setdefault(slot, monotonic())
        self._turn.set()
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_due())

    async def displaced(self, held: HeldState, next_prompt: bytes) -> None:
        """Save the state of a slot that ``next_prompt`` is about to take, if it is due and would be lost."""
        if held.slot not in self._due or next_prompt.startswith(held.packed_ids[: held.prompt_tokens * 4]):
            return
        del self._due[held.slot]
        if monotonic() >= self._next_save and (copied := await self._copy(held)):
            self._write(copied)

    async def _save_due(self) -> None:
        """Save the states of slots whose turn has ended, as soon as the budget allows and nothing runs."""
        while self._due:
            self._turn.clear()
            for slot, since in list(self._due.items()):
                now = monotonic()
                waits = self._admission.running and now < since + _LONGEST_DELAY
                if not self._closing and (now < self._next_save or waits):
                    continue
                if (held := self._admission.borrow(slot)) is None:
                    continue  # The end of the turn that runs there is the next occasion.
                self._due.pop(slot, None)
                try:
                    copied = await self._copy(held)
                finally:
                    self._admission.give_back(slot)
                if copied:
                    await self._write(copied)
            if self._closing:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._turn.wait(), _LOOK_SECONDS)

    async def _copy(self, held: HeldState) -> tuple[Path, bytes] | None:
        """Have llama.cpp copy a state into memory; return its file and tokens, or None if it is not worthwhile."""
        size = held.tokens * self._bytes_per_token
        if held.tokens < LEAST_TOKENS or held.tokens - self.known(held.packed_ids) < LEAST_NEW_TOKENS:
            return None
        if not self._files.has_room(size):
            room = "%d tokens are not saved: %s has no room for %d MB"
            _LOG.warning(room, held.tokens, self._files.folder, size // 10**6)
            return None
        path = self._actions.folder / secrets.token_hex(16)
        try:
            saved = await self._actions.save(held.slot, path.name)
        except OSError as error:
            _LOG.warning("a state could not be saved: %s", error)
            path.unlink(missing_ok=True)
            return None
        earliest = monotonic() - _BURST_SECONDS
        self._next_save = max(self._next_save, earliest) + (saved.size or size) / _BYTES_PER_SECOND
        # Where the ids of an answer are not known exactly, those of the prompt are.
        exact = saved.tokens == held.tokens
        return path, held.packed_ids if exact else held.packed_ids[
            : min(saved.tokens, held.prompt_tokens) * 4
        ]

    def _write(self, copied: tuple[Path, bytes]) -> asyncio.Future[None]:
        """Write a copy to the disk in a thread, which outlives whoever waits for it."""
        task = asyncio.create_task(asyncio.to_thread(self._write_file, *copied))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return asyncio.shield(task)

    def _write_file(self, path: Path, packed_ids: bytes) -> None:
        try:
            if len(packed_ids) // 4 >= LEAST_TOKENS:
                self._files.add(path, packed_ids)
                _LOG.info("saved %d tokens to disk", len(packed_ids) // 4)
        except OSError as error:
            _LOG.warning("a state could not be saved: %s", error)
        finally:
            path.unlink(missing_ok=True)

    async def close(self, seconds: float) -> None:
        """Save what is due at once, wait at most ``seconds`` for it, then end it."""
        self._closing = True
        self._turn.set()
        if self._saving is not None:
            await asyncio.wait({self._saving}, timeout=seconds)
            self._saving.cancel()
            await asyncio.wait({self._saving})
        if self._writing:
            await asyncio.wait(self._writing, timeout=seconds)
