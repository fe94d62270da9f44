"""What results, images, documents and tools become in a prompt."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from prompts.conversations import USER, call, render, turn
from prompts.template_sources import HERMES, PARTS, write_parts
from singletree.conversation import Conversation, Document, Image, Text, Tool, ToolReference, ToolResult
from singletree.errors import InvalidRequest
from singletree.prompts.template import chat_template
from singletree.prompts.template.chat_template import CHATML, ChatTemplate


def test_errors_can_be_read() -> None:
    def output(text: str) -> str:
        failed = turn("tool", ToolResult("call_1", (Text(text),), is_error=True))
        return render(HERMES, USER, turn("assistant", call()), failed)

    assert "<tool_response>\nError: file not found\n" in output("file not found")
    assert "<tool_response>\n<tool_use_error>no</tool_use_error>\n" in output(
        "<tool_use_error>no</tool_use_error>"
    )
    assert "<tool_response>\nError: \n" in output("")


PICTURE = Image("image/png", "aGk=")


def test_images_reach_a_template_that_takes_them() -> None:  # C35
    template = ChatTemplate(PARTS)
    assert template.capabilities.image == {"type": "image"}
    conversation = Conversation((turn("user", "a", PICTURE, "b"),))
    assert template.render(conversation, render_parts=write_parts) == "[user]a<image>b[assistant]"
    blind = template.render(conversation, render_parts=write_parts, vision=False)
    assert blind == "[user]a[image: this model cannot see images]b[assistant]"


def test_images_in_results_are_shown_or_named() -> None:  # C35
    seen = turn("tool", ToolResult("call_1", (Text("t"), PICTURE)))
    assert "t[image: this model cannot see images]" in render(HERMES, USER, turn("assistant", call()), seen)
    after = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
        "{% elif m.role == 'tool' %}{{ raise_exception('text only') }}"
        "{% else %}{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% endif %}"
        "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
        "{% endfor %}"
    )
    text = render(after, USER, turn("assistant", call()), seen, seen, turn("user", "go"))
    shown = "t[image: shown in the next message]"
    assert text.endswith(f"[tool]{shown}[tool]{shown}[user]<image><image>[user]go")


def test_documents_are_read_or_named() -> None:
    data = base64.b64encode("Zeile ä".encode()).decode()
    text = render(
        CHATML,
        turn(
            "user",
            Document("text/plain", data, title="notes"),
            Document("application/pdf", "JVBE"),
            Document("text/plain", "%%%"),
            ToolReference("web"),
        ),
    )
    assert "[document notes]\nZeile ä\n[end of document notes]" in text
    assert "[document: this model cannot read application/pdf]" in text
    assert "[document: unreadable base64]" in text
    assert "[tool: web]" in text


def test_tools_are_printed_in_the_clients_order() -> None:  # C6
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": ["<x>", None, 1.0]}}}
    text = render(HERMES, USER, tools=(Tool("f", "d é", schema), Tool("g"), Tool("h", kind="custom")))
    assert (
        '{"type": "function", "function": {"name": "f", "description": "d é", "parameters": '
        '{"type": "object", '
        '"properties": {"z": {"type": "string"}, "a": {"enum": ["<x>", null, 1.0]}}}}}\n'
        '{"type": "function", "function": {"name": "g", "parameters": '
        '{"type": "object", "properties": {}}}}\n'
    ) in text
    assert '"name": "h", "parameters": {"type": "object", "properties": {"input": {"type": "string"}}' in text


def test_a_tool_list_is_serialised_once(monkeypatch: pytest.MonkeyPatch) -> None:  # C7
    printed: list[Any] = []
    print_list = chat_template.printed_list

    def watch(tools: list[dict[str, Any]]) -> Any:
        printed.append(tools)
        return print_list(tools)

    monkeypatch.setattr(chat_template, "printed_list", watch)
    monkeypatch.setattr(chat_template, "_TOOL_LIST_BYTES", 20_000)
    rendered = ChatTemplate(HERMES)
    printed.clear()
    for number in [0, 0, 0, *range(1, 50), 0]:
        rendered.render(
            Conversation((USER,), (Tool(f"f{number}", "d", {"type": "object"}),)), render_parts=write_parts
        )
        assert 0 < rendered._tools.bytes <= 20_000
    assert len(printed) == 51, "once each, and the first again when it had been let go"


def test_a_schema_too_deep_to_print_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5_000):
        schema = {"properties": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        render(HERMES, USER, tools=(Tool("f", "d", schema),))
