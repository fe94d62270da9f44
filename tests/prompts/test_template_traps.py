"""What plain Jinja does to real chat templates, and must not do here."""

from __future__ import annotations

from prompts.conversations import USER, render, turn
from singletree.conversation import Tool
from singletree.prompts.template.chat_template import CHATML, ChatTemplate

TOOL = Tool("f", "a < b & 'c' \"d\" é", {"type": "object", "properties": {}})


def test_a_list_can_grow() -> None:
    """Kimi K2's templates append to a list, which the immutable sandbox refuses."""
    loop = "{% for m in messages %}{% set _ = seen.append(m.content) %}{% endfor %}"
    source = "{% set seen = [] %}" + loop + "{{ seen | join('+') }}"
    assert render(source, USER, turn("assistant", "ok"), turn("user", "more")) == "hi+ok+more"


def test_json_has_no_html_in_it() -> None:
    text = render(
        "{{ messages[0].content }}{% for t in tools %}{{ t | tojson }}{% endfor %}", USER, tools=(TOOL,)
    )
    assert "a < b & 'c' \\\"d\\\" é" in text


def test_a_generation_block_is_what_it_holds() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert render(source, USER) == "[hi]"


def test_loops_can_be_left() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    assert render(source, USER, turn("assistant", "ok"), turn("user", "more")) == "hi"


def test_a_model_whose_prompt_is_code_is_distinguished() -> None:
    """DeepSeek V3.2 and V4 ship Python instead of a template: ChatML stands in and says that it does."""
    stands_in, own = ChatTemplate(CHATML, is_default=True), ChatTemplate(CHATML)
    assert (stands_in.is_default, own.is_default) == (True, False)
