"""Convert a request's reasoning options to the variables of a template, by tables without model names."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from singletree.conversation import Conversation, Reasoning, Thinking
from singletree.prompts.template.capabilities import (
    BUDGET_VARIABLES,
    THINKING_VARIABLES,
    TemplateCapabilities,
)

OFF_WORDS = ("none", "no_think", "off", "disabled")
"""Effort words that switch reasoning off."""

_NEAREST: dict[str, tuple[str, ...]] = {
    "minimal": ("minimal", "low", "medium", "high"),
    "low": ("low", "minimal", "medium", "high"),
    "medium": ("medium", "low", "high"),
    "high": ("high", "xhigh", "max", "medium", "low"),
    "xhigh": ("xhigh", "max", "high", "medium", "low"),
    "max": ("max", "xhigh", "high", "medium", "low"),
}
"""For each effort of a client, the template's words for it, the nearest first."""

_OFF_VALUES = {name: off for name, _, off in THINKING_VARIABLES.switches}

_UNSET = Thinking()

_DEFAULT_EFFORT = "high"
"""The effort of a request that asks for reasoning and gives no effort: the default of the native APIs
(https://platform.claude.com/docs/en/build-with-claude/effort).
"""


def thinking_arguments(
    thinking: Thinking,
    capabilities: TemplateCapabilities,
    conversation: Conversation,
    *,
    default: Thinking = Thinking(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Return the template's variables for one request, of those that it reads.

    The request takes precedence over the server's ``default``, and that over the template's own default. If the request
    or the server sets reasoning, or the conversation holds reasoning, and it is not switched off, then it is switched
    on by name and the history keeps it, for this request only: a model that reasons between its calls needs its own
    reasoning to go on. The request's ``template_arguments`` override everything, by name.
    """
    if thinking == default == _UNSET and not holds_reasoning(conversation):
        return {}
    merged = Thinking(
        enabled=is_wanted(thinking, default, capabilities.switches),
        effort=default.effort if thinking.effort is None else thinking.effort,
        budget_tokens=default.budget_tokens if thinking.budget_tokens is None else thinking.budget_tokens,
    )
    is_active = _is_set(merged) or holds_reasoning(conversation)
    is_off = is_switched_off(thinking, default, capabilities)
    history = dict(capabilities.history_switches) if is_active and not is_off else {}
    wanted = _settings(merged, capabilities) if is_active else {}
    implied, explicit = ({}, wanted) if _is_set(thinking) else (wanted, {})
    return {
        **history,
        **implied,
        **(default.template_arguments or {}),
        **explicit,
        **(thinking.template_arguments or {}),
    }


def holds_reasoning(conversation: Conversation) -> bool:
    """Return whether an assistant turn of ``conversation`` has reasoning."""
    parts = chain.from_iterable(map(attrgetter("parts"), conversation.turns))
    # One without any is told at once, without Python code for each turn.
    if Reasoning not in map(type, parts):
        return False
    return any(
        type(part) is Reasoning and part.text
        for turn in conversation.turns
        if turn.role == "assistant"
        for part in turn.parts
    )


def is_switched_off(thinking: Thinking, default: Thinking, capabilities: TemplateCapabilities) -> bool:
    """Return whether reasoning is not wanted, and the template has a switch or a word for that."""
    if is_wanted(thinking, default, capabilities.switches) is not False:
        return False
    return bool(capabilities.switches) or _has_off_word(capabilities)


def thinking_settings(capabilities: TemplateCapabilities) -> list[dict[str, Any]]:
    """Return the settings of reasoning that this template has: on, off, and each effort, as its variables."""
    switched = [_switched(capabilities, on=on) for on in (True, False)]
    efforts = [{name: word} for name, words in capabilities.efforts.items() for word in words]
    return [setting for setting in (*switched, *efforts) if setting]


def _is_set(thinking: Thinking) -> bool:
    return (thinking.enabled, thinking.effort, thinking.budget_tokens) != (None, None, None)


def _settings(thinking: Thinking, capabilities: TemplateCapabilities) -> dict[str, Any]:
    if thinking.enabled is False:
        return {**_switched(capabilities, on=False), **_effort(capabilities, "none")}
    budget = {} if thinking.budget_tokens is None else dict.fromkeys(BUDGET_VARIABLES, thinking.budget_tokens)
    # Without a switch, and with a word for no reasoning, only an effort switches reasoning on.
    starts_off = not capabilities.switches and _has_off_word(capabilities)
    effort = thinking.effort or (_DEFAULT_EFFORT if starts_off else None)
    return {
        **_switched(capabilities, on=True),
        **_effort(capabilities, effort),
        **{name: tokens for name, tokens in budget.items() if name in capabilities.variables},
    }


def _has_off_word(capabilities: TemplateCapabilities) -> bool:
    return any(word in OFF_WORDS for words in capabilities.efforts.values() for word in words)


def is_wanted(
    thinking: Thinking, default: Thinking, switches: Mapping[str, tuple[Any, Any]] = MappingProxyType({})
) -> bool | None:
    """Return whether reasoning is wanted, by the request's variables, switch and effort first; None if not set."""
    for options in (thinking, default):
        for name, value in (options.template_arguments or {}).items():
            if name in switches:
                return bool(value != switches[name][1])
            if name in _OFF_VALUES:
                return bool(value != _OFF_VALUES[name])
        if options.enabled is not None:
            return options.enabled
        if options.effort is not None:
            return options.effort.lower() not in OFF_WORDS
    return None


def _switched(capabilities: TemplateCapabilities, *, on: bool) -> dict[str, Any]:
    return {name: values[0 if on else 1] for name, values in capabilities.switches.items()}


def _effort(capabilities: TemplateCapabilities, effort: str | None) -> dict[str, Any]:
    """Return the variable with the template's word for ``effort``; empty if it has none, or for an unknown effort."""
    if effort is None:
        return {}
    effort = effort.lower()
    wanted = _NEAREST.get(effort, (effort,))
    if effort in OFF_WORDS:
        # Without a switch for reasoning, use the least effort that the template knows.
        wanted = (*OFF_WORDS, *(() if capabilities.switches else _NEAREST["minimal"]))
    chosen: dict[str, Any] = {
        name: next(word for word in wanted if word in words)
        for name, words in capabilities.efforts.items()
        if any(word in words for word in wanted)
    }
    flag = capabilities.effort_flags.get(effort)
    return chosen | ({flag: True} if flag is not None else {})
