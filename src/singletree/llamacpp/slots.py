"""Describes what each slot of llama.cpp holds, which request continues it, and the states that have lost their slot.

Such a state is kept until the next turn, as a file in a folder of the llama.cpp process, in memory where the system has
a file system for that. When the limit is reached, those that are needed least are removed (``outlook.worth``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from pathlib import Path
from time import monotonic

import msgspec

from singletree.engines.engine import Outlook, Worth, worth
from singletree.llamacpp.prefix_files import common_tokens
from singletree.remote.transport import ConnectionLost, Transport, ask

_CHANGED_PART = 8
"""A prompt of the same session continues a slot even if the last 1/8 of the prompt before was written anew."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request needs of the engine.

    Attributes:
        packed_ids: its prompt, as of ``pack_ids``.
        tokens: room in the KV cache for its prompt and its answer.
        session: the client's key of its session; empty if unknown.
        salt: the salt with which its tokens are packed; no state of another salt may be found by it.
        outlook: what its conversation will do next; None if nobody knows.
    """

    packed_ids: bytes
    tokens: int
    priority: int = 0
    session: str = ""
    is_subagent: bool = False
    salt: str = ""
    outlook: Outlook | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.packed_ids) // 4


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state of a slot.

    Attributes:
        packed_ids: the tokens that it was computed from, as of ``pack_ids``.
        prompt_tokens: how many of them were the prompt of the last turn; the others are its answer.
        used: when its last turn ended, as a time of ``time.monotonic``; None for now.
        outlook: as of its ``Claim``.
    """

    slot: int
    packed_ids: bytes
    prompt_tokens: int
    used: float | None = None
    outlook: Outlook | None = None

    @property
    def tokens(self) -> int:
        return len(self.packed_ids) // 4


