"""Edits a conversation before anything else is done with it: what the client asks for, and results in user text."""

from __future__ import annotations

from collections.abc import Sequence

from singletree.conversation import AppliedEdit, ContextEdit, Conversation
from singletree.prompts.history.context_editing import CountTokens, apply_edits
from singletree.prompts.history.results_in_text import read_results


def edit_history(
    conversation: Conversation,
    edits: Sequence[ContextEdit],
    count_tokens: CountTokens,
    result_marks: tuple[str, str] | None = None,
    call_opener: str = "",
) -> tuple[Conversation, tuple[AppliedEdit, ...]]:
    """Apply the edits, and read results that the client wrote as user text.

    It is no stage (``prompt_cache``): an edit depends on the whole history.

    Args:
        edits: the edits that the client asks for, in their order.
        count_tokens: returns the number of tokens in a text.
        result_marks, call_opener: as in ``read_results``.

    Returns:
        The conversation after the edits, and a report of each edit that removed something.
    """
    edited, applied = apply_edits(conversation, edits, count_tokens)
    return read_results(edited, result_marks, call_opener), applied
