"""What clients are known to make of a turn, and which cause ``explain`` names for it.

A turn that the server remembers may come back whole whatever the client left out; then there is no break. Where it is
not remembered (no memory, another replica, evicted), the cause has to be the client's habit, and what the cure asks for
has to gain tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from singletree import families
from singletree.prefix_breaks.causes import CAUSES
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import load_chat_template
from singletree.testing import byte_model
from singletree.testing.scripted_engine import ScriptedEngine

from .carrying import Client as Carrier
from .forging import speech, vocabulary
from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)
CHAT = "/v1/chat/completions"
FIRST, LAST = "I need the list of files.", "And now the other one."
THOUGHT = f"<think>\n{FIRST}\n</think>\n\n"
WORDS = "I look."


def call(number: int) -> str:
    return f'<tool_call>\n{{"name": "ls", "arguments": {{"n": {number}, "at": "a b"}}}}\n</tool_call>'


TURN = f"{THOUGHT}{WORDS}\n{call(1)}\n{call(2)}"
INTERLEAVED = f"{THOUGHT}{WORDS}\n{call(1)}\n<think>\n{LAST}\n</think>\n{call(2)}"
SCRIPTS = {"turn": TURN, "two": INTERLEAVED, "end": f"{THOUGHT}Fine."}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}

Body = dict[str, Any]
Habit = Callable[[Body], list[Body]]


def whole(message: Body) -> list[Body]:
    return [message]


def without(*fields: str) -> Habit:
    """What LangChain, CrewAI, Semantic Kernel, Agno and others leave out."""
    return lambda message: [message | dict.fromkeys(fields)]


def with_thought(thought: str) -> Habit:
    """One thought of two: Copilot CLI, Grok Build, Haystack."""
    return lambda message: [message | {"reasoning_content": thought}]


def thought_as_words(message: Body) -> list[Body]:
    """AutoGen."""
    return [message | {"reasoning_content": None, "content": f"{FIRST}\n{message['content']}"}]


def thought_in_tags(message: Body) -> list[Body]:
    content = f"<think>\n\n{FIRST}\n\n</think>\n\n{message['content']}"
    return [message | {"reasoning_content": None, "content": content}]


def in_two_messages(message: Body) -> list[Body]:
    """Open Interpreter, goose."""
    calls = message.get("tool_calls")
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return [fields, {"role": "assistant", "content": None, "tool_calls": calls}] if calls else [fields]


def first_call_alone(message: Body) -> list[Body]:
    """gptme."""
    return [message | {"tool_calls": (message.get("tool_calls") or [])[:1]}]


def respelled(message: Body) -> list[Body]:
    calls = []
    for each in message.get("tool_calls") or []:
        spelled = json.dumps(json.loads(each["function"]["arguments"]), indent=1)
        calls.append(each | {"function": each["function"] | {"arguments": spelled}})
    return [message | {"tool_calls": calls}]


def calls_in_python(message: Body) -> list[Body]:
    """smolagents, which joins neighbouring messages of one role with a line break."""
    calls = [
        {
            "id": each["id"],
            "type": "function",
            "function": each["function"] | {"arguments": json.loads(each["function"]["arguments"])},
        }
        for each in message.get("tool_calls") or []
    ]
    if not calls:
        return [message]
    return [{"role": "assistant", "content": f"{message['content']}\nCalling tools:\n{calls}"}]


def interrupted(message: Body) -> list[Body]:
    """A reminder between the words and the calls."""
    calls = message.get("tool_calls")
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    reminder = {"role": "user", "content": "Go on with the plan."}
    return (
        [fields, reminder, {"role": "assistant", "content": None, "tool_calls": calls}] if calls else [fields]
    )


def other_words(message: Body) -> list[Body]:
    return [message | {"content": "I looked."}]


HABITS: dict[str, tuple[str, Habit, str]] = {
    "reasoning left out": ("turn", without("reasoning_content"), "reasoning_left_out"),
    "both thoughts left out": ("two", without("reasoning_content"), "reasoning_left_out"),
    "first thought alone": ("two", with_thought(FIRST), "answer_in_part"),
    "last thought alone": ("two", with_thought(LAST), "answer_in_part"),
    "no words": ("turn", without("content"), "answer_in_part"),
    "calls alone": ("turn", without("content", "reasoning_content"), "answer_in_part"),
    "first call alone": ("turn", first_call_alone, "answer_in_part"),
    "thought as words": ("turn", thought_as_words, "reasoning_as_text"),
    "thought in tags": ("turn", thought_in_tags, "reasoning_as_text"),
    "calls in Python": ("turn", calls_in_python, "calls_as_text"),
    "interrupted": ("turn", interrupted, "answer_interrupted"),
    "other spelling": ("turn", respelled, "answer_respelled"),
    "other words": ("turn", other_words, "answer_rewritten"),
}
"""Habit -> the turn that is generated, what the client makes of it, and the cause where nothing is remembered."""


class Client:
    """Carries a conversation on Chat Completions as its habit has it."""

    def __init__(self, served: Served, question: str, habit: Habit) -> None:
        self._served, self._habit = served, habit
        self.messages: list[Body] = [{"role": "user", "content": question}]

    async def step(self, **more: Any) -> dict[str, str]:
        """One turn and its results, or the next question; the headers of its answer."""
        asked = {"model": MODEL, "messages": self.messages, "tools": [TOOL], **more}
        reply = await self._served.client.post(
            CHAT, asked, headers={"x-session-id": "s", "x-singletree-explain": "1"}
        )
        assert reply.status == 200, reply.body
        message = reply.json["choices"][0]["message"]
        returned = self._habit(message)
        self.messages += returned
        calls = [each for one in returned for each in one.get("tool_calls") or []]
        self.messages += [{"role": "tool", "tool_call_id": each["id"], "content": "a.txt"} for each in calls]
        if not calls:
            self.messages.append({"role": "user", "content": "and now?"})
        return dict(reply.headers)


def cause(headers: dict[str, str]) -> str:
    return headers.get("x-singletree-break", "").partition(";")[0]


async def second_prompt(script: str, habit: Habit, *, memory: int, steps: int = 2) -> dict[str, str]:
    """The headers of the last of ``steps`` prompts."""
    kept = TurnMemory(memory) if memory else None
    async with serving(SCRIPTS, memory=kept, layout=LAYOUT) as served:
        client = Client(served, f"[[script:{script},end,end]] hi", habit)
        for _ in range(steps):
            headers = await client.step()
    return headers


@pytest.mark.parametrize("name", HABITS)
async def test_a_habit_is_named_where_the_turn_is_not_remembered(name: str) -> None:
    script, habit, expected = HABITS[name]
    headers = await second_prompt(script, habit, memory=0)
    assert headers["x-singletree-course"] == "broken"
    assert headers["x-singletree-break"].startswith(expected)


async def test_neighbouring_messages_are_one_turn_without_any_memory() -> None:
    headers = await second_prompt("turn", in_two_messages, memory=0)
    assert headers["x-singletree-course"] == "appended"


@pytest.mark.parametrize("name", HABITS)
async def test_a_habit_is_no_break_where_the_turn_is_put_back(name: str) -> None:
    script, habit, expected = HABITS[name]
    headers = await second_prompt(script, habit, memory=2**20)
    if expected in ("answer_rewritten", "calls_as_text", "answer_interrupted"):
        assert cause(headers) == expected, "it is rendered as the client has it"
    else:
        assert headers["x-singletree-course"] == "appended"


@pytest.mark.parametrize("name", [name for name, row in HABITS.items() if row[0] == "turn"])
async def test_what_the_cure_asks_for_gains_tokens(name: str) -> None:
    """All of the turn in its place or, for a spelling, a memory that holds the turn."""
    script, habit, expected = HABITS[name]
    before = await second_prompt(script, habit, memory=0)
    if expected == "answer_respelled":
        after = await second_prompt(script, habit, memory=2**20)
    else:
        after = await second_prompt(script, whole, memory=0)
    assert after["x-singletree-course"] == "appended"
    assert int(after["x-singletree-matched-tokens"]) > int(before["x-singletree-matched-tokens"])


async def test_two_thoughts_that_chat_has_no_order_for_need_the_memory() -> None:
    assert cause(await second_prompt("two", whole, memory=0)) == "answer_respelled"
    assert (await second_prompt("two", whole, memory=2**20))["x-singletree-course"] == "appended"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("thinking", "reasoning"), "reasoning_left_out"),
        (("text", "message"), "answer_in_part"),
        (("thinking", "reasoning", "text", "message"), "answer_in_part"),
        ((), ""),
    ],
    ids=["reasoning left out", "words left out", "calls alone", "whole"],
)
async def test_habits_are_named_on_the_other_protocols(
    path: str, kinds: tuple[str, ...], expected: str
) -> None:
    async with serving(SCRIPTS, layout=LAYOUT) as served:
        client = Carrier(path, "[[script:turn,end]] hi", stream=False)
        client.take([item for item in await client.ask(served) if item["type"] not in kinds])
        await client.ask(served)
        [session] = served.service.sessions
    broken = session.steps[-1].broken
    assert ("" if broken is None else broken.cause) == expected


@pytest.mark.parametrize("form", ["{}\n", "<think>\n{}\n</think>\n\n"], ids=["words", "tags"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_each_thought_of_a_turn_as_words_in_its_place(path: str, form: str) -> None:
    """Chat has one field for all of them; these protocols have the order, so words stand between two thoughts."""

    def as_words(item: Body) -> Body:
        if item["type"] == "thinking":
            return {"type": "text", "text": form.format(item["thinking"].strip())}
        if item["type"] == "reasoning":
            written = "".join(part["text"] for part in item["content"])
            content = [{"type": "output_text", "text": form.format(written.strip())}]
            return {"type": "message", "role": "assistant", "content": content}
        return item

    async with serving(SCRIPTS, layout=LAYOUT) as served:
        client = Carrier(path, "[[script:two,end]] hi", stream=False)
        client.take([as_words(item) for item in await client.ask(served)])
        await client.ask(served)
        [session] = served.service.sessions
    broken = session.steps[-1].broken
    assert broken is not None
    assert broken.cause == "reasoning_as_text"


FORGETFUL = byte_model.CHAT_TEMPLATE.replace(
    "{% if message.reasoning_content %}",
    "{% if message.reasoning_content and not (messages[-1].role == 'user' and not loop.last) %}",
)
"""Drops all reasoning at a new question."""


@pytest.mark.parametrize("memory", [0, 2**20])
@pytest.mark.parametrize("habit", [whole, without("reasoning_content")], ids=["whole", "without"])
async def test_a_template_that_drops_thoughts_is_blamed_for_that_alone(habit: Habit, memory: int) -> None:
    """At a new question, where it would drop the thought whoever carried it."""
    template = load_chat_template(TOKENIZER, FORGETFUL)
    given: dict[str, Any] = {"template": template, "layout": template.layout(TOKENIZER)}
    async with serving(SCRIPTS, memory=TurnMemory(memory) if memory else None, **given) as served:
        client = Client(served, "[[script:turn,end]] hi", habit)
        causes = [cause(await client.step()) for _ in range(3)]
    in_loop = "" if habit is whole or memory else "reasoning_left_out"
    # Without its thought the turn of the loop stands in the prompt already as it will be printed then.
    assert causes == ["", in_loop, "thinking_dropped"]


OPENS = "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
"""A generation prompt that opens the reasoning, as that of many newer models does."""


@pytest.mark.parametrize("memory", [0, 2**20])
@pytest.mark.parametrize("habit", [whole, without("reasoning_content")], ids=["whole", "without"])
@pytest.mark.parametrize("source", [FORGETFUL, byte_model.CHAT_TEMPLATE], ids=["drops it", "keeps it"])
async def test_reasoning_of_the_next_turn_is_not_that_of_a_short_answer(
    source: str, habit: Habit, memory: int
) -> None:
    """The answer is so short that the next turn's opened reasoning stands right behind the break."""
    template = load_chat_template(TOKENIZER, source.rpartition("{%- if add_generation_prompt")[0] + OPENS)
    given: dict[str, Any] = {"template": template, "layout": template.layout(TOKENIZER)}
    fields = {"end": "It is.\n</think>\n\nOk."}
    async with serving(fields, memory=TurnMemory(memory) if memory else None, **given) as served:
        client = Client(served, "[[script:end]] hi", habit)
        causes = [cause(await client.step()) for _ in range(3)]
    if source == FORGETFUL:
        assert causes[1:] == ["thinking_dropped"] * 2
    else:
        assert causes[1:] == ["" if habit is whole or memory else "reasoning_left_out"] * 2


