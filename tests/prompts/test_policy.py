"""Which reasoning of earlier turns each template keeps, and that what is kept stays where it was (C4).

The facts are those that were found by hand beside the collected templates: A is an ordinary turn of the past, B a turn
in the current tool loop, C one in a tool loop that is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from prompts.conversations import call, result, turn
from prompts.template_sources import COLLECTED, cached_template, collected, write_parts
from singletree import families
from singletree.conversation import Conversation, Reasoning, Thinking, Tool, ToolCall, Turn
from singletree.errors import BadConfiguration
from singletree.parsing.render_turn import render_turn
from singletree.prompts.template.capabilities import is_switched_off, thinking_arguments
from singletree.prompts.template.chat_template import ChatTemplate, RenderPrompt

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
    return cached_template((COLLECTED / f"{name}.jinja").read_text("utf-8"))


def render(template: ChatTemplate, turns: tuple[Turn, ...], **arguments: Any) -> str:
    return template.render(Conversation(turns, TOOLS), render_parts=write_parts, template_arguments=arguments)


def name_of(fact: Fact) -> str:
    return fact.template


@pytest.mark.parametrize("fact", NATIVE, ids=name_of)
def test_what_the_official_policy_keeps(fact: Fact) -> None:  # C4
    template = load(fact.template)
    assert template.capabilities.reasoning == fact.field
    kept = tuple(THOUGHT in render(template, turns) for turns in (ORDINARY, IN_LOOP, AFTER_LOOP))
    assert kept == fact.kept


@pytest.mark.parametrize("fact", [f for f in NATIVE if f.switches], ids=name_of)
def test_a_switch_brings_history_back(fact: Fact) -> None:  # C4
    template = load(fact.template)
    reads = template.capabilities
    assert set(fact.switches) <= {*reads.history_switches, *reads.switches}
    arguments = thinking_arguments(Thinking(enabled=True), reads, Conversation(ORDINARY))
    assert set(fact.switches) <= arguments.keys()
    texts = [render(template, turns, **arguments) for turns in (ORDINARY, AFTER_LOOP)]
    assert THOUGHT in texts[1]
    assert THOUGHT in texts[0] or fact.template in ONLY_IN_LOOPS
    off = thinking_arguments(Thinking(enabled=False), reads, Conversation(ORDINARY))
    # A model whose template has no way to switch reasoning off reasons anyway, so its history stays.
    stays = not is_switched_off(Thinking(enabled=False), Thinking(), reads)
    assert bool(off.keys() & reads.history_switches.keys()) == (stays and bool(reads.history_switches))


@pytest.mark.parametrize("fact", [f for f in FACTS if f.template in BY_PROBE], ids=name_of)
def test_a_field_is_found_by_a_probe_where_it_is_read_only_sometimes(fact: Fact) -> None:
    template = load(fact.template)
    assert template.capabilities.reasoning is not None
    arguments = thinking_arguments(Thinking(enabled=True), template.capabilities, Conversation(IN_LOOP))
    assert THOUGHT in render(template, IN_LOOP, **arguments)


def _keeps_all(fact: Fact) -> bool:
    native = fact.field != "—" and fact.template not in ONLY_IN_LOOPS
    return native and (all(fact.kept) or bool(fact.switches))


def _words(generated: Turn) -> str:
    return generated.text or "done"


@pytest.mark.parametrize("fact", [f for f in FACTS if _keeps_all(f)], ids=name_of)
def test_with_reasoning_kept_a_conversation_only_grows(fact: Fact) -> None:  # C4
    template = load(fact.template)
    turns: list[Turn] = [turn("system", "qsystem"), USER]
    before = ""
    for number in range(6):
        conversation = Conversation(tuple(turns), TOOLS)
        arguments = thinking_arguments(Thinking(enabled=True), template.capabilities, conversation)
        text = template.render(
            conversation, render_parts=write_parts, template_arguments=arguments, add_generation_prompt=False
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


FORGETS = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content | trim }}</think>{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}<call {{ call.function.name }} {{ call.function.arguments }}/>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""In Qwen 3's manner: a new question takes the reasoning before it out of the prompt."""

SPLITS = """\
{%- for m in messages %}<{{ m.role }}>
{%- if m.role == 'assistant' and not loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<call {{ call.function.name }} {{ call.function.arguments }}/>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""In DeepSeek R1's manner: reasoning is found in the content."""

