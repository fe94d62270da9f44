"""Placeholders for texts that no template may trim, split or read: they are filled in after rendering.

A placeholder is a number between two characters U+DFFE, which no text from outside can hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

DELIMITER = "\udffe"
"""The character before and after the number in a placeholder. No template trims or splits at it."""

_PLACEHOLDERS = re.compile(f"{DELIMITER}([0-9]+){DELIMITER}")


@dataclass(slots=True)
class Placeholders:
    """The texts of a conversation that replace placeholders in the rendered prompt.

    A text with later reasoning of a turn has a second form without it. A marker (a placeholder that is replaced by
    nothing) is put into reasoning that the template gets of the same turn. If the template prints the marker, it keeps
    the turn's reasoning, and the form with reasoning is filled in; otherwise the form without.

    Attributes:
        texts: the texts, by number.
        leads: for each text what the template may print before it, which is removed then.
        without_reasoning: by the number of a text, the number of its marker and the form without reasoning.
        unprobed: by the number of a text, the number of its marker, if the template gets no reasoning of the turn.
        kept: markers that the template printed in a probe render.
        cuts: by the number of a text, the number of the placeholder up to which the rendered text after it is cut out,
            and the text after that placeholder that is cut out too.
    """

    texts: list[str] = field(default_factory=list)
    leads: list[str] = field(default_factory=list)
    without_reasoning: dict[int, tuple[int, str]] = field(default_factory=dict)
    unprobed: dict[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    cuts: dict[int, tuple[int, str]] = field(default_factory=dict)

    def add_text(self, text: str, lead: str = "") -> str:
        """Add ``text`` and return its placeholder. A ``lead`` that the template prints before it is removed."""
        self.texts.append(text)
        self.leads.append(lead)
        return placeholder_of(len(self.texts) - 1)

    def add_marker(self) -> int:
        self.add_text("")
        return len(self.texts) - 1

    def add_alternatives(self, text: str, without_reasoning: str, marker: int | None, lead: str = "") -> str:
        """Return a placeholder for ``text``, or for ``without_reasoning`` if the template does not print the marker."""
        known = self.add_marker() if marker is None else marker
        placeholder = self.add_text(text, lead)
        number = len(self.texts) - 1
        self.without_reasoning[number] = known, without_reasoning
        if marker is None:
            self.unprobed[number] = known
        return placeholder

    def cut_after_last(self, closers: str) -> str:
        """Return a new placeholder: what is printed between the last text and it is cut out, and so are ``closers``."""
        number = len(self.texts) - 1
        end = self.add_marker()
        self.cuts[number] = end, closers
        return placeholder_of(end)

    def copy(self) -> Placeholders:
        copied = Placeholders([*self.texts], [*self.leads], {**self.without_reasoning}, {**self.unprobed})
        copied.cuts = {**self.cuts}
        return copied

    def fill(self, rendered: str) -> str:
        if not self.texts:
            return rendered
        kept = self.kept | placeholder_numbers(rendered) if self.without_reasoning else self.kept
        pieces: list[str] = []
        at = 0
        for match in _PLACEHOLDERS.finditer(rendered):
            number = int(match[1])
            if match.start() < at:
                continue  # it is inside text that is cut out
            marker, without_reasoning = self.without_reasoning.get(number, (None, ""))
            text = self.texts[number] if marker is None or marker in kept else without_reasoning
            pieces += [rendered[at : match.start()].removesuffix(self.leads[number]), text]
            at = self._end_of_cut(number, rendered, match.end())
        return "".join([*pieces, rendered[at:]]) if pieces else rendered

    def _end_of_cut(self, number: int, rendered: str, at: int) -> int:
        if number not in self.cuts:
            return at
        end, closers = self.cuts[number]
        found = rendered.find(placeholder_of(end), at)
        if found < 0:
            return at
        found += len(placeholder_of(end))
        return found + len(closers) if rendered.startswith(closers, found) else found

    def end_of_last(self, rendered: str) -> int:
        """Return the offset in ``rendered`` after the last text's placeholder; 0 if the template did not print it."""
        placeholder = placeholder_of(len(self.texts) - 1)
        return rendered.rfind(placeholder) + len(placeholder) if placeholder in rendered else 0


def placeholder_of(number: int) -> str:
    """Return the placeholder of the text with this number."""
    return f"{DELIMITER}{number}{DELIMITER}"


def placeholder_numbers(text: str) -> frozenset[int]:
    """Return the numbers of the placeholders in ``text``."""
    return frozenset(int(match[1]) for match in _PLACEHOLDERS.finditer(text))


def with_marker(text: str, marker: int) -> str:
    """Put the placeholder of ``marker`` into ``text``, after its first character that is not white space."""
    at = len(text) - len(text.lstrip()) + 1
    return text[:at] + placeholder_of(marker) + text[at:]
