"""Finds the client's stop strings in the model's raw text, before it is parsed.

The match that ends first wins, and of several that end at the same place the longest. So the result does not depend on
how the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

TextPiece = tuple[str, bool]


class StopStrings:
    """Finds the first of several stop strings; holds back only text that may still become one.

    A piece is text and whether it is a special token, as the detokenizer returns them. A stop string may span several
    pieces.

    Args:
        stops: the stop strings.
        includes: whether the text that is passed on includes the stop string.

    Attributes:
        matched: the stop string that was found; None before that.
    """

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        self._includes = includes
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._prefixes = frozenset(s[:n] for s in self._stops for n in range(1, len(s)))
        self._longest = max(map(len, self._stops), default=0)
        self._held: list[TextPiece] = []
        self.matched: str | None = None

    def feed(self, pieces: Sequence[TextPiece]) -> list[TextPiece]:
        """Return the text that can be passed on now. Do not feed more after a match."""
        self._held.extend(pieces)
        text = "".join(piece for piece, _ in self._held)
        found = [(at + len(s), -len(s), s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            end, length, self.matched = min(found)
            return self._release(end if self._includes else end + length)
        return self._release(self._safe(text))

    def close(self) -> list[TextPiece]:
        """Return the text that was held back: the text ended without a stop string in it."""
        return self._release(sum(len(piece) for piece, _ in self._held)) if self.matched is None else []

    def _safe(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)

    def _release(self, length: int) -> list[TextPiece]:
        """Release the first ``length`` characters that are held; a special token that is cut becomes plain text."""
        out: list[TextPiece] = []
        while self._held and length >= len(self._held[0][0]):
            length -= len(self._held[0][0])
            out.append(self._held.pop(0))
        if length and self._held:
            text = self._held[0][0]
            out.append((text[:length], False))
            self._held[0] = (text[length:], False)
        return out
