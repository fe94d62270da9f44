"""Which remembered line a prompt goes on from: agents with one beginning, forks, retries, samples of one prompt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from singletree.engines.engine import Chunk
from singletree.prompts.replay.turn_memory import TurnMemory

from .by_hand import EngineByHand
from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)
CHAT = "/v1/chat/completions"
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "ls", "arguments": {"n": 1}}\n</tool_call>'
SCRIPTS = {"a": f"{THOUGHT}I look.\n{CALL}", "b": f"{THOUGHT}Fine.", "c": "Bye."}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "You are a good agent."}
ENVIRONMENT = {"role": "user", "content": "<environment> here, today </environment> # AGENTS.md: be good."}
SESSIONS: list[dict[str, str]] = [{}, {"x-session-id": "s"}]
named_or_not = pytest.mark.parametrize("headers", SESSIONS, ids=["nameless", "named"])

Body = dict[str, Any]


class Agent:
    """A client on Chat Completions. ``said`` are its messages; ``courses`` how its prompts went on."""

    def __init__(self, served: Served, *output: Body, headers: Mapping[str, str] = {}) -> None:
        self.served, self.headers = served, {**headers, "x-singletree-explain": "1"}
        self.messages: list[Body] = list(output)
        self.courses: list[str] = []
        self.lost = 0

    async def ask(self, messages: list[Body] | None = None) -> Body:
        """The message that answers ``said``."""
        asked = {"model": MODEL, "messages": messages or self.messages, "tools": [TOOL]}
        reply = await self.served.client.post(CHAT, asked, headers=self.headers)
        assert reply.status == 200, reply.body
        self.courses.append(reply.headers["x-singletree-course"])
        self.lost += int(reply.headers["x-singletree-lost-tokens"])
        message: Body = reply.json["choices"][0]["message"]
        return message

    async def step(self) -> None:
        """One turn, and what follows it: a call's result, or the next question."""
        answer = await self.ask()
        self.messages.append(answer)
        for call in answer.get("tool_calls") or []:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"})
        if not answer.get("tool_calls"):
            self.messages.append({"role": "user", "content": f"question {len(self.messages)}"})


def task(text: str) -> Body:
    return {"role": "user", "content": f"[[script:a,b,c]] {text}"}


def remembering(**more: Any) -> Any:
    return serving(SCRIPTS, memory=TurnMemory(2**20), layout=LAYOUT, **more)


ORDERS = [
    (0, 1, 0, 1, 0, 1, 0, 1),
    (0, 0, 0, 1, 1, 0, 1, 1),
    (0, 1, 1, 0, 0, 0, 1, 1),
]


@named_or_not
@pytest.mark.parametrize("order", ORDERS)
async def test_agents_with_one_beginning_are_distinguished(headers: dict[str, str], order: Any) -> None:
    """A harness whose first message of the user is the environment, and the task a message of its own."""
    async with remembering() as served:
        agents = [
            Agent(served, SYSTEM, ENVIRONMENT, task(name), headers=headers) for name in ("mend", "search")
        ]
        for number in order:
            await agents[number].step()
    for agent in agents:
        assert agent.courses == ["first", *["appended"] * (len(agent.courses) - 1)]
        assert agent.lost == 0


@named_or_not
@pytest.mark.parametrize("order", ORDERS)
async def test_agents_with_the_same_examples_are_distinguished(headers: dict[str, str], order: Any) -> None:
    """Turns of the assistant that the model did not say stand before the task."""
    examples = [SYSTEM, {"role": "user", "content": "one?"}, {"role": "assistant", "content": "One."}]
    async with remembering() as served:
        agents = [Agent(served, *examples, task(name), headers=headers) for name in ("mend", "search")]
        for number in order:
            await agents[number].step()
    for agent in agents:
        assert agent.courses == ["first", *["appended"] * (len(agent.courses) - 1)]


