"""A search backwards through the messages finds what it finds from the start, and looks at new messages alone."""

from __future__ import annotations

from datetime import datetime
from itertools import product
from random import Random
from typing import Any

import pytest
from jinja2 import nodes

from singletree.prompts.template.incremental_render import Rendering, RenderRecord
from singletree.prompts.template.jinja_environment import compile_template
from singletree.prompts.template.template_loops import search_flag

INDEX = "{%- set index = (messages|length - 1) - loop.index0 %}"
TEST = "ns.on and m.role == 'user' and not m.content.startswith('<tool>')"
BODY = "{%- set ns.on = false %}{%- set ns.at = index %}"


def searching(*, before: str = INDEX, test: str = TEST, body: str = BODY, start: str = "true") -> str:
    return (
        "{%- macro shown(m) %}{% set ns.n = 1 %}{% endmacro %}"
        f"{{%- set ns = namespace(on={start}, at=messages|length, n=0) %}}"
        f"{{%- for m in messages[::-1] %}}{before}{{%- if {test} %}}{body}{{%- endif %}}{{%- endfor %}}"
        "{{ ns.on }} {{ ns.at }} {{ ns.n }}"
    )


NESTED = searching(
    test="ns.on and m.role == 'user'",
    body="{% set text = m.content|trim %}{% if not(text.startswith('<tool>') and text) %}"
    + BODY
    + "{% endif %}",
)
SEARCHES = {
    "as Qwen writes it": searching(),
    "nested": NESTED,
    "without a place": searching(before="", body="{% set ns.on = false %}"),
    "in a list": searching(test="ns.on and m.role in ['user', 'system']"),
}
OTHERS = {
    "prints": searching(before=INDEX + "."),
    "prints what it finds": searching(body=BODY + "{{ m.role }}"),
    "goes on": searching(body="{% set ns.at = index %}"),
    "goes on after all": searching(body=BODY + "{% set ns.on = true %}"),
    "looks at the place": searching(test="ns.on and index > 2"),
    "looks at the loop": searching(test="ns.on and loop.last"),
    "looks at other messages": searching(test="ns.on and messages[0].role == m.role"),
    "looks at what it changes": searching(test="ns.on and ns.at"),
    "calls a macro": searching(test="ns.on and not shown(m)"),
    "counts in a macro": searching(body=BODY + "{% set ns.at = shown(m) %}"),
    "changes something for each": searching(before=INDEX + "{% set ns.at = index %}"),
    "chooses": searching(body=BODY + "{% else %}{% set ns.at = 3 %}"),
    "looks first at the message": searching(test="m.role == 'user' and ns.on"),
    "forwards": searching().replace("[::-1]", "[::1]"),
}
MESSAGES = [
    {"role": role, "content": text}
    for role, text in product(("user", "assistant", "system"), ("a", "<tool>b", " <tool>"))
]


class Looked(dict[str, Any]):
    """A message that counts how often a template looks at its role."""

    count = 0

    def __getitem__(self, key: str) -> Any:
        Looked.count += key == "role"
        return super().__getitem__(key)


def flag_of(source: str) -> tuple[str, str] | None:
    _, tree, is_tracked, _ = compile_template(source, datetime.now)
    assert is_tracked
    return search_flag(next(iter(tree.find_all(nodes.For))))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_is_recognised(name: str) -> None:
    assert flag_of(SEARCHES[name]) == ("ns", "on")


@pytest.mark.parametrize("name", OTHERS)
def test_another_loop_is_none(name: str) -> None:
    assert flag_of(OTHERS[name]) is None


@pytest.mark.parametrize("source", [*SEARCHES.values(), *OTHERS.values(), searching(start="false")])
def test_the_text_is_that_of_the_whole_loop(source: str) -> None:
    template, *_ = compile_template(source, datetime.now)
    for seed in range(20):
        random = Random(seed)
        messages: list[dict[str, str]] = []
        record: RenderRecord | None = None
        for _ in range(12):
            messages = messages[: random.randrange(len(messages) + 1)] if random.random() < 0.2 else messages
            messages = [*messages, *random.choices(MESSAGES[1:], k=random.randrange(4))]
            record = Rendering(random.choice([record, record, None])).render(template, messages, {})
            assert record.text == template.render(messages=messages)


@pytest.mark.parametrize("question", [None, 0, 7])
def test_only_new_messages_are_looked_at(question: int | None) -> None:
    template, *_ = compile_template(searching(), datetime.now)
    messages = [Looked(role="tool", content="x") for _ in range(50)]
    if question is not None:
        messages[question]["role"] = "user"
    record = Rendering(None).render(template, messages, {})
    for _ in range(3):
        messages = [*messages, Looked(role="assistant", content="x"), Looked(role="tool", content="x")]
        Looked.count = 0
        record = Rendering(record).render(template, messages, {})
        assert Looked.count == 2 + (question is not None)
        assert record.text == template.render(messages=messages)
    changed = [Looked(role="user", content="y") if i == 20 else m for i, m in enumerate(messages)]
    assert Rendering(record).render(template, changed, {}).text == "False 20 0"