CHANNELS = """\
{%- for m in messages %}{% if m.role == 'assistant' -%}
{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor -%}
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""Drops reasoning as gpt-oss's template does."""


@pytest.mark.parametrize("habit", [whole, without("reasoning_content")], ids=["whole", "without"])
async def test_a_marker_of_reasoning_that_both_prompts_begin_alike(habit: Habit) -> None:
    """The prompts differ inside the marker: each message of such a turn begins with ``<|channel|>``."""
    marks = ("start", "end", "message", "channel", "return", "call")
    tokenizer = vocabulary({f"<|{mark}|>": True for mark in marks}, "<|return|>")
    spoken = speech(tokenizer, CHANNELS, families.get("gpt_oss"))
    fields = {
        "end": "<|channel|>analysis<|message|>It is.<|end|><|start|>assistant<|channel|>final<|message|>Ok."
    }
    engine = ScriptedEngine(
        tokenizer.encode,
        tokenizer.decode,
        fields,
        end_token_id=tokenizer.added_tokens["<|return|>"],
        default=fields["end"],
    )
    given: dict[str, Any] = {"tokenizer": tokenizer, "template": spoken.template, "layout": spoken.layout}
    async with serving(engine=engine, family=spoken.family, **given) as served:
        client = Client(served, "hi", habit)
        causes = [cause(await client.step()) for _ in range(3)]
    assert causes == ["", "thinking_dropped", "thinking_dropped"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [(FORGETFUL, "thinking_dropped"), (byte_model.CHAT_TEMPLATE, "reasoning_removed")],
    ids=["template drops it", "template keeps it"],
)
async def test_a_client_that_clears_thoughts_is_blamed_where_the_template_would_keep_them(
    source: str, expected: str
) -> None:
    """At a new question the client takes out what it had sent back before."""
    template = load_chat_template(TOKENIZER, source)
    given: dict[str, Any] = {"template": template, "layout": template.layout(TOKENIZER)}
    async with serving(SCRIPTS, **given) as served:
        client = Client(served, "[[script:turn,end]] hi", whole)
        causes = [cause(await client.step()) for _ in range(2)]
        for message in client.messages:
            message.pop("reasoning_content", None)
        causes.append(cause(await client.step()))
    assert causes == ["", "", expected]


