"""Two conversations that begin alike and make the same call after different thoughts: each has its own, or none."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from clients.returned_turns import first_thought, request_of
from singletree.checking.returned_turns import PROTOCOLS, Mutation, TurnProtocol, as_given, no_thoughts
from singletree.conversation import Conversation, Reasoning, Text, ToolCall, ToolResult, Turn
from singletree.prompts.replay.recall import RecallTurns
from singletree.prompts.replay.turn_keys import HistoryDigests
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt, TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.testing.scripted_engine import ScriptedEngine

from .carrying import Client, Items, capsules, kept_in, last_prompt, unchanged, without_words
from .serving import MODEL, TOKENIZER, Served, serving
from .test_partial_turns import KEEPS_ALL, KIMI, LAYOUT, TOOLS

ASKED = "[[script:a,b,c]] How is it?"
A, B = "thought of A", "thought of B"


def kimi(thought: str, number: int = 0, words: str = "Looking.") -> str:
    call = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get:{number}<|tool_call_argument_begin|>"
        '{"a":  1}<|tool_call_end|><|tool_calls_section_end|>'
    )
    return f"<think>\n{thought}, {number}\n</think>\n\n{words}{call}"


def scripts(thought: str) -> dict[str, str]:
    return {"a": kimi(thought), "b": kimi(thought, 1), "c": "Fine."}


def server(thought: str, memory: TurnMemory, sealing: Any = None, engine: Any = None) -> Any:
    """The same server to its clients, on which the model thinks something else."""
    settings: dict[str, Any] = {"memory": memory, "layout": LAYOUT, "family": KIMI, "context_window": 2**16}
    if sealing is not None:
        settings["capsules"] = sealing
    return serving(scripts(thought), engine=engine, **settings)


class Moody:
    """An engine that thinks what it is told to, whatever the prompt."""

    def __init__(self) -> None:
        end = TOKENIZER.added_tokens["<|im_end|>"]
        self.thought = A
        self._engines = {
            thought: ScriptedEngine(TOKENIZER.encode, TOKENIZER.decode, scripts(thought), end_token_id=end)
            for thought in (A, B)
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines[self.thought], name)

    async def start(self) -> None:
        """Both."""
        for engine in self._engines.values():
            await engine.start()

    async def close(self) -> None:
        """Both."""
        for engine in self._engines.values():
            await engine.close()


class Plain:
    """A client with one habit that carries no capsules."""

    def __init__(self, protocol: TurnProtocol, habit: Mutation) -> None:
        self.protocol, self.habit = protocol, habit
        self.turns: Items = []

    async def go_on(self, served: Served) -> tuple[list[int], str]:
        """One more turn: the tokens of its prompt, and they as text."""
        given = request_of(self.protocol, ASKED, self.turns, TOOLS) | {"model": MODEL}
        answer = await served.client.post(self.protocol.path, given)
        assert answer.status == 200, answer.body
        self.turns += self.protocol.turn(self.habit(self.protocol.blocks(json.loads(answer.body))), False)
        prompt = last_prompt(served)
        return prompt, TOKENIZER.decode(prompt)


async def alternate(one: Any, other: Any, sealing: Any = None) -> list[tuple[list[int], str]]:
    """Three turns of each conversation in turn, on one server: the prompts of A, B, A, B, A, B."""
    made = []
    engine = Moody()
    async with server(A, TurnMemory(2**20), sealing, engine=engine) as served:
        for _ in range(3):
            for client, thought in ((one, A), (other, B)):
                engine.thought = thought
                made.append(await client.go_on(served))
    return made


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
async def test_without_reasoning_neither_gets_a_thought_that_is_not_certain(protocol: TurnProtocol) -> None:
    made = await alternate(Plain(protocol, no_thoughts), Plain(protocol, no_thoughts))
    for number, (_, text) in enumerate(made):
        assert (B if number % 2 == 0 else A) not in text, number
    for _, text in made[-2:]:
        assert text.count('{"a":  1}') == 2, "in the model's spelling"


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
async def test_returned_reasoning_identifies_the_turn(protocol: TurnProtocol) -> None:
    made = await alternate(Plain(protocol, as_given), Plain(protocol, first_thought))
    for thought, prompts in ((A, made[0::2]), (B, made[1::2])):
        for number in (0, 1):
            token_ids = TOKENIZER.encode(kimi(thought, number))
            (before, _), (after, _) = prompts[number : number + 2]
            assert kept_in(after, before, token_ids) == len(token_ids)


class Carrying(Client):
    """A client that carries capsules."""

    def __init__(self, path: str, habit: Callable[[Items], Items], *, stream: bool) -> None:
        super().__init__(path, ASKED, stream=stream)
        self.habit = habit

    async def go_on(self, served: Served) -> tuple[list[int], str]:
        """One more turn: the tokens of its prompt, and they as text."""
        self.take(self.habit(await self.ask(served)))
        prompt = last_prompt(served)
        return prompt, TOKENIZER.decode(prompt)


def unreasoned(items: Items) -> Items:
    return [item for item in items if item["type"] not in ("thinking", "reasoning")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("habit", [unchanged, without_words])
async def test_each_has_its_own_thoughts_where_capsules_come_along(
    path: str, habit: Callable[[Items], Items], stream: bool
) -> None:
    one, other = (Carrying(path, habit, stream=stream) for _ in range(2))
    made = await alternate(one, other, capsules())
    for thought, prompts in ((A, made[0::2]), (B, made[1::2])):
        for number in (0, 1):
            token_ids = TOKENIZER.encode(kimi(thought, number))
            (before, _), (after, _) = prompts[number : number + 2]
            assert kept_in(after, before, token_ids) == len(token_ids), (thought, number)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_the_one_with_capsules_has_its_own_and_the_other_has_none(path: str) -> None:
    made = await alternate(
        Carrying(path, without_words, stream=False), Carrying(path, unreasoned, stream=False), capsules()
    )
    assert A in made[2][1]
    assert A in made[4][1]
    assert not any(A in text for _, text in made[1::2])
    assert not any(B in text for _, text in made[0::2])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("key", ["the same", "another"])
async def test_a_capsule_counts_more_than_what_is_remembered_in_its_place(path: str, key: str) -> None:
    """Only the other conversation's turn is remembered here. A capsule that does not open brings no thought at all."""
    client, other = (Carrying(path, without_words, stream=False) for _ in range(2))
    async with server(A, TurnMemory(2**20), capsules()) as served:
        await client.go_on(served)
    memory = TurnMemory(2**20)
    async with server(B, memory, capsules() if key == "the same" else capsules(b"o" * 32)) as served:
        await other.go_on(served)
        _, text = await client.go_on(served)
    assert (A in text) is (key == "the same")
    assert B not in text


