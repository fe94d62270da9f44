"""Text to token ids and back, for one checkpoint."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from sys import getsizeof
from typing import Any

import msgspec

from singletree.errors import BadConfiguration
from singletree.prompts.added_tokens import GUARD, AddedTokens, well_formed
from singletree.prompts.beginnings import same_characters
from singletree.prompts.definition import Pipeline, TokenizerDefinition, turn_enders
from singletree.prompts.gguf import read_gguf
from singletree.prompts.huggingface import read_directory
from singletree.prompts.pieces import PieceStream, Spelling, TokenTexts
from singletree.prompts.segments import SegmentEncoder
from singletree.recent import Recent

CACHE_BYTES = 128 * 2**20


def load_tokenizer(path: Path, *, cache_bytes: int = CACHE_BYTES) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        path: a Hugging Face directory (``tokenizer.json`` and its companions) or a ``.gguf`` file.
        cache_bytes: the most that is kept of texts encoded or guarded before.

    Raises:
        BadConfiguration: nothing usable is there; the message says what is wrong and what would do.
    """
    return Tokenizer(read_gguf(path) if path.is_file() else read_directory(path), cache_bytes=cache_bytes)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text and its tokens.

    Attributes:
        cut: where it was cut into stretches, text and id; None where it was not.
        ends: (characters, tokens) up to the end of each cut.
    """

    text: str
    token_ids: array[int]
    cut: tuple[str, int] | None
    ends: list[tuple[int, int]]


class Tokenizer:
    """The tokenizer of one checkpoint, and what the checkpoint says beside it.

    Attributes:
        special_tokens: the texts of the control tokens, which a model may only say as that one token.
        added_tokens: ids of all added tokens by their texts, special or not.
        bos_token: empty when the vocabulary has none; so ``eos_token``.
        named_tokens: what a chat template may call by name (``bos_token``, ``eos_token``, ``unk_token`` …).
        stop_token_ids: the tokens that end a turn.
        chat_template: Jinja source, None when the checkpoint has none.
        context_window: in tokens, None when the checkpoint does not say.
        response_template: what the checkpoint says of reading a turn, as JSON; None when it says nothing.
        vocabulary_size: one more than the highest id.
    """

    def __init__(self, definition: TokenizerDefinition, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._added = AddedTokens(definition.added_tokens)
        later = without_first_prefix(definition.pipeline)
        self._first = _segment_encoder(definition.pipeline)
        self._later = self._first if later is None else _segment_encoder(later)
        self._known: Recent[str, array[int]] = Recent(cache_bytes // 2)
        self._guarded: Recent[str, str] = Recent(cache_bytes // 2)
        backend = self._first.backend
        self._texts = TokenTexts(
            definition.added_tokens, backend.id_to_token, spelling_of(definition.pipeline)
        )
        self._strip_first = self._prepends_space(self._first)
        self._strip_later = self._prepends_space(self._later)

        self.special_tokens = frozenset(t.text for t in self._added.tokens if t.special)
        self.added_tokens: Mapping[str, int] = self._added.ids
        self.named_tokens = definition.named_tokens
        self.bos_token = definition.named_tokens.get("bos_token", "")
        self.eos_token = definition.named_tokens.get("eos_token", "")
        self.stop_token_ids = definition.stop_token_ids | turn_enders(self._added.tokens)
        self.chat_template = definition.chat_template
        self.context_window = definition.context_window
        self.response_template = definition.response_template
        self.vocabulary_size = definition.vocabulary_size
        self._cuts = [(t.text, t.id) for t in self._added.apart(self.stop_token_ids)]

    @property
    def cached_bytes(self) -> int:
        """What is kept of texts encoded or guarded before."""
        return self._known.bytes + self._guarded.bytes

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered prompt. Added tokens are matched; none is put in that the text has not.

        Guarded text (see ``guard``) is encoded as what it spells.
        """
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> array[int]:
        """What ``encode`` gives, as an array: of a long prompt seen before, it is copied, not built."""
        return self.encode_on(text).token_ids

    def encode_on(self, text: str, before: Encoded | None = None) -> Encoded:
        """What ``encode`` gives; the tokens of what ``text`` has in common with ``before`` are taken from there."""
        if before is not None and before.cut:
            cut, id = before.cut
            same = same_characters(before.text, text)
            known = bisect_right(before.ends, same, key=itemgetter(0))
        else:
            # The end that most of the turns have: the stretches between stay the same as the text grows.
            cut, id = max(self._cuts, key=lambda cut: text.count(cut[0]), default=("", 0))
            if not cut or cut not in text:
                return Encoded(text, self._between(text, self._first, self._segment), None, [])
            known = 0
        ends = before.ends[:known] if before is not None else []
        at, tokens = ends[-1] if ends else (0, 0)
        ids = before.token_ids[:tokens] if before is not None else array("I")
        for position, stretch in enumerate(text[at:].split(cut)):
            if position:
                ids.append(id)
                at += len(cut)
                ends.append((at, len(ids)))
            if stretch:
                ids.extend(self._stretch(stretch) if at else self._between(stretch, self._first))
                at += len(stretch)
        return Encoded(text, ids, (cut, id), ends)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ``token_ids``, special tokens included; bytes that are no UTF-8 are U+FFFD."""
        stream = PieceStream(self._texts, strip_first=self._strip_first, strip_after_added=self._strip_later)
        pieces = stream.feed(list(token_ids)) + stream.flush()
        return "".join(text for text, _ in pieces)

    def spelled(self, token_id: int) -> bytes:
        """What one token spells, alone: maybe a part of a character. An id outside the vocabulary spells nothing."""
        piece = self._texts[token_id]
        text = piece[0] if isinstance(piece, tuple) else piece
        return text if isinstance(text, bytes) else text.encode("utf-8", "replace")

    def stream(self) -> PieceStream:
        """A stream of the text of one generation."""
        return PieceStream(self._texts, strip_after_added=self._strip_later)

    def guard(self, text: str) -> str:
        """``text`` from a client such that ``encode`` reads no added token in it, nor across its edges.

        The marks are for ``encode`` and ``strip_guards`` alone: such a string cannot be written as UTF-8.
        """
        guarded = self._guarded.get(text)
        if guarded is None:
            guarded = self._added.guard(text)
            kept = text if guarded == text else guarded
            self._guarded.put(text, kept, getsizeof(text) + (0 if kept is text else getsizeof(kept)))
        return guarded

    def accelerate(self) -> bool:
        """Look for a faster encoder with identical ids; True if found. Takes longer than loading."""
        encoders = {id(encoder): encoder for encoder in (self._first, self._later)}
        found = [encoder.accelerate() for encoder in encoders.values()]
        return all(found)

    def _between(
        self, text: str, first: SegmentEncoder, segment_ids: Callable[[str], array[int]] | None = None
    ) -> array[int]:
        """The ids of ``text``, cut at its added tokens; ``first`` encodes what stands before any of them."""
        later = segment_ids or self._later_ids
        parts = self._added.split(text)
        ids = array("I")
        if parts[0]:
            own = first is not self._later
            ids.extend(array("I", first.encode(_spelled(parts[0]))) if own else later(parts[0]))
        for position in range(1, len(parts), 2):
            ids.append(self._added.id(parts[position]))
            if parts[position + 1]:
                ids.extend(later(parts[position + 1]))
        return ids

    def _later_ids(self, segment: str) -> array[int]:
        return array("I", self._later.encode(_spelled(segment)))

    def _segment(self, segment: str) -> array[int]:
        return self._remembered(segment, self._later_ids)

    def _stretch(self, stretch: str) -> array[int]:
        """What stands behind one end of a turn, up to the next: kept as a whole, a turn costs one look."""
        return self._remembered(stretch, lambda text: self._between(text, self._later))

    def _remembered(self, text: str, make: Callable[[str], array[int]]) -> array[int]:
        """By the text with its marks: without them, a guarded token would be taken for the token."""
        ids = self._known.get(text)
        if ids is None:
            ids = make(text)
            self._known.put(text, ids, getsizeof(text) + getsizeof(ids))
        return ids

    def _prepends_space(self, encoder: SegmentEncoder) -> bool:
        pieces = PieceStream(self._texts).feed(encoder.encode("x"))
        return bool(pieces) and pieces[0][0].startswith(" ")


def _spelled(segment: str) -> str:
    """A segment without marks and without what cannot be encoded."""
    return segment if segment.isascii() else well_formed(segment.replace(GUARD, ""))


def spelling_of(pipeline: Pipeline) -> Spelling:
    """How the vocabulary writes bytes, seen from its decoder. Raises BadConfiguration for an unknown one."""
    kinds = {stage.get("type") for stage in _stages(pipeline.decoder, "decoders")}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return "byte_fallback"
    raise BadConfiguration(
        f"the tokenizer's decoder ({', '.join(map(str, kinds)) or 'none'}) is not one that can be streamed; "
        "use a checkpoint with a byte-level or SentencePiece vocabulary"
    )


def without_first_prefix(pipeline: Pipeline) -> Pipeline | None:
    """The pipeline for segments that do not begin the text, where it differs: ``prepend_scheme: first``."""
    stages = _stages(pipeline.pre_tokenizer, "pretokenizers")
    if not any(stage.get("prepend_scheme") == "first" for stage in stages):
        return None
    later = [stage | ({"prepend_scheme": "never"} if "prepend_scheme" in stage else {}) for stage in stages]
    sequence = {"type": "Sequence", "pretokenizers": later}
    return msgspec.structs.replace(pipeline, pre_tokenizer=sequence)


def _stages(stage: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(stage, dict):
        return []
    return list(stage[key]) if key in stage else [stage]


def _segment_encoder(pipeline: Pipeline) -> SegmentEncoder:
    try:
        return SegmentEncoder(pipeline)
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot read
        raise BadConfiguration(f"the tokenizer's definition cannot be used: {error}") from error
