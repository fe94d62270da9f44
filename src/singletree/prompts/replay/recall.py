"""Replaces the assistant turns that a client sent back by the turns as the model generated them.

They are found in the turn memory, or in the capsules that the turns carry. ``turn_memory`` describes how a turn is
recognised.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, takewhile
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypeVar

from singletree.conversation import Conversation, Reasoning, ToolCall, ToolResult, Turn
from singletree.prefixes import common_prefix
from singletree.prompts.prompt_cache import is_same_turn
from singletree.prompts.replay.history_digests import HistoryDigests
from singletree.prompts.replay.partial_turns import without_echoes
from singletree.prompts.replay.turn_comparison import is_part_of, normalized_id, pair_calls
from singletree.prompts.replay.turn_memory import (
    GeneratedTurn,
    TurnMemory,
    is_equivalent_memoized,
    lookup_keys,
    resolve_match,
)

ValueT = TypeVar("ValueT")


class Recalled(NamedTuple):
    """A conversation in which the remembered turns stand as they were generated.

    Attributes:
        conversation: the conversation with these turns.
        turns: the remembered turns, by their index in the conversation.
        digests: the digests of the history before each turn, as the client sent it.
        unknown: the keys under which other turns were searched in vain, by their index.
        settled: how many turns at the beginning are remembered, or unknown, or no answers.
    """

    conversation: Conversation
    turns: Mapping[int, GeneratedTurn]
    digests: HistoryDigests
    unknown: Mapping[int, Sequence[str]] = MappingProxyType({})
    settled: int = 0

    @property
    def in_order(self) -> tuple[GeneratedTurn, ...]:
        """Return the remembered turns from the first to the last."""
        return tuple(map(self.turns.__getitem__, sorted(self.turns)))


class RecallCheckpoint(NamedTuple):
    """The turns that were found for a prompt.

    Attributes:
        given: the conversation as the client sent it.
        recalled: what it was recalled as.
        restores_reasoning: whether reasoning was restored.
    """

    given: Conversation
    recalled: Recalled
    restores_reasoning: bool

    @property
    def bytes(self) -> int:
        """Return about how much memory it takes, in bytes; the turns are the conversation's or the memory's."""
        unknown = self.recalled.unknown
        keys = _KEY_BYTES * len(unknown) + sum(map(len, chain.from_iterable(unknown.values())))
        return _DIGEST_BYTES * len(self.given.turns) + keys


_DIGEST_BYTES = 400
_KEY_BYTES = 400


Unanswered = Literal["none", "last", "any"]
"""The calls of a turn that the chat template prints without a result: none of them, only the last ones, or any."""


class CapsuleReader(Protocol):
    """Reads the capsules that turns carry."""

    def tokens(self, turn: Turn) -> list[array[int]] | None:
        """Return the tokens of each capsule of ``turn`` that can be opened; None if it carries no capsule."""
        ...

    def open(self, turn: Turn) -> tuple[Turn, GeneratedTurn] | None:
        """Return ``turn`` as its capsules have it, and the remembered turn.

        None if it carries no readable capsules, or does not agree with them.
        """
        ...


@dataclass(frozen=True, slots=True)
class RecallTurns:
    """The stage that replaces the turns that are remembered by the turns as they were generated.

    Attributes:
        memory: holds the generated turns; None to replace none.
        restore_reasoning: restore the reasoning of a turn where the harness returned none or only some of it (models
            that are trained with it score whole points lower without it). The template decides whether it is printed.
        unanswered: the calls that the template prints without a result. Calls that the harness left out together with
            their results are restored only if the template can print them.
        tags: the markers of the model's reasoning.
        capsules: reads the capsules of turns; None where capsules are not used.
    """

    memory: TurnMemory | None
    restore_reasoning: bool = True
    unanswered: Unanswered = "last"
    tags: Sequence[str] = ()
    capsules: CapsuleReader | None = None

    def run(
        self, conversation: Conversation, checkpoint: RecallCheckpoint | None
    ) -> tuple[Recalled, RecallCheckpoint]:
        """Search the turns that ``checkpoint`` does not have, and mark all remembered turns as used."""
        turns, same = conversation.turns, 0
        if checkpoint is not None:
            same = common_prefix(checkpoint.given.turns, turns, is_same_turn)
        digests = (
            HistoryDigests(turns) if checkpoint is None else checkpoint.recalled.digests.of_grown(turns, same)
        )
        if self.memory is None:
            recalled = Recalled(conversation, {}, digests)
        else:
            self.memory.refresh(turns, digests)
            search = _Search(self, self.memory, conversation, digests)
            if checkpoint is not None and self._may_reuse(checkpoint, conversation):
                search.take_over(checkpoint.recalled, same)
            recalled = search.run()
            self.memory.mark_used(recalled.in_order)
        return recalled, RecallCheckpoint(conversation, recalled, self.restore_reasoning)

    def _may_reuse(self, checkpoint: RecallCheckpoint, conversation: Conversation) -> bool:
        """Return whether results of ``checkpoint`` hold: tools and restoration of reasoning are the same."""
        known, tools = checkpoint.given.tools, conversation.tools
        return checkpoint.restores_reasoning == self.restore_reasoning and (known is tools or known == tools)


_NOTHING = Turn("tool")
"""Replaces a turn whose calls stand in an earlier one: no template prints a tool turn without results."""


class _Search:
    """Finds the remembered turns of one conversation. Use it once."""

    def __init__(
        self, stage: RecallTurns, memory: TurnMemory, conversation: Conversation, digests: HistoryDigests
    ) -> None:
        self.stage = stage
        self.memory = memory
        self.conversation = conversation
        self.digests = digests
        self._turns = list(conversation.turns)
        self._done = 0
        self._found: dict[int, GeneratedTurn] = {}
        self._unknown: dict[int, Sequence[str]] = {}

    def take_over(self, before: Recalled, same: int) -> None:
        """Take over the remembered turns of an earlier prompt with the same first ``same`` turns, and begin after them.

        A turn that was found, and is still remembered, is the same one. A turn that was not found is searched only if
        the memory has got one of its keys, and so are all turns after it.
        """
        # The results after a turn decide which of its calls may be missing, so the turn after it must be the same, too.
        kept = max(same - 1, 0)
        found, unknown = _below(kept, before.turns), _below(kept, before.unknown)
        self._found = dict(self.memory.still_remembered(found))
        has_new = self.memory.knows_any([*chain.from_iterable(unknown.values())])
        self._unknown = {} if has_new else dict(unknown)
        is_unchanged = len(self._found) == len(found) and not has_new
        self._done = self._settled(min(before.settled, kept) if is_unchanged else 0, kept)
        self._turns[: self._done] = before.conversation.turns[: self._done]
        if self._done < kept:
            self._unknown = dict(_below(self._done, self._unknown))
            for i in self._found:
                self._turns[i] = before.conversation.turns[i]

    def _settled(self, start: int, end: int) -> int:
        """Return the index of the first answer from ``start`` on that is neither remembered nor unknown, or ``end``."""
        turns = self.conversation.turns
        undecided = (
            i
            for i in range(start, end)
            if turns[i].role == "assistant" and i not in self._found and i not in self._unknown
        )
        return next(undecided, end)

    def run(self) -> Recalled:
        """Return the conversation as it was generated."""
        for i in range(self._done, len(self._turns)):
            if self._turns[i].role == "assistant" and i not in self._found:
                self._recall(i)
        given = self.conversation
        is_changed = any(map(operator.is_not, self._turns, given.turns))
        changed = Conversation(tuple(self._turns), given.tools) if is_changed else given
        settled = self._settled(self._done, len(self._turns))
        return Recalled(changed, self._found, self.digests, self._unknown, settled)

    def _recall(self, number: int) -> None:
        """Replace turn ``number`` by the remembered turn that it is, if there is one."""
        turn = self.conversation.turns[number]
        if self.continues_earlier(number):
            self._turns[number] = _NOTHING
            return
        # No turn is remembered by its text alone.
        keys = [key for key in lookup_keys(turn, "") if not key.startswith(" text ")]
        is_unknown = not self.memory.knows_any(keys)
        if is_unknown:
            # The history is long to digest, and only turns without an id of this server need it.
            keys += lookup_keys(turn, self.digests[number])
            is_unknown = not self.memory.knows_any(keys)
        known, is_certain = (None, False) if is_unknown else self.find(number)
        if known is not None:
            keeps = is_certain and (self.stage.restore_reasoning or _has_reasoning(turn))
            self._turns[number] = known.memoized(
                keeps, turn, partial(_restored, turn, known.turn, keeps_reasoning=keeps)
            )
            if is_certain:
                self._found[number] = known
            return
        self._turns[number] = without_echoes(turn)
        capsules = self.stage.capsules
        if capsules is not None and (opened := capsules.open(self._turns[number])) is not None:
            self._turns[number], self._found[number] = opened
            return
        if is_unknown:
            self._unknown[number] = keys

    def find(self, number: int) -> tuple[GeneratedTurn | None, bool]:
        """Return the remembered turn that turn ``number`` is, and whether its reasoning is certain."""
        turn = self.conversation.turns[number]
        accept = partial(self._accepts, number)
        found, _ = self.memory.find_candidates(turn, "", accept)
        if found:
            return found[-1], True
        found, is_complete = self.memory.find_candidates(turn, self.digests[number], accept)
        capsules = self.stage.capsules
        carried = capsules.tokens(turn) if capsules is not None and found else None
        if carried:
            found = [known for known in found if _holds(known.token_ids, carried)]
            return (found[-1], True) if found else (None, False)
        if carried is not None and not turn.reasoning.strip():
            return None, False  # it had reasoning, in capsules that cannot be opened
        return resolve_match(turn, found, is_complete)

    def continues_earlier(self, number: int) -> bool:
        """Return whether turn ``number`` continues an earlier turn that is already restored as a whole.

        Some clients send each call of a turn as a message of its own, followed by its result.
        """
        earlier = next((i for i in range(number - 1, -1, -1) if self._turns[i].role != "tool"), -1)
        known = self._found.get(earlier)
        if known is None:
            return False
        returned = self.conversation.turns
        before = {normalized_id(call.id) for turn in returned[earlier:number] for call in turn.tool_calls}
        now = {normalized_id(call.id) for call in returned[number].tool_calls}
        generated = {normalized_id(call.id) for call in known.turn.tool_calls}
        return bool(now) and now <= generated - before and self._matches(number, returned[number], known)

    def _accepts(self, number: int, turn: Turn, known: GeneratedTurn) -> bool:
        return self._matches(number, turn, known) and self._can_print_calls(number, known)

    def _matches(self, number: int, turn: Turn, known: GeneratedTurn) -> bool:
        # The model continues a turn at the end: missing parts are not generated yet.
        is_over = number + 1 < len(self.conversation.turns)
        tools = self.conversation.tools
        if is_equivalent_memoized(turn, known, tools):
            return True
        compare = partial(
            is_part_of,
            turn,
            known.turn,
            tools,
            tags=self.stage.tags,
            allow_missing_reasoning=self.stage.restore_reasoning,
        )
        return is_over and known.memoized(("in part", self.stage.restore_reasoning), (turn, tools), compare)

    def _can_print_calls(self, number: int, known: GeneratedTurn) -> bool:
        """Return whether the template can print the calls of ``known`` with the results that the conversation has."""
        turns, ours = self.conversation.turns, known.turn.tool_calls
        present = {normalized_id(call.id) for call in turns[number].tool_calls}
        if len(turns[number].tool_calls) == len(ours):
            return True
        if not all(call.complete or normalized_id(call.id) in present for call in ours):
            return False  # a call that was cut off: clients leave it out, because it is not a call
        loop = chain.from_iterable(
            takewhile(lambda turn: turn.role != "user", side)
            for side in (turns[number + 1 :], reversed(turns[:number]))
        )
        present.update(
            normalized_id(p.call_id) for turn in loop for p in turn.parts if isinstance(p, ToolResult)
        )
        missing = [normalized_id(call.id) not in present for call in ours]
        return (
            self.stage.unanswered == "any"
            or not any(missing)
            or (self.stage.unanswered == "last" and _is_sorted(missing))
        )


def _below(end: int, values: Mapping[int, ValueT]) -> Mapping[int, ValueT]:
    """Return ``values`` without those of the indices from ``end`` on."""
    if max(values, default=-1) < end:
        return values  # as in most requests; no Python loop runs over a long conversation
    return {i: value for i, value in values.items() if i < end}


def _is_sorted(flags: Sequence[bool]) -> bool:
    return all(one <= other for one, other in pairwise(flags))


def _holds(token_ids: array[int], runs: Iterable[array[int]]) -> bool:
    """Return whether ``token_ids`` contains all ``runs``, in their order."""
    data, width, at = token_ids.tobytes(), token_ids.itemsize, 0
    for run in runs:
        wanted = run.tobytes()
        at = data.find(wanted, at)
        while at > 0 and at % width:
            at = data.find(wanted, at + 1)
        if at < 0:
            return False
        at += len(wanted)
    return True


def _has_reasoning(turn: Turn) -> bool:
    """Return whether ``turn`` has a reasoning part, be it with text or only with a capsule."""
    return any(isinstance(p, Reasoning) for p in turn.parts)


def _restored(returned: Turn, remembered: Turn, *, keeps_reasoning: bool) -> Turn:
    """Return ``returned`` with the remembered parts, in their order; calls keep the ids to which the results refer."""
    ids = {ours.id: theirs.id for ours, theirs in pair_calls(returned, remembered, in_part=True) or ()}
    parts = [
        replace(p, id=ids.get(p.id, p.id)) if isinstance(p, ToolCall) else p
        for p in remembered.parts
        if keeps_reasoning or not isinstance(p, Reasoning)
    ]
    return replace(returned, parts=tuple(parts))
