"""Continues a turn whose engine failed, on another engine or on the same one once it runs again.

The tokens that the client has already received are appended to the prompt, and the next engine continues after them.
The client sees a pause, bridged by keep-alive events, instead of an error that would cost the turn and, with most
harnesses, the prefix of the next one.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from singletree.conversation import Sampling
from singletree.engines.engine import (
    Chunk,
    Engine,
    EngineInfo,
    GenerationJob,
    count_picture_tokens,
)
from singletree.errors import EngineFailed, EngineUnfit, Overloaded, Rejected
from singletree.pictures import PromptPicture

_LOG = logging.getLogger(__name__)

MAX_FAILURES = 3
"""After so many engine failures a turn is given up: it may be the turn itself that makes every engine fail."""


class FailoverEngine:
    """Use several engines of one model as one: a turn that fails on one engine continues on the next.

    Every turn begins on the first engine. A single engine is tried again, because it may have restarted its process
    or stand behind a load balancer.

    A failure is passed on, and the turn ends, when the engine had yielded no tokens since it was asked (the client
    can repeat the request and loses nothing), when a constraint applied (its grammar would start from the beginning),
    and at once for a lasting cause (``EngineUnfit``).

    Args:
        engines: at least one; all must be resumable (``EngineInfo.resumable``).
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)

    async def start(self) -> None:
        """Start every engine. Raises what ``Engine.start`` raises."""
        for engine in self._engines:
            await engine.start()

    async def close(self) -> None:
        """Close every engine."""
        for engine in self._engines:
            await engine.close()

    def info(self) -> EngineInfo:
        """Return what the first engine reports; all are alike."""
        return self._engines[0].info()

    async def abort(self, request_id: str) -> None:
        """End that generation on whichever engine runs it."""
        for engine in self._engines:
            await engine.abort(request_id)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return what the first engine counts."""
        return await count_picture_tokens(self._engines[0], picture)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the same contract as ``Engine.generate``.

        ``cached_tokens`` and ``prompt_tokens`` come from the first engine only: the prompts of the others contain
        generated tokens. Of a turn that several engines generated, the weights are known from the last engine on, and
        the routed experts are not.
        """
        generated = array("I")
        failure: EngineFailed | None = None
        for failures in range(MAX_FAILURES + 1):
            if last := _ended(generated, job):
                yield last
                return
            before = len(generated)
            chunks = self._engines[failures % len(self._engines)].generate(_remaining_job(job, generated))
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        generated.extend(chunk.token_ids)
                        yield _continued(chunk, before) if failures else chunk
                return
            except (Overloaded, Rejected) as error:
                # A refusal of the extended prompt would not make sense to the client: it sent another one.
                raise failure or error from None
            except EngineFailed as error:
                failure = failure or error
                give_up = isinstance(error, EngineUnfit) or failures == MAX_FAILURES
                if give_up or len(generated) == before or job.constraint is not None:
                    raise failure from error
                _LOG.warning(
                    "the turn continues after an engine failure at token %d: %s",
                    len(generated),
                    error.message,
                )


def _continued(chunk: Chunk, generated: int) -> Chunk:
    """Return a chunk of an engine that continued a turn after ``generated`` tokens, as one of the whole turn."""
    versions = [
        replace(each, start=each.start + generated, end=each.end + generated)
        for each in chunk.weight_versions
    ]
    return replace(
        chunk, cached_tokens=None, prompt_tokens=None, weight_versions=versions, routed_experts=None
    )


def _ended(generated: Sequence[int], job: GenerationJob) -> Chunk | None:
    """Return the last chunk of a turn that was complete when its engine failed; None if it was not complete."""
    if generated and generated[-1] in job.stop_token_ids and not job.sampling.ignore_eos:
        return Chunk((), "stop")
    max_tokens = job.sampling.max_tokens
    if max_tokens is not None and len(generated) >= max_tokens > 0:
        return Chunk((), "length")
    return None


def _remaining_job(job: GenerationJob, generated: Sequence[int]) -> GenerationJob:
    """Return the job that continues after the tokens generated so far."""
    if not generated:
        return job
    prompt = [*job.prompt_token_ids, *generated]
    return replace(job, prompt_token_ids=prompt, sampling=_remaining_sampling(job.sampling, len(generated)))


def _remaining_sampling(sampling: Sampling, generated: int) -> Sampling:
    """Return ``sampling`` with the token limits that remain after ``generated`` tokens."""
    max_tokens = None if sampling.max_tokens is None else sampling.max_tokens - generated
    min_tokens = max(0, sampling.min_tokens - generated)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=None)
