"""What a turn is found by: ids that the server made, its place in a conversation, a fingerprint of its content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from singletree.conversation import Document, Image, Part, Reasoning, Text, ToolCall, ToolResult, Turn
from singletree.prompts.replay.turn_comparison import normalized_id, packed_text, without_space


class Fingerprint(NamedTuple):
    """Hashes that stand for one message: one of its reasoning, one of all other content."""

    role: str
    words: int
    thoughts: int


def fingerprint(turn: Turn) -> Fingerprint:
    """Return the fingerprint of ``turn``, without ids: they are not in the prompt, and some harnesses change them."""
    thoughts: list[str] = []
    words: list[tuple[str, ...]] = []
    for part in turn.parts:
        if type(part) is Reasoning:
            thoughts.append(part.text)
        else:
            _add_words(words, part)
    return Fingerprint(turn.role, hash(tuple(words)), hash(tuple(thoughts)))


def _add_words(words: list[tuple[str, ...]], part: Part) -> None:
    if type(part) is Text:
        words.append(("text", part.text))
    elif type(part) is ToolCall:
        words.append(("call", part.name, part.arguments))
    elif type(part) is ToolResult:
        words.append(("result",))
        for inner in part.parts:
            _add_words(words, inner)
    elif isinstance(part, Image | Document):
        words.append(("data", part.key if type(part) is Image and part.key else part.data, part.url))


REASONING_PREFIX = "rs_"
"""Prefix of the ids of reasoning items."""

_ORDINAL_LENGTH = 4
_REASONING_KEY = "reasoning "
_CALL_KEY = "call "


def reasoning_id(turn: str, ordinal: int) -> str:
    """Return the id of a reasoning item of the turn with the id ``turn``; ``ordinal`` counts its items from 0."""
    return f"{REASONING_PREFIX}{turn}{ordinal:0{_ORDINAL_LENGTH}x}"


def reasoning_keys(turn: Turn) -> Iterable[str]:
    """Return the key of each turn to which the ids of the reasoning items in ``turn`` belong."""
    ids = [part.id for part in turn.parts if type(part) is Reasoning]
    return dict.fromkeys(
        [f"{_REASONING_KEY}{id[:-_ORDINAL_LENGTH]}" for id in ids if id.startswith(REASONING_PREFIX)]
    )


def id_keys(turn: Turn) -> list[str]:
    """Return the keys of the turn to which the ids in ``turn`` belong, if the server made them."""
    ids = (normalized_id(call.id) for call in turn.tool_calls)
    return [*reasoning_keys(turn), *[f"{_CALL_KEY}{id}" for id in ids if id]]


def place_keys(turn: Turn, history_digest: str) -> list[str]:
    """Return the keys of a turn behind a history: the names of its calls, or else its text.

    Each name is a key of its own, because clients leave out calls. They leave out text, too, where reasoning is left.
    """
    if calls := turn.tool_calls:
        return [f"{history_digest} calls {name}" for name in dict.fromkeys(call.name for call in calls)]
    text = without_space(turn.text)
    return [f"{history_digest} {key}" for key in ([f"text {text}"] if text else []) + ["words"] if turn.parts]


class HistoryDigests:
    """Digests of the history before each turn of a conversation and of the whole conversation; its turns' fingerprints.

    White space and reasoning do not count in a digest, since harnesses trim the one and leave out the other. Neither do
    the ids of calls, which some make anew in each request: a call counts by its name and arguments, and a result by the
    number of its call in the turn. All are computed on demand.
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
        known = self._fingerprints
        if len(known) < len(self._turns):
            self._fingerprints = known = (*known, *map(fingerprint, self._turns[len(known) :]))
        return known

    def __getitem__(self, turn: int) -> str:
        for number in range(len(self._digests) - 1, turn):
            added = self._turns[number]
            digest = self._digests[-1].copy()
            texts = _digested(added.parts, partial(self._number_of_call, number))
            digest.update(b"\0".join([added.role.encode(), *texts, b""]))
            self._digests.append(digest)
        return self._digests[turn].hexdigest()

    def _number_of_call(self, turn: int, call_id: str) -> str:
        """Return the number of the call that a result in ``turn`` answers; empty where the turns before it lack it."""
        while turn > 0 and self._turns[turn].role == "tool":
            turn -= 1
        ids = [call.id for call in self._turns[turn].tool_calls]
        if call_id not in ids:  # the client may have kept only the letters and digits of one of them
            ids, call_id = [normalized_id(id) for id in ids], normalized_id(call_id)
        return str(ids.index(call_id)) if call_id in ids else ""


def _digested(parts: Sequence[Part], number_of_call: Callable[[str], str]) -> Iterator[bytes]:
    for part in parts:
        if isinstance(part, Text):
            yield packed_text(part.text)
        elif isinstance(part, ToolCall):
            yield part.name.encode("utf-8", "surrogatepass")
            yield packed_text(part.arguments)
        elif isinstance(part, ToolResult):
            yield number_of_call(part.call_id).encode()
            yield from _digested(part.parts, number_of_call)
        elif isinstance(part, Image | Document):
            key = part.key if isinstance(part, Image) else ""
            yield (key or part.data or part.url).encode("utf-8", "surrogatepass")
