"""A client may give calls other ids: a turn is found by its place, names and arguments where that is certain."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from clients.returned_turns import HABITS, MUTATIONS, RENAMING, new_ids, numbered_ids
from singletree import families
from singletree.checking.returned_turns import PROTOCOLS, Mutation, TurnProtocol, as_given, no_thoughts
from singletree.conversation import Conversation, Part, Reasoning, Text, ToolCall, ToolResult, Turn
from singletree.parsing.family import Family
from singletree.parsing.render_turn import render_turn
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.server.ids import is_minted, new_id
from singletree.testing.scripted_engine import ScriptedEngine

from .forging import speech, vocabulary
from .serving import TOKENIZER, serving
from .test_client_habits import SCRIPTS, Client, cause
from .test_client_habits import Body as Message
from .test_partial_turns import EDITS, KIMI, LAYOUT, QWEN, Session, in_place, parallel, play, prompts, then
from .test_rival_turns import A, B, Plain, alternate

TEMPLATES = Path(__file__).parents[1] / "families" / "templates"
CALLS = (ToolCall("get", '{"a":  1}', "functions.get:0"), ToolCall("read", '{"b": 2}', "functions.read:1"))
SPOKEN: tuple[Part, ...] = (Reasoning("I look."), Text("So."), *CALLS)
MARKS: Mapping[str, Sequence[str]] = {
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[CALL_ID]"),
    "gpt_oss": tuple(
        f"<|{m}|>" for m in ("start", "end", "message", "channel", "call", "constrain", "return")
    ),
    "qwen3": ("<tool_call>", "</tool_call>"),
    "deepseek_v3_1": (),
}
"""Family -> those of its markers that are tokens."""


def settings_of(name: str) -> tuple[dict[str, Any], str]:
    """A model of that family, and a turn as it writes it."""
    family = families.get(name)
    tokenizer = vocabulary(dict.fromkeys((*MARKS[name], "<|im_start|>", "<|im_end|>"), True), "<|im_end|>")
    spoken = speech(tokenizer, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), family)
    given = {part: getattr(spoken, part) for part in ("tokenizer", "template", "family", "layout")}
    return given, render_turn(family, SPOKEN)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("family", [QWEN, KIMI], ids=["own ids", "the model's ids"])
@pytest.mark.parametrize("habit", [no_thoughts, as_given], ids=["without thoughts", "with thoughts"])
async def test_ids_that_are_made_anew_in_each_request(
    habit: Mutation, family: Family, protocol: TurnProtocol
) -> None:
    """A gateway without a memory: a turn has other ids in each request."""
    output = [parallel(family), parallel(family, 2)]
    texts = {f"s{i}": text for i, text in enumerate((*output, "Fine."))}
    async with serving(texts, memory=TurnMemory(2**20), layout=LAYOUT, family=family) as served:
        session = Session(served, protocol, habit, f"[[script:{','.join(texts)}]] How is it?")
        for _ in texts:
            await session.go_on()
            session.turns = renamed(session.turns)
        assert in_place([TOKENIZER.decode(ids) for ids in prompts(served)], output)


def renamed(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with other ids, the same for a call and its result."""
    made: dict[str, str] = {}

    def change(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            is_call = value.get("type") in ("tool_use", "function")
            names = ("call_id", "tool_call_id", "tool_use_id", *(("id",) if is_call else ()))
            return {k: change(v, k if k in names else "") for k, v in value.items()}
        if isinstance(value, list):
            return [change(each) for each in value]
        return made.setdefault(value, f"id-{uuid4()}") if key else value

    changed: list[dict[str, Any]] = change(turns)
    return changed


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("habit", RENAMING, ids=lambda habit: habit.__name__)
async def test_a_turn_with_other_ids_is_in_place_in_every_format(
    habit: Mutation, name: str, protocol: TurnProtocol
) -> None:
    model, written = settings_of(name)
    if model["template"].capabilities.unanswered == "none" and habit is RENAMING[-1]:
        pytest.skip("the template prints no call without its result")
    async with serving_family(model, written) as served:
        session = Session(served, protocol, habit, "[[script:s0,s1]] How is it?")
        for _ in range(2):
            await session.go_on()
        first, second = prompts(served)
        generated = list(model["tokenizer"].encode(written))
        generated = generated[: len(served.engine.log[0].token_ids)]
        assert second[: len(first) + len(generated)] == first + generated


ONE_CALL_EACH = """\
{%- set last = namespace(name=none) %}{% for m in messages %}{% if m.tool_calls -%}
{{ raise_exception('both') if m.content and m.thinking -}}
{% set why = m.content or m.thinking %}{% if why and not messages[loop.index:] | rejectattr('tool_calls', 'defined')
  | selectattr('role', 'equalto', 'assistant') | list -%}
<|start|>assistant<|channel|>analysis<|message|>{{ why }}<|end|>{% endif -%}
{% set f = m.tool_calls[0].function %}{% set last.name = f.name -%}
<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}{{ raise_exception('no call') if last.name is none -}}
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor -%}
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""Prints one call of a message, and text or reasoning before it as reasoning, which it drops when the loop has ended,
as gpt-oss's template does."""


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize(
    "habit", [as_given, no_thoughts, *MUTATIONS, *HABITS], ids=lambda habit: habit.__name__
)
@pytest.mark.parametrize(
    "parts",
    [
        (Reasoning("I look."), *CALLS),
        (Reasoning("I look."), CALLS[0], Reasoning("And more."), CALLS[1]),
        SPOKEN,
        (*SPOKEN[:3], Reasoning("And more."), Text("On."), CALLS[1]),
    ],
    ids=["at once", "a thought between", "words before", "a thought and words between"],
)
async def test_two_calls_are_in_place_where_a_message_has_one(
    parts: tuple[Part, ...], habit: Mutation, protocol: TurnProtocol
) -> None:
    """The engine stops behind ``<|call|>``, so the first of two ends as other messages do."""
    family = families.get("gpt_oss")
    tokenizer = vocabulary(dict.fromkeys(MARKS["gpt_oss"], True), "<|call|>")
    spoken = speech(tokenizer, ONE_CALL_EACH, family)
    model = {part: getattr(spoken, part) for part in ("tokenizer", "template", "family", "layout")}
    written = render_turn(family, parts)
    async with serving_family(model, written.replace("<|call|>", "<|end|>", 1)) as served:
        session = Session(served, protocol, habit, "[[script:s0,s1]] How is it?")
        for _ in range(2):
            await session.go_on()
        first, second = prompts(served)
        generated = list(served.engine.log[0].token_ids)
        assert second[: len(first) + len(generated)] == first + generated
        behind = tokenizer.decode(second[len(first) + len(generated) :])
        named = re.findall(r"<\|start\|>functions\.(\w+) to=", behind)
        assert named
        if habit.__name__ not in (
            "one_call",
            "one_new_id",
            "cut_ids",
        ):  # Elsewhere each call has an id of its own.
            assert named == [call.name for call in CALLS]
        assert "<tool_result>" not in behind


TEXT_LAST = """\
{%- for m in messages %}{% if m.role != 'tool' %}{% if m.role != 'assistant' %}<|turn>user
{{ m.content }}<turn|>{% else %}{% if m.tool_calls and m.reasoning_content -%}
<|channel>thought
{{ m.reasoning_content }}<channel|>{% endif -%}
{% for c in m.tool_calls -%}
<|tool_call>call:{{ c.function.name }}{{ c.function.arguments | tojson }}<tool_call|>{% endfor -%}
{% for r in messages[loop.index:] if m.tool_calls and r.role == 'tool' -%}
<|tool_response>response:{{ r.name }}{{ '{' }}{{ r.content }}}<tool_response|>{% endfor -%}
{{ m.content }}{% endif %}{% endif %}{% endfor -%}
{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model
{% endif %}"""
"""Prints the text of a turn behind its results, and reasoning beside calls only, as Gemma 4's first templates do."""


def test_a_text_stays_between_reasoning_and_call_where_the_template_prints_it_behind_the_result() -> None:
    question, result = Turn("user", (Text("How is it?"),)), ToolResult(CALLS[0].id, (Text("Sunny."),))
    turns = (question, Turn("assistant", SPOKEN[:3]), Turn("tool", (result,)))
    prompt = ChatTemplate(TEXT_LAST).render(
        Conversation(turns), render_parts=partial(render_turn, families.get("gemma4"))
    )
    assert "thought\nI look.<channel|>So.<|tool_call>call:get{" in prompt
    assert "<|tool_response>response:get{Sunny.}" in prompt


def test_a_text_before_a_call_stays_where_the_template_drops_the_reasoning_of_a_loop() -> None:
    family = families.get("gpt_oss")
    question, result = Turn("user", (Text("How is it?"),)), ToolResult(CALLS[0].id, (Text("Sunny."),))
    turns = [question, Turn("assistant", SPOKEN[:3]), Turn("tool", (result,))]
    for ended in (False, True):
        turns += [Turn("assistant", (Text("Fine."),)), question] * ended
        prompt = ChatTemplate(ONE_CALL_EACH).render(
            Conversation(tuple(turns)), render_parts=partial(render_turn, family)
        )
        text = "<|channel|>final<|message|>So.<|end|><|start|>assistant to=functions.get<|channel|>"
        assert text in prompt
        assert ("<|channel|>analysis<|message|>I look.<|end|>" in prompt) is not ended
        assert "<|start|>functions.get to=assistant" in prompt


def serving_family(model: dict[str, Any], output: str) -> Any:
    tokenizer = model["tokenizer"]
    [end] = tokenizer.stop_token_ids
    engine = ScriptedEngine(
        tokenizer.encode, tokenizer.decode, {"s0": output, "s1": "Fine."}, end_token_id=end
    )
    return serving(engine=engine, memory=TurnMemory(2**20), **model)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
async def test_a_turn_with_other_ids_that_was_edited_is_rendered_as_edited(
    edit: Mutation, protocol: TurnProtocol
) -> None:
    output = parallel(QWEN)
    _, prompt = await play([output], protocol, then(edit, numbered_ids))
    is_of_thought = "thought" in edit.__name__  # which such a client does not return
    assert (output in prompt) is (is_of_thought and edit.__name__ == "other_thought")


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("habit", [new_ids, numbered_ids], ids=lambda habit: habit.__name__)
async def test_of_two_conversations_that_begin_alike_neither_gets_a_thought(
    habit: Mutation, protocol: TurnProtocol
) -> None:
    made = await alternate(Plain(protocol, habit), Plain(protocol, habit))
    for number, (_, text) in enumerate(made):
        assert (B if number % 2 == 0 else A) not in text, number


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
async def test_a_turn_of_another_server_is_not_the_one_that_is_remembered_in_its_place(
    protocol: TurnProtocol,
) -> None:
    """Its ids are a server's, so they were not changed: the turn that has others is another one."""

    def spoken(thought: str) -> dict[str, str]:
        return {"a": f"<think>\n{thought}\n</think>\n\nLooking.\n{QWEN_CALL}", "b": "Fine."}

    mine, other = Plain(protocol, no_thoughts), Plain(protocol, no_thoughts)
    for client, thought, asks in ((mine, A, 1), (other, B, 1)):
        memory = TurnMemory(2**20)
        async with serving(spoken(thought), memory=memory, layout=LAYOUT) as served:
            for _ in range(asks):
                await client.go_on(served)
            if client is other:
                _, text = await mine.go_on(served)
    assert B not in text
    renaming = Plain(protocol, no_thoughts)
    renaming.turns = renamed(mine.turns[: len(other.turns)])
    async with serving(spoken(B), memory=memory, layout=LAYOUT) as served:
        _, text = await renaming.go_on(served)
    assert B in text, "with other ids it cannot be told from the one that is remembered"


QWEN_CALL = '<tool_call>\n{"name": "get", "arguments": {"a":  1}}\n</tool_call>'


def test_ids_of_servers_are_distinguished_from_others() -> None:
    assert is_minted(new_id("call_"))
    assert is_minted(new_id("call-"))
    others = ["", "call_1", "functions.get:0", "toolu_0123456789", new_id("fc_"), f"call_{'z' * 24}"]
    assert not any(map(is_minted, [*others, *(f"call_{uuid4().hex[:24]}" for _ in range(100))]))
    assert not is_minted("call_" + "0" * 24), "1970"


@pytest.mark.parametrize("thought", [None, "kept"])
async def test_no_break_is_reported_where_ids_alone_differ(thought: str | None) -> None:
    """With or without its reasoning; Chat."""

    def habit(message: Message) -> list[Message]:
        calls = [each | {"id": f"call_{i}"} for i, each in enumerate(message.get("tool_calls") or [])]
        kept = message if thought else message | {"reasoning_content": None}
        kept = {name: value for name, value in kept.items() if name != "reasoning_details"}
        return [kept | ({"tool_calls": calls} if calls else {})]

    async with serving(SCRIPTS, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        client = Client(served, "[[script:turn,turn,end]] hi", habit)
        headers = [await client.step() for _ in range(3)]
    assert [each["x-singletree-course"] for each in headers[1:]] == ["appended"] * 2
    assert not any(map(cause, headers))