SWITCHED = byte_model.CHAT_TEMPLATE.replace(
    "{% if message.reasoning_content %}",
    "{% if message.reasoning_content and (preserve_thinking or not (messages[-1].role == 'user' and not loop.last)) %}",
)
"""Keeps it if it is told to."""


@pytest.mark.parametrize("source", [FORGETFUL, SWITCHED], ids=["no switch", "switch"])
async def test_the_switch_that_keeps_thoughts_is_named_where_the_template_has_one(source: str) -> None:
    template = load_chat_template(TOKENIZER, source)
    given: dict[str, Any] = {"template": template, "layout": template.layout(TOKENIZER)}
    async with serving(SCRIPTS, memory=TurnMemory(2**20), **given) as served:
        client = Client(served, "[[script:turn,end]] hi", whole)
        for _ in range(3):
            await client.step(chat_template_kwargs={"preserve_thinking": False})
        [session] = (await served.client.get("/v1/singletree/sessions")).json["data"]
        steps = (await served.client.get(f"/v1/singletree/sessions/{session['id']}")).json["steps"]
        broken = steps[-1]["break"]
        assert broken["cause"] == "thinking_dropped"
        if source == FORGETFUL:
            assert "no switch" in broken["cure"]
            return
        assert 'chat_template_kwargs {"preserve_thinking": true}' in broken["cure"]
        client = Client(served, "[[script:turn,end]] ho", whole)
        courses = [
            (await client.step(chat_template_kwargs={"preserve_thinking": True}))["x-singletree-course"]
            for _ in range(3)
        ]
        assert courses == ["first", "appended", "appended"]


