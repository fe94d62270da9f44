"""A prompt that goes on from an earlier one is the prompt that is written anew, whatever happens between them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from prompts.conversations import call, turn
from prompts.template_sources import ALTERNATING, HERMES, KIMI, PARTS, XML, collected, draw, label
from singletree.conversation import Conversation, Part, Reasoning, Text, Tool, ToolResult, Turn
from singletree.prompts.beginnings import Beginnings, is_same_turn, same_characters, same_items, same_objects
from singletree.prompts.stability import canonicalise, canonicalise_on
from singletree.prompts.template import ChatTemplate, Rendered

LOOKING_AHEAD = """\
{%- set ns = namespace(asked=0, seen=[]) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index %}{% endif %}{% endfor %}
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in said %}
{%- if loop.previtem is defined and loop.previtem.role == m.role %}={% endif %}[{{ loop.index }}{{ m.role }}]
{%- if messages[loop.index0 + 2] is defined %}{{ messages[loop.index0 + 2].role }}{% endif %}
{%- if loop.nextitem is defined and loop.nextitem.role == 'tool' %}>{% endif %}
{%- if loop.index0 >= ns.asked %}{{ m.reasoning_content }}{% endif %}{{ m.content }}
{%- set ns.seen = ns.seen + [m.role] %}{{ ns.seen | length }}{{ '.' if loop.last }}
{%- endfor %}{% if add_generation_prompt %}[assistant]{{ effort }}{% endif %}"""
COUNTING = """\
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{{ messages | length }}{{ loop.revindex }}{{ messages[-1].role }}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
ALIASED = """\
{%- set ns = namespace(n=0) %}{% macro shown(m) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}{% endmacro %}
{%- for m in messages %}[{{ m.role }}]{{ shown(m) }}{% set other = ns %}{% set other.n = other.n + 1 %}
{%- if loop.changed(m.role) %}!{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
EXTRA_ARGUMENT = """\
{%- set flag = effort %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{{ flag }}
{%- for t in tools or [] %}{{ t.function.name }}{% endfor %}
{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
SOURCES = {
    "hermes": HERMES,
    "xml": XML,
    "alternating": ALTERNATING,
    "parts": PARTS,
    "kimi": KIMI,
    "looking ahead": LOOKING_AHEAD,
    "counting": COUNTING,
    "aliased": ALIASED,
    "argument": EXTRA_ARGUMENT,
}
CHOSEN = (
    *("llama.cpp/Qwen-Qwen3-0.6B", "llama.cpp/Qwen3-Coder", "llama.cpp/Qwen3.5-4B", "llama.cpp/GLM-4.6"),
    *("llama.cpp/Kimi-K2-Thinking", "llama.cpp/deepseek-ai-DeepSeek-V3.1", "llama.cpp/MiniMax-M2"),
    *("llama.cpp/openai-gpt-oss-120b", "llama.cpp/google-gemma-4-31B-it", "llama.cpp/StepFun3.5-Flash"),
    *("llama.cpp/Mistral-Small-3.2-24B-Instruct-2506", "llama.cpp/meta-llama-Llama-3.1-8B-Instruct"),
    *("llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "llama.cpp/deepseek-ai-DeepSeek-V3.2"),
)
"""Of the collected templates those that differ most in what they look at."""

TOOLS = (Tool("f", "does", {"type": "object"}), Tool("g", "later", {"type": "object"}, deferred=True))


def grown(turns: list[Turn], random: Random, number: int) -> list[Turn]:
    """The conversation as a harness might send it next."""
    step = random.random()
    if step < 0.12 and len(turns) > 3:
        i = random.randrange(1, len(turns))
        turns = [*turns[:i], *turns[i + 1 :]]
    elif step < 0.24 and turns:
        i = random.randrange(len(turns))
        edited = tuple(Text(f"{p.text}!") if isinstance(p, Text) else p for p in turns[i].parts)
        turns = [*turns[:i], Turn(turns[i].role, edited), *turns[i + 1 :]]
    elif step < 0.3:
        turns = turns[: random.randrange(1, len(turns) + 1)]
    elif step < 0.4:
        turns = [*turns, turn("system", f"Note {number}.", "Twice.")]
    elif step < 0.55:
        turns = [
            *turns,
            turn("assistant", Reasoning("Hm."), f"I say {number}."),
            turn("user", f"Ask {number}?"),
        ]
    calls = [
        call(f'{{"k": {random.choice(["1", "1.0", "true"])}}}', f"c{number}_{i}")
        for i in range(1 + number % 2)
    ]
    said: list[Part] = [Reasoning(f"Think {number}."), Text(f"Say {number}.")]
    parts = random.sample(said, random.randrange(3))
    answered = [ToolResult(c.id, (Text(f"Got {c.id}."),)) for c in calls]
    if random.random() < 0.3:
        return [*turns, turn("assistant", *parts, *calls), *(Turn("tool", (r,)) for r in reversed(answered))]
    return [*turns, turn("assistant", *parts, *calls), Turn("tool", tuple(answered))]


def conversations(seed: int, steps: int = 30) -> Iterator[tuple[Conversation, dict[str, object]]]:
    """A conversation that grows, is edited and goes back, and what is asked of the template meanwhile."""
    random = Random(seed)
    turns = [turn("system", "Be brief."), turn("user", "Hello?")]
    tools: tuple[Tool, ...] = TOOLS[:1]
    effort: object = "low"
    for number in range(steps):
        if random.random() < 0.2:
            tools, effort = random.choice([(), TOOLS[:1]]), random.choice(["low", 1, 1.0, True])
        turns = grown(turns, random, number)
        yield Conversation(tuple(turns), tools), {"effort": effort}


def check(source: str, seed: int) -> int:
    """How many loops were entered behind their first iterations, while every prompt is as it should be."""
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2026, 1, 1))
    random = Random(seed)
    earlier: list[Rendered | None] = [None]
    entered = 0
    for conversation, arguments in conversations(seed):
        canonical, _ = canonicalise(conversation)
        before = random.choice(earlier[-2:])
        rendered = template.render_on(before, canonical, draw=draw, template_arguments=arguments)
        assert rendered.text == template.render(canonical, draw=draw, template_arguments=arguments)
        if before and before.printed and rendered.printed:
            old, new = before.printed.loops, rendered.printed.loops
            entered += sum(new[n].marks[0] is old[n].marks[0] for n in new if n in old and new[n].marks)
        earlier.append(rendered)
    return entered


@pytest.mark.parametrize("name", SOURCES)
def test_a_template_goes_on_where_it_was(name: str) -> None:  # C41
    entered = sum(check(SOURCES[name], seed) for seed in range(4))
    assert (entered > 0) == (name not in ("kimi", "counting", "aliased"))


@pytest.mark.parametrize("path", [p for p in collected() if label(p) in CHOSEN], ids=label)
def test_collected_templates_go_on_where_they_were(path: Path) -> None:  # C41
    check(path.read_text(encoding="utf-8"), 7)


@pytest.mark.parametrize("seed", range(12))
def test_rules_go_on_where_they_were(seed: int) -> None:  # C1 C2
    made = None
    for conversation, _ in conversations(seed):
        made = canonicalise_on(made, conversation)
        assert (made.conversation, made.rules) == canonicalise(conversation)


def test_what_two_have_in_common() -> None:
    long = "word " * 1000
    for one, other in (
        ("", "a"),
        ("ab", "ab"),
        (long, long + "x"),
        (long + "ab", long + "cd"),
        ("x" + long, long),
    ):
        same = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert same_characters(one, other) == same_characters(other, one) == same
    assert same_items([1, 2, 3], [1, 2, 4, 5]) == 2
    assert same_objects([None, 1.0], [None, 1]) == 1


def test_a_turn_is_the_same_with_all_that_it_carries() -> None:
    one = Turn("assistant", (Reasoning("a", {"signature": "x"}),))
    assert is_same_turn(one, Turn("assistant", (Reasoning("a", {"signature": "x"}),)))
    assert not is_same_turn(one, Turn("assistant", (Reasoning("a", {"signature": "y"}),)))


def test_what_is_kept_is_bounded_in_bytes() -> None:
    kept: Beginnings[int, str] = Beginnings(100)
    for number in range(20):
        kept.keep([number, 1], str(number), 30, needed=2)
        assert kept.bytes <= 100
    assert kept.longest([0, 1]) is None
    kept.keep([19], "too large", 101, needed=1)
    found = kept.longest([19, 1, 2])
    assert found is not None
    assert found[0] == "19"
    kept.keep([19, 1, 2], "longer", 30, needed=3, instead_of=found[1])
    assert (kept.longest([19, 1]) or ("", 0)) == ("longer", None)
    assert kept.bytes == 90


def test_a_conversation_does_not_take_the_place_of_another_with_the_same_head() -> None:
    kept: Beginnings[str, str] = Beginnings(100)
    for question in "ab":
        _, number = kept.longest(["head", question]) or ("", None)
        kept.keep(["head", question], question, 10, needed=2, instead_of=number)
    assert [(kept.longest(["head", question, "more"]) or ("", 0))[0] for question in "ab"] == ["a", "b"]
