"""Where the messages of a prompt are in its tokens.

A template writes what it likes around a message, so its place is found by its own words: the first and the last line of
each text, and the names of calls. The border between two messages is behind the token that ends a turn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from singletree.conversation import Part, Text, ToolCall, ToolResult, Turn
from singletree.engines.engine import FIRST_PICTURE_NUMBER
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.inspect.prompt_history import PromptMessage

_LINE = 200
_WINDOW = 1 << 16
"""How far behind the last message the next words may be, in bytes, besides twice the length of the message."""


class PromptText:
    """The text of a prompt with the place of each token.

    Args:
        tokenizer: the model's tokenizer.
        ids: the tokens; numbers of pictures stand for pictures.

    Attributes:
        data: the text in UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        pieces = [b"" if id >= FIRST_PICTURE_NUMBER else tokenizer.token_bytes(id) for id in ids]
        self.data = b"".join(pieces)
        self._ids = ids
        self._starts = list(accumulate(map(len, pieces), initial=0))
        self._stops = tokenizer.stop_token_ids
        self._special = frozenset(tokenizer.added_tokens.values())

    def between(self, start: int, end: int) -> str:
        """Return the text of the tokens from ``start`` up to ``end``."""
        return self.data[self._starts[start] : self._starts[end]].decode("utf-8", "replace")

    def token_at(self, byte: int) -> int:
        """Return the index of the token that contains the byte at this position."""
        return max(0, bisect_right(self._starts, byte) - 1)

    def border(self, end: int, start: int) -> int:
        """Return the index of the first token of a message.

        Args:
            end: where the words of the message before end, in bytes.
            start: where its own words begin.
        """
        first, last = bisect_left(self._starts, end), self.token_at(start)
        gap = range(first, last)
        stop = next((at for at in reversed(gap) if self._ids[at] in self._stops), None)
        if stop is None:
            stop = next((at for at in gap if self._ids[at] in self._special), None)
        if stop is None:
            return last
        at = stop + 1
        while at < last and self.between(at, at + 1).isspace():
            at += 1
        return at


def message_ranges(
    text: PromptText, messages: Sequence[PromptMessage], count: int
) -> list[tuple[int, int] | None]:
    """Return (first token, end) of each message; None for one whose words are not found. ``count``: all tokens."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for index, message in enumerate(messages):
        words = list(_words(message.turn))
        window = at + _WINDOW + 2 * sum(part.chars for part in message.parts) * 4
        start = -1
        for word in words:
            place = text.data.find(word, at, window)
            if place < 0:
                continue
            start = place if start < 0 else start
            at = place + len(word)
        if start >= 0:
            found.append((index, start, at))
    ranges: list[tuple[int, int] | None] = [None] * len(messages)
    borders = [0]
    for (_, _, end), (_, start, _) in pairwise(found):
        borders.append(text.border(end, start))
    borders.append(count)
    for number, (index, _, _) in enumerate(found):
        ranges[index] = (borders[number], max(borders[number], borders[number + 1]))
    return ranges


def _words(turn: Turn | None) -> Iterator[bytes]:
    """Yield what a prompt has of a message, in its order."""
    for part in () if turn is None else turn.parts:
        yield from _words_of(part)


def _words_of(part: Part) -> Iterator[bytes]:
    if isinstance(part, Text):
        lines = part.text.strip().splitlines()
        if lines:
            yield _utf8(lines[0].strip()[:_LINE])
        if len(lines) > 1:
            yield _utf8(lines[-1].strip()[-_LINE:])
    elif isinstance(part, ToolCall):
        yield _utf8(part.name)
    elif isinstance(part, ToolResult):
        for inner in part.parts:
            yield from _words_of(inner)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")
