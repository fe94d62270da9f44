"""Replaces the assistant turns that a client sent back by the turns as the model generated them.

They are found in the turn memory, or in the capsules that the turns carry. ``turn_memory`` says how.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, takewhile
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypeVar

from singletree.conversation import Conversation, Reasoning, Tool, ToolCall, ToolResult, Turn
from singletree.prefixes import common_prefix
from singletree.prompts.prompt_cache import is_same_turn
from singletree.prompts.replay.turn_comparison import is_part_of, normalized_id, pair_calls, without_echoes
from singletree.prompts.replay.turn_keys import HistoryDigests, id_keys, place_keys
from singletree.prompts.replay.turn_memory import (
    GeneratedTurn,
    TurnMemory,
    is_equivalent_memoized,
    resolve_match,
)

ValueT = TypeVar("ValueT")


class Recalled(NamedTuple):
    """A conversation in which the remembered turns stand as they were generated, by their index in ``turns``.

    Attributes:
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
        return tuple(map(self.turns.__getitem__, sorted(self.turns)))


RestoredReasoning = Literal["all", "written_while_off", "none"]
"""Which reasoning is restored that a client left out: all, only that of turns which reason although the prompt had
closed their reasoning, or none. A client that switches reasoning off takes none of the latter out."""


class RecallCheckpoint(NamedTuple):
    """The turns that were found for a prompt whose conversation the client sent as ``given``."""

    given: Conversation
    recalled: Recalled
    restored_reasoning: RestoredReasoning

    @property
    def bytes(self) -> int:
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

    def open(self, turn: Turn) -> tuple[Turn, GeneratedTurn] | None:
        """Return ``turn`` as its capsules have it, and the remembered turn; None if unreadable, or if they disagree."""


