"""Keeps the states of conversations that have lost their slot, until their next turn.

A state is a file in a folder of the llama.cpp process, in memory where the system has a file system for that. The least
recently used states are removed when the limit is reached.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from singletree.llamacpp.prefix_files import common_tokens
from singletree.llamacpp.slots import HeldState, SlotActions

_LOG = logging.getLogger(__name__)

LEAST_TOKENS = 256
"""Fewer tokens are neither parked nor restored: they are read again in the same time."""

MEMORY_FOLDER = Path("/dev/shm")
"""A file system in memory."""


def parking_root(limit: int) -> str:
    """Return the folder for ``limit`` bytes of states: in memory where there is room, else for temporary files."""
    with contextlib.suppress(OSError):
        if os.access(MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(MEMORY_FOLDER).free >= 2 * limit:
            return str(MEMORY_FOLDER)
    return tempfile.gettempdir()


@dataclass(frozen=True, slots=True)
class _ParkedState:
    name: str
    packed_ids: bytes
    size: int


class ParkedStates:
    """The parked states of one running llama.cpp process.

    Args:
        limit: the largest size of all states, in bytes; 0 for none.
        bytes_per_token: size of a token in the KV cache; None if unknown.
    """

    def __init__(self, actions: SlotActions, limit: int, bytes_per_token: int | None) -> None:
        self._actions = actions
        self._limit = limit
        self._bytes_per_token = bytes_per_token or 0
        self._states: dict[str, _ParkedState] = {}

    @property
    def size(self) -> int:
        """The size of all states, in bytes."""
        return sum(each.size for each in self._states.values())

    def __len__(self) -> int:
        return len(self._states)

    def known(self, packed_ids: bytes) -> int:
        return max((common_tokens(each.packed_ids, packed_ids) for each in self._states.values()), default=0)

    async def park(self, held: HeldState, next_prompt: bytes = b"") -> None:
        """Save the state of a slot that ``next_prompt`` is about to take, unless little of it would be lost."""
        lost = held.tokens - common_tokens(held.packed_ids, next_prompt)
        size = held.tokens * self._bytes_per_token
        if lost < LEAST_TOKENS or held.tokens - self.known(held.packed_ids) < LEAST_TOKENS:
            return
        if size > self._limit:
            return
        self._make_room(size)
        name = secrets.token_hex(16)
        try:
            began = monotonic()
            saved = await self._actions.save(held.slot, name)
            # Where the ids of an answer are not known exactly, those of the prompt are.
            exact = saved.tokens == held.tokens
            known = held.packed_ids if exact else held.packed_ids[: min(saved.tokens, held.prompt_tokens) * 4]
            for other in [each for each in self._states.values() if known.startswith(each.packed_ids)]:
                self._remove(other)
            self._states[name] = _ParkedState(name, known, saved.size or size)
            self._make_room(0)
            seconds = monotonic() - began
            _LOG.debug("parked %d tokens of slot %d in %.0f ms", saved.tokens, held.slot, seconds * 1000)
        except OSError as error:
            _LOG.warning("the state of a slot could not be parked: %s", error)
        finally:
            if name not in self._states:
                self._unlink(name)

    async def restore(self, slot: int, packed_ids: bytes, found: int, room: int) -> int:
        """Put the state that has most of a prompt into a slot.

        Args:
            slot: its number; it is idle, and what it holds is lost.
            found: how many tokens of the prompt it holds already.
            room: how many tokens a state may have.

        Returns:
            How many tokens of the prompt it holds now.
        """
        fitting = [each for each in self._states.values() if len(each.packed_ids) // 4 <= room]
        common: Callable[[_ParkedState], int] = lambda each: common_tokens(each.packed_ids, packed_ids)  # noqa: E731
        best = max(fitting, key=common, default=None)
        if best is None or common(best) - found < LEAST_TOKENS:
            return found
        # The least recently used comes first.
        self._states[best.name] = self._states.pop(best.name)
        try:
            began = monotonic()
            await self._actions.restore(slot, best.name)
        except OSError as error:
            _LOG.warning("a parked state could not be restored: %s", error)
            self._remove(best)
            return 0
        milliseconds = (monotonic() - began) * 1000
        _LOG.debug("restored %d parked tokens in %.0f ms", len(best.packed_ids) // 4, milliseconds)
        return common(best)

    def _make_room(self, size: int) -> None:
        for state in list(self._states.values()):
            if self.size + size <= self._limit:
                return
            self._remove(state)

    def _remove(self, state: _ParkedState) -> None:
        self._states.pop(state.name, None)
        self._unlink(state.name)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._actions.folder / name).unlink()
