"""Continues a turn under a grammar on another engine, whose own grammar would begin from its start.

The engine generates without the constraint, and each token is checked by a matcher that has followed the turn from its
beginning. A token that the grammar does not allow is not passed on; in its place one is generated among those that it
allows. The tokens are distributed as under the constraint: a token that is kept was sampled with its probability p, and
a replacement with the rest 1 - Z of it, so that together an allowed token has p + (1 - Z) p / Z = p / Z.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import groupby
from typing import Protocol

from msgspec import structs

from singletree.engines.engine import Chunk, Constraint, EngineInfo, GenerationJob, StopKind
from singletree.errors import EngineFailed

_CANDIDATES = 20
"""How many alternatives are asked for where an engine can be limited in no other way."""


class TokenMatcher(Protocol):
    """Follows a grammar over the tokens of one turn."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on over the tokens that the grammar allows, and return how many these are, from the first on."""

    def allowed(self) -> Sequence[int]:
        """Return the tokens that the grammar allows next, with those that end the turn; none if it is over."""

    def may_end(self) -> bool:
        """Return whether the turn may end here."""


class MatcherSource(Protocol):
    """Makes matchers for the constraints of a model."""

    async def follow(self, constraint: Constraint, token_ids: Sequence[int]) -> TokenMatcher | None:
        """Return a matcher that has gone over ``token_ids``; None if the grammar cannot be followed."""


Ask = Callable[[GenerationJob], AsyncGenerator[Chunk, None]]
"""Generates a job behind the tokens that the turn has so far."""


async def continue_constrained(
    job: GenerationJob, generated: array[int], matcher: TokenMatcher, ask: Ask, info: EngineInfo
) -> AsyncGenerator[Chunk, None]:
    """Generate the rest of a turn under the constraint of ``job``, with the contract of ``Engine.generate``.

    Args:
        generated: the tokens of it so far; those that are yielded are added.
        matcher: has gone over the tokens so far.
        ask: generates a job behind the tokens that were yielded so far.

    Raises:
        EngineFailed: an engine fails; or no allowed token can be generated.
    """
    free = structs.replace(job, constraint=None)
    limit = job.sampling.max_tokens
    while True:
        async with aclosing(ask(free)) as chunks:
            async for chunk in chunks:
                kept = _kept(chunk, matcher)
                generated.extend(kept.token_ids)
                if kept.token_ids or kept.finish is not None or kept.cached_tokens is not None or kept.route:
                    yield kept
                if kept.finish is not None:
                    return
                if len(kept.token_ids) < len(chunk.token_ids) or chunk.finish is not None:
                    break
            else:
                raise EngineFailed("the engine stopped without a finish reason; try again")
        if limit is not None and len(generated) >= limit > 0:
            yield Chunk((), "length")
            return
        allowed = matcher.allowed()
        if not allowed:
            yield Chunk((), "stop")
            return
        chunk = await _one_of(free, len(generated), allowed, ask, info)
        if matcher.accept(chunk.token_ids) < len(chunk.token_ids):
            raise EngineFailed("the grammar of the turn cannot be continued; try again")
        generated.extend(chunk.token_ids)
        yield chunk
        if chunk.finish is not None:
            return
        if len(generated) == limit:
            yield Chunk((), "length")
            return


def _kept(chunk: Chunk, matcher: TokenMatcher) -> Chunk:
    """Return the part of ``chunk`` that the grammar allows; with its finish reason if that is allowed, too."""
    count = matcher.accept(chunk.token_ids)
    if count == len(chunk.token_ids):
        ends_early = chunk.finish == "stop" and not matcher.may_end()
        return replace(chunk, finish=None) if ends_early else chunk
    rows = None if chunk.logprobs is None else chunk.logprobs[:count]
    return replace(chunk, token_ids=chunk.token_ids[:count], finish=None, logprobs=rows)


async def _one_of(
    free: GenerationJob, generated: int, allowed: Sequence[int], ask: Ask, info: EngineInfo
) -> Chunk:
    """Generate one of the tokens ``allowed``; with a finish reason if it ends the turn."""
    if own := free.sampling.allowed_token_ids:
        allowed = [token for token in allowed if token in set(own)] or allowed
    if len(allowed) == 1 and free.sampling.logprobs is None:
        return _chunk_of(free, allowed[0], None)
    sampling = replace(free.sampling, max_tokens=generated + 1, min_tokens=0)
    one = structs.replace(free, sampling=sampling)
    if "allowed_token_ids" in info.optional_sampling:
        one = structs.replace(one, sampling=replace(sampling, allowed_token_ids=tuple(allowed)))
    elif "lark" in info.constraints:
        one = structs.replace(one, constraint=Constraint("lark", f"start: <[{_ranges(allowed)}]>"))
    else:
        return await _likeliest_of(one, allowed, ask)
    found = await _only_token(one, ask)
    token = found.token_ids[0]
    if token not in allowed:
        return await _likeliest_of(structs.replace(one, constraint=None, sampling=sampling), allowed, ask)
    return _chunk_of(free, token, found)


async def _likeliest_of(one: GenerationJob, allowed: Sequence[int], ask: Ask) -> Chunk:
    """Return the likeliest of the tokens ``allowed``, by the log-probabilities that the engine reports."""
    wanted = max(_CANDIDATES, one.sampling.logprobs or 0)
    found = await _only_token(structs.replace(one, sampling=replace(one.sampling, logprobs=wanted)), ask)
    [row] = found.logprobs or ((),)
    known = {token: value for token, value in row if token in set(allowed)}
    if not known:
        raise EngineFailed(
            f"none of the {wanted} likeliest tokens is allowed by the grammar of the turn; try again"
        )
    token = max(known, key=known.__getitem__)
    ordered = [(token, known[token]), *(pair for pair in row if pair[0] != token)]
    shown = None if one.sampling.logprobs is None else [ordered[: one.sampling.logprobs + 1]]
    return _chunk_of(one, token, replace(found, logprobs=shown))


async def _only_token(one: GenerationJob, ask: Ask) -> Chunk:
    found: Chunk | None = None
    async with aclosing(ask(one)) as chunks:
        async for chunk in chunks:
            if chunk.token_ids and found is None:
                found = chunk
    if found is None:
        raise EngineFailed("the engine generated no token; try again")
    return found


def _chunk_of(job: GenerationJob, token: int, found: Chunk | None) -> Chunk:
    finish: StopKind | None = "stop" if token in job.stop_token_ids else None
    rows = None if found is None or found.logprobs is None else found.logprobs[:1]
    return Chunk((token,), finish, logprobs=rows)


def _ranges(tokens: Sequence[int]) -> str:
    """Return sorted token ids in llguidance's notation of ranges: ``1-3,7``."""
    runs = [
        [token for _, token in run] for _, run in groupby(enumerate(sorted(tokens)), lambda at: at[1] - at[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
