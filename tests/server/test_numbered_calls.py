"""A call and its result have one id in the prompt, whatever ids template, client and model give them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from clients.returned_turns import new_ids, numbered_ids
from singletree.checking.returned_turns import PROTOCOLS, Mutation, ReturnedBlock, TurnProtocol, as_given
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate

from .carrying import PATHS, capsules
from .carrying import Client as Carrier
from .serving import TOKENIZER, Served, serving
from .test_partial_turns import KIMI, Session, prompts
from .test_rival_turns import kimi

TEMPLATE = """\
{%- set ns = namespace(n=0, ids=[]) %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}## Return of {{ RESULT }}
{% endif %}{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls -%}
{% set id = 'functions.' ~ c.function.name ~ ':' ~ ns.n %}{% set ns.n = ns.n + 1 %}{% set _ = ns.ids.append(id) -%}
<|tool_call_begin|>{{ CALL }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SOURCES = {
    "numbers itself": TEMPLATE.replace("CALL", "id").replace("RESULT", "ns.ids.pop(0)"),
    "prints ids": TEMPLATE.replace("CALL", "c.id").replace("RESULT", "m.tool_call_id"),
}
CALL_ID = re.compile(r"<\|tool_call_begin\|>(\S+?)<\|")
RESULT_ID = re.compile(r"## Return of (\S+)")


def settings(source: str) -> dict[str, Any]:
    template = ChatTemplate(SOURCES[source], call_id_format="functions.{name}:{index}")
    return {
        "memory": TurnMemory(2**20),
        "template": template,
        "layout": template.layout(TOKENIZER),
        "family": KIMI,
        "context_window": 2**16,
    }


def ids_in(prompt: str) -> tuple[list[str], list[str]]:
    return CALL_ID.findall(prompt), RESULT_ID.findall(prompt)


def last(served: Served) -> str:
    return TOKENIZER.decode(prompts(served)[-1])


HABITS = [as_given, new_ids, numbered_ids]
MODEL_OUTPUT = [kimi("thought", number) for number in range(3)]


async def play(
    source: str, protocol: TurnProtocol, habit: Mutation, output: list[str], cut: slice
) -> list[str]:
    """The prompts of a session, at the end of which the messages ``cut`` are missing."""
    scripts = {f"s{i}": text for i, text in enumerate((*output, "Fine."))}
    async with serving(scripts, **settings(source)) as served:
        session = Session(served, protocol, habit, f"[[script:{','.join(scripts)}]] How is it?")
        for _ in output:
            await session.go_on()
        del session.turns[cut]
        await session.go_on()
        return [TOKENIZER.decode(ids) for ids in prompts(served)]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
async def test_behind_a_call_that_was_cut_calls_and_results_agree(
    habit: Mutation, source: str, protocol: TurnProtocol
) -> None:
    """The turns behind it have another place now, so that they are rendered from what the client sent."""
    items = 2 if protocol.name != "responses" else 4 if habit is as_given else 3
    played = await play(source, protocol, habit, MODEL_OUTPUT, slice(0, items))
    called, answered = ids_in(played[-1])
    assert called == answered
    kept = source == "prints ids" and habit is as_given
    assert called == [f"functions.get:{number}" for number in ((1, 2) if kept else (0, 1))]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("renames", [False, True], ids=["the model's ids", "other ids"])
async def test_turns_whose_capsules_come_along_agree_with_their_results(
    renames: bool, source: str, path: str
) -> None:
    """They are found wherever they are: the prompt has their tokens only if the template gives the same numbers."""
    scripts = {"a": MODEL_OUTPUT[0], "b": MODEL_OUTPUT[1], "c": MODEL_OUTPUT[2], "d": "Fine."}
    client = Carrier(path, "[[script:a,b,c,d]] How is it?", stream=False)
    async with serving(scripts, capsules=capsules(), **settings(source)) as served:
        for _ in range(3):
            items = await client.ask(served)
            if renames:
                items = json.loads(re.sub(r"functions\.get:(\d)", r"call_of_\1_x", json.dumps(items)))
            client.take(items)
        del client.messages[1 : 3 if client.is_messages else 5]
        await client.ask(served)
        prompt = last(served)
    called, answered = ids_in(prompt)
    assert called == answered
    if source == "prints ids":
        assert called == ["functions.get:1", "functions.get:2"], "as the model wrote them"
        assert all(text in prompt for text in MODEL_OUTPUT[1:])
    else:
        assert called == ["functions.get:0", "functions.get:1"]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
async def test_nothing_is_lost_where_nothing_was_cut(
    habit: Mutation, source: str, protocol: TurnProtocol
) -> None:
    played = await play(source, protocol, habit, MODEL_OUTPUT, slice(0, 0))
    for before, output, after in zip(played, MODEL_OUTPUT, played[1:], strict=False):
        assert after.startswith(before + output)
    called, answered = ids_in(played[-1])
    assert called == answered == [f"functions.get:{number}" for number in range(3)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
async def test_a_number_that_the_model_gives_twice_is_that_of_the_result(
    habit: Mutation, source: str
) -> None:
    """Where the template prints ids it prints the one that the model wrote; else both have the template's."""
    output = [kimi("one", 0), kimi("two", 0)]
    played = await play(source, PROTOCOLS[1], habit, output, slice(0, 0))
    called, answered = ids_in(played[-1])
    assert called == answered
    assert (output[1] in played[-1]) is (source == "prints ids")


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("source", SOURCES)
async def test_a_call_that_is_not_remembered_takes_no_number_of_one_that_is(
    source: str, protocol: TurnProtocol
) -> None:
    """The last turn is edited, so its id is made here."""

    def edited(blocks: list[ReturnedBlock]) -> list[ReturnedBlock]:
        changed = [
            ReturnedBlock("call", '{"a": 2}', "mine", "get") if block.kind == "call" else block
            for block in blocks
        ]
        return changed if any(block.text == "thought, 2" for block in blocks) else new_ids(blocks)

    size = slice(0, 3) if protocol.name == "responses" else slice(0, 2)
    played = await play(source, protocol, edited, MODEL_OUTPUT, size)
    called, answered = ids_in(played[-1])
    assert called == answered
    assert len(set(called)) == 2
