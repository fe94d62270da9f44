"""Which reasoning of earlier turns each template keeps, and that what is kept stays where it was (C4).

The facts are those that were found by hand beside the collected templates: A is an ordinary turn of the past, B a turn
in the current tool loop, C one in a tool loop that is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from prompts.conversations import call, result, turn
from prompts.template_sources import COLLECTED, draw
from singletree.conversation import Conversation, Reasoning, Thinking, Tool, Turn
from singletree.prompts.template import ChatTemplate
from singletree.prompts.template_reads import HISTORY_SWITCHES
from singletree.prompts.thinking import thinking_arguments

THOUGHT = "qthought"
USER, LATER = turn("user", "quser"), turn("user", "qlater")
TOOLS = (Tool("f", "d", {"type": "object", "properties": {"k": {"type": "integer", "description": "d"}}}),)
ID = "functions.f:0"
CALLING = turn("assistant", Reasoning(THOUGHT), call(id=ID))
ORDINARY = (USER, turn("assistant", Reasoning(THOUGHT), "qanswer"), LATER)
IN_LOOP = (USER, CALLING, result(id=ID))
AFTER_LOOP = (*IN_LOOP, turn("assistant", "qanswer"), LATER)


@dataclass(frozen=True)
class Fact:
    """One row: the template, the field it takes reasoning in, what it keeps, and which switches bring it back."""

    template: str
    field: str
    kept: tuple[bool, bool, bool]
    switches: tuple[str, ...]


def facts() -> list[Fact]:
    """The table beside the templates; empty where they are not at hand."""
    notes = COLLECTED / "README.md"
    rows = (
        re.findall(r"^\| (\S+)\.jinja \|([^\n]*)\|$", notes.read_text("utf-8"), re.M)
        if notes.is_file()
        else []
    )
    found = []
    for name, rest in rows:
        field, a, b, c, knobs = (cell.strip() for cell in rest.split("|")[:5])
        brought = tuple(re.findall(r"(\w+)=\w+: \+hist", knobs))
        found.append(Fact(name, field, (a == "keep", b == "keep", c == "keep"), brought))
    return found


FACTS = facts()
NATIVE = [fact for fact in FACTS if fact.field != "—"]
BY_PROBE = {
    "llama.cpp/Reka-Edge",  # takes reasoning_content once enable_thinking is on
    "llama.cpp/deepseek-ai-DeepSeek-V3.2",
    "llama.cpp/deepseek-ai-DeepSeek-V4",
    "llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731",
    "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512",  # as a content part
}
"""Templates that keep reasoning, though not with every switch at rest."""


ONLY_IN_LOOPS = {"trl/diffusion_gemma", "trl/gemma4_v5", "vllm/tool_chat_template_gemma4"}
"""Their switch brings back the reasoning of tool loops that are over, not that of ordinary turns."""


@cache
def load(name: str) -> ChatTemplate:
    return ChatTemplate((COLLECTED / f"{name}.jinja").read_text("utf-8"), bos_token="<s>", eos_token="</s>")


def render(template: ChatTemplate, turns: tuple[Turn, ...], **arguments: Any) -> str:
    return template.render(Conversation(turns, TOOLS), draw=draw, template_arguments=arguments)


def name_of(fact: Fact) -> str:
    return fact.template


@pytest.mark.parametrize("fact", NATIVE, ids=name_of)
def test_what_the_official_policy_keeps(fact: Fact) -> None:  # C4
    template = load(fact.template)
    assert template.reads.reasoning == fact.field
    kept = tuple(THOUGHT in render(template, turns) for turns in (ORDINARY, IN_LOOP, AFTER_LOOP))
    assert kept == fact.kept


@pytest.mark.parametrize("fact", [f for f in NATIVE if f.switches], ids=name_of)
def test_a_switch_brings_history_back(fact: Fact) -> None:  # C4
    template = load(fact.template)
    reads = template.reads
    assert set(fact.switches) <= {*reads.history_switches, *reads.switches}
    arguments = thinking_arguments(Thinking(enabled=True), reads, Conversation(ORDINARY))
    assert set(fact.switches) <= arguments.keys()
    texts = [render(template, turns, **arguments) for turns in (ORDINARY, AFTER_LOOP)]
    assert THOUGHT in texts[1]
    assert THOUGHT in texts[0] or fact.template in ONLY_IN_LOOPS
    off = thinking_arguments(Thinking(enabled=False), reads, Conversation(ORDINARY))
    assert not off.keys() & HISTORY_SWITCHES.keys()


@pytest.mark.parametrize("fact", [f for f in FACTS if f.template in BY_PROBE], ids=name_of)
def test_a_field_is_found_by_a_probe_where_it_is_read_only_sometimes(fact: Fact) -> None:
    template = load(fact.template)
    assert template.reads.reasoning is not None
    arguments = thinking_arguments(Thinking(enabled=True), template.reads, Conversation(IN_LOOP))
    assert THOUGHT in render(template, IN_LOOP, **arguments)


def _keeps_all(fact: Fact) -> bool:
    native = fact.field != "—" and fact.template not in ONLY_IN_LOOPS
    return native and (all(fact.kept) or bool(fact.switches))


def _words(said: Turn) -> str:
    return said.text or "done"


@pytest.mark.parametrize("fact", [f for f in FACTS if _keeps_all(f)], ids=name_of)
def test_with_reasoning_kept_a_conversation_only_grows(fact: Fact) -> None:  # C4
    template = load(fact.template)
    turns: list[Turn] = [turn("system", "qsystem"), USER]
    before = ""
    for number in range(6):
        conversation = Conversation(tuple(turns), TOOLS)
        arguments = thinking_arguments(Thinking(enabled=True), template.reads, conversation)
        text = template.render(
            conversation, draw=draw, template_arguments=arguments, add_generation_prompt=False
        )
        assert text.startswith(before)
        before = text[: text.rindex(_words(turns[-1])) + len(_words(turns[-1]))]
        id = f"functions.f:{number // 2}"
        if number % 2:
            turns += [
                turn("assistant", Reasoning(f"thought {number}"), f"answer {number}"),
                turn("user", f"{number}?"),
            ]
        else:
            turns += [turn("assistant", Reasoning(f"thought {number}"), call(id=id)), result(id=id)]
