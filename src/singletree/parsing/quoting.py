"""Where in Markdown a text stands, as far as it tells a quoted marker from one that is meant."""

from __future__ import annotations

import re

_TICKS = re.compile(r"`+|[^`]+")
_FENCE = 3


_MATES = {"`": "`", '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»"}


class Quoting:
    """Follows text piece by piece. ``fenced`` inside a code fence; ``last`` is the last character seen."""

    __slots__ = ("_run", "fenced", "last")

    def __init__(self) -> None:
        self.fenced = False
        self.last = ""
        self._run = 0

    def feed(self, text: str) -> None:
        """More text."""
        if text:
            self.last = text[-1]
            if self._run or "`" in text:
                self._follow(text)

    def _follow(self, text: str) -> None:
        for found in _TICKS.finditer(text):
            if found.group()[0] == "`":
                before, self._run = self._run, self._run + len(found.group())
                if before < _FENCE <= self._run:
                    self.fenced = not self.fenced
            else:
                self._run = 0

    def mates(self, mark: str) -> str:
        """What closes a quotation that ``mark`` opened; empty when it opens none."""
        return _MATES.get(mark, "")
