"""Describes what each slot of llama.cpp holds, and which request continues it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from singletree.engines.outlook import Outlook, Worth, worth
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
