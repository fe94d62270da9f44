"""A turn that comes back in part is the turn as it was said; what a client changed or cleared stays so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from clients.returned_turns import (
    HABITS,
    calls_alone,
    no_words,
    one_call,
    request_of,
    tagged_thoughts,
    thoughts_as_words,
)
from singletree import families
from singletree.checking.returned_turns import (
    PROTOCOLS,
    Mutation,
    ReturnedBlock,
    TurnProtocol,
    as_given,
    no_thoughts,
)
from singletree.conversation import Thinking
from singletree.parsing.family import Family
from singletree.parsing.parser import parse
from singletree.parsing.render_turn import render_turn
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.server.settings.config import Config
from singletree.testing import byte_model
from singletree.testing.scripts import Script

from .serving import MODEL, SWITCHABLE, TEMPLATE, TOKENIZER, Served, serving, template_settings

LAYOUT = TEMPLATE.layout(TOKENIZER)
QWEN = families.get("qwen3")
KIMI = families.pair(reasoning="deepseek_r1", tools="kimi_k2")
TOOLS = [("get", "", {"type": "object"}), ("read", "", {"type": "object"})]
MESSAGES, CHAT, RESPONSES = PROTOCOLS


def calls(family: Family, number: int) -> tuple[str, str]:
    """Two calls as the model writes them; ``number`` counts calls where the model does."""
    first, second = '{"wind": -0.0,  "days":3.0}', '{"path":"a"}'
    if family is QWEN:
        return (
            f'<tool_call>\n{{"name": "get",  "arguments": {first}}}\n</tool_call>',
            f'<tool_call>\n{{"name": "read",  "arguments": {second}}}\n</tool_call>',
        )
    made = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|><|tool_calls_section_end|>"
        for at, (name, arguments) in enumerate((("get", first), ("read", second)), number)
    )
    one, other = made
    return one, other


def interleaved(family: Family, number: int = 0) -> str:
    one, other = calls(family, number)
    thought = "<think>\nFirst the weather. \n\nThen more.\n</think>\n\n"
    return f"{thought}Let me see.\n{one}\n<think>\nNow it.\n</think>\n\n{other}"


def parallel(family: Family, number: int = 0) -> str:
    one, other = calls(family, number)
    return f"<think>\nBoth at once.\n</think>\n\nBoth.\n{one}\n{other}"


class Session:
    """A client with one habit, on one protocol."""

    def __init__(self, served: Served, protocol: TurnProtocol, habit: Mutation, asked: str) -> None:
        self.served, self.protocol, self.habit, self.asked = served, protocol, habit, asked
        self.turns: list[dict[str, Any]] = []

    async def go_on(self, **more: Any) -> list[ReturnedBlock]:
        """One turn, given back in the client's way; the blocks as they came."""
        settings = {**self.protocol.settings, **more}
        given = request_of(replace(self.protocol, settings=settings), self.asked, self.turns, TOOLS)
        answer = await self.served.client.post(self.protocol.path, given | {"model": MODEL})
        assert answer.status == 200, answer.body
        blocks = self.protocol.blocks(json.loads(answer.body))
        self.turns += self.protocol.turn(self.habit(blocks), False)
        return blocks


def prompts(served: Served) -> list[list[int]]:
    return [list(record.prompt_token_ids) for record in served.engine.log]


async def play(
    output: Sequence[str],
    protocol: TurnProtocol,
    habit: Mutation,
    settings: dict[str, Any] | None = None,
    **model: Any,
) -> list[str]:
    """The prompts of a session in which the model says each of ``said``; ``settings`` go with the last request."""
    scripts = {f"s{i}": text for i, text in enumerate((*output, "Fine."))}
    given = {"memory": TurnMemory(2**20), "layout": LAYOUT, "context_window": 2**16, **model}
    async with serving(scripts, **given) as served:
        session = Session(served, protocol, habit, f"[[script:{','.join(scripts)}]] How is it?")
        for _ in output:
            await session.go_on()
        await session.go_on(**(settings or {}))
        return [TOKENIZER.decode(ids) for ids in prompts(served)]


