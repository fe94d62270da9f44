"""Follows the constraint of a turn with llguidance, whichever engine enforced it so far."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from singletree.engines.abilities import encode_grammar
from singletree.engines.engine import Constraint
from singletree.errors import InvalidRequest
from singletree.prompts.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LOG = logging.getLogger(__name__)


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
    """Follows one grammar; see ``TokenMatcher``."""

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
        return self._ended or self._matcher.is_accepting()


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
