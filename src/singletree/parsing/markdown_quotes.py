"""Tracks code and quotes in Markdown text, to distinguish a quoted marker from a real one."""

from __future__ import annotations

import re

_TICKS = re.compile(r"`+|[^`]+")
_FENCE = 3


_MATES = {"`": "`", '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»"}


class Quoting:
    """The state of Markdown text that is read piece by piece.

    Attributes:
        fenced: whether the text is inside a code fence.
        inline: whether the text is inside inline code.
        last: the last character; empty at the start.
    """

    __slots__ = ("_run", "fenced", "inline", "last")

    def __init__(self) -> None:
        self.fenced = False
        self.inline = False
        self.last = ""
        self._run = 0

    @property
    def is_plain(self) -> bool:
        """Return whether text without a backtick changes nothing but ``last``."""
        return not (self.inline or self._run)

    def feed(self, text: str) -> None:
        """Read more text."""
        if text:
            self.last = text[-1]
            if self._run or self.inline or "`" in text:
                self._follow(text)

    def _follow(self, text: str) -> None:
        for found in _TICKS.finditer(text):
            if found.group()[0] == "`":
                before, self._run = self._run, self._run + len(found.group())
                if before < _FENCE <= self._run:
                    self.fenced = not self.fenced
                    self.inline = False
                elif not before:
                    self.inline = not self.inline
            else:
                self._run = 0
                self.inline = self.inline and "\n" not in found.group()

    def closing_mark(self, mark: str) -> str:
        """Return the character that closes a quotation opened by ``mark``; empty when ``mark`` opens none."""
        return _MATES.get(mark, "")