@pytest.mark.parametrize("memory", [0, 2**20])
async def test_a_template_that_keeps_thoughts_is_not_blamed_at_a_new_question(memory: int) -> None:
    """LangChain, Strands, openai-agents on Chat: the loop's thoughts are put back, those of earlier ones may not be."""
    async with serving(SCRIPTS, memory=TurnMemory(memory) if memory else None, layout=LAYOUT) as served:
        client = Client(served, "[[script:turn,end]] hi", without("reasoning_content"))
        causes = [cause(await client.step()) for _ in range(3)]
    assert causes[2] in ("reasoning_left_out", "" if memory else "reasoning_left_out")
    assert "thinking_dropped" not in causes


@pytest.mark.parametrize("name", ["reasoning left out", "calls alone", "other spelling"])
async def test_a_turn_that_was_forgotten_later_is_not_the_templates_doing(name: str) -> None:
    """It was put back in one prompt, and is evicted before the next: the messages are the same in both."""
    script, habit, _ = HABITS[name]
    causes = {"reasoning left out": "reasoning_left_out", "calls alone": "answer_in_part"}
    memory = TurnMemory(2**20)
    async with serving(SCRIPTS, memory=memory, layout=LAYOUT) as served:
        client = Client(served, f"[[script:{script},turn,end]] hi", habit)
        await client.step()
        second = await client.step()
        with memory._lock:
            for entry in list(memory._entries.values()):
                memory._drop(entry)
        third = await client.step()
    if second["x-singletree-course"] == "appended":
        assert third["x-singletree-course"] == "broken"
        assert cause(third) == causes.get(name, "answer_respelled")