ONE, TWO = call(id="functions.f:0"), call(id="functions.f:1")
RESULTS = (result(id="functions.f:0"), result(id="functions.f:1"))
TURNS = {
    "between calls": (Reasoning("qfirst"), ONE, Reasoning("qsecond"), TWO),
    "behind text": (Reasoning("qfirst"), "qsaid", Reasoning("qsecond"), ONE, TWO),
    "two in a row": (Reasoning("qfirst"), Reasoning("qsecond"), ONE, TWO),
    "behind the calls": (Reasoning("qfirst"), ONE, TWO, Reasoning("qsecond"), "qsaid"),
    "three": (
        Reasoning("qfirst"),
        "a",
        Reasoning("qthird"),
        ONE,
        Reasoning("qsecond"),
        TWO,
        Reasoning("qfourth"),
    ),
}
SOURCES = {
    "forgets": FORGETS,
    "splits": SPLITS,
    **{str(path): path.read_text("utf-8") for path in collected()},
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda name: "/".join(name.rsplit("/", 2)[-2:]))
def test_every_thought_of_a_turn_shares_the_fate_of_its_first(source: str) -> None:  # C4
    try:
        template = cached_template(SOURCES[source])
    except BadConfiguration:
        pytest.skip("it needs variables that no client gives")
    stage, before = RenderPrompt(template, write_parts, {}), None
    for parts in TURNS.values():
        looped = (USER, turn("assistant", *parts), *RESULTS)
        over = (*looped, turn("assistant", Reasoning("qended"), "qanswer"), LATER)
        for turns in (looped, over):
            text = render(template, turns)
            words = [part.text for part in parts if isinstance(part, Reasoning)]
            assert len({word in text for word in words}) == 1
            assert "\udffe" not in text
            again, before = stage.run(Conversation(turns, TOOLS), before)
            assert again == text, "it goes on from the prompt before"


@pytest.mark.parametrize("source", [FORGETS, SPLITS])
@pytest.mark.parametrize(
    "parts",
    [
        (ONE, Reasoning("qsecond"), TWO),
        ("qsaid", Reasoning("qsecond"), ONE),
        (Reasoning(" "), *TURNS["between calls"][1:]),
    ],
)
def test_a_turn_that_begins_without_a_thought_follows_the_same_policy(source: str, parts: Any) -> None:
    template = ChatTemplate(source)
    looped = (USER, turn("assistant", *parts), *RESULTS)
    over = (*looped, turn("assistant", "qanswer"), LATER)
    assert ("qsecond" in render(template, looped)) == (source is FORGETS)
    text = render(template, over)
    assert "qsecond" not in text
    assert text.count("<call f") == 1 + (TWO in parts)


def test_a_thought_is_trimmed_as_it_was() -> None:
    parts = (Reasoning(" \n qfirst \n"), ONE, Reasoning(" qsecond "), TWO)
    text = render(ChatTemplate(FORGETS), (USER, turn("assistant", *parts), *RESULTS))
    assert "<think>qfirst</think><call" in text
    assert "/><think> qsecond </think><call" in text


COUNTS = """\
{%- set ns = namespace(final=-1, count=0, ids=[]) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}<|im_{{ m.role }}|>
{%- if m.role == 'assistant' %}
<think>{{ m.reasoning_content if loop.index0 > ns.final }}</think>{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}
{%- set id = 'functions.' ~ call.function.name ~ ':' ~ ns.count %}{% set ns.count = ns.count + 1 %}
{%- set _ = ns.ids.append(id) -%}
<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ call.function.arguments }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}
{%- elif m.role == 'tool' %}## Return of {{ ns.ids.pop(0) if ns.ids else 'nobody' }}
{{ m.content }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"""
"""In Kimi K2 Thinking's manner: a message without calls is the answer, and calls are counted as they are printed."""

REFUSES = """\
{%- set ns = namespace(called=false) %}
{%- for m in messages %}[{{ m.role }}]
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- set ns.called = m.tool_calls is defined and m.tool_calls %}
{%- for call in m.tool_calls or [] %}
<invoke name="{{ call.function.name }}">
{%- for key, value in call.function.arguments | items %}<parameter name="{{ key }}">{{ value }}</parameter>{% endfor %}
</invoke>
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('no call for this result') }}{% endif %}{{ m.content }}
{%- else %}{{ m.content }}{% endif %}[end]
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""In MiniMax M2's manner: a result needs a call, and arguments are taken apart."""

