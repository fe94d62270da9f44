"""Compaction of a Responses conversation: a summary replaces what the model did.

https://developers.openai.com/api/docs/guides/compaction. A ``compaction_trigger`` at the end of the input (as Codex
sends it), a request to ``/v1/responses/compact`` or a ``compact_threshold`` starts it. The model writes the summary
after the prompt that it already had, so the engine does not read that prompt again. The client carries the summary in
the ``encrypted_content`` of a ``compaction`` item. Where such an item is in an input, the model sees the messages of
users, developers and the system before it, then the summary, but not its own turns or the results of its tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from singletree.conversation import Reasoning, Request, Text, ToolChoice, Turn

TRIGGER = "compaction_trigger"
ITEMS = ("compaction", "compaction_summary")
"""The type of the item, and its older name, which Codex still reads."""

OpenSummary = Callable[[str, str], str | None]
"""``encrypted_content`` and its path in the request -> the summary; None if it cannot be decrypted."""

_QUESTION = (
    "The conversation is about to be shortened: your turns and the results of your tools will be removed, and you will "
    "go on from your summary alone. Write that summary now, as text, and call no tool. Say what was asked for and what "
    "the user wants to be kept to; what was done, with the files, commands and results that matter; what was decided "
    "and why; what failed; and what is left to do, the next step first."
)
_INTRODUCTION = (
    "The conversation was shortened here: your earlier turns and the results of your tools were removed. This is the "
    "summary that you wrote of them. Go on from it; do nothing twice.\n\n"
)
_KEPT_ROLES = ("system", "developer", "user")


def no_summary(sealed: str, at: str) -> str | None:
    """Return None: an ``OpenSummary`` without a key."""
    return None


def no_summaries(model: str) -> OpenSummary:
    """Return ``no_summary``, for any model."""
    return no_summary


def is_triggered(items: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the input ends with a compaction trigger."""
    return bool(items) and items[-1].get("type") == TRIGGER


def summary_request(request: Request) -> Request:
    """Return a request for the summary of the conversation of ``request``: the same prompt, followed by a question.

    The question is a system turn: after a user turn, templates leave out the reasoning of the tool loop before it.
    """
    turns = (*request.conversation.turns, Turn("system", (Text(_QUESTION),)))
    return replace(
        request,
        conversation=replace(request.conversation, turns=turns),
        tool_choice=ToolChoice("none"),
        response_format=None,
        options=replace(request.options, compacts=True),
    )


def shorten(turns: Iterable[Turn], summary: str, item: Mapping[str, Any]) -> list[Turn]:
    """Return ``turns`` with ``summary`` in place of what the model did; ``item`` is the item that holds it."""
    kept = [turn for turn in turns if turn.role in _KEPT_ROLES and not _is_summary(turn)]
    return [*kept, Turn("user", (Text(_INTRODUCTION + summary),), item)]


def _is_summary(turn: Turn) -> bool:
    return turn.extra is not None and turn.extra.get("type") in ITEMS


def summary_of(turn: Turn) -> str:
    """Return the text of ``turn``, or its reasoning if there is no text, which is better than nothing."""
    reasoning = "\n\n".join(part.text for part in turn.parts if isinstance(part, Reasoning))
    return turn.text.strip() or reasoning.strip()
