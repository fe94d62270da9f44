"""Converts token ids to text: the text of each token, and the text of a stream of tokens in whole characters."""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Literal

from singletree.prompts.tokenizer.added_tokens import AddedToken

ByteEncoding = Literal["byte_level", "byte_fallback"]
"""How a vocabulary represents bytes: by GPT-2's alphabet of 256 characters, or as SentencePiece does, by text with
``▁`` for a space and ``<0x0A>`` for a byte."""

TokenPiece = str | bytes | tuple[str, bool]
"""The content of one token: whole characters, or bytes that are a part of some, or (text, True) for a special token."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts(dict[int, TokenPiece]):
    """The text of each token id, computed at the first access; empty outside the vocabulary, which engines pad."""

    def __init__(
        self, added: Iterable[AddedToken], id_to_token: Callable[[int], str | None], encoding: ByteEncoding
    ) -> None:
        mark = "▁" if encoding == "byte_fallback" else " "
        super().__init__({t.id: (t.text, True) if t.special else t.text.replace(mark, " ") for t in added})
        self.added_ids = frozenset(self)
        self._id_to_token = id_to_token
        self._to_bytes = _TO_BYTES[encoding]

    def __missing__(self, token_id: int) -> TokenPiece:
        try:
            token = self._id_to_token(token_id)
        except OverflowError:
            token = None
        data = b"" if token is None else self._to_bytes(token)
        try:
            piece: TokenPiece = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece


class Detokenizer:
    """Converts the tokens of one generation into text, as they arrive. It never splits a character.

    It returns pieces: (text, whether it is a special token). Adjacent ordinary tokens of one ``feed`` are one piece. A
    space at the beginning, or after each added token, is removed where the tokenizer had added it.
    """

    __slots__ = ("_after_added", "_held", "_strip", "_texts")

    def __init__(
        self, texts: TokenTexts, *, strip_first: bool = False, strip_after_added: bool = False
    ) -> None:
        self._texts = texts
        self._held = b""  # the beginning of a character
        self._strip = strip_first
        self._after_added = strip_after_added

    def feed(self, token_ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the pieces that these tokens complete; the beginning of a character is held back."""
        if len(token_ids) == 1 and not (self._held or self._strip):
            piece = self._texts[token_ids[0]]
            if type(piece) is str and not (self._after_added and token_ids[0] in self._texts.added_ids):
                return [(piece, False)] if piece else []
        return self._feed_many(token_ids)

    def whole_text(self, token_ids: Sequence[int]) -> str | None:
        """Return what ``feed`` would for ordinary tokens of whole characters; None for others. Nothing is fed."""
        if self._held or self._strip:
            return None
        if self._after_added and not self._texts.added_ids.isdisjoint(token_ids):
            return None  # A space behind an added token is removed.
        try:
            return "".join(map(self._texts.__getitem__, token_ids))  # type: ignore[arg-type]
        except TypeError:  # bytes, or a special token
            return None

    def flush(self) -> list[tuple[str, bool]]:
        """Return the text that was held back, at the end of the generation; an incomplete character becomes U+FFFD."""
        held = self._decode(b"", final=True)
        return [(held, False)] if held else []

    def _feed_many(self, token_ids: Sequence[int]) -> list[tuple[str, bool]]:
        pieces: list[tuple[str, bool]] = []
        text: list[str] = []
        texts = self._texts
        for token_id in token_ids:
            piece = texts[token_id]
            if isinstance(piece, tuple):
                text.append(self._decode(b"", final=True))
                _close(text, pieces)
                pieces.append(piece)
            elif isinstance(piece, str) and not self._held and not self._strip:
                text.append(piece)
            else:
                data = piece.encode() if isinstance(piece, str) else piece
                text.append(self._decode(self._stripped(data)))
            if (self._strip or self._after_added) and token_id in texts.added_ids:
                self._strip = self._after_added
        _close(text, pieces)
        return pieces

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        data = self._held + data
        text, used = utf_8_decode(data, "replace", final)
        self._held = data[used:]
        return text

    def _stripped(self, data: bytes) -> bytes:
        if not self._strip or not data:
            return data
        self._strip = False
        return data.removeprefix(b" ")


def _close(text: list[str], pieces: list[tuple[str, bool]]) -> None:
    joined = "".join(text)
    if joined:
        pieces.append((joined, False))
    text.clear()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for the 256 bytes (https://github.com/openai/gpt-2, encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + offset): byte for offset, byte in enumerate(others)
    }


def _byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def _byte_fallback(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8", "replace")


_TO_BYTES: dict[ByteEncoding, Callable[[str], bytes]] = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
}