@named_or_not
async def test_many_agents_with_one_beginning(headers: dict[str, str]) -> None:
    """As many as a session has lines; those without a name have a session each."""
    count = 24 if headers else 40
    async with remembering() as served:
        agents = [Agent(served, SYSTEM, ENVIRONMENT, task(str(n)), headers=headers) for n in range(count)]
        for agent in itertools.chain.from_iterable([agents] * 3):
            await agent.step()
    assert [agent.courses for agent in agents] == [["first", "appended", "appended"]] * count


@named_or_not
async def test_samples_of_one_prompt_go_on_each_from_its_own(headers: dict[str, str]) -> None:
    """The same first prompt, at once, and other answers."""
    count = 16
    engine = EngineByHand()
    async with serving(engine=engine, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        agents = [
            Agent(served, SYSTEM, {"role": "user", "content": "draw"}, headers=headers) for _ in range(count)
        ]
        for turn in range(3):
            asking = [asyncio.create_task(agent.ask()) for agent in agents]
            await asyncio.sleep(0.01)
            for letter in range(len(agents)):
                engine.emit(Chunk((65 + letter, 75 + turn), "stop"))
            for agent, answer in zip(agents, await asyncio.gather(*asking), strict=True):
                agent.messages += [answer, {"role": "user", "content": "more"}]
    assert [agent.courses for agent in agents] == [["first", "appended", "appended"]] * count
    assert sum(agent.lost for agent in agents) == 0


@named_or_not
@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_prompt_that_comes_again_later_is_a_retry(headers: dict[str, str], turns: int) -> None:
    """Samples one after the other, or a turn that is asked for again once others followed."""
    async with remembering() as served:
        agent = Agent(served, SYSTEM, ENVIRONMENT, task("mend"), headers=headers)
        prompts = []
        for _ in range(turns):
            prompts.append(list(agent.messages))
            await agent.step()
        before = agent.courses[:]
        for prompt in prompts:
            await agent.ask(prompt)
    again = agent.courses[len(before) :]
    assert again[0] == "back"
    assert set(again) <= {"back", "appended"}
    assert agent.lost == 0


@named_or_not
async def test_a_line_that_is_extended_as_a_whole_comes_before_its_fork(headers: dict[str, str]) -> None:
    async with remembering() as served:
        main = Agent(served, SYSTEM, ENVIRONMENT, task("mend"), headers=headers)
        await main.step()
        await main.step()
        fork = [*main.messages[:-1], {"role": "user", "content": "quite another thing"}]
        await main.step()
        for _ in range(3):  # forks that share the header of the next message with what follows
            await main.ask(fork)
            fork = [*fork[:-1], {"role": "user", "content": f"question {len(fork)} anew"}]
        await main.step()
    assert main.courses[-1] == "appended"
    assert "broken" not in main.courses


@pytest.mark.parametrize("memory", [0, 2**20])
async def test_a_task_that_was_changed_in_place_is_still_a_break(memory: int) -> None:
    """What the model did since comes back behind it, so it is the same conversation."""
    async with serving(SCRIPTS, memory=TurnMemory(memory) if memory else None, layout=LAYOUT) as served:
        agent = Agent(served, SYSTEM, ENVIRONMENT, task("mend"))
        for turn in range(3):
            await agent.step()
            agent.messages[2] = task(f"mend, {turn}")
        await agent.step()
    assert agent.courses == ["first", "broken", "broken", "broken"]


async def test_words_that_moved_behind_a_later_message_are_still_a_break() -> None:
    context = {"role": "user", "content": "<<<CONTEXT>>> nothing runs"}
    async with remembering() as served:
        agent = Agent(served, SYSTEM, ENVIRONMENT, context)
        await agent.ask()
        agent.messages = [SYSTEM, ENVIRONMENT, {"role": "user", "content": "by the way"}, context]
        await agent.ask()
    assert agent.courses == ["first", "broken"]
