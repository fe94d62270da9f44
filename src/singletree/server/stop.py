"""Stop strings, watched in the model's raw text before anything reads it.

The match that ends first wins, and of those that end at the same place the longest: so the outcome is the
same however the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

Piece = tuple[str, bool]


class StopStrings:
    """Finds the first of ``stops``. What could still become one is held back, and nothing else.

    Pieces are (text, whether it is a special token), as the tokenizer gives them; a stop string may run over
    several of them. ``matched`` names the string once it was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._prefixes = frozenset(s[:n] for s in self._stops for n in range(1, len(s)))
        self._longest = max(map(len, self._stops), default=0)
        self._held: list[Piece] = []
        self.matched: str | None = None

    def feed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """What of the text so far can go on. After a match there is nothing more to feed."""
        self._held.extend(pieces)
        text = "".join(piece for piece, _ in self._held)
        found = [(at + len(s), -len(s), s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            end, length, self.matched = min(found)
            return self._release(end + length)
        return self._release(self._safe(text))

    def close(self) -> list[Piece]:
        """The text ended: what was held back after all belongs to it."""
        return self._release(sum(len(piece) for piece, _ in self._held)) if self.matched is None else []

    def _safe(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)

    def _release(self, length: int) -> list[Piece]:
        """The first ``length`` characters of what is held; a special token that is cut is no longer one."""
        out: list[Piece] = []
        while self._held and length >= len(self._held[0][0]):
            length -= len(self._held[0][0])
            out.append(self._held.pop(0))
        if length and self._held:
            text = self._held[0][0]
            out.append((text[:length], False))
            self._held[0] = (text[length:], False)
        return out
