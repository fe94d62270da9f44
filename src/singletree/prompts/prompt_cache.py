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

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from threading import Lock
from typing import Any, Protocol, TypeVar, get_args

from singletree.conversation import Part, ToolResult, Turn
from singletree.prefixes import common_prefix


class StageCheckpoint(Protocol):
    """The work of one stage on one prompt."""

    @property
    def bytes(self) -> int:
        """Return about how much memory it takes, in bytes, without what the conversation holds anyway."""
        ...


ValueT = TypeVar("ValueT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
CheckpointT = TypeVar("CheckpointT", bound=StageCheckpoint | None)
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


@dataclass(frozen=True, slots=True)
class _Entry:
    turns: Sequence[Turn]
    checkpoints: Mapping[type, Any]
    size: int

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
        self._numbers = count()
        self._lock = Lock()
        self.bytes = 0

    def resume(self, turns: Sequence[Turn]) -> Continuation:
        """Begin a prompt of ``turns``, with the checkpoints of the prompt that has most of them in common."""
        with self._lock:
            entries = list(self._entries.items())
        found: Mapping[type, Any] = {}
        replaces: int | None = None
        most = 0
        for number, entry in reversed(entries):
            if (same := common_prefix(turns, entry.turns)) > most:
                most, found = same, entry.checkpoints
                replaces = number if same >= entry.needed else None
        return Continuation(self, turns, found, replaces)

    def keep(
        self, turns: Sequence[Turn], checkpoints: Mapping[type, Any], *, instead_of: int | None = None
    ) -> None:
        """Store the checkpoints of a prompt. ``Continuation.keep`` calls it.

        Args:
            turns: the conversation.
            checkpoints: those of the stages, by their types.
            instead_of: the number of the entry that ``turns`` continues; it is dropped.
        """
        size = sum(each.bytes for each in checkpoints.values() if each is not None)
        with self._lock:
            self._drop(instead_of)
            if size > self._limit:
                return
            self._entries[next(self._numbers)] = _Entry(turns, checkpoints, size)
            self.bytes += size
            while self.bytes > self._limit:
                self._drop(next(iter(self._entries)))

    def _drop(self, number: int | None) -> None:
        dropped = None if number is None else self._entries.pop(number, None)
        if dropped is not None:
            self.bytes -= dropped.size


class Continuation:
    """Runs the stages of one prompt, each from its own checkpoint. Use it for one prompt, in one thread.

    Args:
        cache: gets the checkpoints of this prompt.
        turns: the conversation, by which the next prompt finds them.
        earlier: the checkpoints of an earlier prompt, by the types of the stages.
        replaces: the number of the cache's entry whose conversation this one continues; None for none.
    """

    def __init__(
        self, cache: PromptCache, turns: Sequence[Turn], earlier: Mapping[type, Any], replaces: int | None
    ) -> None:
        self._cache = cache
        self._turns = turns
        self._earlier = earlier
        self._replaces = replaces
        self._made: dict[type, Any] = {}

    def run(self, stage: Stage[GivenT, MadeT, CheckpointT], value: GivenT) -> MadeT:
        """Return the result of ``stage`` for ``value``. Raises what the stage raises."""
        result, self._made[type(stage)] = stage.run(value, self._earlier.get(type(stage)))
        return result

    def keep(self) -> None:
        """Store the checkpoints of all stages that were run, for the next prompt of the conversation."""
        self._cache.keep(self._turns, self._made, instead_of=self._replaces)


def is_same_turn(one: Turn, other: Turn) -> bool:
    """Return whether two turns are equal in all their fields; ``==`` ignores some, such as ids and capsules."""
    return one is other or (one == other and _is_same(one, other))


def _is_same(one: Turn | Part, other: Turn | Part) -> bool:
    """Return whether two equal values are equal in the fields that ``==`` ignores, too, and so are their parts."""
    if one is other:
        return True
    if any(getattr(one, name) != getattr(other, name) for name in _IGNORED_FIELDS[type(one)]):
        return False
    if isinstance(one, Turn | ToolResult) and isinstance(other, Turn | ToolResult):
        return all(map(_is_same, one.parts, other.parts))
    return True


_IGNORED_FIELDS = {
    kind: tuple(field.name for field in fields(kind) if not field.compare) for kind in (Turn, *get_args(Part))
}
"""The fields that ``==`` ignores, by class."""
