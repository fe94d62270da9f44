"""Describes what each slot of llama.cpp holds, and which request continues it."""

from __future__ import annotations

from dataclasses import dataclass

from singletree.engines.llamacpp.prefix_files import common_tokens

_CHANGED_PART = 8
"""A prompt of the same session continues a slot even if the last 1/8 of the prompt before was written anew."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request needs of the engine.

    Attributes:
        packed_ids: its prompt, as of ``pack_ids``.
        tokens: room in the KV cache for its prompt and its answer.
        priority: the lowest goes first.
        session: the client's key of its session; empty if unknown.
        is_subagent: whether a sub-agent sent it.
    """

    packed_ids: bytes
    tokens: int
    priority: int = 0
    session: str = ""
    is_subagent: bool = False

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt in tokens."""
        return len(self.packed_ids) // 4


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state of a slot.

    Attributes:
        slot: the number of the slot.
        packed_ids: the tokens that it was computed from, as of ``pack_ids``.
        prompt_tokens: how many of them were the prompt of the last turn; the others are its answer.
    """

    slot: int
    packed_ids: bytes
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return len(self.packed_ids) // 4


@dataclass(slots=True)
class Slot:
    """One slot of llama.cpp.

    Attributes:
        number: its number in llama.cpp.
        running: the request that has it; None if it is idle.
        is_ending: whether that request was left early, and llama.cpp has not noticed it yet.
        is_lent: whether its state is being saved or removed, so that no request may have it.
        owner: the last request that had it; None if its state belongs to nobody.
        held: the tokens of its state, as of ``pack_ids``. While it runs: those that the request found.
        prompt_tokens: how many of them were the prompt of the last turn.
        kept_until: until when the idle slot is kept for the session of its owner, as a time of the clock.
        owned_since: when that session took it.
        used: when its last turn ended.
    """

    number: int
    running: Claim | None = None
    is_ending: bool = False
    is_lent: bool = False
    owner: Claim | None = None
    held: bytes = b""
    prompt_tokens: int = 0
    kept_until: float = 0.0
    owned_since: float = 0.0
    used: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether a request may have it."""
        return self.running is None and not self.is_lent

    @property
    def tokens(self) -> int:
        """The number of tokens that it holds."""
        return len(self.held) // 4

    @property
    def state(self) -> HeldState:
        """Its state."""
        return HeldState(self.number, self.held, self.prompt_tokens)

    def common(self, claim: Claim) -> int:
        """Return how many tokens of a prompt it holds."""
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
        """Note that it holds nothing."""
        self.held, self.prompt_tokens, self.owner, self.kept_until = b"", 0, None, 0.0