RESPONSE = "<tool_response>\na.txt\n</tool_response>"


def calls_as_text(message: Body) -> list[Body]:
    """Qwen-Agent's default form: tools, calls and results are text, and the calls are in its own spelling."""
    before, marker, rest = message["content"].partition("<tool_call>\n")
    calls = [each.partition("\n</tool_call>")[0] for each in (marker + rest).split("<tool_call>\n")[1:]]
    spelled = [f"<tool_call>\n{json.dumps(json.loads(each))}\n</tool_call>" for each in calls]
    return [{"role": "assistant", "content": "\n".join([before.strip(), *spelled])}]


@pytest.mark.parametrize("memory", [0, 2**20])
@pytest.mark.parametrize("spaces", ["", "  "], ids=["same spelling", "other spelling"])
async def test_calls_and_results_as_text(memory: int, spaces: str) -> None:
    turn = TURN.replace('"arguments": ', f'"arguments": {spaces}')
    kept = TurnMemory(memory) if memory else None
    async with serving({**SCRIPTS, "turn": turn}, memory=kept, layout=LAYOUT) as served:
        client = Client(served, "[[script:turn,end]] hi", calls_as_text)
        await client.step(tools=[])
        client.messages[-1] = {"role": "user", "content": f"{RESPONSE}\n{RESPONSE}"}
        headers = await client.step(tools=[])
    assert cause(headers) in ("calls_as_text", "" if memory else "calls_as_text")


def test_every_cause_of_a_habit_is_in_the_table() -> None:
    assert {cause for _, _, cause in HABITS.values()} <= {cause.name for cause in CAUSES}
