"""A reminder in a tool loop is no new question: it costs no earlier turn its reasoning."""

from __future__ import annotations

import pytest

from singletree.conversation import Conversation, Part, Reasoning, Text, ToolCall, ToolResult, Turn
from singletree.prompts.template.chat_template import ChatTemplate

# As Qwen3.5's: a system message may only open the prompt, and reasoning is kept behind the last question.
FORGETS = """\
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}[{{ m.role }}]
{%- if m.reasoning_content and loop.index0 > ns.asked %}<{{ m.reasoning_content }}>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments }}){% endfor %}
{%- endfor %}"""
KEEPS = FORGETS.replace("and loop.index0 > ns.asked", "")
SWITCHED = FORGETS.replace("loop.index0 > ns.asked", "(loop.index0 > ns.asked or preserve_thinking)")


def turn(role: str, *parts: Part) -> Turn:
    return Turn(role, parts)  # type: ignore[arg-type]


LOOP = (
    turn("user", Text("go")),
    turn("assistant", Reasoning("why"), ToolCall("f", "{}", "call_1")),
    turn("tool", ToolResult("call_1", (Text("done"),))),
)
REMINDER = turn("system", Text("mind"))


def render(source: str, *turns: Turn) -> str:
    return ChatTemplate(source).render(Conversation(turns), render_parts=lambda parts: "")


def test_a_reminder_behind_a_result_ends_the_result() -> None:  # C1 C3
    before = render(FORGETS, *LOOP)
    assert before == "[user]go[assistant]<why>(f {})[tool]done"
    assert render(FORGETS, *LOOP, REMINDER) == before + "\n\nmind"
    assert render(FORGETS, *LOOP, REMINDER, turn("assistant", Text("so"))).startswith(before + "\n\nmind[")


@pytest.mark.parametrize("source", [KEEPS, SWITCHED], ids=["keeps", "switched"])
def test_where_it_costs_nothing_it_is_a_message_of_its_own(source: str) -> None:
    assert not ChatTemplate(source).capabilities.user_ends_loop
    assert render(source, *LOOP, REMINDER).endswith("[tool]done[user]mind")


def test_a_question_ends_the_loop() -> None:
    assert ChatTemplate(FORGETS).capabilities.user_ends_loop
    assert render(FORGETS, *LOOP, turn("user", Text("and"))) == "[user]go[assistant](f {})[tool]done[user]and"
    assert render(FORGETS, LOOP[0], REMINDER).endswith("[user]go[user]mind")
