"""Edits a conversation before anything else is done with it: what the client asks for, and results in user text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from singletree.conversation import AppliedEdit, ContextEdit, Conversation
from singletree.prompts.history.context_editing import CountTokens, apply_edits
from singletree.prompts.history.results_in_text import read_results


class Edited(NamedTuple):
    """A conversation after the edits, and a report of each edit that removed something."""

    conversation: Conversation
    applied: tuple[AppliedEdit, ...]


@dataclass(frozen=True, slots=True)
class EditHistory:
    """The stage that edits the conversation. It has no checkpoint: an edit depends on the whole history.

    Attributes:
        edits: the edits that the client asks for, in their order.
        count_tokens: returns the number of tokens in a text.
        result_marks: as in ``read_results``.
        call_opener: as in ``read_results``.
    """

    edits: Sequence[ContextEdit]
    count_tokens: CountTokens
    result_marks: tuple[str, str] | None = None
    call_opener: str = ""

    def run(self, conversation: Conversation, checkpoint: None) -> tuple[Edited, None]:
        """Apply the edits, and read results that the client wrote as user text."""
        edited, applied = apply_edits(conversation, self.edits, self.count_tokens)
        return Edited(read_results(edited, self.result_marks, self.call_opener), applied), None
