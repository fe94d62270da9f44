"""Keeps the outlook of each conversation, and reads prompts ahead where a harness asks for it.

What a session will do next is seen at the end of a turn. Calls went out: it comes back when the tools have run, which
takes as long as it took before. A sub-agent answered without a call: it is over. The next request shows the rest: a
prompt that rewrites the one before, or a summary in its place, leaves a branch that nobody continues.

A turn that ends in tool calls comes back with their results. Everything up to the results is known when the turn ends.
Mostly the engine holds it already, because turns come back as the tokens in which they were generated; but a template
that prints earlier turns in another way (without their reasoning, say) makes the next prompt differ. Then the engine
can read it in the time that the tools take. A harness asks for this by the hint ``speculative_prefill``.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from contextlib import aclosing
from dataclasses import replace
from statistics import median
from time import monotonic

from singletree.conversation import Request, Sampling, Text, ToolResult, Turn
from singletree.engines.engine import GenerationJob, Outlook
from singletree.errors import SingletreeError
from singletree.events import FinishReason, ToolCallStart, fold
from singletree.lru import LruCache
from singletree.pictures import PromptPicture, comparable_tokens
from singletree.prefixes import common_text_prefix
from singletree.server.sessions.divergence import roles_of
from singletree.server.sessions.sessions import Opened
from singletree.server.sessions.step import Step
from singletree.server.turn.generation import Generation
from singletree.server.turn.prompt import write_prompt
from singletree.server.turn.round_trip import returned_turn

UNKNOWN_PAUSE = 5.0
"""How long tools are expected to run that have not been seen, in seconds."""

_TOOLS, _PAUSES = 1024, 9
"""How many sets of tools that are called together, and how many pauses of each, are kept."""


class Foresight:
    """What one owner's sessions will do next; see ``server.answers.observer.Foresees``."""

    def __init__(self) -> None:
        self._pauses: LruCache[tuple[str, ...], deque[float]] = LruCache(entries=_TOOLS)
        self._read_ahead: dict[str, asyncio.Task[None]] = {}

    def begin(self, opened: Opened, generation: Generation) -> None:
        if (task := self._read_ahead.pop(opened.step.session, None)) is not None:
            task.cancel()
        earlier = None if opened.compared is None else opened.compared.step
        before = None if earlier is None else earlier.outlook
        outlook = Outlook(bool(opened.ends))
        if before is not None:
            course = opened.step.course
            if course == "appended":
                outlook = self._came_back(before)
            elif course == "broken" or _is_summary(opened):
                before.is_over = True
        outlook.is_pinned = generation.request.hints.keep
        opened.step.outlook = generation.outlook = outlook

    def end(self, step: Step, generation: Generation, reason: FinishReason) -> None:
        outlook, request = generation.outlook, generation.request
        if outlook is None:
            return
        tools = _called(generation) if reason == "stop" else ()
        if tools:
            outlook.tools, outlook.since = tools, monotonic()
            outlook.returns_at = outlook.since + median(self._pauses.get(tools) or (UNKNOWN_PAUSE,))
            if request.hints.speculative_prefill:
                self._begin_to_read(step.session, generation)
        agent = request.agent
        is_last = reason == "stop" and not tools and (agent.is_subagent or request.options.compacts)
        outlook.is_over, outlook.is_running = agent.session_final or is_last, False
        outlook.changed()

    async def close(self) -> None:
        tasks = tuple(self._read_ahead.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin_to_read(self, session: str, generation: Generation) -> None:
        """Read the next prompt ahead, until the next request of the session comes."""

        def forget(done: asyncio.Task[None]) -> None:
            if self._read_ahead.get(session) is done:
                del self._read_ahead[session]

        if (before := self._read_ahead.get(session)) is not None:
            before.cancel()
        task = self._read_ahead[session] = asyncio.create_task(read_ahead(generation))
        task.add_done_callback(forget)

    def _came_back(self, outlook: Outlook) -> Outlook:
        if outlook.tools:
            pauses = self._pauses.get(outlook.tools) or deque(maxlen=_PAUSES)
            pauses.append(monotonic() - outlook.since)
            self._pauses.put(outlook.tools, pauses)
        outlook.returns_at, outlook.tools, outlook.is_over = None, (), False
        outlook.is_running = outlook.goes_on = True
        return outlook


def _called(generation: Generation) -> tuple[str, ...]:
    if not generation.decoder.has_calls:
        return ()
    return tuple(sorted({each.name for each in generation.events if isinstance(each, ToolCallStart)}))


def _is_summary(opened: Opened) -> bool:
    """Return whether a summary of the user stands in the place of all of the model's turns: a compacted session."""
    assert opened.compared is not None
    at, roles = opened.same_messages, roles_of(opened.compared.messages)
    acted = roles.index("assistant") if "assistant" in roles else 0
    return 0 < at == acted and roles_of(opened.messages[at : at + 1]) == ["user"]


_LOG = logging.getLogger(__name__)

MIN_NEW_TOKENS = 64
"""Fewer tokens are read faster with the results than in a generation of their own."""

_RESULTS = ("0", "x")
"""Two results that begin differently: what the prompts with them have in common does not depend on the results."""


async def read_ahead(generation: Generation) -> None:
    """Have the engine read what is known of the next prompt, if that is worthwhile."""
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
            outlook=generation.outlook,
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
