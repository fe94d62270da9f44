"""The capabilities of a chat template, and the variables and fields that templates are known to have.

A request's reasoning options become the variables of a template by tables without model names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from singletree.conversation import ThinkingVariables

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
        results_need_calls: whether it prints them only after a turn whose calls it printed.
        unanswered: which calls of a turn may have no result: ``none`` where the template refuses that, ``last`` where
            it matches results to calls by their order alone, ``any`` where it prints which call a result answers.
        call_closers: the text that the template prints after the arguments of a turn's last call, where the template
            has to see the calls of a turn: otherwise it takes the turn for the final answer, and drops the reasoning or
            the results of the loop. None where calls may be text in the content.
        result_marks: the prefix and suffix of a user message that the template treats as a result: it keeps the
            reasoning of the loop, as after a result. None if it treats none so.
        user_after_result: whether a user message may follow a tool result.
        user_ends_loop: whether a user message after a tool result removes the reasoning of the loop from the prompt,
            whatever its switches are set to.
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
        history_switches: the variables that keep earlier turns' reasoning, with the value that keeps it.
        efforts: for each effort variable, the words that it accepts, weakest first.
        effort_flags: the variables that are true for an effort, by effort.
    """

    renders: bool = False
    clock: bool = False
    variables: frozenset[str] = frozenset()
    reasoning: ReasoningField | None = None
    text_beside_reasoning: bool = False
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
