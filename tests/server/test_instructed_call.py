"""The call that a template's instructions show, beside the calls that the family reads."""

from __future__ import annotations

import pytest

from prompts.template_sources import ALTERNATING, HERMES
from singletree import families
from singletree.drafting.template_turns import find_instructed_calls
from singletree.server.models.chat_format import template_alone


def _instructed(text: str) -> str:
    """Return a template that shows its tools and then ``text``."""
    shown = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return HERMES.replace("{% endfor %}<|im_end|>", "{% endfor %}{{ '" + shown + "' }}<|im_end|>", 1)


@pytest.mark.parametrize(
    ("family", "call", "fits"),
    [
        ("hermes", '<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>', True),
        ("hermes", '<tool_call>\n{{"name": <function-name>, "arguments": <args>}}\n</tool_call>', False),
        ("hermes", '<tool_call>{"arguments": {"a": "b"}, "name": "f"}</tool_call>', True),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": "b"}}</tool_call>', False),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', False),
        (
            "nemotron_nano",
            '<TOOLCALL>[{"name": "a", "arguments": "b"}, {"name": "c", "arguments": "d"}]</TOOLCALL>',
            True,
        ),
        ("nemotron_nano", '<TOOLCALL>[{{"name": "a", "arguments": "b"}}]</TOOLCALL>', False),
        ("apriel", '<tool_calls>[{"name": <n>, "arguments": <a>},\n ...\n]</tool_calls>', True),
        (
            "qwen3_coder",
            "<tool_call>\n<function=example>\n<parameter=p>\nv\n</parameter>\n</function>\n</tool_call>",
            True,
        ),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', False),
        (
            "glm45",
            "<tool_call>{function-name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n</tool_call>",
            True,
        ),
        ("phi4", 'functools[{"name": [function name], "arguments": [arguments]}] and so on', True),
    ],
)
def test_the_shape_of_a_call(family: str, call: str, fits: bool) -> None:
    found = find_instructed_calls(template_alone(_instructed(f"Write\n{call}")), families.get(family))
    assert [each.fits for each in found] == [fits]


def test_markers_that_are_only_mentioned_show_no_call() -> None:
    words = "Begin with <tool_call> and end with </tool_call>, as in <tool_call>\n...\n</tool_call>."
    for family in ("hermes", "qwen3_coder"):
        assert find_instructed_calls(template_alone(_instructed(words)), families.get(family)) == []


def test_a_template_without_tools_shows_no_call() -> None:
    assert find_instructed_calls(template_alone(ALTERNATING), families.get("hermes")) == []
