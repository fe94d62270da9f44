"""The capabilities of a chat template, and the variables and fields that templates are known to have.

A request's reasoning options become the variables of a template by tables without model names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

from singletree.conversation import Conversation, Reasoning, Thinking, ThinkingVariables

MessageDict = dict[str, Any]
Render = Callable[..., str]
ReasoningField = Literal["reasoning_content", "reasoning", "thinking", "part"]

REASONING_FIELDS: tuple[ReasoningField, ...] = ("reasoning_content", "reasoning", "thinking", "part")
"""Message fields that templates read reasoning from, in the order in which they are tried."""

THINKING_VARIABLES = ThinkingVariables(
    switches=(
        ("enable_thinking", True, False),
        ("thinking", True, False),
        ("thinking_mode", "enabled", "disabled"),
        ("reasoning", True, False),
    ),
    history=(("preserve_thinking", True), ("preserve_reasoning", True)),
    efforts=("reasoning_effort",),
)
"""The variables that any template may read: formats of several makers share their names, clients send them to models
that they do not know, and checkpoints without a family have them too. A variable that one format alone has is declared
by its family (``Family.thinking_variables``). Which of them a template reads is found by its syntax tree and by probes.
"""

BUDGET_VARIABLES = ("thinking_budget",)
"""Variables that hold the number of tokens for reasoning; any template may read them."""

EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words for the effort of reasoning that templates are probed with, weakest first."""

IMAGES: tuple[MessageDict, ...] = ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}})
"""Content parts that templates accept as an image, in the order in which they are tried."""

CLOCK = "strftime_now"
"""The function with which templates print the time."""

