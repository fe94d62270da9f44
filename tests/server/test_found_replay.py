"""Whose turn it is: nothing of one conversation comes into another, and what a client changed stays changed."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import pytest

from singletree import families
from singletree.conversation import Conversation, Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.prompts.replay.recall import RecallTurns
from singletree.prompts.replay.turn_comparison import is_equivalent_turn, is_part_of
from singletree.prompts.replay.turn_keys import HistoryDigests
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt, TurnMemory
from singletree.testing.scripts import Script

from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)
BASH = {"name": "bash", "description": "", "input_schema": {"type": "object"}}
KIMI = families.pair(reasoning="deepseek_r1", tools="kimi_k2")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def kimi(thought: str) -> str:
    """A call under an id of the model's own, which counts from 0 in each conversation."""
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
        '{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    return f"<think>{thought}</think>Looking.{call}"


async def ask(served: Served, messages: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    given = {"model": MODEL, "max_tokens": 4000, "messages": messages, "tools": [BASH], **more}
    answer = await served.client.post("/v1/messages", given)
    assert answer.status == 200, answer.body
    content: list[dict[str, Any]] = json.loads(answer.body)["content"]
    return content


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def went_on(blocks: list[dict[str, Any]], *dropped: str) -> list[dict[str, Any]]:
    """The turn as a harness gives it back, and the results of its calls."""
    kept = [b for b in blocks if b["type"] not in dropped]
    results = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "ok"}
        for b in kept
        if b["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": kept}, {"role": "user", "content": results}]


def last_prompt(served: Served) -> str:
    return TOKENIZER.decode(served.engine.log[-1].prompt_token_ids)


async def test_the_same_id_in_another_conversation_is_another_turn() -> None:  # C3
    scripts = {"a": kimi("thought of A"), "b": kimi("thought of B"), "c": "Fine."}
    memory = TurnMemory(2**20)
    async with serving(scripts, memory=memory, layout=LAYOUT, family=KIMI) as served:
        first, second = asked("[[script:a,c]] one"), asked("[[script:b,c]] two")
        mine, yours = await ask(served, [first]), await ask(served, [second])
        await ask(served, [first, *went_on(mine, "thinking")])
        assert "thought of A" in last_prompt(served)
        assert "thought of B" not in last_prompt(served)
        await ask(served, [second, *went_on(yours, "thinking")])
        assert "thought of B" in last_prompt(served)
        assert "thought of A" not in last_prompt(served)


async def test_the_same_words_in_another_conversation_bring_no_reasoning() -> None:
    scripts = {"a": "<think>\nthought of A\n</think>\n\nDone."}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        await ask(served, [asked("[[script:a]] one")])
        await ask(served, [asked("two"), {"role": "assistant", "content": "Done."}])
        assert "thought of A" not in last_prompt(served)


