"""Saves prompts that llama.cpp has read to disk, and restores them after a restart.

llama.cpp saves a slot between two batches. So the engine saves when nothing runs, and borrows the slot meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from singletree.llamacpp.admission import Admission
from singletree.llamacpp.prefix_files import PrefixFiles
from singletree.llamacpp.slots import HeldState, SlotActions

_LOG = logging.getLogger(__name__)

LEAST_TOKENS = 512
"""Fewer tokens are neither saved nor restored: to read them takes seconds at most."""

_GROWTH = 2  # A conversation is saved again when it has grown by 1/2, so that all saves are 3 times its size at most.
_QUIET_SECONDS = 0.2
_PAUSE_RATIO = 20.0  # Saving takes at most 1/20 of the time.


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
        self._due: set[int] = set()
        self._saving: asyncio.Task[None] | None = None
        self._next_save = 0.0

    def known(self, packed_ids: bytes) -> int:
        found = self._files.longest(packed_ids, float("inf"))
        return found[1] if found is not None else 0

    async def restore(self, slot: int, packed_ids: bytes, found: int, room: int) -> int:
        """Restore the saved state that has most of a prompt; see ``ParkedStates.restore``."""
        best = self._files.longest(packed_ids, room)
        if best is None or best[1] - found < LEAST_TOKENS:
            return found
        saved, common = best
        if not await asyncio.to_thread(self._files.is_intact, saved):
            _LOG.warning("a saved prefix was damaged or removed, and is not used: %s", saved.path)
            return found
        try:
            began = monotonic()
            with self._linked(saved.path) as name:
                await self._actions.restore(slot, name)
        except OSError as error:
            _LOG.warning("a saved prefix could not be restored: %s", error)
            return 0
        _LOG.info("restored %d tokens from disk in %.0f ms", saved.tokens, (monotonic() - began) * 1000)
        return common

    def turn_ended(self, slot: int) -> None:
        self._due.add(slot)
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_when_quiet())

    def _is_worthwhile(self, held: HeldState) -> bool:
        size = held.tokens * self._bytes_per_token
        covered = self.known(held.packed_ids)
        return held.tokens - covered >= max(LEAST_TOKENS, covered // _GROWTH) and self._files.has_room(size)

    async def _save_when_quiet(self) -> None:
        """Save what idle slots hold. If a request has come meanwhile, the end of its turn is the next occasion."""
        await asyncio.sleep(max(_QUIET_SECONDS, self._next_save - monotonic()))
        while self._due and not self._admission.running:
            slot = self._due.pop()
            held = self._admission.borrow(slot)
            if held is None:
                continue
            try:
                if self._is_worthwhile(held):
                    began = monotonic()
                    await self._save(held)
                    self._next_save = monotonic() + (monotonic() - began) * _PAUSE_RATIO
            finally:
                self._admission.give_back(slot)

    async def _save(self, held: HeldState) -> None:
        name = self._files.new_part()
        try:
            with self._linked(self._files.folder / name) as link:
                saved = await self._actions.save(held.slot, link)
            # Where the ids of an answer are not known exactly, those of the prompt are.
            exact = saved.tokens == held.tokens
            ids = held.packed_ids if exact else held.packed_ids[: min(saved.tokens, held.prompt_tokens) * 4]
            if len(ids) // 4 >= LEAST_TOKENS:
                await asyncio.shield(asyncio.to_thread(self._files.add, name, ids))
                _LOG.info("saved %d tokens to disk", saved.tokens)
        except OSError as error:
            _LOG.warning("a prefix could not be saved: %s", error)
        finally:
            self._files.drop_part(name)

    @contextlib.contextmanager
    def _linked(self, path: Path) -> Iterator[str]:
        """Return the name of a link to ``path`` in the only folder that llama.cpp uses."""
        link = self._actions.folder / path.name
        link.symlink_to(path.resolve())
        try:
            yield link.name
        finally:
            link.unlink(missing_ok=True)

    async def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for a save that is due, then end it."""
        if self._saving is not None:
            await asyncio.wait({self._saving}, timeout=seconds)
            self._saving.cancel()
            await asyncio.wait({self._saving})
