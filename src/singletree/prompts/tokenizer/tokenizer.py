"""Converts text to token ids and back, for one checkpoint."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from sys import getsizeof
from threading import Lock, Thread

from singletree.errors import BadConfiguration
from singletree.lru import LruCache
from singletree.prefixes import common_text_prefix
from singletree.prompts.tokenizer.added_tokens import (
    GUARD,
    PICTURE_MARK,
    AddedToken,
    AddedTokens,
    replace_surrogates,
)
from singletree.prompts.tokenizer.definition import (
    Pipeline,
    TokenizerDefinition,
    byte_encoding_of,
    end_of_turn_ids,
    without_first_prefix,
)
from singletree.prompts.tokenizer.detokenizer import Detokenizer, TokenTexts
from singletree.prompts.tokenizer.encoder import SegmentEncoder, return_freed_memory
from singletree.prompts.tokenizer.huggingface import KnownTokenizerFiles, TokenizerFacts, read_directory

__all__ = ["Tokenizer", "load_tokenizer"]

CACHE_BYTES = 128 * 2**20
"""The default size of the cache of one tokenizer."""

_SAMPLES = 1000

GuardFunction = Callable[[str], str]
"""Marks a text such that no added token is matched in it."""


def load_tokenizer(
    path: Path,
    *,
    cache_bytes: int = CACHE_BYTES,
    marks_pictures: bool = False,
    facts_folder: Path | None = None,
) -> Tokenizer:
    """Load the tokenizer of a checkpoint: a directory in Hugging Face's layout, or a ``.gguf`` file.

    Args:
        cache_bytes: the size limit of the cache of encoded texts, in bytes.
        facts_folder: keeps what was found out about a directory's ``tokenizer.json``. One that is known there is not
            loaded until the first text is encoded (``Tokenizer.load``).

    Raises:
        BadConfiguration: ``path`` has no usable tokenizer; the message names the cause and the cure.
        WeightsUnavailable: the ``.gguf`` file cannot be read or is damaged.
    """
    if path.is_file():
        from singletree.prompts.tokenizer.gguf_vocabulary import read_gguf

        tokenizer = Tokenizer(read_gguf(path), cache_bytes=cache_bytes, marks_pictures=marks_pictures)
    elif facts_folder is None:
        tokenizer = Tokenizer(read_directory(path), cache_bytes=cache_bytes, marks_pictures=marks_pictures)
    else:
        known = KnownTokenizerFiles(facts_folder)
        place, facts = known.find(path / "tokenizer.json")
        definition = read_directory(path, None if facts is None else facts.vocabulary_size)
        tokenizer = Tokenizer(definition, cache_bytes=cache_bytes, marks_pictures=marks_pictures, facts=facts)
        if place is not None and facts is None:
            known.keep(place, tokenizer.facts())
    return_freed_memory()
    return tokenizer


@dataclass(frozen=True, slots=True)
class TextCheckpoint:
    """A text and its tokens, from which a longer text goes on.

    Attributes:
        token_ids: the tokens, from index ``begin`` on; those before belong to something else.
        separator: the added token that ends the sections of the text; empty where there is none.
        ends: the end of each separator, as (characters, tokens), both counted from the beginning of the text.
    """

    text: str
    token_ids: array[int]
    begin: int
    separator: str
    ends: list[tuple[int, int]]


class Tokenizer:
    """The tokenizer of one checkpoint, and the checkpoint's metadata (``TokenizerDefinition``).

    Attributes:
        special_tokens: the texts of the control tokens, which a model generates only as that one token.
        added_tokens: the ids of all added tokens by their texts, special or not.
        bos_token: empty when the vocabulary has none; so is ``eos_token``.
        stop_token_ids: the tokens that end a turn.
        neutral: the texts of added tokens that ``guard`` breaks by a character that the model reads.
        picture_mark_id: the id that ``PICTURE_MARK`` is encoded as (``marks_pictures``), the first one that the
            vocabulary does not have; None where the mark is not encoded.

    Args:
        facts: what is known of it, because it was loaded before. It is then loaded for the first text (``load``).
    """

    def __init__(
        self,
        definition: TokenizerDefinition,
        *,
        cache_bytes: int = CACHE_BYTES,
        marks_pictures: bool = False,
        facts: TokenizerFacts | None = None,
    ) -> None:
        self.neutral: frozenset[str] = frozenset()
        self.picture_mark_id = definition.vocabulary_size if marks_pictures else None
        named = set(definition.named_tokens.values())
        self._named_ids = {token.id for token in definition.added_tokens if token.text in named}
        self._own_stops = definition.stop_token_ids
        self._cache_bytes = cache_bytes
        mark = [AddedToken(definition.vocabulary_size, PICTURE_MARK, special=True)] if marks_pictures else []
        self._set_stops((*definition.added_tokens, *mark), end_of_turn_ids(definition.added_tokens))
        later = without_first_prefix(definition.pipeline)
        is_lazy = facts is not None
        self._first = _segment_encoder(definition.pipeline, is_lazy)
        self._later = self._first if later is None else _segment_encoder(later, is_lazy)
        self._texts = TokenTexts(
            definition.added_tokens, self._first.id_to_token, byte_encoding_of(definition.pipeline)
        )
        self._strip_first = self._prepends_space(self._first) if facts is None else facts.strip_first
        self._strip_later = self._prepends_space(self._later) if facts is None else facts.strip_later

        own = [token for token in self._added.tokens if token.text != PICTURE_MARK]
        self.special_tokens = frozenset(t.text for t in own if t.special)
        self.added_tokens: Mapping[str, int] = {token.text: token.id for token in own}
        self.named_tokens = definition.named_tokens
        self.bos_token = definition.named_tokens.get("bos_token", "")
        self.eos_token = definition.named_tokens.get("eos_token", "")
        self.chat_template = definition.chat_template
        self.context_window = definition.context_window
        self.response_template = definition.response_template
        self.vocabulary_size = definition.vocabulary_size
        self._sample = None if facts is None else facts.sample
        self._acceleration = Lock()  # taken by whoever accelerates, and never released

    def with_format(self, stop_markers: Collection[str], markers: Collection[str]) -> Tokenizer:
        """Return this tokenizer, with the tokens that end a turn in the format of the model: its ``stop_markers``.

        A token inside one of ``markers``, all markers of the format, that is no stop marker does not end a turn, unless
        the checkpoint names it.
        """
        other = copy(self)
        other._set_stops(self._added.tokens, end_of_turn_ids(self._added.tokens, stop_markers, markers))
        return other

    def with_template(self, source: str) -> Tokenizer:
        """Return this tokenizer, with the chat template ``source`` in place of the checkpoint's own."""
        other = copy(self)
        other.chat_template = source
        return other

    def with_neutral(self, texts: Collection[str]) -> Tokenizer:
        """Return this tokenizer, whose guards break the tokens ``texts`` for an engine that decodes a prompt, too."""
        other = copy(self)
        other.neutral = frozenset(texts)
        other._set_stops(self._added.tokens, self.stop_token_ids)
        return other

    def of(self, owner: str) -> Tokenizer:
        """Return this tokenizer with the cached texts of one owner: by the time, nobody learns what others sent."""
        other = copy(self)
        other._encoded = self._encoded.part(owner)
        return other

    def _set_stops(self, added: tuple[AddedToken, ...], stops: frozenset[int]) -> None:
        """Set the tokens that end a turn, beside those that the checkpoint names, and what depends on them."""
        self.stop_token_ids = self._own_stops | stops
        self._added = AddedTokens(added, self.stop_token_ids | self._named_ids, self.neutral)
        self._separators = [token.text for token in self._added.unambiguous(self.stop_token_ids)]
        self._encoded = self._cache = LruCache[str, "array[int]"](self._cache_bytes)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt. Added tokens are matched but in guarded text; none is added."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> array[int]:
        """Return the ids of ``encode`` as an array. It is faster: cached ids are copied, without an object for each."""
        return self.encode_incremental(text, None, array("I")).token_ids

    def encode_incremental(
        self, text: str, checkpoint: TextCheckpoint | None, token_ids: array[int]
    ) -> TextCheckpoint:
        """Encode ``text``; the tokens of the prefix that it shares with ``checkpoint`` are taken from there.

        ``token_ids`` gets the tokens, after those that it has. Return the checkpoint of ``text``, which has them.
        """
        begin = len(token_ids)
        ends: list[tuple[int, int]] = []
        at, separator = 0, ""
        if checkpoint is not None and checkpoint.separator:
            separator = checkpoint.separator
            same = common_text_prefix(checkpoint.text, text)
            ends = checkpoint.ends[: bisect_right(checkpoint.ends, same, key=itemgetter(0))]
            at, known = ends[-1] if ends else (0, 0)
            # Without a copy between, which a slice of the tokens would be.
            with memoryview(checkpoint.token_ids) as tokens:
                token_ids.frombytes(tokens[checkpoint.begin : checkpoint.begin + known].cast("B"))
        parts, known_ids = self._added.split(text[at:]), self._added.ids
        if not separator:
            # The token that ends the last turn: the sections between stay the same as the text grows.
            separator = next(filter(self._separators.__contains__, parts[-2::-2]), "")
        if parts[0]:
            token_ids.extend(self._segment_ids(parts[0], self._later if at else self._first))
        offsets = tuple(accumulate(map(len, parts), initial=at))
        for place in range(1, len(parts), 2):
            token, segment = parts[place], parts[place + 1]
            token_ids.append(known_ids[token] if token in known_ids else self._added.id(token))
            if token == separator:
                ends.append((offsets[place + 1], len(token_ids) - begin))
            if segment:
                token_ids.extend(self._segment_ids(segment, self._later))
        return TextCheckpoint(text, token_ids, begin, separator, ends)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ``token_ids``, special tokens included; invalid UTF-8 becomes U+FFFD."""
        stream = Detokenizer(self._texts, strip_first=self._strip_first, strip_after_added=self._strip_later)
        pieces = stream.feed(list(token_ids)) + stream.flush()
        return "".join(text for text, _ in pieces)

    def sample(self) -> str:
        """Return the text of a thousand ids from all over the vocabulary, by which two vocabularies are told apart."""
        if self._sample is None:
            self._sample = self.decode(range(0, self.vocabulary_size, 1 + self.vocabulary_size // _SAMPLES))
        return self._sample

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, which can be a part of a character; none outside the vocabulary."""
        piece = self._texts[token_id]
        text = piece[0] if isinstance(piece, tuple) else piece
        return text if isinstance(text, bytes) else text.encode("utf-8", "replace")

    def new_detokenizer(self) -> Detokenizer:
        """Return a new detokenizer, for one generation."""
        return Detokenizer(self._texts, strip_after_added=self._strip_later)

    def guard(self, text: str) -> str:
        """Mark text of a client such that ``encode`` matches no added token in it, nor across its edges.

        Only ``encode`` and ``strip_guards`` understand the marks; a string with marks cannot be encoded as UTF-8.
        """
        return self._added.guard(text)

    def guard_except(self, allowed: Collection[str]) -> GuardFunction:
        """Return a guard for text that comes back as the assistant's, in which the ``allowed`` texts of tokens match.

        Special tokens, tokens that end a turn and tokens that the checkpoint names are never allowed.
        """
        return self._added.guard_except(allowed)

    def control_tokens(self, *, with_tags: bool = False) -> Mapping[str, int]:
        """Return the special tokens and their ids, and ``with_tags`` every added token of the form ``<…>``."""
        return {
            text: id
            for text, id in self.added_tokens.items()
            if text in self.special_tokens or (with_tags and text.startswith("<") and text.endswith(">"))
        }

    def facts(self) -> TokenizerFacts:
        """Return what only a loaded tokenizer shows, for the next one of the same definition."""
        return TokenizerFacts(self.vocabulary_size, self._strip_first, self._strip_later, self.sample())

    def load(self) -> None:
        """Load what is needed to encode, if that was put off. Takes half a second; other threads may encode."""
        for encoder in (self._first, self._later):
            encoder.load_once()

    def load_in_background(self) -> None:
        """Do the same in a thread. The program does not exit before the thread has ended."""
        Thread(target=self.load, name="load tokenizer").start()

    def accelerate(self) -> bool:
        """Switch to a faster encoder if one gives identical ids; return whether it did. Takes longer than loading."""
        encoders = {id(encoder): encoder for encoder in (self._first, self._later)}
        found = [encoder.accelerate(self.vocabulary_size) for encoder in encoders.values()]
        if all(found):
            self._cache.resize(0)
        return_freed_memory()
        return all(found)

    def accelerate_in_background(self) -> None:
        """Do the same in a thread, once. The program does not exit before the thread has ended."""
        if self._acceleration.acquire(blocking=False):
            Thread(target=self.accelerate, name="accelerate tokenizer").start()

    def _segment_ids(self, segment: str, encoder: SegmentEncoder) -> array[int]:
        """Encode a segment. A fast encoder takes hardly longer than to look the ids up, and to keep them."""
        if encoder.is_fast or encoder is not self._later:
            return encoder.encode_array(_encodable(segment))
        ids = self._encoded.get(segment)
        if ids is None:
            ids = encoder.encode_array(_encodable(segment))
            self._encoded.put(segment, ids, getsizeof(segment) + getsizeof(ids))
        return ids

    def _prepends_space(self, encoder: SegmentEncoder) -> bool:
        pieces = Detokenizer(self._texts).feed(encoder.encode("x"))
        return bool(pieces) and pieces[0][0].startswith(" ")


def _encodable(segment: str) -> str:
    """Return a segment without guards, and with U+FFFD for characters that cannot be encoded."""
    return segment if segment.isascii() else replace_surrogates(segment.replace(GUARD, ""))


def _segment_encoder(pipeline: Pipeline, is_lazy: bool) -> SegmentEncoder:
    try:
        return SegmentEncoder(pipeline, is_lazy=is_lazy)
    except Exception as error:  # tokenizers raises a bare Exception for any definition that it cannot read
        raise BadConfiguration(f"the tokenizer's definition cannot be used: {error}") from error
