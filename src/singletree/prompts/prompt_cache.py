"""The stages of writing a prompt go on from the last prompt of the conversation in one way; their cache is here.

A harness sends the whole conversation with every turn, so that each prompt begins like the one before. A stage
(``Stage``) turns a value into the next one. It also returns a checkpoint, from which the same stage goes on for the
next prompt. These rules hold for every stage:

1. A stage compares its value with the value that the checkpoint was made from. What both begin with is taken from the
   checkpoint; only the rest is worked on.
2. The result is the same with any checkpoint of the same model as without one. A checkpoint that does not fit costs
   time, and changes no text and no token.
3. A checkpoint is complete: it goes on from no other checkpoint, and no stage needs that of another stage.
4. Nothing that others can see in a checkpoint changes after it was made: several prompts may go on from it at once.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count, islice
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar, get_args

import msgspec

from singletree.conversation import Part, Tool, ToolResult, Turn
from singletree.prefixes import common_prefix, identical_prefix


class StageCheckpoint(Protocol):
    """The work of one stage on one prompt."""

    @property
    def bytes(self) -> int:
        """Return about how much memory it takes, in bytes, without what the conversation holds anyway."""


ValueT = TypeVar("ValueT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
CheckpointT = TypeVar("CheckpointT", bound=StageCheckpoint)
GivenT = TypeVar("GivenT")
MadeT = TypeVar("MadeT")


class Stage(Protocol[ValueT, ResultT, CheckpointT]):
    """One step from a conversation to the tokens of its prompt. Its fields are the settings of the request."""

    def run(self, value: ValueT, checkpoint: CheckpointT | None) -> tuple[ResultT, CheckpointT]:
        """Return the next value, and the checkpoint of this prompt. Raises InvalidRequest if it cannot be served."""


_Heads = dict[int, dict[int, None]]


class _Entry(NamedTuple):
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...]
    checkpoints: Mapping[type, Any]
    size: int
    heads: tuple[int, ...]
    settings: object
    by_head: _Heads

    @property
    def needed(self) -> int:
        """Return how many turns a longer conversation has in common: up to the last answer; the others may go."""
        unanswered = next((i for i, turn in enumerate(reversed(self.turns)) if turn.role == "assistant"), 0)
        return len(self.turns) - unanswered


class PromptCache:
    """Keeps the checkpoints of the last prompts, up to ``limit`` bytes; the oldest go first. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._shared = _Shared(limit)
        # The numbers of the entries by the hashes of their first turns: no request is compared with all conversations.
        self._by_head: _Heads = {}
        self._parts: dict[str, PromptCache] = {}

    @property
    def bytes(self) -> int:
        return self._shared.bytes

    def of(self, owner: str) -> PromptCache:
        """Return the cache of one owner, which shares the limit of this one and finds nothing of others."""
        if not owner:
            return self
        with self._shared.lock:
            part = self._parts.get(owner)
            if part is None:
                part = self._parts[owner] = PromptCache(0)
                part._shared = self._shared
            return part

    def checkpoints(self) -> list[Mapping[type, Any]]:
        """Return the checkpoints of each prompt that is kept, by the types of the stages; the latest first."""
        with self._shared.lock:
            entries = reversed(self._shared.entries.values())
            return [entry.checkpoints for entry in entries if entry.by_head is self._by_head]

    def resume(
        self, turns: Sequence[Turn], tools: tuple[Tool, ...] = (), settings: object = None
    ) -> Continuation:
        """Begin a prompt of ``turns``, with the checkpoints of the prompt that has most of them in common."""
        heads = _heads(turns)
        number, entry, most = self._most_similar(turns, heads)
        if entry is None:
            return Continuation(self, tuple(turns), tools, heads, settings=settings)
        shared = entry.turns if most == len(entry.turns) else entry.turns[:most]
        turns = shared if most == len(turns) else (*shared, *turns[most:])
        tools = entry.tools if _is_same_list(entry.tools, tools) else tools
        replaced = number if most >= entry.needed else None
        return Continuation(self, turns, tools, heads, entry.checkpoints, replaced, settings)

    def new_turns(self, turns: Sequence[Turn], tools: tuple[Tool, ...], settings: object) -> Sequence[Turn]:
        """Return the last of ``turns``: those behind the prompt that they continue, with the same tools and settings.

        All are new where they continue none: a prompt that leaves another one in its middle may share no checkpoint.
        """
        _, entry, most = self._most_similar(turns, _heads(turns))
        if entry is None or most < entry.needed:
            return turns
        is_continued = entry.settings == settings and _is_same_list(entry.tools, tools)
        return turns[most:] if is_continued else turns

    def _most_similar(
        self, turns: Sequence[Turn], heads: tuple[int, ...]
    ) -> tuple[int | None, _Entry | None, int]:
        number, entry, most = None, None, 0
        for candidate, other in self._candidates(heads):
            same = common_prefix(turns, other.turns, is_same_turn)
            if same > most:
                number, entry, most = candidate, other, same
        return number, entry, most

    def _candidates(self, heads: tuple[int, ...]) -> list[tuple[int, _Entry]]:
        """Return the entries with the same two first turns, or else one with the same first; the latest first."""
        entries = self._shared.entries
        with self._shared.lock:
            for head in heads:  # of the first two turns, then of the first one
                if found := self._by_head.get(head):
                    numbers = islice(reversed(found), 1 if head is heads[-1] else None)
                    return [(number, entries[number]) for number in numbers]
        return []

    def keep(self, work: Continuation, checkpoints: Mapping[type, Any]) -> None:
        size = 0
        for each in checkpoints.values():
            size += each.bytes
        kept = self._shared
        with kept.lock:
            kept.drop(work.replaces)
            if size > kept.limit:
                return
            number = next(kept.numbers)
            kept.entries[number] = _Entry(
                work.turns, work.tools, checkpoints, size, work.heads, work.settings, self._by_head
            )
            for head in work.heads:
                self._by_head.setdefault(head, {})[number] = None
            kept.bytes += size
            while kept.bytes > kept.limit:
                kept.drop(next(iter(kept.entries)))