async def test_what_came_behind_the_one_call_is_not_given_back() -> None:
    more = Script(f"{CALL}\n{CALL.replace('ls', 'rm')}", chunk=16)
    async with serving({"a": more, "b": "Fine."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        first = asked("[[script:a,b]] go")
        answer = await ask(served, [first], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        await ask(served, [first, *went_on(answer)])
        turn = last_prompt(served).partition("go<|im_end|>")[2]
        assert turn.count("<tool_call>") == 1, turn


async def test_the_start_of_a_turn_that_the_client_wrote_is_not_the_models() -> None:
    """The client continued a turn of its own; later it gives back only what the model added."""
    async with serving({"a": "And more."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        first = asked("[[script:a]] go")
        await ask(served, [first, {"role": "assistant", "content": "Begun."}])
        await ask(served, [first, {"role": "assistant", "content": "And more."}, asked("and?")])
        assert "Begun." not in last_prompt(served)


def renamed(messages: list[dict[str, Any]], id: str, command: str = "ls") -> list[dict[str, Any]]:
    """A turn and its results under an id of the client's own, as OpenClaw makes of one with a point in it."""
    turn, results = json.loads(json.dumps(messages))
    for block in turn["content"]:
        if block["type"] == "tool_use":
            block |= {"id": id, "input": {"command": command}}
    results["content"][0]["tool_use_id"] = id
    return [turn, results]


async def test_a_call_under_an_id_of_the_clients_own_is_found_where_it_was_made() -> None:  # C3
    scripts = {"a": kimi("thought of A"), "c": "Fine."}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT, family=KIMI) as served:
        first = asked("[[script:a,c]] one")
        answer = went_on(await ask(served, [first]), "thinking")
        await ask(served, [first, *renamed(answer, "call_functions_bash_0_fc_1")])
        assert "thought of A" in last_prompt(served)
        await ask(served, [first, *renamed(answer, "call_functions_bash_0_fc_1", "rm")])
        assert "thought of A" not in last_prompt(served), "another call"
        await ask(served, [first, *renamed(answer, "functionsbash0", "rm")])
        assert "thought of A" not in last_prompt(served)


def turn(text: str = "", arguments: str = "{}", thought: str = "") -> Turn:
    return Turn("assistant", (Reasoning(thought), Text(text), ToolCall("f", arguments, "call_1")))


@pytest.mark.parametrize(
    ("returned", "remembered", "same"),
    [
        (turn(text="a  b"), turn(text="a b"), False),
        (turn(text="def f():  x"), turn(text="def f():\n  x"), False),
        (turn(text="a b"), turn(text="\n a b \n"), True),
        (turn(thought="a\nb"), turn(thought="a b"), False),
        (turn(thought=""), turn(thought="a"), True),
        (turn(arguments='{"n": true}'), turn(arguments='{"n": 1}'), False),
        (turn(arguments='{"n": 3}'), turn(arguments='{"n": 3.0}'), True),
        (turn(arguments='{"b": 1, "a": 2}'), turn(arguments='{"a":2,"b":1}'), True),
        (turn(arguments="[" * 100_000), turn(arguments="[" * 99_999), False),
        (turn(arguments=f'{{"n": {"9" * 5000}}}'), turn(arguments='{"n": 1}'), False),
    ],
)
def test_what_counts_as_an_edit(returned: Turn, remembered: Turn, same: bool) -> None:
    assert is_equivalent_turn(returned, remembered) is same


def test_turns_of_one_place_bring_reasoning_only_if_they_agree() -> None:
    """An answer that was asked for once more, or another conversation's: what was found before is not found again."""
    user, call = Turn("user", (Text("a"),)), ToolCall("f", '{"a":  1}', "functions.f:0")
    came = replace(call, arguments='{"a":1}')
    given = Conversation((user, Turn("assistant", (came,)), Turn("tool", (ToolResult(call.id, ()),))))
    memory, made = TurnMemory(2**20), None
    for thought, brought in (("one", "one"), ("one", "one"), ("two", ""), ("two", ""), ("one", "")):
        generated = Turn("assistant", (Reasoning(thought), call))
        memory.remember(
            GeneratedTurn(generated, GenerationPrompt(), array("I", [1]), HistoryDigests(given.turns)[1])
        )
        recalled, made = RecallTurns(memory).run(given, made)
        assert recalled.conversation.turns[1].reasoning == brought
        assert recalled.conversation.turns[1].tool_calls == (call,), "in the model's spelling"
        assert RecallTurns(memory).run(given, None)[0].conversation == recalled.conversation


def test_a_turn_that_was_unknown_is_found_once_it_is_remembered() -> None:
    """As where another process brings it, or the one that generated it was still at work."""
    ids = [f"call_{number}" for number in range(3)]
    turns: list[Turn] = [Turn("user", (Text("a"),))]
    for id in ids:
        turns += [Turn("assistant", (ToolCall("f", '{"a":1}', id),)), Turn("tool", (ToolResult(id, ()),))]
    given, memory = Conversation((*turns, Turn("user", (Text("b"),)))), TurnMemory(2**20)
    recalled, made = RecallTurns(memory).run(given, None)
    assert (list(recalled.turns), list(recalled.unknown)) == ([], [1, 3, 5])
    for number, known in ((1, [3]), (0, [1, 3]), (2, [1, 3, 5])):
        generated = Turn("assistant", (ToolCall("f", '{"a":  1}', ids[number]),))
        memory.remember(GeneratedTurn(generated, GenerationPrompt(), array("I", [number])))
        for _ in range(2):
            recalled, made = RecallTurns(memory).run(given, made)
            assert sorted(recalled.turns) == known
            assert recalled.conversation == RecallTurns(memory).run(given, None)[0].conversation
    assert recalled.settled == len(given.turns)
    other = Conversation((Turn("user", (Text("other"),)), *turns[1:]))
    again, _ = RecallTurns(memory).run(other, made)
    assert again.conversation == RecallTurns(memory).run(other, None)[0].conversation != other


def test_a_schema_that_comes_later_explains_what_it_filled_in() -> None:
    schema = {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}}
    generated, back = (Turn("assistant", (ToolCall("f", it, "call_1"),)) for it in ("{}", '{"all": false}'))
    memory = TurnMemory(2**20)
    memory.remember(GeneratedTurn(generated, GenerationPrompt(), array("I", [1])))
    assert memory.find(back) is None
    assert memory.find(back, tools=(Tool("f", "", schema),)) is not None
    assert memory.find(back, tools=(Tool("f", "", {"type": "object"}),)) is None


CUT = '{"path": "a\\u00e9", "more": {"b": [1, 2.0, {}], "c": "tex'


@pytest.mark.parametrize(
    ("returned", "same"),
    [
        (CUT, True),
        ("", True),
        ("{}", True),
        ('{"path":"a\u00e9"}', True),
        ('{"path":"a\u00e9","more":{}}', True),
        ('{"path": "a\u00e9", "more": {"b": [1]}}', True),
        ('{"path": "a\u00e9", "more": {"b": [1, 2, {}]}}', True),
        ('{"path": "a"}', False),
        ('{"more": {"b": [1]}}', False),
        ('{"path": "a\u00e9", "more": {"b": [1, 20]}}', False),
        ('{"path": "a\u00e9", "more": {"b": [1, 2, {}], "c": "text"}}', False),
        ('{"path": "a\u00e9", "more": {"b": [1, 2, {}]}, "d": 4}', False),
        ("[]", False),
    ],
)
def test_a_cut_call_comes_back_with_the_values_that_were_complete(returned: str, same: bool) -> None:
    def calling(arguments: str, complete: bool) -> Turn:
        return Turn("assistant", (ToolCall("f", arguments, "c1", complete=complete),))

    assert is_equivalent_turn(calling(returned, True), calling(CUT, False)) is same
    assert is_part_of(calling(returned, True), calling(CUT, False)) is same
    whole = CUT + 't"}}'
    assert is_equivalent_turn(calling(returned, True), calling(whole, True)) is returned.endswith('"text"}}')


def test_a_long_cut_call_is_compared_in_linear_time() -> None:
    cut = '{"text": "' + '\\"' * 200_000
    [generated, back] = [Turn("assistant", (ToolCall("f", a, "c", complete=False),)) for a in (cut, "{}")]
    assert is_equivalent_turn(back, generated)


def test_calls_under_other_ids_are_identified_by_their_order() -> None:
    def calling(*calls: tuple[str, str]) -> Turn:
        return Turn("assistant", tuple(ToolCall(name, "{}", id) for name, id in calls))

    generated = calling(("f", "a"), ("g", "b"))
    assert is_equivalent_turn(calling(("g", "b"), ("f", "a")), generated)
    assert is_equivalent_turn(calling(("f", "x"), ("g", "y")), generated)
    assert not is_equivalent_turn(calling(("g", "x"), ("f", "y")), generated)
    assert not is_equivalent_turn(calling(("f", "a"), ("g", "y")), generated)


def test_trimmed_and_joined_text_is_the_same() -> None:
    generated = Turn("assistant", (Text("One.\n\n"), Text("Two.\n"), Text("\n"), Text("Three.")))
    for joined in ("One.Two.Three.", "One.\n\nTwo.\n\nThree.", " One.\nTwo.\n\n\nThree.\n"):
        assert is_equivalent_turn(Turn("assistant", (Text(joined),)), generated), joined
    assert not is_equivalent_turn(Turn("assistant", (Text("One.Two."),)), generated)
    assert not is_equivalent_turn(Turn("assistant", (Text("One.Two.Three.Four."),)), generated)


def test_a_place_is_what_was_written_before() -> None:
    user, generated = Turn("user", (Text("a"),)), turn("b", thought="c")
    place = HistoryDigests([user, generated])[2]
    assert place == HistoryDigests([user, turn(" b\n")])[2]
    assert place != HistoryDigests([generated, user])[2]
    assert place != HistoryDigests([user, turn("bc")])[2]
    first = HistoryDigests([user, generated])
    assert first.of_grown([user, generated], 2).of_grown([user, generated, user], 2)[2] == place == first[2]
    assert first.of_grown([user, generated, user], 2)[3] == HistoryDigests([user, generated, user])[3]
    assert (
        first.of_grown([generated, generated, user], 0)[3] == HistoryDigests([generated, generated, user])[3]
    )
    assert HistoryDigests([])[0] == HistoryDigests([user])[0]
