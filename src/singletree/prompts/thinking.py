"""A client's wishes about reasoning, as the variables that this template reads. Tables, no model names."""

from __future__ import annotations

from typing import Any, TypeVar

from singletree.conversation import Conversation, Thinking
from singletree.prompts.template_reads import SWITCHES, Reads

T = TypeVar("T")

OFF_WORDS = ("none", "no_think", "off", "disabled")
"""Effort words that ask for no reasoning at all."""

_NEAREST: dict[str, tuple[str, ...]] = {
    "minimal": ("minimal", "low", "medium", "high"),
    "low": ("low", "minimal", "medium", "high"),
    "medium": ("medium", "low", "high"),
    "high": ("high", "xhigh", "max", "medium", "low"),
    "xhigh": ("xhigh", "max", "high", "medium", "low"),
    "max": ("max", "xhigh", "high", "medium", "low"),
}
"""For each word of the clients, the template's words for it, the nearest first."""

_UNSAID_EFFORT = "high"
"""What a client means that asks for reasoning and does not say how much: the default of the native APIs
(https://platform.claude.com/docs/en/build-with-claude/effort).
"""

_BUDGET_VARIABLES = ("thinking_budget",)

_EFFORT_FLAGS = {"minimal": "low_effort", "low": "low_effort", "medium": "medium_effort"}
"""Nemotron 3's templates have a flag for each weaker effort instead of a word."""


def thinking_arguments(
    thinking: Thinking,
    reads: Reads,
    conversation: Conversation,
    *,
    default: Thinking = Thinking(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """The template's variables for one request.

    The request comes before the server's ``default``, and that before the template's own. Where reasoning is
    in play and not switched off, it is switched on by name and the history keeps it, for this request only: a
    model that reasons between its calls needs its own thoughts to go on.

    Args:
        thinking: what the request asks; its ``template_arguments`` have the last word, by name.
        reads: what the template reads; variables that it does not read are not set.
        conversation: reasoning in its assistant turns brings reasoning into play.
        default: what the server was started with.
    """
    wish = Thinking(
        enabled=is_wanted(thinking, default),
        effort=_first(thinking.effort, default.effort),
        budget_tokens=_first(thinking.budget_tokens, default.budget_tokens),
    )
    asked = wish.enabled is not None or wish.effort is not None or wish.budget_tokens is not None
    carried = any(turn.reasoning for turn in conversation.turns if turn.role == "assistant")
    in_play = wish.enabled is not False and (asked or carried)
    history = dict(reads.history_switches) if in_play else {}
    wished = _wished(wish, reads) if asked or carried else {}
    said_now = (
        thinking.enabled is not None or thinking.effort is not None or thinking.budget_tokens is not None
    )
    implied, said = ({}, wished) if said_now else (wished, {})
    return {
        **history,
        **implied,
        **(default.template_arguments or {}),
        **said,
        **(thinking.template_arguments or {}),
    }


def thinking_settings(reads: Reads) -> list[dict[str, Any]]:
    """The ways in which reasoning can be set in this template: on, off, and each effort."""
    switched = [_switched(reads, on=on) for on in (True, False)]
    efforts = [{name: word} for name, words in reads.efforts.items() for word in words]
    return [setting for setting in (*switched, *efforts) if setting]


def _first(ours: T | None, theirs: T | None) -> T | None:
    return theirs if ours is None else ours


def _wished(wish: Thinking, reads: Reads) -> dict[str, Any]:
    if wish.enabled is False:
        return {**_switched(reads, on=False), **_effort(reads, "none")}
    budget = {} if wish.budget_tokens is None else dict.fromkeys(_BUDGET_VARIABLES, wish.budget_tokens)
    effort = wish.effort or (_UNSAID_EFFORT if _starts_off(reads) else None)
    return {
        **_switched(reads, on=True),
        **_effort(reads, effort),
        **{name: tokens for name, tokens in budget.items() if name in reads.variables},
    }


def _starts_off(reads: Reads) -> bool:
    """Whether only an effort switches reasoning on: where there is no other switch, and a word for none."""
    return not reads.switches and any(word in OFF_WORDS for words in reads.efforts.values() for word in words)


def is_wanted(thinking: Thinking, default: Thinking) -> bool | None:
    """On, off or unsaid: by the request's variables, switch or effort, whichever is given first, then the server's."""
    for wish in (thinking, default):
        for name, value in (wish.template_arguments or {}).items():
            if name in SWITCHES:
                return bool(value != SWITCHES[name][1])
        if wish.enabled is not None:
            return wish.enabled
        if wish.effort is not None:
            return wish.effort.lower() not in OFF_WORDS
    return None


def _switched(reads: Reads, *, on: bool) -> dict[str, Any]:
    return {name: values[0 if on else 1] for name, values in reads.switches.items()}


def _effort(reads: Reads, effort: str | None) -> dict[str, Any]:
    """The template's word for ``effort``; nothing where it has none, or for a word that nobody knows."""
    if effort is None:
        return {}
    effort = effort.lower()
    wanted = _NEAREST.get(effort, (effort,))
    if effort in OFF_WORDS:
        # Where nothing switches reasoning off, as little as there is.
        wanted = (*OFF_WORDS, *(() if reads.switches else _NEAREST["minimal"]))
    chosen: dict[str, Any] = {
        name: next(word for word in wanted if word in words)
        for name, words in reads.efforts.items()
        if any(word in words for word in wanted)
    }
    flag = _EFFORT_FLAGS.get(effort, "")
    return chosen | ({flag: True} if flag in reads.variables else {})
