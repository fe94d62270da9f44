"""An engine that dies in the middle of a turn: the turn goes on on another one, or on the same once it runs again.

What a client has read stays: the tokens that it stands for go into the prompt, behind it, and the engine that takes
over writes what comes next. Its client sees a pause, filled with signs of life, in place of an error that would cost
the turn and, with most harnesses, the prefix of the next.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, Engine, EngineInfo
from singletree.errors import EngineFailed, Overloaded

LOG = logging.getLogger(__name__)

MOST_DEATHS = 3
"""How many engines one turn may outlive: a turn that kills every engine it comes to has to end."""


class ContinuingEngine:
    """Several engines of one model as one. The first serves; a turn that it drops goes on on the next.

    One alone is asked again: an engine that starts its process anew, or stands behind a balancer, is another one.
    A turn ends with the failure when its engine had told nothing of it (the client can ask again, and loses nothing)
    or held it to a grammar, which would begin anew.

    Args:
        engines: all of them go on where their prompt ends (``EngineInfo.goes_on``).
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)

    async def start(self) -> None:
        """See Engine."""
        for engine in self._engines:
            await engine.start()

    async def close(self) -> None:
        """See Engine."""
        for engine in self._engines:
            await engine.close()

    def info(self) -> EngineInfo:
        """What the first tells; they are alike."""
        return self._engines[0].info()

    async def abort(self, request_id: str) -> None:
        """See Engine."""
        for engine in self._engines:
            await engine.abort(request_id)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        stop_token_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        """See Engine. What an engine had cached is told of the first only: of the others it is not the prompt's."""
        told = array("I")
        failure: EngineFailed | None = None
        for deaths in range(MOST_DEATHS + 1):
            if last := _ended(told, sampling, stop_token_ids):
                yield last
                return
            before = len(told)
            chunks = self._engines[deaths % len(self._engines)].generate(
                [*prompt_token_ids, *told] if told else prompt_token_ids,
                _rest(sampling, before) if told else sampling,
                request_id,
                stop_token_ids=stop_token_ids,
                constraint=constraint,
                priority=priority,
            )
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        told.extend(chunk.token_ids)
                        yield replace(chunk, cached_tokens=None) if deaths else chunk
                return
            except Overloaded as error:
                raise failure or error from None
            except EngineFailed as error:
                failure = failure or error
                if len(told) == before or constraint is not None or deaths == MOST_DEATHS:
                    raise failure from error
                LOG.warning("a turn goes on after %d tokens: %s", len(told), error.message)


def _ended(told: Sequence[int], sampling: Sampling, stop_token_ids: Sequence[int]) -> Chunk | None:
    """The last chunk of a turn whose engine had died before it could say that it was over."""
    if told and told[-1] in stop_token_ids and not sampling.ignore_eos:
        return Chunk((), "stop")
    if sampling.max_tokens is not None and len(told) >= sampling.max_tokens > 0:
        return Chunk((), "length")
    return None


def _rest(sampling: Sampling, told: int) -> Sampling:
    """What is left to be drawn after so many tokens."""
    left = None if sampling.max_tokens is None else sampling.max_tokens - told
    return replace(sampling, max_tokens=left, prompt_logprobs=None)
