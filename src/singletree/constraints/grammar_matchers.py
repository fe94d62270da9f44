"""Continues a turn under a grammar on another engine, whose own grammar would begin from its start: follows it with
llguidance, whichever engine enforced it so far.

The engine generates without the constraint, and each token is checked by a matcher that has followed the turn from its
beginning. A token that the grammar does not allow is not passed on; in its place one is generated among those that it
allows. The tokens are distributed as under the constraint: a token that is kept was sampled with its probability p, and
a replacement with the rest 1 - Z of it, so that together an allowed token has p + (1 - Z) p / Z = p / Z.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec import structs

from singletree.engines.abilities import encode_grammar
from singletree.engines.engine import Chunk, Constraint, EngineInfo, GenerationJob, StopKind
from singletree.engines.workers import Ask
from singletree.errors import EngineFailed, InvalidRequest
from singletree.prompts.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LOG = logging.getLogger(__name__)
_CANDIDATES = 20
"""How many alternatives are asked for where an engine can be limited in no other way."""


@dataclass(frozen=True, slots=True)
class MatcherVocabulary:
    """The vocabulary of a model, as a grammar needs it.

    Attributes:
        token_bytes: the bytes of each token, by its id; of a special token its name.
        special_ids: the special tokens: they are no text.
        stop_ids: the tokens that end a turn.
        encode: converts text to token ids.
    """

    token_bytes: Sequence[bytes]
    special_ids: Sequence[int]
    stop_ids: Sequence[int]
    encode: Callable[[str], Sequence[int]]


def matcher_vocabulary(tokenizer: Tokenizer, with_tags: bool = False) -> MatcherVocabulary:
    """Return the vocabulary by which llguidance follows a turn. Takes a second for a large one.

    ``with_tags``: ``EngineInfo.has_special_tags`` of the engines.
    """
    special = tokenizer.control_tokens(with_tags=with_tags).values()
    texts = [tokenizer.token_bytes(id) for id in range(tokenizer.vocabulary_size)]
    return MatcherVocabulary(texts, sorted(special), sorted(tokenizer.stop_token_ids), tokenizer.encode)


def make_matchers(tokenizer: Tokenizer, with_tags: bool) -> GrammarMatchers:
    """Return what follows the grammars of turns of the model of ``tokenizer``; see ``matcher_vocabulary``."""
    return GrammarMatchers(partial(matcher_vocabulary, tokenizer, with_tags))


class GrammarMatchers:
    """Make matchers for constraints of one model.

    Args:
        vocabulary: reads the model's vocabulary; blocks, and is called once, for the first matcher.
    """

    def __init__(self, vocabulary: Callable[[], MatcherVocabulary]) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._stop_ids: tuple[int, ...] = ()
        self._loading = asyncio.Lock()

    async def follow(self, constraint: Constraint, token_ids: Sequence[int]) -> GrammarMatcher | None:
        """Return a matcher that has gone over ``token_ids``.

        None if the constraint has no form that llguidance reads, if llguidance is not installed, and if it does not
        accept these tokens: then it and the engine disagree about the grammar.
        """
        try:
            grammar = _lark(constraint)
        except InvalidRequest as error:
            _LOG.warning("a constrained turn cannot continue: %s", error.message)
            return None
        if grammar is None:
            return None
        async with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = await asyncio.to_thread(self._load)
                except ImportError:
                    _LOG.warning("a constrained turn cannot continue: install llguidance for that")
                    return None
        return await asyncio.to_thread(self._open, grammar, list(token_ids))

    def _load(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        found = self._vocabulary()
        self._stop_ids = tuple(found.stop_ids)
        wrapped = _Wrapped(found)
        return LLTokenizer(TokenizerWrapper(wrapped), eos_token=list(found.stop_ids) or wrapped.eos_token_id)

    def _open(self, grammar: str, token_ids: list[int]) -> GrammarMatcher | None:
        from llguidance import LLMatcher

        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error() or not matcher.consume_tokens(token_ids):
            _LOG.warning(
                "a constrained turn cannot continue: the grammar does not accept what the engine generated under it"
            )
            return None
        return GrammarMatcher(matcher, self._stop_ids)


class GrammarMatcher:
    """Follows one grammar over the tokens of one turn; a ``TurnMatcher``."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._stop_ids = frozenset(stop_ids)
        self._ended = False

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on over the tokens that the grammar allows, and return how many these are, from the first on."""
        count = 0
        for token in token_ids:
            if self._ended:
                break
            if token in self._stop_ids and self._matcher.is_accepting():
                self._ended = True
            elif self._matcher.is_stopped() or self._matcher.validate_tokens([token]) == 0:
                break
            else:
                self._matcher.consume_token(token)
            count += 1
        return count

    def allowed(self) -> Sequence[int]:
        """Return the tokens that the grammar allows next, with those that end the turn; none if it is over."""
        if self._ended:
            return ()
        ends = self._stop_ids if self._matcher.is_accepting() else frozenset[int]()
        if self._matcher.is_stopped():
            return sorted(ends)
        bits = int.from_bytes(self._matcher.compute_bitmask(), "little")
        return sorted(ends.union(_set_bits(bits)))

    def may_end(self) -> bool:
        """Return whether the turn may end here."""
        return self._ended or self._matcher.is_accepting()

    def go_on(
        self, job: GenerationJob, generated: array[int], ask: Ask, info: EngineInfo
    ) -> AsyncGenerator[Chunk, None]:
        return continue_constrained(job, generated, self, ask, info)


def _set_bits(bits: int) -> list[int]:
    return [at for at, bit in enumerate(reversed(bin(bits)[2:])) if bit == "1"]


def _lark(constraint: Constraint) -> str | None:
    """Return the constraint in Lark, as llguidance reads it; None if it has no such form."""
    if constraint.kind in ("gbnf", "structural_tag"):
        return encode_grammar(Constraint("lark", constraint.lark)) if constraint.lark else None
    return encode_grammar(constraint)


class _Wrapped:
    """A vocabulary with the names that llguidance expects."""

    def __init__(self, vocabulary: MatcherVocabulary) -> None:
        self.tokens = list(vocabulary.token_bytes)
        if vocabulary.stop_ids:
            self.eos_token_id = vocabulary.stop_ids[0]
        else:  # llguidance needs one; no engine generates it
            self.eos_token_id = len(self.tokens)
            self.tokens.append(b"<end>")
        self.bos_token_id = None
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.stop_ids, self.eos_token_id})
        self._encode = vocabulary.encode

    def __call__(self, text: Any) -> list[int]:
        """Return the ids of ``text``, as bytes or characters."""
        return list(self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text))


async def continue_constrained(
    job: GenerationJob, generated: array[int], matcher: GrammarMatcher, ask: Ask, info: EngineInfo
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


def _kept(chunk: Chunk, matcher: GrammarMatcher) -> Chunk:
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
    runs = [
        [token for _, token in run] for _, run in groupby(enumerate(sorted(tokens)), lambda at: at[1] - at[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
