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
from dataclasses import replace

from singletree.conversation import Request, Sampling, Text, ToolResult, Turn
from singletree.engines.engine import GenerationJob
from singletree.errors import SingletreeError
from singletree.events import fold
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
