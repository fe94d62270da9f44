"""Compaction of a Responses conversation: a summary takes the place of what the model did.

https://developers.openai.com/api/docs/guides/compaction. A ``compaction_trigger`` at the end of the input (as Codex
sends it), a request to ``/v1/responses/compact`` or a ``compact_threshold`` asks for it; the model writes the summary
behind the very prompt that it had, so nothing of it is read again. The client carries the summary in the
``encrypted_content`` of a ``compaction`` item. Where that stands in an input, the model reads what users, developers
and the system said before it, then the summary; its own turns and the results of its tools are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from singletree.conversation import Reasoning, Request, Text, ToolChoice, Turn

TRIGGER = "compaction_trigger"
ITEMS = ("compaction", "compaction_summary")
"""The item and its older name, which Codex still reads."""

OpenSummary = Callable[[str, str], str | None]
"""``encrypted_content`` and its path in the request -> the summary; None for one that cannot be opened."""

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
_KEPT = ("system", "developer", "user")


def unopened(sealed: str, at: str) -> str | None:
    """An ``OpenSummary`` for who has no key."""
    return None


def unopened_by(model: str) -> OpenSummary:
    """The same for every model."""
    return unopened


def is_triggered(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the input asks for a compaction."""
    return bool(items) and items[-1].get("type") == TRIGGER


def asking(request: Request) -> Request:
    """``request`` for the summary of its conversation: the same prompt, and a question behind it.

    The system asks: after a user's question templates leave out what the model thought in the tool loop before it.
    """
    turns = (*request.conversation.turns, Turn("system", (Text(_QUESTION),)))
    return replace(
        request,
        conversation=replace(request.conversation, turns=turns),
        tool_choice=ToolChoice("none"),
        response_format=None,
        extra={**request.extra, "compacts": True},
    )


def shortened(turns: Iterable[Turn], summary: str, item: Mapping[str, Any]) -> list[Turn]:
    """``turns`` with ``summary`` in place of what the model did; ``item`` is what carries it."""
    kept = [turn for turn in turns if turn.role in _KEPT and not _is_summary(turn)]
    return [*kept, Turn("user", (Text(_INTRODUCTION + summary),), item)]


def _is_summary(turn: Turn) -> bool:
    return turn.extra is not None and turn.extra.get("type") in ITEMS


def summary_of(turn: Turn) -> str:
    """What the model wrote; its thoughts where it wrote nothing else, since they are better than nothing."""
    thoughts = "\n\n".join(part.text for part in turn.parts if isinstance(part, Reasoning))
    return turn.text.strip() or thoughts.strip()