@dataclass(frozen=True, slots=True)
class RecallTurns:
    """The stage that replaces the turns that are remembered by the turns as they were generated.

    Attributes:
        memory: holds the generated turns; None to replace none.
        restored_reasoning: the turns whose reasoning is restored where the harness returned none or only some of it
            (models that are trained with it score whole points lower without it). The template decides whether it is
            printed.
        unanswered: the calls that the template prints without a result. Calls that the harness left out together with
            their results are restored only if the template can print them.
        tags: the markers of the model's reasoning: openers and closers in turn.
        is_minted: returns whether a server has made the id of a call. A turn with such an id is no other turn with the
            same history.
        elsewhere: returns the stages of the server's other models. A turn that one of them generated stands here with
            all its parts, such as the reasoning that a harness left out; its tokens are never used.
    """

    memory: TurnMemory | None
    restored_reasoning: RestoredReasoning = "all"
    unanswered: Unanswered = "last"
    tags: Sequence[str] = ()
    capsules: CapsuleReader | None = None
    is_minted: Callable[[str], bool] = lambda _: False
    elsewhere: Callable[[], Sequence[RecallTurns]] = tuple

    def run(
        self, conversation: Conversation, checkpoint: RecallCheckpoint | None
    ) -> tuple[Recalled, RecallCheckpoint]:
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
        return recalled, RecallCheckpoint(conversation, recalled, self.restored_reasoning)

    def restores_reasoning(self, known: GeneratedTurn) -> bool:
        if self.restored_reasoning == "written_while_off":
            closers = filter(None, map(str.strip, self.tags[1::2]))
            return any(closer in known.opening.text for closer in closers)
        return self.restored_reasoning == "all"

    def _may_reuse(self, checkpoint: RecallCheckpoint, conversation: Conversation) -> bool:
        known, tools = checkpoint.given.tools, conversation.tools
        return checkpoint.restored_reasoning == self.restored_reasoning and (known is tools or known == tools)


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
        self._found = dict(self.memory.still_remembered(found, self.conversation.turns))
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
        turns = self.conversation.turns
        answers = (i for i in range(start, end) if turns[i].role == "assistant")
        return next((i for i in answers if i not in self._found and i not in self._unknown), end)

    def run(self) -> Recalled:
        for i in range(self._done, len(self._turns)):
            if self._turns[i].role == "assistant" and i not in self._found:
                self._recall(i)
        given = self.conversation
        is_changed = any(map(operator.is_not, self._turns, given.turns))
        changed = Conversation(tuple(self._turns), given.tools) if is_changed else given
        settled = self._settled(self._done, len(self._turns))
        return Recalled(changed, self._found, self.digests, self._unknown, settled)

    def _recall(self, number: int) -> None:
        turn = self.conversation.turns[number]
        if self.continues_earlier(number):
            self._turns[number] = _NOTHING
            return
        keys = id_keys(turn)
        is_unknown = not self.memory.knows_any(keys)
        if is_unknown:
            keys += place_keys(turn, self.digests[number])
            is_unknown = not self.memory.knows_any(keys)
        known, is_certain = (None, False) if is_unknown else self.find(number)
        if known is not None:
            # A part with a capsule alone is reasoning, too.
            has_reasoning = any(isinstance(part, Reasoning) for part in turn.parts)
            keeps = is_certain and (has_reasoning or self.stage.restores_reasoning(known))
            self._turns[number] = known.memoized(
                keeps,
                turn,
                partial(_restored, turn, known.turn, self.conversation.tools, keeps_reasoning=keeps),
            )
            if is_certain:
                self._found[number] = known
            return
        self._turns[number] = without_echoes(turn)
        capsules = self.stage.capsules
        if capsules is not None and (opened := capsules.open(self._turns[number])) is not None:
            self._turns[number], self._found[number] = opened
            return
        self._turns[number] = self._written_elsewhere(number) or self._turns[number]
        if is_unknown:
            self._unknown[number] = keys

    @cached_property
    def _others(self) -> Sequence[_Search]:
        searches = []
        for stage in self.stage.elsewhere():
            if stage.memory is not None:
                stage.memory.refresh(self.conversation.turns, self.digests)
                alone = replace(stage, elsewhere=tuple)
                searches.append(_Search(alone, stage.memory, self.conversation, self.digests))
        return searches

    def _written_elsewhere(self, number: int) -> Turn | None:
        """Return the turn as another model generated it, without ids in that model's own form; None if none did."""
        for other in self._others:
            other._recall(number)
            if number in other._found:
                turn = other._turns[number]
                calls = (replace(p, written_id="") if isinstance(p, ToolCall) else p for p in turn.parts)
                return replace(turn, parts=tuple(calls))
        return None

    def find(self, number: int) -> tuple[GeneratedTurn | None, bool]:
        turn = self.conversation.turns[number]
        accept = partial(self._accepts, number)
        found, _ = self.memory.find_candidates(turn, "", accept)
        if found:
            return found[-1], True
        found, is_complete = self.memory.find_candidates(turn, self.digests[number], accept)
        minted = {normalized_id(call.id) for call in turn.tool_calls if self.stage.is_minted(call.id)}
        if found and minted:
            found = [
                known for known in found if minted <= {normalized_id(c.id) for c in known.turn.tool_calls}
            ]
        capsules = self.stage.capsules
        carried = capsules.tokens(turn) if capsules is not None and found else None
        if carried:
            found = [known for known in found if _holds(known.token_ids, carried)]
            return (found[-1], True) if found else (None, False)
        if carried is not None and not turn.reasoning.strip():
            return None, False  # it had reasoning, in capsules that cannot be opened
        return resolve_match(turn, found, is_complete)

    def continues_earlier(self, number: int) -> bool:
        """Some clients send each call of a turn as a message of its own: is the turn restored as a whole earlier?"""
        earlier = next((i for i in range(number - 1, -1, -1) if self._turns[i].role != "tool"), -1)
        known = self._found.get(earlier)
        turn = self.conversation.turns[number]
        if known is None or not turn.tool_calls:
            return False
        pairs = self._pairs(range(earlier, number + 1), known)
        if pairs is None or not self._matches(number, turn, known):
            return False
        # The same call with another id may be one that the model made again.
        return _have_same_ids(pairs) or self.find(number)[0] is None

    def _pairs(self, numbers: Iterable[int], known: GeneratedTurn) -> list[tuple[ToolCall, ToolCall]] | None:
        calls = (self.conversation.turns[i].tool_calls for i in numbers)
        returned = Turn("assistant", tuple(chain.from_iterable(calls)))
        return pair_calls(returned, known.turn, self.conversation.tools, in_part=True)

    def _accepts(self, number: int, turn: Turn, known: GeneratedTurn) -> bool:
        return self._matches(number, turn, known) and self._can_print_calls(number, known)

    def _matches(self, number: int, turn: Turn, known: GeneratedTurn) -> bool:
        # The model continues a turn at the end: missing parts are not generated yet.
        is_over = number + 1 < len(self.conversation.turns)
        tools = self.conversation.tools
        if is_equivalent_memoized(turn, known, tools):
            return True
        restores = self.stage.restores_reasoning(known)
        compare = partial(
            is_part_of, turn, known.turn, tools, tags=self.stage.tags, allow_missing_reasoning=restores
        )
        return is_over and known.memoized(("in part", restores), (turn, tools), compare)

    def _can_print_calls(self, number: int, known: GeneratedTurn) -> bool:
        turns, ours = self.conversation.turns, known.turn.tool_calls
        if len(turns[number].tool_calls) == len(ours):
            return True
        pairs = self._pairs((number,), known) or []
        present = {normalized_id(call.id) for call, _ in pairs}
        if not all(call.complete or normalized_id(call.id) in present for call in ours):
            return False  # a call that was cut off: clients leave it out, because it is not a call
        loop = chain.from_iterable(
            takewhile(lambda turn: turn.role != "user", side)
            for side in (turns[number + 1 :], reversed(turns[:number]))
        )
        present.update(
            normalized_id(p.call_id) for turn in loop for p in turn.parts if isinstance(p, ToolResult)
        )
        if not _have_same_ids(pairs):
            present.update(normalized_id(call.id) for call, _ in self._pairs_behind(number, known))
        missing = [normalized_id(call.id) not in present for call in ours]
        return (
            self.stage.unanswered == "any"
            or not any(missing)
            or (self.stage.unanswered == "last" and missing == sorted(missing))
        )

    def _pairs_behind(self, number: int, known: GeneratedTurn) -> list[tuple[ToolCall, ToolCall]]:
        """Pair the calls of turn ``number``, and of the turns that continue it, with those of ``known``."""
        turns, numbers = self.conversation.turns, [number]
        pairs = self._pairs(numbers, known) or []
        for i in range(number + 1, len(turns)):
            if turns[i].role == "tool":
                continue
            longer = self._pairs([*numbers, i], known) if turns[i].role == "assistant" else None
            if not longer or len(longer) == len(pairs) or self.find(i)[0] is not None:
                break
            numbers, pairs = [*numbers, i], longer
        return pairs


def _below(end: int, values: Mapping[int, ValueT]) -> Mapping[int, ValueT]:
    if max(values, default=-1) < end:
        return values  # as in most requests; no Python loop runs over a long conversation
    return {i: value for i, value in values.items() if i < end}


def _have_same_ids(pairs: Iterable[tuple[ToolCall, ToolCall]]) -> bool:
    return all(normalized_id(ours.id) == normalized_id(theirs.id) for ours, theirs in pairs)


def _holds(token_ids: array[int], runs: Iterable[array[int]]) -> bool:
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


def _restored(returned: Turn, remembered: Turn, tools: Sequence[Tool], *, keeps_reasoning: bool) -> Turn:
    """Return ``returned`` with the remembered parts, in their order; calls keep the ids to which the results refer."""
    pairs = pair_calls(returned, remembered, tools, in_part=True) or ()
    ids = {ours.id: theirs.id for ours, theirs in pairs}
    parts = [
        replace(p, id=ids.get(p.id, p.id)) if isinstance(p, ToolCall) else p
        for p in remembered.parts
        if keeps_reasoning or not isinstance(p, Reasoning)
    ]
    return replace(returned, parts=tuple(parts))
