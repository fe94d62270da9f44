"""Has the engine read the known part of a session's next prompt while the harness runs its tools.

A turn that ends in tool calls comes back with their results. Everything up to the results is known when the turn ends.
Mostly the engine holds it already, because turns come back as the tokens in which they were generated; but a template
that prints earlier turns in another way (without their reasoning, say) makes the next prompt differ. Then the engine
can read it in the time that the tools take. A harness asks for this by the hint ``speculative_prefill``.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from singletree.conversation import Request, Sampling, Text, ToolResult, Turn
from singletree.engines.engine import GenerationJob
from singletree.errors import SingletreeError
from singletree.events import fold
from singletree.owners import owned_id
from singletree.pictures import PromptPicture, comparable_tokens
from singletree.prefixes import common_text_prefix
from singletree.server.turn.generation import Generation
from singletree.server.turn.prompt import write_prompt
from singletree.server.turn.round_trip import returned_turn

_LOG = logging.getLogger(__name__)

MIN_NEW_TOKENS = 64
"""Fewer tokens are read faster with the results than in a generation of their own."""

_RESULTS = ("0", "x")
"""Two results that begin differently: what the prompts with them have in common does not depend on the results."""


@dataclass(slots=True)
class SpeculativePrefills:
    """The prompts that are read ahead, one for each session. The session's next request ends it."""

    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _owner: str = ""

    def of(self, owner: str) -> SpeculativePrefills:
        """Return those of one owner's sessions; these ones for an empty name."""
        return replace(self, _owner=owner) if owner else self

    def begin(self, session: str, generation: Generation) -> None:
        if not generation.request.hints.speculative_prefill or generation.ended != "stop":
            return
        self.cancel(session)
        place = owned_id(self._owner, session)
        task = self._tasks[place] = asyncio.create_task(_prefill(generation))
        task.add_done_callback(lambda done: self._forget(place, done))

    def cancel(self, session: str) -> None:
        """End what is read ahead for the session: its next request has come."""
        if self._tasks and (task := self._tasks.pop(owned_id(self._owner, session), None)) is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, place: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(place) is task:
            del self._tasks[place]


async def _prefill(generation: Generation) -> None:
    try:
        known = await asyncio.to_thread(known_prompt, generation)
        if known is None:
            return
        request, (tokens, pictures) = generation.request, known
        job = GenerationJob(
            tokens,
            Sampling(max_tokens=1, temperature=0.0),
            "speculative-prefill",
            priority=request.hints.rank + 1,
            pictures=pictures,
            session=generation.session_name,
            cache_salt=request.cache_salt,
        )
        async with aclosing(generation.model.engine.generate(job)) as chunks:
            async for _ in chunks:
                pass
    except SingletreeError as error:
        _LOG.debug("a prompt was not read ahead: %s", error.message)


def known_prompt(generation: Generation) -> tuple[array[int], tuple[PromptPicture, ...]] | None:
    """Return the tokens of the next prompt up to the results of the turn's calls, and its pictures.

    None if the turn has no calls, or if the engine holds nearly all of them already.

    Raises:
        SingletreeError: the next prompt cannot be written.
    """
    turn = fold(generation.events)
    if not turn.tool_calls:
        return None
    try:
        turn = returned_turn(turn, generation.request.conversation.tools)
    except (ValueError, RecursionError):
        return None  # nobody knows how it comes back
    one, other = (
        write_prompt(generation.model, _with_results(generation.request, turn, text)) for text in _RESULTS
    )
    tokens, width = comparable_tokens(one.token_ids, one.pictures), array("I").itemsize
    common = common_text_prefix(
        tokens.tobytes(), comparable_tokens(other.token_ids, other.pictures).tobytes()
    )
    length = common // width
    held = comparable_tokens(generation.prompt.token_ids, generation.prompt.pictures) + generation.token_ids
    shared = common_text_prefix(tokens[:length].tobytes(), held.tobytes()) // width
    if length - shared < MIN_NEW_TOKENS or length >= generation.model.context_window:
        return None
    pictures = tuple(picture for picture in one.pictures if picture.position < length)
    return one.token_ids[:length], pictures


def _with_results(request: Request, turn: Turn, text: str) -> Request:
    results = Turn("tool", tuple(ToolResult(call.id, (Text(text),)) for call in turn.tool_calls))
    conversation = replace(request.conversation, turns=(*request.conversation.turns, turn, results))
    return replace(request, conversation=conversation)
