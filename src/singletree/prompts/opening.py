"""How a prompt opened a turn that was generated, which is remembered and carried with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Opening:
    """How a prompt opened a turn.

    Attributes:
        header: which of the template's headers stood before it; empty where none did.
        text: what stood behind the header, such as ``<think>`` and a line break.
        asked: all that stood between the last words that the turn answers and its first token; empty when that is not
            known.
        answers: a digest of those words.
        clock: the time that the prompt showed, in unix seconds; 0 where it showed none.
    """

    header: str = ""
    text: str = ""
    asked: str = ""
    answers: str = ""
    clock: float = 0.0

    @property
    def tail(self) -> str:
        """What the model's parser has to know of it."""
        return self.header + self.text if self.header else self.asked