async def test_the_same_answer_after_other_thoughts() -> None:
    """No calls: a turn is known by its words and its place alone."""
    template = ChatTemplate(KEEPS_ALL)
    memory, layout = TurnMemory(2**20), template.layout(TOKENIZER)
    texts = []
    clients = [Plain(PROTOCOLS[1], no_thoughts) for _ in range(2)]
    for _ in range(2):
        for client, thought in zip(clients, (A, B), strict=True):
            output = {"a": f"<think>\n{thought}\n</think>\n\nDone.", "b": "Fine."}
            async with serving(output, memory=memory, layout=layout, template=template) as served:
                texts.append((await client.go_on(served))[1])
    assert not any(thought in text for text in texts for thought in (A, B))


def conversation() -> Conversation:
    call = ToolCall("f", "{}", "functions.f:0")
    result = Turn("tool", (ToolResult(call.id, (Text("ok"),)),))
    return Conversation((Turn("user", (Text("a"),)), Turn("assistant", (call,)), result))


def generated_turn(thought: str, tokens: int = 1, words: str = "") -> GeneratedTurn:
    given = conversation()
    turn = Turn("assistant", (Reasoning(thought), Text(words), *given.turns[1].tool_calls))
    return GeneratedTurn(turn, GenerationPrompt(), array("I", [tokens] * 500), HistoryDigests(given.turns)[1])


def thought_of(memory: TurnMemory) -> str:
    recalled, _ = RecallTurns(memory).run(conversation(), None)
    return recalled.conversation.turns[1].reasoning


def test_the_same_turn_generated_twice_is_no_rival() -> None:
    memory = TurnMemory(2**20)
    for tokens in (1, 1, 2):
        memory.remember(generated_turn("one", tokens))
        assert thought_of(memory) == "one"
    memory.remember(generated_turn("one ", 3))
    assert thought_of(memory) == "one "


