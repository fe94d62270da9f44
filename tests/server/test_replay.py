"""A turn comes back as it was: the tokens of turn N are the prefix of turn N+1, whatever a harness made of the JSON."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from singletree.conversation import ToolCall, Turn
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt, TurnMemory

from .serving import MODEL, SWITCHABLE, TEMPLATE, TOKENIZER, Served, serving, template_settings

ARGUMENTS = '{"unit": "celsius",  "city": "Par\\u00eds", "days":3.0}'
CALL = f'<tool_call>\n{{"name": "get_weather",  "arguments": {ARGUMENTS}}}\n</tool_call>'
MODEL_OUTPUT = f"<think>\nI need the weather.\n\nAnd more. \n</think>\n\nLet me check.\n{CALL}"
INTERLEAVED = f"<think>\nFirst.\n</think>\n\nChecking.\n{CALL}\n<think>\nNow the other.\n</think>\n\n{CALL}"
TOOL = {"name": "get_weather", "description": "", "input_schema": {"type": "object"}}
LAYOUT = TEMPLATE.layout(TOKENIZER)

Mutation = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def as_given(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return blocks


def calls_last(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(blocks, key=lambda b: b["type"] == "tool_use")


def trimmed(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.strip() if isinstance(v, str) else v for k, v in b.items()} for b in blocks]


def joined_thoughts(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    thought = "".join(b["thinking"].strip() for b in blocks if b["type"] == "thinking")
    return [
        {"type": "thinking", "thinking": thought, "signature": ""},
        *(b for b in blocks if b["type"] != "thinking"),
    ]


def no_thoughts(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [b for b in blocks if b["type"] != "thinking"]


def sorted_keys(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [b | {"input": dict(sorted(b["input"].items()))} if b["type"] == "tool_use" else b for b in blocks]


def stripped_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [b | {"id": b["id"].replace("_", "")} if b["type"] == "tool_use" else b for b in blocks]


MUTATIONS = [as_given, calls_last, trimmed, joined_thoughts, no_thoughts, sorted_keys, stripped_ids]


async def ask(served: Served, messages: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    given = {"model": MODEL, "max_tokens": 4000, "messages": messages, "tools": [TOOL], **more}
    answer = await served.client.post("/v1/messages", given)
    assert answer.status == 200, answer.body
    content: list[dict[str, Any]] = json.loads(answer.body)["content"]
    return content


def results(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    found = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "Sunny."}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    return {"role": "user", "content": found[::-1]}


async def two_turns(output: str, mutate: Mutation, **settings: Any) -> tuple[list[int], list[int], list[int]]:
    """(prompt of turn 1, what was generated, prompt of turn 2)."""
    first = {"role": "user", "content": "[[script:a,b]] How is it?"}
    memory = TurnMemory(2**20)
    async with serving({"a": output, "b": "Fine."}, memory=memory, layout=LAYOUT, **settings) as served:
        blocks = mutate(await ask(served, [first]))
        await ask(served, [first, {"role": "assistant", "content": blocks}, results(blocks)])
        one, two = (list(record.prompt_token_ids) for record in served.engine.log)
    return one, TOKENIZER.encode(output), two


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("output", [MODEL_OUTPUT, INTERLEAVED], ids=["one", "interleaved"])
async def test_every_generated_token_is_in_place(output: str, mutate: Mutation) -> None:  # C3 C5
    one, generated, two = await two_turns(output, mutate)
    assert two[: len(one)] == one
    assert two[len(one) : len(one) + len(generated)] == generated


async def test_replayed_turns_are_counted() -> None:
    first = {"role": "user", "content": "[[script:a,b]] How is it?"}
    async with serving({"a": MODEL_OUTPUT, "b": "Fine."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        blocks = await ask(served, [first])
        await ask(served, [first, {"role": "assistant", "content": blocks}, results(blocks)])
        reported = served.service.tracing.exposition().decode()
    assert f'singletree_replayed_turns_total{{model="{MODEL}"}} 1.0' in reported


async def test_an_edited_turn_is_rendered_as_edited() -> None:
    def edit(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [b | {"text": "Let me NOT check."} if b["type"] == "text" else b for b in blocks]

    _, generated, two = await two_turns(MODEL_OUTPUT, edit)
    text = TOKENIZER.decode(two)
    assert "Let me NOT check." in text
    assert "Let me check." not in text
    assert TOKENIZER.decode(generated) not in text


async def test_reasoning_is_restored_only_where_it_may_be() -> None:
    _, _, two = await two_turns(MODEL_OUTPUT, no_thoughts, restore_reasoning=False)
    assert "I need the weather." not in TOKENIZER.decode(two)


async def test_reasoning_is_not_restored_against_the_clients_word() -> None:
    first = {"role": "user", "content": "[[script:a,b]] How is it?"}
    model = template_settings(SWITCHABLE)
    async with serving({"a": MODEL_OUTPUT, "b": "Fine."}, memory=TurnMemory(2**20), **model) as served:
        blocks = no_thoughts(await ask(served, [first]))
        messages: list[dict[str, Any]] = [first, {"role": "assistant", "content": blocks}, results(blocks)]
        await ask(served, messages, thinking={"type": "disabled"})
        text = TOKENIZER.decode(served.engine.log[1].prompt_token_ids)
    assert "I need the weather." not in text


async def test_without_a_memory_the_turn_is_rendered() -> None:
    first = {"role": "user", "content": "[[script:a,b]] How is it?"}
    async with serving({"a": MODEL_OUTPUT, "b": "Fine."}) as served:
        blocks = await ask(served, [first])
        await ask(served, [first, {"role": "assistant", "content": blocks}, results(blocks)])
        text = TOKENIZER.decode(served.engine.log[1].prompt_token_ids)
    assert MODEL_OUTPUT not in text
    assert "get_weather" in text


async def test_turns_of_another_session_are_not_taken_for_this_one() -> None:
    """Two calls alike but for their ids are two turns; each comes back with its own spelling."""
    memory = TurnMemory(2**20)
    other = MODEL_OUTPUT.replace('"days":3.0', '"days": 3.0')
    first = {"role": "user", "content": "[[script:a,b]] How is it?"}
    second = {"role": "user", "content": "[[script:c,b]] How is it?"}
    async with serving({"a": MODEL_OUTPUT, "b": "Fine.", "c": other}, memory=memory, layout=LAYOUT) as served:
        mine, yours = await ask(served, [first]), await ask(served, [second])
        await ask(served, [first, {"role": "assistant", "content": mine}, results(mine)])
        await ask(served, [second, {"role": "assistant", "content": yours}, results(yours)])
        texts = [TOKENIZER.decode(record.prompt_token_ids) for record in served.engine.log]
    assert MODEL_OUTPUT in texts[2]
    assert other in texts[3]


def test_memory_is_bounded() -> None:
    memory = TurnMemory(20_000)
    for i in range(100):
        turn = Turn("assistant", (ToolCall("f", "{}", f"call{i}"),))
        memory.remember(GeneratedTurn(turn, GenerationPrompt(), array("I", range(200))))
        assert memory.bytes <= 20_000
    assert memory.find(Turn("assistant", (ToolCall("f", "{}", "call_99"),))) is not None
    assert memory.find(Turn("assistant", (ToolCall("f", "{}", "call0"),))) is None


def chat_turn(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a chat harness sends back: merged, trimmed, arguments written again."""
    message = body["choices"][0]["message"]
    calls = [
        call
        | {
            "function": call["function"]
            | {"arguments": json.dumps(json.loads(call["function"]["arguments"]))}
        }
        for call in message["tool_calls"]
    ]
    messages = {"role": "assistant", "content": message["content"].strip(), "tool_calls": calls}
    return [messages, *({"role": "tool", "tool_call_id": call["id"], "content": "Sunny."} for call in calls)]


