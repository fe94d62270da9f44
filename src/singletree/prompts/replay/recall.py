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
from typing import Literal, Protocol

from singletree.conversation import Conversation, Reasoning, Tool, ToolCall, ToolResult, Turn
from singletree.prefixes import common_prefix
from singletree.prompts.prompt_cache import is_same_turn
from singletree.prompts.replay.partial_turns import without_echoes
from singletree.prompts.replay.turn_comparison import is_part_of, normalized_id, pair_calls
from singletree.prompts.replay.turn_memory import (
    GeneratedTurn,
    HistoryDigests,
    TurnMemory,
    is_equivalent_memoized,
    resolve_match,
)


@dataclass(frozen=True, slots=True)
class Recalled:
    """A conversation in which the remembered turns stand as they were generated.

    Attributes:
        conversation: the conversation with these turns.
        turns: the remembered turns, by their index in the conversation.
        digests: the digests of the history before each turn, as the client sent it.
    """

    conversation: Conversation
    turns: Mapping[int, GeneratedTurn]
    digests: HistoryDigests

    @property
    def in_order(self) -> tuple[GeneratedTurn, ...]:
        """Return the remembered turns from the first to the last."""
        return tuple(self.turns[i] for i in sorted(self.turns))


@dataclass(frozen=True, slots=True)
class RecallCheckpoint:
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
        """Return about how much memory the digests take, in bytes; the turns are the conversation's or the memory's."""
        return _DIGEST_BYTES * len(self.given.turns)


_DIGEST_BYTES = 400


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
        same = 0
        if checkpoint is not None:
            same = common_prefix(checkpoint.given.turns, conversation.turns, is_same_turn)
        digests = (
            HistoryDigests(conversation.turns)
            if checkpoint is None
            else checkpoint.recalled.digests.of_grown(conversation.turns, same)
        )
        recalled = Recalled(conversation, {}, digests)
        if self.memory is not None:
            found = {}
            self.memory.refresh(conversation.turns, digests)
            if checkpoint is not None:
                found = self._found_before(self.memory, checkpoint, conversation.tools, same)
            recalled = self._recall(self.memory, conversation, digests, checkpoint, found)
            self.memory.mark_used(recalled.in_order)
        return recalled, RecallCheckpoint(conversation, recalled, self.restore_reasoning)

    def _found_before(
        self, memory: TurnMemory, checkpoint: RecallCheckpoint, tools: Sequence[Tool], same: int
    ) -> dict[int, GeneratedTurn]:
        """Return the remembered turns of ``checkpoint`` among the first ``same`` turns, which did not change.

        Nothing is reused where the tools or the restoration of reasoning changed.
        """
        before = checkpoint.recalled
        if checkpoint.restores_reasoning != self.restore_reasoning or checkpoint.given.tools != tools:
            return {}
        # The results after a turn decide which of its calls may be missing, so the turn after it must be the same, too.
        return memory.still_remembered({i: known for i, known in before.turns.items() if i + 1 < same})

    def _recall(
        self,
        memory: TurnMemory,
        conversation: Conversation,
        digests: HistoryDigests,
        checkpoint: RecallCheckpoint | None,
        found: dict[int, GeneratedTurn],
    ) -> Recalled:
        """Return ``conversation`` as it was generated; the turns ``found`` are those of ``checkpoint``."""
        turns = list(conversation.turns)
        search = _Search(self, memory, conversation, digests)
        for i, turn in enumerate(conversation.turns):
            if turn.role != "assistant":
                continue
            if checkpoint is not None and i in found:
                turns[i] = checkpoint.recalled.conversation.turns[i]
                continue
            if search.continues_earlier(i, turns, found):
                turns[i] = _NOTHING
                continue
            known, is_certain = search.find(i)
            if known is not None:
                keeps = is_certain and (self.restore_reasoning or _has_reasoning(turn))
                turns[i] = known.memoized(
                    keeps, turn, partial(_restored, turn, known.turn, keeps_reasoning=keeps)
                )
                if is_certain:
                    found[i] = known
                continue
            turns[i] = without_echoes(turn)
            if self.capsules is not None and (opened := self.capsules.open(turns[i])) is not None:
                turns[i], found[i] = opened
        is_changed = any(map(operator.is_not, turns, conversation.turns))
        changed = replace(conversation, turns=tuple(turns)) if is_changed else conversation
        return Recalled(changed, found, digests)


_NOTHING = Turn("tool")
"""Replaces a turn whose calls stand in an earlier one: no template prints a tool turn without results."""


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds the remembered turns of one conversation."""

    stage: RecallTurns
    memory: TurnMemory
    conversation: Conversation
    digests: HistoryDigests

    def find(self, number: int) -> tuple[GeneratedTurn | None, bool]:
        """Return the remembered turn that turn ``number`` is, and whether its reasoning is certain."""
        turn = self.conversation.turns[number]
        accept = partial(self._accepts, number)
        found, _ = self.memory.find_candidates(turn, "", accept)
        if found:
            return found[-1], True
        # The history is long to digest, and only turns without an id of this server need it.
        found, is_complete = self.memory.find_candidates(turn, self.digests[number], accept)
        capsules = self.stage.capsules
        carried = capsules.tokens(turn) if capsules is not None and found else None
        if carried:
            found = [known for known in found if _holds(known.token_ids, carried)]
            return (found[-1], True) if found else (None, False)
        if carried is not None and not turn.reasoning.strip():
            return None, False  # it had reasoning, in capsules that cannot be opened
        return resolve_match(turn, found, is_complete)

    def continues_earlier(
        self, number: int, turns: Sequence[Turn], found: Mapping[int, GeneratedTurn]
    ) -> bool:
        """Return whether turn ``number`` continues an earlier turn that is already restored as a whole.

        Some clients send each call of a turn as a message of its own, followed by its result.

        Args:
            turns: the turns as they are recalled so far.
            found: the remembered turns among them, by index.
        """
        earlier = next((i for i in range(number - 1, -1, -1) if turns[i].role != "tool"), -1)
        known = found.get(earlier)
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
