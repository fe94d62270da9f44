"""Keeps the outlook of each conversation, and reads prompts ahead where a harness asks for it.

What a session will do next is seen at the end of a turn. Calls went out: it comes back when the tools have run, which
takes as long as it took before. A sub-agent answered without a call: it is over. The next request shows the rest: a
prompt that rewrites the one before, or a summary in its place, leaves a branch that nobody continues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from statistics import median
from time import monotonic

from singletree.engines.outlook import Outlook
from singletree.events import FinishReason, ToolCallStart
from singletree.foresight.speculative_prefill import read_ahead
from singletree.lru import LruCache
from singletree.server.sessions.divergence import roles_of
from singletree.server.sessions.sessions import Opened
from singletree.server.sessions.step import Step
from singletree.server.turn.generation import Generation

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
    """Return the names of the tools that a turn has called, each once."""
    if not generation.decoder.has_calls:
        return ()
    return tuple(sorted({each.name for each in generation.events if isinstance(each, ToolCallStart)}))


def _is_summary(opened: Opened) -> bool:
    """Return whether a summary of the user stands in the place of all of the model's turns: a compacted session."""
    assert opened.compared is not None
    at, roles = opened.same_messages, roles_of(opened.compared.messages)
    acted = roles.index("assistant") if "assistant" in roles else 0
    return 0 < at == acted and roles_of(opened.messages[at : at + 1]) == ["user"]