def test_a_rival_that_the_client_may_mean_counts_even_if_it_wrote_more() -> None:
    memory = TurnMemory(2**20)
    memory.remember(generated_turn("one"))
    memory.remember(generated_turn("two", words="Looking."))
    assert thought_of(memory) == ""


def test_a_rival_that_was_forgotten_counts_too() -> None:
    """It may be the one that comes back."""
    one, two = generated_turn("one"), generated_turn("two", 2)
    memory = TurnMemory(2**20)
    memory.remember(one)
    room = memory.bytes
    memory = TurnMemory(room)
    memory.remember(one)
    memory.remember(two)
    assert memory.bytes == room
    assert thought_of(memory) == ""


def test_rivals_are_bounded() -> None:
    memory = TurnMemory(2**24)
    sizes = []
    for number in range(40):
        memory.remember(generated_turn(f"thought {number:02}", number))
        sizes.append(memory.bytes)
    assert sizes[-1] == sizes[-2] == sizes[10]
    assert thought_of(memory) == ""
    found = memory.find(generated_turn("thought 39").turn, HistoryDigests(conversation().turns)[1])
    assert found is not None
    assert found.turn.reasoning == "thought 39"


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    memory = TurnMemory(20_000)
    for number in range(300):
        known = generated_turn(f"thought {number}", number)
        memory.remember(replace(known, history_digest=f"place {number % 7} of {number % 50}"))
        memory.remember(generated_turn("x", number % 3))
    slots = [slot for rivals in memory._rivals.values() for slot in rivals]
    assert sorted(slots) == sorted(memory._by_slot)
    assert memory._incomplete <= memory._rivals.keys()
    assert memory.bytes == sum(entry.size for entry in memory._entries.values()) <= 20_000


@pytest.mark.parametrize("room", [4_000, 20_000, 10**6])
def test_what_is_still_remembered_is_what_a_search_would_find_again(room: int) -> None:
    """No rival came, none was forgotten, and it is in the memory: then nobody searches the turn again."""
    memory, chance = TurnMemory(room), random.Random(room)
    turns = []
    for _ in range(400):
        known = generated_turn(f"thought {chance.randint(0, 3)}", chance.randint(0, 3))
        known = replace(known, history_digest=f"place {chance.randint(0, 60)}")
        turns.append(known)
        memory.remember(chance.choice(turns[-20:]), behind=chance.sample(turns, min(3, len(turns))))
        memory.mark_used(chance.sample(turns, 2 if len(turns) > 1 else 1))
        for each in turns[-30:]:
            found, is_complete = memory.find_candidates(each.turn, each.history_digest, lambda *_: True)
            is_alone = is_complete and len(found) == 1 and found[0] is each
            assert memory.still_remembered({0: each}, [each.turn]) == ({0: each} if is_alone else {})
    came = [known.turn for known in turns]
    alone = {at: each for at, each in enumerate(turns) if memory.still_remembered({at: each}, came)}
    assert memory.still_remembered(alone, came) == alone
    assert memory.still_remembered(dict(enumerate(turns)), came) == alone
    assert memory._certain <= memory._entries.keys()


async def test_an_id_of_the_models_beside_one_of_the_servers_is_in_every_conversation() -> None:
    """The model gives two calls one id, so the server makes one for the second."""
    calls = "".join(kimi(A).partition("<|tool_calls_section_begin|>")[1:])
    twice = f"<think>\n{A}\n</think>\n\n{calls}{calls}"
    memory = TurnMemory(2**20)
    given: dict[str, Any] = {"memory": memory, "layout": LAYOUT, "family": KIMI}
    async with serving({"a": twice, "b": kimi(B), "c": "Fine."}, **given) as served:
        first = Plain(PROTOCOLS[1], no_thoughts)
        await first.go_on(served)
        other = {"role": "user", "content": "[[script:c]] Something else"}
        call = {
            "id": "functions.get:0",
            "type": "function",
            "function": {"name": "get", "arguments": '{"a":1}'},
        }
        answer = {"role": "tool", "tool_call_id": "functions.get:0", "content": "ok"}
        messages = [other, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
        reply = await served.client.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
        assert reply.status == 200, reply.body
        assert A not in TOKENIZER.decode(last_prompt(served))


def test_a_turn_that_is_remembered_twice_is_held_once() -> None:
    memory, one = TurnMemory(2**20), generated_turn("one")
    memory.remember(one)
    size = memory.bytes
    memory.remember(one)
    assert memory.bytes == size
    assert thought_of(memory) == "one"