class _Shared:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: OrderedDict[int, _Entry] = OrderedDict()
        self.numbers = count()
        self.lock = Lock()
        self.bytes = 0

    def drop(self, number: int | None) -> None:
        dropped = None if number is None else self.entries.pop(number, None)
        if number is None or dropped is None:
            return
        self.bytes -= dropped.size
        for head in dropped.heads:
            numbers = dropped.by_head[head]
            del numbers[number]
            if not numbers:
                del dropped.by_head[head]


def _heads(turns: Sequence[Turn]) -> tuple[int, ...]:
    if not turns:
        return ()
    first = hash(turns[0])
    return (first,) if len(turns) == 1 else (hash((first, turns[1])), first)


def _is_same_list(one: tuple[Tool, ...], other: tuple[Tool, ...]) -> bool:
    """Return whether two lists of tools are the same in all their fields and every byte of their JSON."""
    if len(one) != len(other):
        return False
    if identical_prefix(one, other) == len(one):
        return True
    # Equal values are equally deep, so a schema that is nested too deeply is not encoded here.
    return one == other and _rest(one) == _rest(other)


def _rest(tools: tuple[Tool, ...]) -> bytes:
    """Return what ``==`` does not compare exactly: fields that it ignores, the order of keys, and 1 and 1.0."""
    return msgspec.json.encode(
        [(tool.parameters, tool.extra, tool.schema_at, tool.client_name, tool.namespace) for tool in tools]
    )


@dataclass(eq=False, slots=True)
class Continuation:
    """Runs the stages of one prompt, each from its own checkpoint. Use it for one prompt, in one thread.

    Attributes:
        cache: gets the checkpoints of this prompt.
        turns: the conversation. Those turns that the earlier prompt has, too, are the same objects as there, and so are
            the tools if none of them changed: stages compare them by identity.
        heads: the hashes under which the cache finds the conversation.
        earlier: the checkpoints of an earlier prompt, by the types of the stages.
        replaces: the number of the cache's entry whose conversation this one continues; None for none.
        settings: what else the prompt depends on, for ``PromptCache.new_turns``.
        made: the checkpoints of this prompt.
    """

    cache: PromptCache
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...]
    heads: tuple[int, ...]
    earlier: Mapping[type, Any] = field(default_factory=dict)
    replaces: int | None = None
    settings: object = None
    made: dict[type, Any] = field(default_factory=dict)

    def run(self, stage: Stage[GivenT, MadeT, CheckpointT], value: GivenT) -> MadeT:
        kind = type(stage)
        result, self.made[kind] = stage.run(value, self.earlier.get(kind))
        return result

    def keep(self) -> None:
        self.cache.keep(self, self.made)


def is_same_turn(one: Turn, other: Turn) -> bool:
    """Return whether two turns are equal in all their fields; ``==`` ignores some, such as ids and capsules."""
    return one is other or (one == other and _is_same(one, other))


def _is_same(one: Turn | Part, other: Turn | Part) -> bool:
    if one is other:
        return True
    for name in _IGNORED_FIELDS[type(one)]:
        if getattr(one, name) != getattr(other, name):
            return False
    if isinstance(one, _WITH_PARTS) and isinstance(other, _WITH_PARTS):
        parts = one.parts, other.parts
        return all(map(operator.is_, *parts)) or all(map(_is_same, *parts))
    return True


_WITH_PARTS = (Turn, ToolResult)

_IGNORED_FIELDS = {
    kind: tuple(field.name for field in fields(kind) if not field.compare) for kind in (Turn, *get_args(Part))
}
"""The fields that ``==`` ignores, by class."""