def in_place(played: Sequence[str], output: Sequence[str]) -> bool:
    pairs = zip(played, output, played[1:], strict=False)
    return all(after.startswith(before + text) for before, text, after in pairs)


@pytest.mark.parametrize("family", [QWEN, KIMI], ids=["own ids", "the model's ids"])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
async def test_what_comes_back_in_part_is_the_turn_as_written(
    habit: Mutation, protocol: TurnProtocol, family: Family
) -> None:  # C3 C5
    output = [interleaved(family), parallel(family, 2)]
    assert in_place(await play(output, protocol, habit, family=family), output)


def then(one: Mutation, other: Mutation) -> Mutation:
    """Both, one after the other."""
    return lambda blocks: other(one(blocks))


def changed(blocks: list[ReturnedBlock], kind: str, old: str, new: str) -> list[ReturnedBlock]:
    return [replace(b, text=b.text.replace(old, new)) if b.kind == kind else b for b in blocks]


def other_words(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return changed(blocks, "text", "Both", "Neither")


def fewer_words(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return changed(blocks, "text", "Both.", "Bo")


def more_words(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return [*blocks[:1], ReturnedBlock("text", "More."), *blocks[1:]]


def other_thought(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return changed(blocks, "thought", "at once", "later")


def other_thought_in_words(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return changed(tagged_thoughts(blocks), "text", "at once", "later")


def other_arguments(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return changed(calls_alone(blocks), "call", '"a"', '"b"')


def another_call(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return [*no_words(blocks), ReturnedBlock("call", "{}", "call_of_mine", "get")]


def other_name(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    return [replace(b, name="write") if b.name == "read" else b for b in calls_alone(blocks)]


EDITS = [
    other_words,
    fewer_words,
    more_words,
    other_thought,
    other_thought_in_words,
    other_arguments,
    another_call,
    other_name,
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
async def test_a_turn_with_other_words_is_rendered_as_edited(edit: Mutation) -> None:
    output = parallel(QWEN)
    for protocol in PROTOCOLS:
        _, prompt = await play([output], protocol, edit)
        assert output not in prompt, protocol.name


CLEARED = {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}
SWITCHED_OFF: list[tuple[TurnProtocol, dict[str, Any]]] = [
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    (MESSAGES, {"context_management": CLEARED}),
    (CHAT, {"reasoning_effort": "none"}),
    (RESPONSES, {"reasoning": {"effort": "none"}}),
]


HAS_EFFORTS = (
    """\
{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'high'] %}
{{- raise_exception('unknown effort') }}{% endif -%}
<|im_start|>system
{{ reasoning_effort or 'medium' }}<|im_end|>
"""
    + byte_model.CHAT_TEMPLATE
)
"""Knows no effort that is none, as gpt-oss's template."""


@pytest.mark.parametrize(("protocol", "settings"), SWITCHED_OFF)
@pytest.mark.parametrize("habit", [no_thoughts, calls_alone, one_call])
async def test_what_was_cleared_is_not_given_back(
    habit: Mutation, protocol: TurnProtocol, settings: dict[str, Any]
) -> None:
    """By a switch that the template has, in a request behind others without it; or by an edit of the context."""
    habits, model = then(habit, no_thoughts), template_settings(SWITCHABLE)
    _, prompt = await play([parallel(QWEN)], protocol, habits, settings, **model)
    assert "Both at once." not in prompt
    assert "Both.\n" in prompt
    assert '"path":"a"' in prompt


OFF: list[tuple[TurnProtocol, dict[str, Any]]] = [
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"reasoning": {"enabled": False}}),
    (CHAT, {"enable_thinking": False}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (RESPONSES, {"reasoning": {"effort": "none"}}),
    (RESPONSES, {"chat_template_kwargs": {"enable_thinking": False}}),
]


@pytest.mark.parametrize(
    "source", [byte_model.CHAT_TEMPLATE, SWITCHABLE, HAS_EFFORTS], ids=["", "switch", "efforts"]
)
@pytest.mark.parametrize(
    ("protocol", "settings"), OFF, ids=lambda value: str(value) if type(value) is dict else ""
)
@pytest.mark.parametrize("habit", [as_given, no_thoughts, calls_alone, one_call])
async def test_a_model_that_reasons_although_it_was_asked_not_to_keeps_its_turns(
    habit: Mutation, protocol: TurnProtocol, settings: dict[str, Any], source: str
) -> None:
    """claude-code-router switches reasoning off in every request; MiniMax-M2's template has no switch for it."""
    asking = replace(protocol, settings={**protocol.settings, **settings})
    output = [parallel(QWEN), interleaved(QWEN)]
    prompts = await play(output, asking, habit, **template_settings(source))
    assert in_place(prompts, output)


@pytest.mark.parametrize(
    "source", [byte_model.CHAT_TEMPLATE, SWITCHABLE, HAS_EFFORTS], ids=["", "switch", "efforts"]
)
async def test_a_server_that_asks_for_no_reasoning_keeps_what_the_model_wrote(source: str) -> None:
    output = [parallel(QWEN), interleaved(QWEN)]
    for protocol in PROTOCOLS:
        given: dict[str, Any] = {"thinking": Thinking(enabled=False), **template_settings(source)}
        assert in_place(await play(output, protocol, no_thoughts, **given), output), protocol.name


async def test_without_restoring_words_and_calls_are_given_back_alone() -> None:
    for habit in (calls_alone, one_call):
        played = await play([parallel(QWEN)], CHAT, then(habit, no_thoughts), restore_reasoning=False)
        assert "Both at once." not in played[-1]
        spelled = (call.replace(',  "arg', ', "arg') for call in calls(QWEN, 0))
        assert "\n".join(("Both.", *spelled)) in played[-1]


async def test_a_turn_left_open_is_gone_on_with_as_it_came() -> None:
    """Its end is for the model to say: what it once said there is not put in."""
    output = parallel(QWEN)
    async with serving({"a": output, "b": "?"}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        session = Session(served, CHAT, calls_alone, "[[script:a,b]] How is it?")
        await session.go_on()
        session.turns = session.turns[:1]
        session.turns[0]["tool_calls"] = session.turns[0]["tool_calls"][:1]
        await session.go_on()
        assert calls(QWEN, 0)[1] not in TOKENIZER.decode(prompts(served)[1])


WORDS = "<think>\nOf the weather.\n</think>\n\nIt is fine."
KEEPS_ALL = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}",  "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
KEEPS_IF_ASKED = KEEPS_ALL.replace(
    "{% if m.reasoning_content %}",
    "{% set later = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}"
    "{% if m.reasoning_content and (preserve_thinking or not later) %}",
)


@pytest.mark.parametrize("source", [KEEPS_ALL, KEEPS_IF_ASKED], ids=["always", "by a switch"])
@pytest.mark.parametrize("habit", [as_given, no_thoughts, thoughts_as_words, tagged_thoughts])
async def test_earlier_reasoning_is_given_back_where_the_template_prints_it(
    source: str, habit: Mutation
) -> None:
    """Answers without calls, one question after the other; and a tool loop before them."""
    template = ChatTemplate(source)
    layout = template.layout(TOKENIZER)
    output = [parallel(QWEN), WORDS, WORDS.replace("fine", "good"), WORDS.replace("fine", "grand")]
    for protocol in PROTOCOLS:
        played = await play(output, protocol, habit, template=template, layout=layout)
        assert in_place(played, output), protocol.name


async def test_a_client_that_asks_for_nothing_and_carries_nothing_keeps_its_reasoning() -> None:
    """LangChain, Strands and others on Chat: the template's switch is on as long as there is reasoning."""
    template, plain = ChatTemplate(KEEPS_IF_ASKED), replace(CHAT, settings={})
    output = [parallel(QWEN), WORDS, WORDS.replace("fine", "good")]
    layout = template.layout(TOKENIZER)
    assert in_place(await play(output, plain, no_thoughts, template=template, layout=layout), output)


async def test_earlier_reasoning_is_not_printed_where_the_template_drops_it() -> None:
    source = KEEPS_IF_ASKED.replace("preserve_thinking or ", "")
    for habit in (as_given, no_thoughts):
        played = await play([WORDS, WORDS], CHAT, habit, template=ChatTemplate(source))
        assert "Of the weather." not in played[-1]


@pytest.mark.parametrize("habit", [thoughts_as_words, tagged_thoughts])
async def test_an_answer_without_calls_brings_all_its_words(habit: Mutation) -> None:
    """Nothing but its words tells which it is."""
    template = ChatTemplate(KEEPS_ALL)
    output = f"{WORDS} So far."
    for old, new in (("So far.", ""), ("It is", "It was"), ("weather", "whether")):

        def edit(blocks: list[ReturnedBlock], old: str = old, new: str = new) -> list[ReturnedBlock]:
            return changed(blocks, "text", old, new)

        played = await play([output], CHAT, then(habit, edit), template=template)
        assert output not in played[-1], old


REFUSES = KEEPS_ALL.replace(
    "{%- for m in messages %}",
    "{%- for m in messages if m.tool_calls and (m.tool_calls | length) != "
    "(messages | selectattr('role', 'equalto', 'tool') | list | length) %}"
    "{{ raise_exception('Not the same number of function calls and responses') }}{% endfor %}"
    "{%- for m in messages %}",
    1,
)
NAMES_IDS = KEEPS_ALL.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}")


def the_other_call(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
    """The first call left out, and its result."""
    return [block for block in blocks if block.name != "get"]


@pytest.mark.parametrize(
    ("source", "unanswered", "restored"),
    [
        (KEEPS_ALL, "last", [True, False]),
        (NAMES_IDS, "any", [True, True]),
        (REFUSES, "none", [False, False]),
    ],
    ids=["by order", "by id", "refused"],
)
async def test_a_call_without_a_result_is_given_back_where_results_stay_theirs(
    source: str, unanswered: str, restored: list[bool]
) -> None:
    template, output = ChatTemplate(source), parallel(QWEN)
    assert template.capabilities.unanswered == unanswered
    layout = template.layout(TOKENIZER)
    for protocol in PROTOCOLS:
        for habit, is_restored in zip((one_call, the_other_call), restored, strict=True):
            played = await play([output], protocol, habit, template=template, layout=layout)
            assert in_place(played, [output]) is is_restored, (protocol.name, habit.__name__)


async def test_a_call_that_was_cut_stays_left_out() -> None:
    one, other = calls(QWEN, 0)
    whole = f"Both.\n{one}\n{other}"
    token_ids = Script(whole, cut_after=len(TOKENIZER.encode(whole)) - 10)
    live = Config(live_arguments=True)
    async with serving(
        {"a": token_ids, "b": "Fine."}, config=live, memory=TurnMemory(2**20), layout=LAYOUT
    ) as served:
        session = Session(served, CHAT, one_call, "[[script:a,b]] How is it?")
        await session.go_on()
        await session.go_on()
        assert TOKENIZER.decode(prompts(served)[1]).partition("How is it?")[2].count("<tool_call>") == 1


async def test_echoes_of_thoughts_are_no_words() -> None:
    """After a restart: nothing is remembered, and each thought comes back once more as a message."""
    call: dict[str, Any] = {"type": "function_call", "call_id": "call_1", "name": "get", "arguments": "{}"}
    thought: dict[str, Any] = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Thinking so."}],
    }
    echo = {"type": "message", "role": "assistant", "content": "\nThinking so."}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "ok"}
    async with serving(memory=TurnMemory(2**20), layout=LAYOUT) as served:
        for written in ([thought, echo, call, result], [thought, echo]):
            asked = {"type": "message", "role": "user", "content": "Go"}
            more = [] if result in written else [asked]
            request = request_of(RESPONSES, "Go", [*written, *more], TOOLS) | {"model": MODEL}
            assert (await served.client.post("/v1/responses", request)).status == 200
        looped, alone = (TOKENIZER.decode(ids) for ids in prompts(served))
    assert looped.count("Thinking so.") == 1
    assert alone.count("Thinking so.") >= 1


def test_the_turns_are_those_of_their_formats() -> None:
    """What the tests above say is read as what they mean."""
    for family in (QWEN, KIMI):
        for output in (interleaved(family), parallel(family)):
            turn = parse(family, output, (), "")
            assert [call.name for call in turn.tool_calls] == ["get", "read"]
            assert render_turn(family, turn.parts)
    assert Config().restore_reasoning