SEES_CALLS = {
    "counts": (COUNTS, "kimi_k2"),
    "refuses": (REFUSES, "minimax_m2"),
    **{
        f"{path.parent.name}/{path.stem}": (path.read_text("utf-8"), "")
        for path in collected()
        if path.stem in ("Kimi-K2-Thinking", "kimi_k25", "MiniMax-M2", "minimax_m2", "MiniMax-M3")
    },
}


def _ids(number: int) -> str:
    return f"functions.f:{number}"


@pytest.mark.parametrize("source", SEES_CALLS)
@pytest.mark.parametrize(
    "parts",
    [
        (Reasoning("qsecond"), "before", call('{"k": 11}', _ids(1)), "behind"),
        (Reasoning("qsecond"), call('{"k": 11}', _ids(1)), "between", call('{"k": 22}', _ids(2))),
        (Reasoning("qsecond"), call('{"k": 11}', _ids(1)), Reasoning("qmore"), call('{"k": 22}', _ids(2))),
        (Reasoning("qsecond"), call('{"k": 11}', _ids(1)), call('{"k": 22}', _ids(2)), "behind"),
        ("before", call('{"k": 11}', _ids(1)), "behind", call('{"k": 33}', "", complete=False)),
    ],
)
def test_a_turn_with_text_behind_its_calls_ends_no_loop(source: str, parts: Any) -> None:  # C3 C4
    text, name = SEES_CALLS[source]
    template = cached_template(text)
    family = families.get(name) if name else families.find(text).family
    calls = [part for part in parts if isinstance(part, ToolCall) and part.complete]
    turns = (
        USER,
        turn("assistant", Reasoning("qfirst"), call('{"k": 0}', _ids(0))),
        result("qresult0", _ids(0)),
        turn("assistant", *parts),
        *(result(f"qresult{i}", call.id) for i, call in enumerate(calls, 1)),
        turn("assistant", Reasoning("qthird"), call('{"k": 44}', _ids(len(calls) + 1))),
        result("qresult9", _ids(len(calls) + 1)),
    )
    prompt = template.render(Conversation(turns, TOOLS), render_parts=partial(render_turn, family))
    whole, prompt = prompt, prompt[prompt.index("quser") :]
    expected = ["qfirst", "qresult0", *map(_text_of, parts)]
    places = [prompt.find(word) for word in [*expected, "qresult1", "qthird", "44", "qresult9"]]
    assert -1 not in places
    assert places == sorted(places)
    assert prompt.count("qvalue") == prompt.count("\udffe") == 0
    assert [prompt.count(_text_of(part)) for part in parts] == [1] * len(parts)
    if "tool_calls_section" in text and len(calls) == sum(isinstance(part, ToolCall) for part in parts):
        for number in range(len(calls) + 2):
            assert prompt.count(f"<|tool_call_begin|>{_ids(number)}<") == 1
            assert prompt.count(f"Return of {_ids(number)}\n") == 1
    stage = RenderPrompt(template, partial(render_turn, family))
    _, begun = stage.run(Conversation(turns[:4], TOOLS), None)
    assert stage.run(Conversation(turns, TOOLS), begun)[0] == whole


@pytest.mark.parametrize("source", SEES_CALLS)
@pytest.mark.parametrize(
    "begun", [("qbegun",), (Reasoning("qmore"), "qbegun"), (call('{"k": 55}', _ids(1)), "qbegun")]
)
def test_a_turn_that_goes_on_ends_no_loop(source: str, begun: Any) -> None:
    text, name = SEES_CALLS[source]
    template = cached_template(text)
    family = families.get(name) if name else families.find(text).family
    turns = (
        USER,
        turn("assistant", Reasoning("qfirst"), call('{"k": 0}', _ids(0))),
        result("qresult", _ids(0)),
        turn("assistant", *begun),
    )
    prompt = template.render(Conversation(turns, TOOLS), render_parts=partial(render_turn, family))
    for word in ("qfirst", "qresult", *map(_text_of, begun)):
        assert prompt.count(word) >= 1
    assert prompt.endswith("qbegun")


def _text_of(part: Any) -> str:
    return re.sub(r"\D", "", part.arguments) if isinstance(part, ToolCall) else getattr(part, "text", part)
