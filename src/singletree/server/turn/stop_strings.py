"""Finds the client's stop strings in the model's raw text, before it is parsed.

The match that ends first wins, and of several that end at the same place the longest. So the result does not depend on
how the text is cut into pieces.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

TextPiece = tuple[str, bool]

_CHARACTERS = 0x110000
"""How many characters there are: one more than the highest code point."""
_KEPT = 4
"""How many automatons are kept: a harness sends the same stop strings with every request."""


class StopAutomaton:
    """The states in which a text can be as to its stop strings: an automaton of Aho and Corasick.

    A state stands for the longest end of the text with which a stop string begins; 0 is none. There are at most as many
    as the stop strings have characters, and a character of the text costs a few look-ups, however many there are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: dict[int, int] = {}
        self.depths = array("I", [0])
        """The length of what each state stands for: so many characters must be held back."""
        self._shorter = array("I", [0])
        """The state of the next shorter end of the text with which a stop string begins."""
        self.found = array("I", [0])
        """The length of the longest stop string with which a text in each state ends; 0 for none."""
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        after, code = self._next, ord(character)
        while (found := after.get(state * _CHARACTERS + code)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return found

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            key = state * _CHARACTERS + ord(character)
            child = self._next.get(key)
            if child is None:
                child = self._next[key] = len(self.depths)
                self.depths.append(self.depths[state] + 1)
                self._shorter.append(0)
                self.found.append(0)
            state = child
        self.found[state] = len(stop)

    def _link(self) -> None:
        # From short to long: what a state goes back to is always shorter than it.
        edges = sorted(self._next.items(), key=lambda edge: self.depths[edge[1]])
        for key, child in edges:
            state, code = divmod(key, _CHARACTERS)
            if state:
                self._shorter[child] = self.step(self._shorter[state], chr(code))
            if not self.found[child]:
                self.found[child] = self.found[self._shorter[child]]


@lru_cache(maxsize=_KEPT)
def _automaton(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)


class StopStrings:
    """Finds the first of several stop strings; holds back only text that may still become one.

    A piece is text and whether it is a special token, as the detokenizer returns them. A stop string may span several
    pieces. The choices of a request share what is made of its stop strings.

    Args:
        includes: whether the text that is passed on includes the stop string.

    Attributes:
        matched: the stop string that was found; None before that.
    """

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        self._includes = includes
        self._automaton = _automaton(tuple(stop for stop in stops if stop))
        self._state = 0
        self._held: deque[TextPiece] = deque()
        self._length = 0
        self.matched: str | None = None

    def feed(self, pieces: Sequence[TextPiece]) -> list[TextPiece]:
        """Return the text that can be passed on now. Do not feed more after a match."""
        automaton, state, end = self._automaton, self._state, self._length
        found, step = automaton.found, automaton.step
        for piece in pieces:
            self._held.append(piece)
            self._length += len(piece[0])
        for text, _ in pieces:
            for character in text:
                state = step(state, character)
                end += 1
                if found[state]:
                    begin = end - found[state]
                    self.matched = "".join(piece for piece, _ in self._held)[begin:end]
                    return self._release(end if self._includes else begin)
        self._state = state
        return self._release(end - automaton.depths[state])

    def close(self) -> list[TextPiece]:
        return self._release(self._length) if self.matched is None else []

    def take(self) -> list[TextPiece]:
        """Return the text that was held back, and forget what was found in it: it is not searched."""
        self.matched = None
        self._state = 0
        return self.close()

    def _release(self, length: int) -> list[TextPiece]:
        """Release the first ``length`` characters that are held; a special token that is cut becomes plain text."""
        out: list[TextPiece] = []
        self._length -= length
        while self._held and length >= len(self._held[0][0]):
            length -= len(self._held[0][0])
            out.append(self._held.popleft())
        if length and self._held:
            text = self._held[0][0]
            out.append((text[:length], False))
            self._held[0] = (text[length:], False)
        return out
