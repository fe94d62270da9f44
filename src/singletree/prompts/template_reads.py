"""What a chat template reads, as a value, and the variables and fields that templates are known to have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
Render = Callable[..., str]
ReasoningField = Literal["reasoning_content", "reasoning", "thinking", "part"]

REASONING_FIELDS: tuple[ReasoningField, ...] = ("reasoning_content", "reasoning", "thinking", "part")

SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    "thinking_option": ("on", "off"),
    "reasoning": (True, False),
}
"""Variables by which templates turn reasoning on and off: (on, off)."""

HISTORY_SWITCHES: dict[str, Any] = {
    "truncate_history_thinking": False,  # Nemotron 3
    "clear_thinking": False,  # GLM 4.7
    "preserve_thinking": True,  # Qwen 3.6, Gemma 4, LFM 2.5
    "preserved_thinking": True,  # Hunyuan 3
    "preserve_reasoning": True,
    "drop_thinking": False,  # DeepSeek
}
"""Variables by which templates keep the reasoning of earlier turns, with the value that keeps it."""

EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORT_VARIABLES = ("reasoning_effort", "thinking_effort")

IMAGES: tuple[Message, ...] = (
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": ""}},
)
CLOCK = "strftime_now"
STANDARD_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)


@dataclass(frozen=True, slots=True)
class Reads:
    """What a template takes, and in which form.

    Attributes:
        renders: whether it renders as much as one user message.
        clock: whether it prints the time.
        variables: the variables it reads beside messages, tools and token texts.
        reasoning: the message field in which it takes reasoning (``part``: a content part of type thinking);
            None when it has no such field.
        text_beside_reasoning: whether a turn of reasoning and calls may have text as well.
        tools: whether it prints tools.
        tools_always: whether having no tools must be said by an empty list.
        needed_descriptions: whether a ``tool``, or even a ``parameter``, breaks it without a description.
        calls: whether it prints an assistant's calls.
        parallel_calls: whether it takes several calls in one turn.
        text_with_calls: whether it prints the text of a turn that has calls.
        arguments: ``text`` where it prints a JSON string as it is, ``object`` where it takes them parsed.
        empty_content: what the content of a turn of calls alone must be: "" or None.
        call_ids: ``nine`` where only ids of nine letters and digits pass, ``kimi`` where the model knows its
            calls as ``functions.name:index``, else ``any``.
        results: whether it prints messages of role tool in place.
        results_need_calls: whether it prints them only after a turn that it printed calls of.
        user_after_result: whether a user message may follow a tool result.
        user_ends_loop: whether a user message after a tool result takes the reasoning of the loop out of the prompt,
            whatever its switches say.
        system: whether it takes a system message at the head, and leaves it there in a longer conversation.
        system_alone: whether it prints one when there is nothing else.
        system_runs: whether it takes two of them.
        system_inside: whether it prints a later one as system where it stands.
        consecutive_users: whether it takes two user messages in a row.
        consecutive_assistants: whether it takes two assistant messages in a row.
        content_parts: whether it takes content only as a list of parts.
        image: the content part that it takes for an image in a user message, None when it takes none.
        result_images: whether it takes that part in a tool result as well.
        switches: the variables that turn reasoning on and off: (on, off).
        history_switches: the variables that keep earlier turns' reasoning, with the value that keeps it.
        efforts: for each effort variable, the words it takes, weakest first.
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
    empty_content: str | None = ""
    call_ids: Literal["any", "nine", "kimi"] = "any"
    results: bool = False
    results_need_calls: bool = False
    user_after_result: bool = False
    user_ends_loop: bool = False
    system: bool = False
    system_alone: bool = False
    system_runs: bool = False
    system_inside: bool = False
    consecutive_users: bool = False
    consecutive_assistants: bool = False
    content_parts: bool = False
    image: Mapping[str, Any] | None = None
    result_images: bool = False
    switches: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    history_switches: Mapping[str, Any] = field(default_factory=dict)
    efforts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def put_reasoning(message: Message, place: ReasoningField, text: str) -> Message:
    """``message`` with ``text`` as its reasoning, where the template looks for it."""
    if place != "part":
        return message | {place: text}
    said = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return message | {"content": [{"type": "thinking", "thinking": text}, *said]}
