"""The text with which a prompt opened a generated turn. It is remembered, and carried in capsules, with the turn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """The end of a prompt, after which a turn was generated.

    Attributes:
        header: the template's header that opened the turn; empty where none did.
        text: the text after the header, such as ``<think>`` and a line break.
        since_anchor: the whole text between the anchor of the turn before (``replay.anchors``) and the first generated
            token; empty where it is not known.
        anchor_digest: a digest of that anchor.
        clock: the time that the prompt showed, in unix seconds; 0 where it showed none.
    """

    header: str = ""
    text: str = ""
    since_anchor: str = ""
    anchor_digest: str = ""
    clock: float = 0.0

    @property
    def tail(self) -> str:
        """Return the part of it that the model's parser needs."""
        return self.header + self.text if self.header else self.since_anchor
