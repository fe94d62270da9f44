"""Saves what llama.cpp has read to disk, restores it after a restart, and prepares a slot for each request.

llama.cpp copies a slot between two batches, into a folder in memory. A thread writes the copy to the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from pathlib import Path
from time import monotonic

from singletree.llamacpp.admission import KEEP_SECONDS, Admission, Ticket
from singletree.llamacpp.prefix_files import PrefixFiles
from singletree.llamacpp.process import LlamaProcess
from singletree.llamacpp.slots import MEMORY_FOLDER, HeldState, ParkedStates, SlotActions
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


MIN_REPORTED_SECONDS = 5.0
"""Shorter waits are not logged."""
REPORT_SECONDS = 30.0
"""After this time the rest of the same prompt is logged again."""
_FEWEST_TOKENS = 32
"""A measurement of fewer tokens is too inexact."""


class PrefillSpeed:
    """The last measured speed at which an engine reads prompts.

    Attributes:
        tokens_per_second: None until enough tokens of a prompt have been read.
    """

    def __init__(self) -> None:
        self.tokens_per_second: float | None = None

    def record(self, tokens: int, seconds: float) -> None:
        if tokens >= _FEWEST_TOKENS and seconds > 0:
            self.tokens_per_second = tokens / seconds


class PrefillEstimator:
    """Estimate the remaining time for one prompt.

    Args:
        speed: the engine's speed; updated with what is measured here.
    """

    def __init__(self, speed: PrefillSpeed) -> None:
        self._speed = speed
        self._next_report = 0.0

    def estimate(self, total: int, cached: int, read: int, seconds: float) -> str | None:
        """Record the progress of this prompt, and estimate the rest.

        Args:
            total: tokens of the prompt.
            cached: how many of them were in the prefix cache.
            read: how many have been read so far, the cached ones included.

        Returns:
            A sentence for the log: when the speed is known and the remaining time is at least
            ``MIN_REPORTED_SECONDS``, and then every ``REPORT_SECONDS``. Otherwise None.
        """
        self._speed.record(read - cached, seconds)
        speed, left = self._speed.tokens_per_second, total - read
        if seconds < self._next_report or speed is None or left / speed < MIN_REPORTED_SECONDS:
            return None
        self._next_report = seconds + REPORT_SECONDS
        return (
            f"{left} of {total} prompt tokens have to be read: about {left / speed:.0f} s until the first word, "
            f"at the measured {speed:.0f} tokens/s"
        )


# llama.cpp copies about 120 MB of a state in a second, once to park it and once to restore it.
_PARKED_BYTES_PER_SECOND = 60e6
_LONGEST_KEEP_SECONDS = 30.0


def keep_seconds(tokens: int, parked_bytes: int | None, speed: float | None) -> float:
    """Return how long an idle slot is kept for its session: as long as another turn would cost without its state.

    Then waiting and changing cost the same at worst, whenever the next turn comes.

    Args:
        tokens: how many tokens the slot holds.
        parked_bytes: the size of its state if that would be parked; None if it would be read again.
        speed: how many tokens are read in a second; None if unknown.
    """
    reading = tokens / speed if speed else 0.0
    cost = reading if parked_bytes is None else parked_bytes / _PARKED_BYTES_PER_SECOND
    return min(max(cost, KEEP_SECONDS), _LONGEST_KEEP_SECONDS)


class SlotStates:
    """The states of one running llama.cpp process that are not in its slots: parked ones, and saved ones on disk.

    Args:
        parked: None for a model whose states cannot be saved.
        prefixes: None without ``--prefix-cache-path``.
    """

    def __init__(
        self,
        admission: Admission,
        actions: SlotActions,
        parked: ParkedStates | None,
        prefixes: PrefixCache | None,
    ) -> None:
        self.parked = parked
        self.prefixes = prefixes
        self._admission = admission
        self._actions = actions

    def known(self, packed_ids: bytes) -> int:
        """Return how many tokens of a prompt, as of ``pack_ids``, are parked or on disk."""
        caches = (self.parked, self.prefixes)
        return max((cache.known(packed_ids) for cache in caches if cache is not None), default=0)

    async def prepare(self, ticket: Ticket) -> int:
        """Prepare the slot of a ticket that was granted, and give back the slots that were lent to it.

        Returns:
            How many tokens of the prompt the slot has now.
        """
        try:
            await self._park(ticket)
            packed_ids, found = ticket.claim.packed_ids, ticket.found
            # Until the prompt is compared with it, a restored state has all its tokens.
            room = self._admission.room_for(ticket)
            if self.parked is not None:
                found = await self.parked.restore(ticket.slot, packed_ids, found, room)
            if self.prefixes is not None:
                found = await self.prefixes.restore(ticket.slot, packed_ids, found, room)
            return found
        finally:
            self._admission.settle(ticket)

    async def _park(self, ticket: Ticket) -> None:
        if self.prefixes is not None:
            for held in ticket.displaced:
                await self.prefixes.displaced(held, ticket.claim.packed_ids)
        if self.parked is None:
            return
        for held in ticket.displaced:
            if held.slot == ticket.slot:
                await self.parked.park(held, ticket.claim.packed_ids)
                continue
            await self.parked.park(held)
            try:
                await self._actions.erase(held.slot)
            except OSError as error:
                _LOG.warning("a slot could not be erased: %s", error)
        if ticket.source is not None:
            await self.parked.park(ticket.source)

    def turn_ended(self, slot: int) -> None:
        if self.prefixes is not None:
            self.prefixes.turn_ended(slot)

    async def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for what is being saved."""
        if self.prefixes is not None:
            await self.prefixes.close(seconds)
