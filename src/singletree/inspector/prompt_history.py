"""The prompts of a session, each as what it adds to an earlier one, so that a turn costs what is new in it.

An entry has the tokens, messages and bytes of the request that the prompt before did not have. After some entries one
is kept in full: a prompt is then put together from few entries, and old entries can be dropped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import zstandard

from singletree.conversation import Turn
from singletree.prefixes import common_text_prefix
from singletree.prompts.replay.turn_keys import Fingerprint
from singletree.server.sessions.divergence import WIDTH

_DEEPEST = 64
_FEW = 2
_ENTRY_BYTES = 400
_MESSAGE_BYTES = 300
_COMPRESSED_FROM = 1024
_COMPRESSED_UP_TO = 1 << 20
"""Compressing more would hold up other streams: it is mostly pictures, which hardly become smaller."""

ReplayedRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MessagePart:
    """The shape of one part of a message: its kind, the name of its tool, its length in characters."""

    kind: str
    name: str | None
    chars: int


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """A message of a prompt, with the stability rules that changed it; ``turn`` is None where texts are not kept."""

    fingerprint: Fingerprint
    parts: tuple[MessagePart, ...]
    rules: tuple[str, ...] = ()
    turn: Turn | None = None

    @property
    def bytes(self) -> int:
        text = sum(part.chars for part in self.parts) if self.turn is not None else 0
        return _MESSAGE_BYTES + text


@dataclass(frozen=True, slots=True)
class BodyChange:
    """The bytes of a request, as a change of an earlier one: its first ``head`` and last ``tail`` bytes are equal."""

    head: int
    tail: int
    middle: bytes
    is_compressed: bool = False

    def apply(self, before: bytes) -> bytes:
        middle = zstandard.decompress(self.middle) if self.is_compressed else self.middle
        return before[: self.head] + middle + before[len(before) - self.tail :]


def body_change(body: bytes, before: bytes | None) -> BodyChange:
    """Return ``body`` as a change of the request ``before``; None for no earlier one."""
    head = tail = 0
    if before is not None:
        head = common_text_prefix(body, before)
        tail = _common_suffix(body[head:], before[head:])
    middle = body[head : len(body) - tail]
    if not _COMPRESSED_FROM <= len(middle) <= _COMPRESSED_UP_TO:
        return BodyChange(head, tail, middle)
    return BodyChange(head, tail, zstandard.compress(middle, 1), is_compressed=True)


def _common_suffix(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        # Slices of bytes are copied and compared at the speed of memory; those of a memoryview byte by byte.
        if _last(one, low, middle) == _last(other, low, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _last(data: bytes, low: int, high: int) -> bytes:
    return data[len(data) - high : len(data) - low]


@dataclass(slots=True)
class PromptEntry:
    """One prompt, as what it adds to that of the turn ``before``.

    Attributes:
        before: the id of the earlier turn; None for an entry in full.
        depth: how many entries are needed beside this one.
        kept_tokens: how many tokens it has in common with the earlier prompt and its turn.
        tokens: its other tokens, and those of the turn that answered it, packed; None where texts are not kept.
        kept_ranges: up to which token the replayed turns are those of the earlier prompt.
        replayed: the ranges of tokens that are replayed turns, without those.
        kept_messages: how many messages it has in common with the earlier prompt; ``messages`` are its other ones.
    """

    before: str | None
    depth: int
    kept_tokens: int
    prompt_tokens: int
    tokens: bytes | None
    kept_ranges: int
    replayed: tuple[ReplayedRange, ...]
    kept_messages: int
    messages: tuple[PromptMessage, ...]
    body: BodyChange | None = None

    @property
    def bytes(self) -> int:
        body = 0 if self.body is None else len(self.body.middle)
        messages = sum(message.bytes for message in self.messages)
        return _ENTRY_BYTES + len(self.tokens or b"") + 100 * len(self.replayed) + messages + body


class PromptHistory:
    """The prompts of one session, by the ids of their turns; None stands for what is not kept."""

    def __init__(self) -> None:
        self._entries: dict[str, PromptEntry] = {}
        self.bytes = 0

    def __contains__(self, id: str) -> bool:
        return id in self._entries

    def base_for(self, id: str | None) -> tuple[str | None, PromptEntry | None]:
        """Return the turn that an entry after the turn ``id`` builds on, and its entry; None for an entry in full."""
        known = None if id is None else self._entries.get(id)
        return (None, None) if known is None or known.depth >= _DEEPEST else (id, known)

    def add(self, id: str, entry: PromptEntry) -> None:
        self._entries[id] = entry
        self.bytes += entry.bytes

    def add_turn(self, id: str, token_ids: bytes) -> None:
        """Add the tokens of the turn that answered the prompt, packed."""
        entry = self._entries.get(id)
        if entry is not None and entry.tokens is not None:
            entry.tokens += token_ids
            self.bytes += len(token_ids)

    def prune(self, needed: Collection[str]) -> None:
        """Drop all entries but those of the turns ``needed`` and those that they build on.

        Where few of them build on others, these become entries in full, so that nothing else has to stay.
        """
        wanted = set(needed)
        roots = [
            id for id in needed if id in self._entries and self._entries[id].before not in (None, *wanted)
        ]
        if len(roots) <= _FEW:
            self._entries |= {id: entry for id in roots if (entry := self._in_full(id)) is not None}
        keep: dict[str, PromptEntry] = {}
        for id in needed:
            at: str | None = id
            while at is not None and at not in keep and (entry := self._entries.get(at)) is not None:
                keep[at] = entry
                at = entry.before
        self._entries = {id: entry for id, entry in self._entries.items() if id in keep}
        self.bytes = sum(entry.bytes for entry in self._entries.values())

    def _in_full(self, id: str) -> PromptEntry | None:
        entry, tokens, body = self._entries[id], self.tokens(id), self.body(id)
        if entry.tokens is not None and tokens is None:
            return None
        turn = (
            b"" if entry.tokens is None else entry.tokens[(entry.prompt_tokens - entry.kept_tokens) * WIDTH :]
        )
        return PromptEntry(
            before=None,
            depth=0,
            kept_tokens=0,
            prompt_tokens=entry.prompt_tokens,
            tokens=None if tokens is None else tokens + turn,
            kept_ranges=0,
            replayed=tuple(self.replayed(id)),
            kept_messages=0,
            messages=self.messages(id),
            body=None if body is None else body_change(body, None),
        )

    def _chain(self, id: str) -> list[PromptEntry]:
        """Return the entries that the prompt is made of, the one in full first; empty where one is gone."""
        chain: list[PromptEntry] = []
        at: str | None = id
        while at is not None:
            entry = self._entries.get(at)
            if entry is None:
                return []
            chain.append(entry)
            at = entry.before
        return chain[::-1]

    def tokens(self, id: str) -> bytes | None:
        """Return the tokens of the prompt, packed; None where they are not kept."""
        chain = self._chain(id)
        parts: list[bytes] = []
        limit = chain[-1].prompt_tokens if chain else 0
        for entry in reversed(chain):
            if entry.tokens is None:
                return None
            if limit > entry.kept_tokens:
                parts.append(entry.tokens[: (limit - entry.kept_tokens) * WIDTH])
                limit = entry.kept_tokens
        return b"".join(reversed(parts)) if chain else None

    def replayed(self, id: str) -> list[ReplayedRange]:
        ranges: list[ReplayedRange] = []
        for entry in self._chain(id):
            ranges = [each for each in ranges if each[1] <= entry.kept_ranges]
            ranges += entry.replayed
        return ranges

    def messages(self, id: str) -> tuple[PromptMessage, ...]:
        messages: tuple[PromptMessage, ...] = ()
        for entry in self._chain(id):
            messages = (*messages[: entry.kept_messages], *entry.messages)
        return messages

    def body(self, id: str) -> bytes | None:
        body: bytes | None = None
        for entry in self._chain(id):
            if entry.body is None or (body is None and entry.body.head + entry.body.tail):
                body = None
            else:
                body = entry.body.apply(body or b"")
        return body
