"""A prompt that goes on from an earlier one is the prompt that is written anew, whatever happens between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from jinja2.runtime import LoopContext

from prompts.conversations import call, canonicalize, turn
from prompts.template_sources import (
    ALTERNATING,
    HERMES,
    KIMI,
    PARTS,
    XML,
    cached_template,
    collected,
    label,
    load_template,
    write_parts,
)
from singletree.conversation import Conversation, Part, Reasoning, Text, Tool, ToolResult, Turn
from singletree.prefixes import common_prefix
from singletree.prompts import prompt_cache
from singletree.prompts.history.canonicalization import Canonicalize
from singletree.prompts.prompt_cache import (
    PromptCache,
    is_same_turn,
)
from singletree.prompts.template import incremental_render
from singletree.prompts.template.chat_template import ChatTemplate, RenderCheckpoint, RenderPrompt
from singletree.prompts.template.incremental_render import Rendering
from singletree.prompts.template.jinja_environment import compile_template

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
SEARCHING = """\
{%- set ns = namespace(searches=true, last=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searches and m.role == 'user' and not m.content.startswith('Hello') %}
        {%- set ns.searches = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% if loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
SOURCES = {
    "searching": SEARCHING,
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
    written: list[Part] = [Reasoning(f"Think {number}."), Text(f"Say {number}.")]
    parts = random.sample(written, random.randrange(3))
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
    template = load_template(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2026, 1, 1))
    random = Random(seed)
    earlier: list[RenderCheckpoint | None] = [None]
    entered = 0
    for conversation, arguments in conversations(seed):
        canonical, _ = canonicalize(conversation)
        before = random.choice(earlier[-2:])
        text, rendered = RenderPrompt(template, write_parts, arguments).run(canonical, before)
        assert text == template.render(canonical, render_parts=write_parts, template_arguments=arguments)
        if before and before.rendered.record and rendered.rendered.record:
            old, new = before.rendered.record.loops, rendered.rendered.record.loops
            both = [(new[n].checkpoints, old[n].checkpoints) for n in new if n in old]
            entered += sum(ours[0] is theirs[0] for ours, theirs in both if ours)
        earlier.append(rendered)
    return entered


@pytest.mark.parametrize("name", SOURCES)
def test_a_template_goes_on_where_it_was(name: str) -> None:  # C41
    entered = sum(check(SOURCES[name], seed) for seed in range(4))
    assert (entered > 0) == (name not in ("kimi", "counting", "aliased"))


@pytest.mark.parametrize(
    ("looks_at", "first"),
    [
        ("", 3),
        ("loop.nextitem is defined", 3),
        ("messages[0].role", 3),
        ("messages[loop.index0 + 2] is defined", 2),
        ("messages | length", 0),
        ("messages[-1].role", 0),
    ],
)
def test_a_loop_is_entered_behind_all_that_would_be_the_same(looks_at: str, first: int) -> None:  # C41
    """The example in the module's docstring."""
    shown: list[str] = []
    variables = {"show": shown.append}
    printed = f"{{{{ {looks_at} }}}}" if looks_at else ""
    source = f"{{% for m in messages %}}{{{{ show(m.role) }}}}{printed}{{% endfor %}}"
    template, *_ = compile_template(source, datetime.now)
    messages = [{"role": role} for role in ("system", "user", "assistant", "tool", "assistant", "tool")]
    record = Rendering(None).render(template, messages[:4], variables)
    shown.clear()
    Rendering(record).render(template, messages, variables)
    assert len(shown) == len(messages) - first


class Clock:
    """A clock that stands still, another object for each prompt."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, format: str) -> str:
        return f"{format}{self.at}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Clock) and self.at == other.at

    def __hash__(self) -> int:
        return hash(self.at)


@pytest.mark.parametrize(("later", "entered"), [(1, True), (2, False)])
def test_a_clock_that_stands_still_changes_nothing(later: int, entered: bool) -> None:
    source = "{{ clock('now') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template, *_ = compile_template(source, datetime.now)
    messages = [{"content": str(number)} for number in range(6)]
    record = Rendering(None).render(template, messages[:4], {"clock": Clock(1)})
    again = Rendering(record).render(template, messages, {"clock": Clock(later)})
    assert (record.text, again.text) == ("now10123", f"now{later}012345")
    assert (again.loops[0].checkpoints[0] is record.loops[0].checkpoints[0]) == entered


@pytest.mark.parametrize("path", [p for p in collected() if label(p) in CHOSEN], ids=label)
def test_collected_templates_go_on_where_they_were(path: Path) -> None:  # C41
    check(path.read_text(encoding="utf-8"), 7)


@pytest.mark.parametrize("seed", range(12))
def test_rules_go_on_where_they_were(seed: int) -> None:  # C1 C2
    made = None
    for conversation, _ in conversations(seed):
        canonical, made = Canonicalize().run(conversation, made)
        assert (canonical.conversation, canonical.rules) == canonicalize(conversation)


@pytest.mark.parametrize("kind", [Turn, *get_args(Part)])
def test_a_turn_is_the_same_with_all_that_it_carries(kind: Any) -> None:
    """A field that is added later counts, too, whether or not ``==`` ignores it."""
    needed = [
        each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING
    ]
    made = kind(**dict.fromkeys(needed, "x"))
    assert _is_same_in_turn(made, replace(made))
    for each in fields(kind):
        assert not _is_same_in_turn(made, replace(made, **{each.name: ("y",)})), each.name


def _is_same_in_turn(one: Any, other: Any) -> bool:
    if isinstance(one, Turn):
        return is_same_turn(one, other)
    results = (ToolResult("c", (part,)) for part in (one, other))
    return is_same_turn(*(Turn("tool", (part,)) for part in results)) and is_same_turn(
        Turn("assistant", (one,)), Turn("assistant", (other,))
    )


class Sized:
    """A checkpoint of so many bytes."""

    def __init__(self, words: str, bytes: int) -> None:
        self.words, self.bytes = words, bytes


class Join:
    """A stage that joins words, and goes on from any words that they begin with."""

    def __init__(self, bytes: int = 30) -> None:
        self.bytes = bytes
        self.began: str | None = None

    def run(self, value: Sequence[Turn], checkpoint: Sized | None) -> tuple[str, Sized]:
        self.began = checkpoint.words if checkpoint is not None else None
        joined = " ".join(each.text for each in value)
        return joined, Sized(joined, self.bytes)


def asked(*words: str) -> list[Turn]:
    return [turn("assistant" if number % 2 else "user", each) for number, each in enumerate(words)]


def kept(cache: PromptCache, turns: list[Turn], bytes: int = 30) -> str | None:
    """What the prompt of ``turns`` goes on from; its own checkpoint is kept."""
    stage, work = Join(bytes), cache.resume(turns)
    assert work.run(stage, turns) == " ".join(each.text for each in turns)
    work.keep()
    return stage.began


def found(cache: PromptCache, *words: str) -> str | None:
    stage, turns = Join(), asked(*words)
    cache.resume(turns).run(stage, turns)
    return stage.began


def test_what_is_kept_is_bounded_in_bytes() -> None:
    cache = PromptCache(100)
    for number in range(20):
        assert kept(cache, asked(str(number), "1")) is None
        assert cache.bytes <= 100
    assert found(cache, "0", "1") is None
    assert kept(cache, asked("18"), 101) == "18 1"
    assert found(cache, "18", "1") == "18 1", "what is too large takes no place"
    assert kept(cache, asked("19", "1", "2")) == "19 1"
    assert found(cache, "19", "1") == "19 1 2"
    assert cache.bytes == 90


def test_a_conversation_does_not_take_the_place_of_another_with_the_same_head() -> None:
    cache = PromptCache(100)
    for question in "ab":
        kept(cache, asked("head", question))
    assert [found(cache, "head", question, "more") for question in "ab"] == ["head a", "head b"]


def test_a_conversation_takes_its_own_place_when_what_was_not_answered_changes() -> None:
    cache = PromptCache(100)
    for question in "ab":
        kept(cache, asked("head", "answer", question))
    assert found(cache, "head", "answer", "a") == "head answer b"
    assert cache.bytes == 30


def test_stages_go_on_from_their_own_checkpoints() -> None:
    class Other(Join):
        pass

    cache, turns = PromptCache(100), asked("a", "b")
    work = cache.resume(turns)
    work.run(Join(), turns)
    work.keep()
    other = Other()
    cache.resume(turns).run(other, turns)
    assert other.began is None


def test_a_prompt_that_failed_is_not_kept() -> None:
    cache, turns = PromptCache(100), asked("a", "b")
    cache.resume(turns).run(Join(), turns)
    assert cache.bytes == 0


def test_a_conversation_goes_on_with_the_objects_of_the_last_prompt() -> None:
    cache, first = PromptCache(100), asked("a", "b", "c")
    work = cache.resume(first, TOOLS)
    work.run(Join(), first)
    work.keep()
    again = cache.resume(asked("a", "b", "C"), tuple(replace(tool) for tool in TOOLS))
    assert [one is other for one, other in zip(again.turns, first, strict=True)] == [True, True, False]
    assert again.tools is TOOLS
    repeated = cache.resume(asked("a", "b", "c"))
    assert repeated.turns is work.turns
    other = [first[0], replace(first[1], extra={"id": "x"}), first[2]]
    assert cache.resume(other).turns[1] is other[1], "fields that == ignores count"


@pytest.mark.parametrize(
    "changed",
    [
        {"parameters": {"b": 1, "a": 1}},
        {"parameters": {"a": 1.0, "b": 1}},
        {"parameters": {"a": True, "b": 1}},
        {"client_name": "f"},
        {"strict": True},
        {"extra": {"x": 1}},
    ],
)
def test_tools_that_are_printed_or_named_in_another_way_are_others(changed: dict[str, Any]) -> None:
    cache, turns = PromptCache(100), asked("a", "b")
    tools = (Tool("f", "does", {"a": 1, "b": 1}),)
    work = cache.resume(turns, tools)
    work.run(Join(), turns)
    work.keep()
    other = (replace(tools[0], **changed),)
    assert cache.resume(turns, (replace(tools[0]),)).tools is tools
    assert cache.resume(turns, other).tools is other


def test_a_conversation_is_compared_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def watched(one: Sequence[Turn], other: Sequence[Turn], same: Any) -> int:
        compared.append(other)
        return common_prefix(one, other, same)

    cache = PromptCache(2**20)
    for number in range(500):
        kept(cache, asked("head", str(number)))
    monkeypatch.setattr(prompt_cache, "common_prefix", watched)
    assert found(cache, "head", "7", "more") == "head 7"
    assert found(cache, "head", "new") == "head 499"
    assert found(cache, "other", "7") is None
    assert len(compared) == 2


def test_nothing_is_left_of_conversations_that_went() -> None:
    cache, random = PromptCache(300), Random(5)
    for _ in range(300):
        kept(cache, asked(*(random.choice("abc") for _ in range(random.randrange(1, 5)))))
    assert cache.bytes == 30 * len(cache._shared.entries) <= 300
    numbers = {number for each in cache._by_head.values() for number in each}
    assert numbers == set(cache._shared.entries)
    assert all(cache._by_head.values())
    kept(cache, [], 301)
    assert kept(cache, asked("new"), 300) is None
    assert list(cache._by_head) == [hash(asked("new")[0])]


def test_a_prompt_that_is_asked_for_again_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = cached_template(COUNTING)
    conversation = Conversation((turn("user", "hi"), turn("assistant", "so"), turn("user", "and")), TOOLS[:1])
    settings: dict[str, Any] = {"template_arguments": {"effort": 1}, "continues": False}
    text, made = RenderPrompt(template, write_parts, **settings).run(conversation, None)
    with monkeypatch.context() as patched:
        patched.setattr(template, "_template", None)
        again, same = RenderPrompt(template, write_parts, **settings).run(replace(conversation), made)
    assert (again, same) == (text, made)
    changes: list[dict[str, Any]] = [
        {"template_arguments": {"effort": 1.0}},
        {"template_arguments": {"effort": True}},
        {"template_arguments": {}},
        {"add_generation_prompt": False},
        {"vision": False},
    ]
    for changed in changes:
        stage = RenderPrompt(template, write_parts, **settings | changed)
        assert stage.run(conversation, made)[0] == stage.run(conversation, None)[0]
        assert stage.run(conversation, made)[1] is not made
    opened = Conversation(conversation.turns[:2])
    for before in (None, RenderPrompt(template, write_parts).run(opened, None)[1]):
        for continues in (True, False):
            stage = RenderPrompt(template, write_parts, continues=continues)
            assert stage.run(opened, before)[0] == stage.run(opened, None)[0]


@pytest.mark.parametrize(
    ("head", "is_pure"),
    [
        ("", True),
        ("{{ strftime_now('%S') }}", False),
        ("{{ [1, 2] | random }}", False),
        ("{{ lipsum() }}", False),
    ],
)
def test_a_template_that_prints_something_else_each_time_is_rendered_each_time(
    head: str, is_pure: bool
) -> None:
    seconds = iter(range(1000))
    template = load_template(
        head + COUNTING, bos_token="", eos_token="", now=lambda: datetime.fromtimestamp(next(seconds))
    )
    assert template.is_pure == is_pure
    conversation = Conversation((turn("user", "hi"),))
    stage = RenderPrompt(template, write_parts)
    text, made = stage.run(conversation, None)
    again, same = stage.run(conversation, made)
    assert (same is made) == is_pure
    if "now" in head:
        assert again != text


@pytest.fixture
def checked_again() -> Iterator[None]:
    incremental_render.missing_internals.cache_clear()
    yield
    incremental_render.missing_internals.cache_clear()


class OtherNamespace(dict[str, object]):
    pass


@pytest.mark.usefixtures("checked_again")
@pytest.mark.parametrize("missing", [None, "LoopContext._peek_next", "Namespace.__attrs"])
def test_templates_are_rendered_in_full_where_jinja2_lacks_an_internal(
    missing: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing == "LoopContext._peek_next":
        monkeypatch.delattr(LoopContext, "_peek_next")
    elif missing:
        monkeypatch.setattr(incremental_render, "Namespace", OtherNamespace)
    template = ChatTemplate(HERMES, named_tokens={})
    turns = (turn("user", "hi"), turn("assistant", call()), turn("user", "and"), turn("assistant", "so"))
    stage = RenderPrompt(template, write_parts, continues=False)
    before: RenderCheckpoint | None = None
    for count in range(1, len(turns) + 1):
        grown = Conversation(turns[:count])
        text, before = stage.run(grown, before)
        assert text == template.render(grown, render_parts=write_parts, continues=False)
        assert (before.rendered.record is None) == (missing is not None)
    assert incremental_render.missing_internals() == (() if missing is None else (missing,))
    assert caplog.text.count("jinja2 lacks") == (missing is not None)
