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
from dataclasses import fields
from itertools import count, islice
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, get_args

import msgspec

from singletree.conversation import Part, Tool, ToolResult, Turn
from singletree.prefixes import common_prefix, identical_prefix


class StageCheckpoint(Protocol):
    """The work of one stage on one prompt."""

    @property
    def bytes(self) -> int:
        """Return about how much memory it takes, in bytes, without what the conversation holds anyway."""
        ...


ValueT = TypeVar("ValueT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
CheckpointT = TypeVar("CheckpointT", bound=StageCheckpoint)
GivenT = TypeVar("GivenT")
MadeT = TypeVar("MadeT")


class Stage(Protocol[ValueT, ResultT, CheckpointT]):
    """One step from a conversation to the tokens of its prompt. Its fields are the settings of the request."""

    def run(self, value: ValueT, checkpoint: CheckpointT | None) -> tuple[ResultT, CheckpointT]:
        """Return the next value, and the checkpoint of this prompt.

        Args:
            value: the result of the stage before.
            checkpoint: that of an earlier prompt; None to begin at the first turn.

        Raises:
            InvalidRequest: the conversation cannot be served.
        """
        ...


class _Entry(NamedTuple):
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...]
    checkpoints: Mapping[type, Any]
    size: int
    heads: tuple[int, ...]
    settings: object

    @property
    def needed(self) -> int:
        """Return how many turns another conversation must have in common with this one to take its place.

        They end with the last assistant turn: the next prompt need not have what was not answered.
        """
        unanswered = next((i for i, turn in enumerate(reversed(self.turns)) if turn.role == "assistant"), 0)
        return len(self.turns) - unanswered


class PromptCache:
    """Keeps the checkpoints of the last prompts of conversations; the oldest go first. Safe to use from many threads.

    Args:
        limit: the size in bytes at which the oldest prompts are evicted.

    Attributes:
        bytes: the size of all checkpoints now.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        # The numbers of the entries by the hashes of their first turns: no request is compared with all conversations.
        self._by_head: dict[int, dict[int, None]] = {}
        self._numbers = count()
        self._lock = Lock()
        self.bytes = 0

    def resume(
        self, turns: Sequence[Turn], tools: tuple[Tool, ...] = (), settings: object = None
    ) -> Continuation:
        """Begin a prompt of ``turns``, with the checkpoints of the prompt that has most of them in common.

        Args:
            settings: what else the prompt depends on, for ``new_turns``.
        """
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
        """Return the entry that has most turns in common with a conversation, its number, and how many they are."""
        number, entry, most = None, None, 0
        for candidate, other in self._candidates(heads):
            same = common_prefix(turns, other.turns, is_same_turn)
            if same > most:
                number, entry, most = candidate, other, same
        return number, entry, most

    def _candidates(self, heads: tuple[int, ...]) -> list[tuple[int, _Entry]]:
        """Return the entries that may begin like a conversation with these heads, and their numbers; the latest first.

        They are those with the same two first turns. Of those with only the first in common, one is as good as another.
        """
        with self._lock:
            for head in heads:
                if found := self._by_head.get(head):
                    numbers = islice(reversed(found), 1 if head is heads[-1] else None)
                    return [(number, self._entries[number]) for number in numbers]
        return []

    def keep(self, work: Continuation, checkpoints: Mapping[type, Any]) -> None:
        """Store the checkpoints of a prompt, by the types of their stages. ``Continuation.keep`` calls it."""
        size = 0
        for each in checkpoints.values():
            size += each.bytes
        with self._lock:
            self._drop(work.replaces)
            if size > self._limit:
                return
            number = next(self._numbers)
            self._entries[number] = _Entry(
                work.turns, work.tools, checkpoints, size, work.heads, work.settings
            )
            for head in work.heads:
                self._by_head.setdefault(head, {})[number] = None
            self.bytes += size
            while self.bytes > self._limit:
                self._drop(next(iter(self._entries)))

    def _drop(self, number: int | None) -> None:
        dropped = None if number is None else self._entries.pop(number, None)
        if number is None or dropped is None:
            return
        self.bytes -= dropped.size
        for head in dropped.heads:
            numbers = self._by_head[head]
            del numbers[number]
            if not numbers:
                del self._by_head[head]


def _heads(turns: Sequence[Turn]) -> tuple[int, ...]:
    """Return the hashes of the first two turns and of the first one, as far as there are so many."""
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


class Continuation:
    """Runs the stages of one prompt, each from its own checkpoint. Use it for one prompt, in one thread.

    Args:
        cache: gets the checkpoints of this prompt.
        turns: the conversation, by which the next prompt finds them.
        tools: its tools.
        heads: the hashes under which the cache finds it.
        earlier: the checkpoints of an earlier prompt, by the types of the stages.
        replaces: the number of the cache's entry whose conversation this one continues; None for none.
        settings: what else the prompt depends on.

    Attributes:
        turns: the conversation. Those turns that the earlier prompt has, too, are the same objects as there, and so are
            the tools if none of them changed: stages compare them by identity.
    """

    def __init__(
        self,
        cache: PromptCache,
        turns: tuple[Turn, ...],
        tools: tuple[Tool, ...],
        heads: tuple[int, ...],
        earlier: Mapping[type, Any] = MappingProxyType({}),
        replaces: int | None = None,
        settings: object = None,
    ) -> None:
        self._cache = cache
        self._earlier = earlier
        self._made: dict[type, Any] = {}
        self.turns = turns
        self.tools = tools
        self.heads = heads
        self.replaces = replaces
        self.settings = settings

    def run(self, stage: Stage[GivenT, MadeT, CheckpointT], value: GivenT) -> MadeT:
        """Return the result of ``stage`` for ``value``. Raises what the stage raises."""
        kind = type(stage)
        result, self._made[kind] = stage.run(value, self._earlier.get(kind))
        return result

    def keep(self) -> None:
        """Store the checkpoints of all stages that were run, for the next prompt of the conversation."""
        self._cache.keep(self, self._made)


def is_same_turn(one: Turn, other: Turn) -> bool:
    """Return whether two turns are equal in all their fields; ``==`` ignores some, such as ids and capsules."""
    return one is other or (one == other and _is_same(one, other))


def _is_same(one: Turn | Part, other: Turn | Part) -> bool:
    """Return whether two equal values are equal in the fields that ``==`` ignores, too, and so are their parts."""
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