@dataclass(slots=True)
class Slot:
    """One slot of llama.cpp.

    Attributes:
        running: the request that has it; None if it is idle.
        is_ending: whether that request was left early, and llama.cpp has not noticed it yet.
        is_lent: whether its state is being saved or removed, so that no request may have it.
        is_copied: whether its state is being copied to be saved: a request that continues it waits.
        owner: the last request that had it; None if its state belongs to nobody.
        held: the tokens of its state, as of ``pack_ids``. While it runs: those that the request found.
        prompt_tokens: how many of them were the prompt of the last turn.
        kept_until: until when the idle slot is kept for the session of its owner, as a time of the clock.
        salt: the salt of the last request that had it: what is left of that one in llama.cpp, whatever ``held`` has;
            None if there was none.
    """

    number: int
    running: Claim | None = None
    is_ending: bool = False
    is_lent: bool = False
    is_copied: bool = False
    owner: Claim | None = None
    held: bytes = b""
    prompt_tokens: int = 0
    kept_until: float = 0.0
    owned_since: float = 0.0
    used: float = 0.0
    salt: str | None = None

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self.is_lent and not self.is_copied

    @property
    def tokens(self) -> int:
        return len(self.held) // 4

    @property
    def state(self) -> HeldState:
        return HeldState(self.number, self.held, self.prompt_tokens, self.used, self.outlook)

    @property
    def outlook(self) -> Outlook | None:
        return None if self.owner is None else self.owner.outlook

    def worth(self, now: float) -> Worth:
        return worth(self.outlook, self.used, now)

    def common(self, claim: Claim) -> int:
        return common_tokens(self.held, claim.packed_ids)

    def is_continued_by(self, claim: Claim) -> bool:
        """Return whether a request is the next turn of the conversation that the slot holds.

        The prompt of the next turn contains the prompt of this one. Sub-agents share the beginning of their prompts, so
        a long common prefix alone proves nothing.
        """
        if self.owner is None or not self.prompt_tokens:
            return False
        one, other = self.owner.session, claim.session
        if one and other and one != other:
            return False
        least = self.prompt_tokens
        if one and one == other:
            least -= least // _CHANGED_PART
        return self.common(claim) >= least

    def clear(self) -> None:
        self.held, self.prompt_tokens, self.owner, self.kept_until = b"", 0, None, 0.0


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
        transport: reaches llama.cpp.
        folder: the only folder whose files it saves and restores.
    """

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.folder = folder
        self._transport = transport

    async def save(self, slot: int, name: str) -> SavedState:
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
        await self._act(slot, "erase")

    async def _act(self, slot: int, action: str, name: str = "") -> bytes:
        body = msgspec.json.encode({"filename": name} if name else {})
        try:
            status, content = await ask(self._transport, f"/slots/{slot}?action={action}", body)
        except ConnectionLost as lost:
            raise OSError(str(lost)) from lost
        if status != 200:
            raise OSError(f"llama.cpp answered {content.decode(errors='replace')}")
        return content


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


_COPIED = Outlook()
_COPIED.is_over = True


@dataclass(frozen=True, slots=True)
class _ParkedState:
    name: str
    packed_ids: bytes
    size: int
    used: float
    outlook: Outlook | None


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
        return sum(each.size for each in self._states.values())

    def __len__(self) -> int:
        return len(self._states)

    def known(self, packed_ids: bytes) -> int:
        return self._longest(packed_ids)[1]

    async def park(self, held: HeldState, next_prompt: bytes = b"") -> None:
        """Save the state of a slot that ``next_prompt`` is about to take, unless little of it would be lost."""
        common = common_tokens(held.packed_ids, next_prompt)
        if held.tokens - common < LEAST_TOKENS:
            return
        now, (best, known) = monotonic(), self._longest(held.packed_ids)
        used = now if held.used is None else held.used
        needed = worth(held.outlook, used, now)
        if best is not None and held.tokens - known < LEAST_TOKENS:
            if needed > worth(best.outlook, best.used, now):
                self._states[best.name] = replace(best, used=used, outlook=held.outlook)
            return
        if held.outlook is not None and held.outlook.is_over and max(common, known) >= LEAST_TOKENS:
            return  # Others may begin like it, and that beginning is there.
        size = held.tokens * self._bytes_per_token
        if not self._make_room(size, needed):
            return
        name = secrets.token_hex(16)
        try:
            began = monotonic()
            saved = await self._actions.save(held.slot, name)
            # Where the ids of an answer are not known exactly, those of the prompt are.
            exact = saved.tokens == held.tokens
            ids = held.packed_ids if exact else held.packed_ids[: min(saved.tokens, held.prompt_tokens) * 4]
            for other in [each for each in self._states.values() if ids.startswith(each.packed_ids)]:
                self._remove(other)
            self._states[name] = _ParkedState(name, ids, saved.size or size, used, held.outlook)
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
        best, common = self._longest(packed_ids, room)
        if best is None or common - found < LEAST_TOKENS:
            return found
        # The conversation goes on in the slot, and needs nothing of this copy until it is parked again.
        outlook = None if best.outlook is None else _COPIED
        self._states[best.name] = replace(best, used=monotonic(), outlook=outlook)
        try:
            began = monotonic()
            await self._actions.restore(slot, best.name)
        except OSError as error:
            _LOG.warning("a parked state could not be restored: %s", error)
            self._remove(best)
            return 0
        milliseconds = (monotonic() - began) * 1000
        _LOG.debug("restored %d parked tokens in %.0f ms", len(best.packed_ids) // 4, milliseconds)
        return common

    def _longest(self, packed_ids: bytes, room: float = inf) -> tuple[_ParkedState | None, int]:
        """Return the state of at most ``room`` tokens that shares the longest prefix with a prompt, and how much."""
        states = [each for each in self._states.values() if len(each.packed_ids) // 4 <= room]
        common = [common_tokens(each.packed_ids, packed_ids) for each in states]
        best = max(range(len(states)), key=common.__getitem__, default=None)
        return (None, 0) if best is None else (states[best], common[best])

    def _make_room(self, size: int, new: Worth | None = None) -> bool:
        """Remove what is needed least until ``size`` bytes have room; return False where ``new`` is needed less."""
        now, free = monotonic(), self._limit - self.size
        states = [(worth(each.outlook, each.used, now), each) for each in self._states.values()]
        gone = []
        for needed, state in sorted(states, key=itemgetter(0)):
            if free >= size or (new is not None and new < needed):
                break
            gone.append(state)
            free += state.size
        if free < size:
            return False
        for state in gone:
            self._remove(state)
        return True

    def _remove(self, state: _ParkedState) -> None:
        self._states.pop(state.name, None)
        self._unlink(state.name)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._actions.folder / name).unlink()