def responses_turn(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a Responses harness sends back that carries no reasoning."""
    items = [item for item in body["output"] if item["type"] != "reasoning"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Sunny."}
        for item in items
        if item["type"] == "function_call"
    ]
    return [*items, *results]


def messages_turn(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What Claude Code sends back."""
    blocks = calls_last(body["content"])
    return [{"role": "assistant", "content": blocks}, results(blocks)]


FUNCTION = {"name": "get_weather", "description": "", "parameters": {"type": "object"}}
PATHS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], list[dict[str, Any]]]]] = {
    "/v1/messages": ("messages", {"tools": [TOOL], "max_tokens": 4000}, messages_turn),
    "/v1/chat/completions": ("messages", {"tools": [{"type": "function", "function": FUNCTION}]}, chat_turn),
    "/v1/responses": ("input", {"tools": [{"type": "function", **FUNCTION}]}, responses_turn),
}


class Session:
    """A harness on one protocol. ``said`` is all that was said so far."""

    def __init__(self, served: Served, path: str) -> None:
        self._served, self._path = served, path
        self._field, self._settings, self._returned = PATHS[path]
        self.messages: list[dict[str, Any]] = []

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    async def go_on(self) -> None:
        """One turn more, its calls answered."""
        self.messages += self._returned(await self.send(self.messages))

    async def send(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        given = {"model": MODEL, self._field: messages, **self._settings}
        answer = await self._served.client.post(self._path, given)
        assert answer.status == 200, answer.body
        body: dict[str, Any] = json.loads(answer.body)
        return body


def prompts(served: Served) -> list[list[int]]:
    return [list(record.prompt_token_ids) for record in served.engine.log]


@pytest.mark.parametrize("path", PATHS)
async def test_a_tool_loop_is_only_appended_to(path: str) -> None:  # C3 C5
    scripts = {"a": MODEL_OUTPUT, "b": INTERLEAVED, "c": MODEL_OUTPUT.replace("check", "look"), "d": "Fine."}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        session = Session(served, path)
        session.ask("[[script:a,b,c,d]] How is it?")
        for _ in range(3):
            await session.go_on()
        await session.send(session.messages)
        written_prompts = prompts(served)
    for before, after, output in zip(written_prompts, written_prompts[1:], scripts.values(), strict=False):
        whole = before + TOKENIZER.encode(output)
        assert after[: len(whole)] == whole


@pytest.mark.parametrize("path", PATHS)
async def test_a_fork_and_a_resumed_session_replay(path: str) -> None:
    async with serving(
        {"a": MODEL_OUTPUT, "b": INTERLEAVED}, memory=TurnMemory(2**20), layout=LAYOUT
    ) as served:
        session = Session(served, path)
        session.ask("[[script:a,b]] How is it?")
        await session.go_on()
        fork = list(session.messages)
        await session.go_on()
        await session.send(fork)  # the same turn again, from its first results on
        await session.send(session.messages)
        one, two, forked, resumed = prompts(served)
    assert forked == two
    assert resumed[: len(two)] == two
    assert two[: len(one)] == one


@pytest.mark.parametrize("path", PATHS)
async def test_sub_agents_replay_beside_their_session(path: str) -> None:  # C3
    """They share its head and its tools, and run in turn with it; a side request comes between."""
    scripts = {"a": MODEL_OUTPUT, "b": INTERLEAVED, "c": MODEL_OUTPUT.replace("check", "look"), "d": "Fine."}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        agents = [Session(served, path) for _ in range(3)]
        reported: list[list[list[int]]] = [[] for _ in agents]
        for number, agent in enumerate(agents):
            agent.ask(f"[[script:a,b,c,d]] Task {number}: how is it?")
        for _ in range(3):
            for agent, its in zip(agents, reported, strict=True):
                await agent.go_on()
                its.append(prompts(served)[-1])
            await agents[0].send([{"role": "user", "content": "Write a title."}])
    for its in reported:
        for before, after, output in zip(its, its[1:], scripts.values(), strict=False):
            whole = before + TOKENIZER.encode(output)
            assert after[: len(whole)] == whole


@pytest.mark.parametrize("path", PATHS)
async def test_a_compacted_session_replays_what_is_left(path: str) -> None:
    """The beginning is gone and a summary stands for it; the last turn stays as the model wrote it."""
    async with serving({"a": MODEL_OUTPUT, "b": "Fine."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        session = Session(served, path)
        session.ask("[[script:a,b]] How is it?")
        await session.go_on()
        session.messages[0] = {"role": "user", "content": "Summary: they asked for the weather."}
        await session.send(session.messages)
        text = TOKENIZER.decode(prompts(served)[1])
    assert MODEL_OUTPUT in text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_an_open_turn_at_the_end_does_not_hide_the_others(path: str) -> None:
    async with serving({"a": MODEL_OUTPUT, "b": "ne."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        session = Session(served, path)
        session.ask("[[script:a,b]] How is it?")
        await session.go_on()
        await session.send([*session.messages, {"role": "assistant", "content": "It is fi"}])
        text = TOKENIZER.decode(prompts(served)[1])
    assert MODEL_OUTPUT in text
    assert text.endswith("It is fi")