STANDARD_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)
"""Variables that every template may read."""


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a chat template accepts, and in which form. Found by probe renders (``probe``).

    Attributes:
        renders: whether it renders a single user message.
        clock: whether it prints the time.
        variables: the variables that it reads, except messages, tools and token texts.
        reasoning: the message field from which it prints reasoning (``part``: a content part of type thinking);
            None if it has no such field.
        text_beside_reasoning: whether a turn with reasoning and calls may have text as well.
        call_header: what it prints before the words of a turn, and before the name of a call, behind the header of
            both; empty where a turn with reasoning and calls may have text as well, or calls may be text.
        tools: whether it prints tools.
        tools_always: whether it needs an empty list, not None, where there are no tools.
        needed_descriptions: whether it fails on a ``tool``, or on a ``parameter`` too, without a description.
        calls: whether it prints an assistant's calls.
        parallel_calls: whether it accepts several calls in one turn.
        text_with_calls: whether it prints the text of a turn that has calls.
        arguments: ``text`` where it prints a JSON string as it is, ``object`` where it needs them parsed.
        parsed_arguments: whether it prints parsed arguments, possibly beside text.
        empty_content: the content that a turn with calls alone must have: "" or None.
        call_ids: ``nine`` where only ids of nine letters and digits are accepted, else ``any``.
        call_id_format: the form of the ids by which the model knows its calls, with ``{name}`` and ``{index}``
            (counted over the conversation); empty where any id is good. No probe finds it: the family has it.
        results: whether it prints messages with the role tool, in their place.
        results_need_calls: whether it prints them only after a turn whose calls it printed, in each step of a loop.
        unanswered: which calls of a turn may have no result: ``none`` where the template refuses that, ``last`` where
            it matches results to calls by their order alone, ``any`` where it prints which call a result answers.
        call_closers: the text that the template prints after the arguments of a turn's last call, where the template
            has to see the calls of a turn: otherwise it takes the turn for the final answer, and drops the reasoning or
            the results of the loop. None where calls may be text in the content.
        result_marks: the prefix and suffix of a user message that the template treats as a result: it keeps the
            reasoning of the loop, as after a result. None if it treats none so.
        user_after_result: whether a user message may follow a tool result.
        user_ends_loop: whether a user message after a tool result removes the reasoning of the loop from the prompt,
            whatever its switches are set to, or moves the tools.
        system: whether it prints a system message at the head, and keeps it there in a longer conversation.
        system_alone: whether it prints a system message when there is no other message.
        consecutive_systems: whether it accepts two system messages at the head.
        system_inside: whether it prints a later system message in its place, as system.
        consecutive_users: whether it accepts two user messages in a row.
        consecutive_assistants: whether it accepts two assistant messages in a row.
        content_parts: whether it accepts content only as a list of parts.
        image: the content part that it accepts as an image in a user message; None if it accepts none.
        result_images: whether it accepts that part in a tool result as well.
        switches: the variables that switch reasoning on and off: (value for on, value for off).
        adaptive: whether the model decides by itself where no switch is set: the prompt is that of neither value.
        history_switches: the variables that keep earlier turns' reasoning, with the value that keeps it.
        efforts: for each effort variable, the words that it accepts, weakest first.
        effort_flags: the variables that are true for an effort, by effort.
    """

    renders: bool = False
    clock: bool = False
    variables: frozenset[str] = frozenset()
    reasoning: ReasoningField | None = None
    text_beside_reasoning: bool = False
    call_header: tuple[str, str] = ("", "")
    tools: bool = False
    tools_always: bool = False
    needed_descriptions: Literal["none", "tool", "parameter"] = "none"
    calls: bool = False
    parallel_calls: bool = False
    text_with_calls: bool = False
    arguments: Literal["text", "object"] = "text"
    parsed_arguments: bool = False
    empty_content: str | None = ""
    call_ids: Literal["any", "nine"] = "any"
    call_id_format: str = ""
    results: bool = False
    results_need_calls: bool = False
    unanswered: Literal["none", "last", "any"] = "last"
    call_closers: str | None = None
    result_marks: tuple[str, str] | None = None
    user_after_result: bool = False
    user_ends_loop: bool = False
    system: bool = False
    system_alone: bool = False
    consecutive_systems: bool = False
    system_inside: bool = False
    consecutive_users: bool = False
    consecutive_assistants: bool = False
    content_parts: bool = False
    image: Mapping[str, Any] | None = None
    result_images: bool = False
    switches: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    adaptive: bool = False
    history_switches: Mapping[str, Any] = field(default_factory=dict)
    efforts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    effort_flags: Mapping[str, str] = field(default_factory=dict)


def put_reasoning(message: MessageDict, place: ReasoningField, text: str) -> MessageDict:
    """Return ``message`` with the reasoning ``text`` in ``place``, the field that the template reads."""
    if place != "part":
        return message | {place: text}
    content = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return message | {"content": [{"type": "thinking", "thinking": text}, *content]}


def placeholder_arguments(form: Literal["text", "object"], value: str) -> Any:
    """Return arguments that hold only ``value``, for a call that is rendered and then cut out of the prompt."""
    return value if form == "text" else {"value": value}


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

# Of a request that asks for reasoning and gives no effort: the default of the native APIs
# (https://platform.claude.com/docs/en/build-with-claude/effort).
_DEFAULT_EFFORT = "high"


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
    on by name and the history keeps it, for this request only: between its calls a model needs its own reasoning. A
    model that decides by itself gets no switch. The request's ``template_arguments`` override everything, by name.
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
    is_switched = is_active and (_is_set(merged) or not capabilities.adaptive)
    wanted = _settings(merged, capabilities) if is_switched else {}
    implied, explicit = ({}, wanted) if _is_set(thinking) else (wanted, {})
    given = (history, implied, default.template_arguments or {}, explicit, thinking.template_arguments or {})
    return {name: value for each in given for name, value in each.items()}


def holds_reasoning(conversation: Conversation) -> bool:
    """Return whether an assistant turn of ``conversation`` has reasoning."""
    parts = chain.from_iterable(map(attrgetter("parts"), conversation.turns))
    # One without any is told at once, without Python code for each turn.
    if Reasoning not in map(type, parts):
        return False
    answers = (turn.parts for turn in conversation.turns if turn.role == "assistant")
    return any(type(part) is Reasoning and part.text for part in chain.from_iterable(answers))


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
