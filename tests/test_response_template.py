"""Families from the ``response_template`` of a checkpoint whose chat template belongs to no known family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prompts.tiny_vocabulary import byte_level, write_directory
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.drafting.response_template import UnsupportedTemplate, family_of
from singletree.errors import BadConfiguration
from singletree.parsing.parser import parse
from singletree.prompts.template.chat_template import CHATML, ChatTemplate
from singletree.prompts.tokenizer.tokenizer import load_tokenizer
from singletree.server.models.chat_format import choose_family, load_chat_format
from singletree.server.settings.config import Config

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THOUGHT = {"open": "<mull>", "close_pattern": r"</mull>\s*", "content": "text"}
MODEL_OUTPUT = {"close_pattern": r"(?:<\|stop\|>|<\|over\|>)\s*|$", "content": "text"}
OBJECTS = {
    "open": "<act>",
    "close_pattern": r"</act>\s*",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
TAGS = {
    "open_pattern": r"<act>\s*<do=(?P<name>[^\n>]+)>",
    "close_pattern": r"</act>\s*",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<with=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</with>"},
    "transform": CALL,
}
NAMED = {
    "open_pattern": r"<act>(?P<name>\w+):",
    "close": "</act>",
    "repeats": True,
    "content": "json",
    "transform": CALL,
}
ENDING = NAMED | {"close": None, "close_pattern": r"</act><\|over\|>\s*"}
QUOTED = NAMED | {
    "open_pattern": r"<act>(?P<name>\w+)",
    "content_args": {"string_delims": [["<q>", "<q>"]], "unquoted_keys": True},
}
KEYS = OBJECTS | {"transform": {"function": {"name": "{content.tool}", "arguments": "{content.with}"}}}


def template(calls: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    shown = {
        "reasoning_content": THOUGHT,
        **({"tool_calls": calls} if calls else {}),
        "content": MODEL_OUTPUT,
    } | fields
    return {"start_anchor": "<|me|>", "fields": {name: field for name, field in shown.items() if field}}


WRITTEN = {
    "objects": (OBJECTS, '<act>\n{"name": "ls", "arguments": {"n": 1.0}}\n</act>'),
    "tags": (TAGS, "<act>\n<do=ls>\n<with=n>\n1.0\n</with>\n</do>\n</act>"),
    "named": (NAMED, '<act>ls:{"n": 1.0}</act>'),
    "quoted": (QUOTED, "<act>ls{n:1.0}</act>"),
    "keys": (KEYS, '<act>{"tool": "ls", "with": {"n": 1.0}}</act>'),
}


@pytest.mark.parametrize("shape", WRITTEN)
def test_a_description_becomes_a_family(shape: str) -> None:
    calls, written = WRITTEN[shape]
    tools = [Tool("ls", parameters={"properties": {"n": {"type": "number"}}})]
    text = f"<mull>hm</mull>\n\nI look.\n{written}\n{written}<|over|>"
    parsed_parts: list[Part] = [
        part
        for part in parse(family_of(template(calls)), text, tools).parts
        if getattr(part, "text", "x").strip()
    ]
    assert parsed_parts[:2] == [Reasoning("hm"), Text(parsed_parts[1].text)]  # type: ignore[union-attr]
    assert parsed_parts[1].text.strip() == "I look."  # type: ignore[union-attr]
    made = [
        (part.name, json.loads(part.arguments), part.complete)
        for part in parsed_parts
        if isinstance(part, ToolCall)
    ]
    assert made == [("ls", {"n": 1.0}, True)] * 2
    assert len(parsed_parts) == 4


def test_the_end_of_the_turn_does_not_close_a_call() -> None:
    family = family_of(template(ENDING))
    assert family.forms[0].call.endswith("</act>")
    assert family.stop_markers == ("<|stop|>", "<|over|>")


def test_reasoning_that_the_prompt_opens() -> None:
    family = family_of(
        template(reasoning_content=THOUGHT | {"open": None, "open_pattern": r"(?=[\s\S]*?</mull>)"})
    )
    assert family.starts_open
    assert [type(part) for part in parse(family, "hm</mull>so").parts] == [Reasoning, Text]


UNSAYABLE: list[tuple[Any, str]] = [
    (None, "no fields"),
    ("x", "no fields"),
    ({"fields": {}}, "no fields"),
    (template(OBJECTS | {"content_args": {"string_delims": [3], "unquoted_keys": True}}), "wrong type"),
    (template(TAGS | {"content_args": ["x"]}), "wrong type"),
    ({"fields": {"content": 3}}, "no fields"),
    (template(mood={"open": "a"}), "'mood'"),
    (template(reasoning_content={"open": "<mull>"}), "no opener or no closer"),
    (template(OBJECTS | {"content": "kv-lines"}), "'kv-lines'"),
    (template(OBJECTS | {"transform": {"function": {"name": "f"}}}), "structure that is not supported"),
    (template(NAMED | {"open_pattern": r"<act>(?P<who>\w+):"}), "'who'"),
    (template(NAMED | {"open_pattern": r"<act>[a-z]{2,3}(?P<name>\w+):"}), "cannot be written with slots"),
    (template(TAGS | {"content_args": {}}), "cannot be written with slots"),
    (template(QUOTED | {"content_args": {"string_delims": [["<", ">"]]}}), "variant of JSON"),
]


@pytest.mark.parametrize(("value", "says"), UNSAYABLE, ids=range(len(UNSAYABLE)))
def test_unsupported_text_stays_text(value: Any, says: str) -> None:
    with pytest.raises(UnsupportedTemplate, match=says):
        family_of(value)


UNKNOWN = """\
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ tools | tojson if tools and loop.first }}
{%- for c in m.tool_calls or [] %}<act>
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
</act>{% endfor %}<|over|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""A chat template of no declared family."""


def choose(source: str, described: object, **flags: Any) -> tuple[str, str]:
    family, why = choose_family(Config(**flags), ChatTemplate(source), described)
    return family.name, why


def test_the_order_is_fingerprint_then_description_then_plain_text() -> None:
    known = "{{ messages[0].content }}<|tool_calls_section_begin|>"
    assert choose(known, template(OBJECTS))[0] == "kimi_k2"
    name, why = choose(UNKNOWN, template(OBJECTS))
    assert (name, why) == ("response_template", "by the checkpoint's response_template")
    name, why = choose(UNKNOWN, None)
    assert name == "plain"
    assert "WARNING" in why


def test_a_template_that_only_thinks_is_less_than_a_description() -> None:
    thinks = CHATML + "{# <think> </think> #}"
    assert choose(thinks, None)[0] == "basic"
    assert choose(thinks, template(OBJECTS))[0] == "response_template"
    assert choose(thinks, template(OBJECTS | {"content": "kv-lines"}))[0] == "basic"


def test_a_description_that_does_not_read_the_templates_own_turns_is_left_aside() -> None:
    name, why = choose(UNKNOWN, template(NAMED))
    assert name == "plain"
    assert "misreads turns that the chat template writes (single" in why
    assert "WARNING" in why


@pytest.mark.parametrize("flag", ["hf", "response_template"])
def test_the_name_that_other_servers_have_for_it(flag: str) -> None:
    known = "{{ messages[0].content }}<|tool_calls_section_begin|>"
    name, why = choose(known, template(OBJECTS), tool_call_parser=flag)
    assert name == "kimi_k2+response_template"
    assert why.startswith("by --tool-call-parser")
    with pytest.raises(BadConfiguration, match="has no response_template"):
        choose(UNKNOWN, None, tool_call_parser=flag)
    with pytest.raises(
        BadConfiguration, match="cannot be used: its calls have content of the type 'kv-lines'"
    ):
        choose(UNKNOWN, template(OBJECTS | {"content": "kv-lines"}), tool_call_parser=flag)


def test_it_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    config = {"chat_template": UNKNOWN, "response_template": template(OBJECTS)}
    folder = write_directory(tmp_path, byte_level(), tokenizer_config=config)
    speech = load_chat_format(Config(), load_tokenizer(folder))
    assert speech.family.forms[0].calls == ("<act>", "</act>")
