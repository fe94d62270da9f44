"""Digests of the history before each turn of a conversation, under which the turn memory may hold it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from singletree.conversation import Document, Image, Text, ToolCall, ToolResult, Turn
from singletree.prompts.replay.fingerprint import Fingerprint, fingerprint
from singletree.prompts.replay.turn_comparison import normalized_id, without_space


class HistoryDigests:
    """Digests of the history before each turn of a conversation and of the whole conversation; its turns' fingerprints.

    White space and reasoning do not count in a digest, since harnesses trim the one and leave out the other. All are
    computed on demand.

    Args:
        turns: the turns of the conversation.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._digests = [hashlib.blake2b(digest_size=16)]
        self._fingerprints: tuple[Fingerprint, ...] = ()

    def of_grown(self, turns: Sequence[Turn], same: int) -> HistoryDigests:
        """Return the digests of ``turns``; those that were computed for the first ``same`` turns are taken over."""
        grown = HistoryDigests(turns)
        grown._digests = self._digests[: same + 1]
        grown._fingerprints = self._fingerprints[:same]
        return grown

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """Return the fingerprint of each turn."""
        known = self._fingerprints
        if len(known) < len(self._turns):
            self._fingerprints = known = (*known, *map(fingerprint, self._turns[len(known) :]))
        return known

    def __getitem__(self, turn: int) -> str:
        """Return the digest of all before the turn with the index ``turn``, as hexadecimal text."""
        for added in self._turns[len(self._digests) - 1 : turn]:
            digest = self._digests[-1].copy()
            for text in (added.role, *_digested(added.parts)):
                digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
            self._digests.append(digest)
        return self._digests[turn].hexdigest()


def _digested(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Text):
            yield without_space(part.text)
        elif isinstance(part, ToolCall):
            yield normalized_id(part.id)
        elif isinstance(part, ToolResult):
            yield normalized_id(part.call_id)
            yield from _digested(part.parts)
        elif isinstance(part, Image | Document):
            yield (part.key if isinstance(part, Image) else "") or part.data or part.url
