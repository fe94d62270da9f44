"""A family is one declaration: what the server does by it needs no other place in the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.forging import vocabulary
from singletree import families
from singletree.conversation import (
    Conversation,
    Text,
    Thinking,
    ThinkingVariables,
    ToolCall,
    ToolResult,
    Turn,
)
from singletree.parsing.family import Family, Form
from singletree.parsing.render_turn import render_turn
from singletree.prompts.template.capabilities import is_wanted, thinking_arguments
from singletree.server.models.chat_format import ChatFormat, load_chat_format
from singletree.server.settings.config import Config

ACME = Family(
    name="acme",
    reasoning=("<|ponder|>", "<|end|>"),
    forms=(
        Form(
            call="<|act|>{id}\n{args}<|done|>",
            id=r"(?P<name>[^#]+)(?:#\d+)?",
            id_format="{name}#{index}",
        ),
    ),
    stop_markers=("<|stop|>",),
    thinking_variables=ThinkingVariables(
        switches=(("ponders", "yes", "no"),),
        history=(("forgets", False),),
        efforts=("depth",),
        effort_flags=(("max", "all_out"),),
    ),
    fingerprint=("<|ponder|>", "<|act|>"),
)
TEMPLATE = """\
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'tool' %}{{ m.tool_call_id }}: {% endif %}{{ m.content }}
{%- for call in m.tool_calls %}<|act|>{{ call.id }}\n{{ call.function.arguments }}<|done|>{% endfor %}<|stop|>
{%- endfor %}{% if forgets %}{% endif %}{% if depth is defined and depth not in ['low', 'high'] %}
{{- raise_exception('depth') }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% if ponders == 'no' %}-{% endif %}{% if all_out %}!{% endif %}
{%- if false %}<|ponder|>{% endif %}{% endif %}"""
SPECIAL = (
    "<s>",
    "</s>",
    "<|ponder|>",
    "<|end|>",
    "<|act|>",
    "<|done|>",
    "<|stop|>",
    "<|user|>",
    "<|assistant|>",
)


@pytest.fixture(params=[{}, {"tool_call_parser": "none", "reasoning_parser": "none"}], ids=["found", "flags"])
def acme(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatFormat:
    table = (*families.table(), ACME)
    monkeypatch.setattr(families, "table", lambda: table)
    (tmp_path / "acme.jinja").write_text(TEMPLATE)
    flags: dict[str, Any] = request.param
    tokenizer = vocabulary(dict.fromkeys(SPECIAL, True))
    return load_chat_format(Config(chat_template=tmp_path / "acme.jinja", **flags), tokenizer)


def test_its_stop_markers_stop_the_engine_and_its_other_markers_do_not(acme: ChatFormat) -> None:
    ids = acme.tokenizer.added_tokens
    assert acme.tokenizer.stop_token_ids == {ids["<|stop|>"], ids["</s>"]}


def test_its_calls_have_the_ids_that_the_model_knows(acme: ChatFormat) -> None:
    turns = (
        Turn("user", (Text("go"),)),
        Turn("assistant", (ToolCall("ls", "{}", "toolu_1"), ToolCall("ls", "{}", "ls#7"))),
        Turn("tool", (ToolResult("toolu_1", (Text("a"),)), ToolResult("ls#7", (Text("b"),)))),
    )
    text = acme.template.render(Conversation(turns), render_parts=lambda parts: render_turn(ACME, parts))
    assert "<|act|>ls#0\n{}<|done|><|act|>ls#7\n{}<|done|>" in text
    assert "<|tool|>ls#0: a" in text


def test_its_variables_control_reasoning(acme: ChatFormat) -> None:
    reads, talk = acme.template.capabilities, Conversation((Turn("user", (Text("go"),)),))
    assert reads.switches == {"ponders": ("yes", "no")}
    on = thinking_arguments(Thinking(enabled=True, effort="high"), reads, talk)
    assert on == {"forgets": False, "ponders": "yes", "depth": "high"}
    most = thinking_arguments(Thinking(effort="max"), reads, talk)
    assert most["all_out"] is True
    off = Thinking(template_arguments={"ponders": "no"})
    assert is_wanted(off, Thinking(), reads.switches) is False
    assert thinking_arguments(off, reads, talk) == {"ponders": "no"}
