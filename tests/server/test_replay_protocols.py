"""One turn, three protocols, one prompt; and what a server's own wish about reasoning does."""

from __future__ import annotations

import pytest

from singletree.conversation import Thinking
from singletree.errors import BadConfiguration
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.server.models.chat_format import default_thinking
from singletree.server.settings.config import Config

from .serving import MODEL, TOKENIZER, serving
from .test_replay import INTERLEAVED, LAYOUT, MODEL_OUTPUT, PATHS, TOOL, Session, ask, prompts, results

THINKS = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ '<think></think>' if enable_thinking is false }}{% endif %}"""


async def test_a_turn_of_thoughts_and_calls_gives_one_prompt_on_all_protocols() -> None:  # C5
    """Think, call, think, call: blocks, one merged message without its reasoning, and items."""
    reported = []
    for path in PATHS:
        async with serving(
            {"a": INTERLEAVED, "b": "Fine."}, memory=TurnMemory(2**20), layout=LAYOUT
        ) as served:
            session = Session(served, path)
            session.ask("[[script:a,b]] How is it?")
            await session.go_on()
            await session.send(session.messages)
            reported.append(prompts(served))
    assert reported[0] == reported[1] == reported[2]
    assert INTERLEAVED in TOKENIZER.decode(reported[0][1])


@pytest.mark.parametrize("path", PATHS)
async def test_the_servers_wish_holds_where_the_client_has_none(path: str) -> None:
    wish = Thinking(enabled=False)
    async with serving(
        {"a": MODEL_OUTPUT, "b": "Fine."}, template=ChatTemplate(THINKS), thinking=wish
    ) as served:
        session = Session(served, path)
        session.ask("[[script:a,b]] How is it?")
        await session.send(session.messages)
        assert TOKENIZER.decode(prompts(served)[0]).endswith("<think></think>")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), Thinking()),
        (Config(default_thinking="on"), Thinking(enabled=True)),
        (Config(default_thinking="OFF"), Thinking(enabled=False)),
        (Config(default_thinking="low"), Thinking(effort="low")),
        (Config(default_chat_template_kwargs='{"a": 1}'), Thinking(template_arguments={"a": 1})),
    ],
)
def test_the_flags(config: Config, expected: Thinking) -> None:
    assert default_thinking(config) == expected


@pytest.mark.parametrize("variables", ["{", "[1]", "1", "null"])
def test_variables_that_are_no_object_are_refused(variables: str) -> None:
    with pytest.raises(BadConfiguration, match="give a JSON object"):
        default_thinking(Config(default_chat_template_kwargs=variables))


async def test_a_client_that_clears_thinking_gets_none_back() -> None:
    """Claude Code's ``clear_thinking_20251015``: what it takes out is not restored from the memory."""
    async with serving({"a": MODEL_OUTPUT, "b": "Fine."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        session = Session(served, "/v1/messages")
        session.ask("[[script:a,b]] How is it?")
        await session.go_on()
        written = [
            m | {"content": [b for b in m["content"] if b["type"] != "thinking"]}
            if m["role"] == "assistant"
            else m
            for m in session.messages
        ]
        edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
        given = {"model": MODEL, "max_tokens": 100, "messages": written, "tools": [TOOL]}
        for more in ({}, {"context_management": {"edits": [edit]}}):
            answer = await served.client.post("/v1/messages", given | more)
            assert answer.status == 200, answer.body
        restored, cleared = (TOKENIZER.decode(ids) for ids in prompts(served)[1:])
    assert "I need the weather." in restored
    assert "I need the weather." not in cleared


async def test_words_that_are_only_quoted_are_no_turn() -> None:
    """A harness that asks for a summary quotes what was said in a question of its own."""
    async with serving({"a": MODEL_OUTPUT, "b": "Fine."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        session = Session(served, "/v1/messages")
        session.ask("[[script:a,b]] How is it?")
        await session.go_on()
        quoted = {"role": "user", "content": "Summarise: <assistant>Let me check.</assistant>"}
        await session.send([quoted])
        assert "I need the weather." not in TOKENIZER.decode(prompts(served)[1])


async def test_defaults_that_a_harness_filled_in_are_no_edit() -> None:  # C3
    """Claude Code sends ``replace_all: false`` along, which the model never wrote."""
    memory = TurnMemory(2**20)
    schema = {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}}
    async with serving({"a": MODEL_OUTPUT, "b": "Fine."}, memory=memory, layout=LAYOUT) as served:
        first = {"role": "user", "content": "[[script:a,b]] How is it?"}
        tools = [TOOL | {"input_schema": schema}]
        blocks = await ask(served, [first], tools=tools)
        filled = [b | {"input": {"all": False, **b["input"]}} if "input" in b else b for b in blocks]
        await ask(served, [first, {"role": "assistant", "content": filled}, results(blocks)], tools=tools)
        one, two = prompts(served)
    generated = TOKENIZER.encode(MODEL_OUTPUT)
    assert two[len(one) : len(one) + len(generated)] == generated
