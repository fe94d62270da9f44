"""What two prompts have in common, and where and why they part."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from singletree.prefix_breaks.causes import CAUSES
from singletree.prefixes import common_prefix
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import load_chat_template
from singletree.testing import byte_model

from .serving import MODEL, SWITCHABLE, TEMPLATE, TOKENIZER, Served, serving, template_settings

LAYOUT = TEMPLATE.layout(TOKENIZER)
CALLS = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "ls", "arguments": {"n": 1}}\n</tool_call>'
SCRIPTS = {"a": CALLS, "b": "<think>\nso\n</think>\n\nFine.", "c": "Bye."}
TOOL = {"name": "ls", "description": "lists", "input_schema": {"type": "object", "properties": {}}}
OTHER_TOOL = TOOL | {"name": "cat"}
SYSTEM = "You are a good agent, and today it is 2026-11-20, 09:15."

Body = dict[str, Any]


async def send(served: Served, body: Body, **headers: str) -> tuple[list[Any], dict[str, str]]:
    """The blocks of the answer, and its headers."""
    asked = {"x-claude-code-session-id": "one", "x-singletree-explain": "1"} | headers
    reply = await served.client.post("/v1/messages", body, headers=asked)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)["content"], dict(reply.headers)


async def three_turns(served: Served, **more: Any) -> Body:
    """A tool loop, its end, and a further question that was answered; the body of that last request."""
    messages: list[Body] = [{"role": "user", "content": "[[script:a,b,c]] at 09:15"}]
    body = {
        "model": MODEL,
        "max_tokens": 500,
        "system": SYSTEM,
        "messages": messages,
        "tools": [TOOL],
        **more,
    }
    called, _ = await send(served, body)
    result = {"type": "tool_result", "tool_use_id": called[-1]["id"], "content": "a.txt"}
    messages += [{"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
    answer, _ = await send(served, body)
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "[[script:c]] and now?"},
    ]
    last, headers = await send(served, body)
    assert headers["x-singletree-course"] == "appended"
    messages += [{"role": "assistant", "content": last}, {"role": "user", "content": "more"}]
    return body


Mutation = Callable[[Body], Any]


def replaced(*path: Any) -> Mutation:
    *inner, key, value = path

    def change(body: Body) -> None:
        for step in inner:
            body = body[step]
        body[key] = value

    return change


def new_date(body: Body) -> None:
    body["system"] = SYSTEM.replace("2026-11-20", "2026-11-21")


def inserted(body: Body) -> None:
    body["messages"].insert(3, {"role": "user", "content": "By the way."})


def removed(body: Body) -> None:
    del body["messages"][1:3]


def dropped(body: Body) -> None:
    del body["messages"][-2]


def thoughtless(body: Body) -> None:
    body["messages"][1]["content"] = [
        block for block in body["messages"][1]["content"] if block["type"] != "thinking"
    ]
    body["thinking"] = {"type": "disabled"}


def billed(value: str) -> Mutation:
    header = f"x-anthropic-billing-header: cc_version=2.1.{value}; cc_entrypoint=cli;\n"
    return replaced("system", header + SYSTEM)


BREAKS: dict[str, tuple[Mutation, str]] = {
    "system_changed": (replaced("system", SYSTEM.replace("good", "bad")), "message 0 (system)"),
    "date_in_system": (new_date, "message 0 (system)"),
    "tools_added": (replaced("tools", [TOOL, OTHER_TOOL]), "tools"),
    "tools_changed": (replaced("tools", [TOOL | {"description": "lists all"}]), "tools"),
    "message_changed": (replaced("messages", 2, "content", 0, "content", "b.txt"), "message 3 (tool)"),
    "date_in_message": (replaced("messages", 0, "content", "[[script:a,b,c]] at 09:16"), "message 1 (user)"),
    "message_inserted": (inserted, "message 4 (assistant)"),
    "message_removed": (removed, "message 2 (assistant)"),
    "answer_edited": (replaced("messages", 3, "content", "Not fine."), "message 4 (assistant)"),
    "reasoning_removed": (thoughtless, "message 2 (assistant)"),
    "answer_rewritten": (replaced("messages", -2, "content", "Hello."), "message 6 (assistant)"),
    "answer_dropped": (dropped, "message 6 (assistant)"),
}


@pytest.mark.parametrize("cause", BREAKS)
async def test_each_cause_is_named(cause: str) -> None:
    change, place = BREAKS[cause]
    model = template_settings(SWITCHABLE)
    async with serving(SCRIPTS, memory=TurnMemory(2**20), **model) as served:
        body = await three_turns(served)
        change(body)
        _, headers = await send(served, body)
        before, after = (list(played.prompt_token_ids) for played in list(served.engine.log)[-2:])
        whole = before + list(served.engine.log[-2].token_ids)
    assert headers["x-singletree-course"] == "broken"
    assert headers["x-singletree-break"] == f"{cause}; {place}"
    assert int(headers["x-singletree-matched-tokens"]) == common_prefix(whole, after)
    assert int(headers["x-singletree-new-tokens"]) == len(after) - common_prefix(whole, after)
    assert int(headers["x-singletree-lost-tokens"]) in range(1, len(whole))


async def test_a_system_message_that_changed_along_with_the_tools() -> None:
    async with serving(SCRIPTS, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        body = await three_turns(served)
        body |= {"tools": [TOOL, OTHER_TOOL], "system": SYSTEM.replace("good", "bad")}
        _, headers = await send(served, body)
    assert headers["x-singletree-break"] == "system_changed; message 0 (system)"


UNCOUNTED = (
    "system_changed",
    "tools_added",
    "message_changed",
    "answer_edited",
    "message_removed",
    "answer_dropped",
)


@pytest.mark.parametrize("cause", UNCOUNTED)
async def test_causes_are_named_where_turns_cannot_be_counted(cause: str) -> None:
    """The template's headers are not known, and nothing is remembered of what was generated."""
    change, place = BREAKS[cause]
    async with serving(SCRIPTS) as served:
        body = await three_turns(served)
        change(body)
        _, headers = await send(served, body)
    assert headers["x-singletree-break"] == f"{cause}; {place}"


async def test_a_billing_header_is_named_where_its_rule_is_off() -> None:  # C2
    off = frozenset({"billing_header"})
    async with serving(SCRIPTS, memory=TurnMemory(2**20), layout=LAYOUT, stability_off=off) as served:
        body = await three_turns(served)
        for value, course in (("a5145", "broken"), ("b62f0", "broken")):
            billed(value)(body)
            _, headers = await send(served, body)
            assert headers["x-singletree-course"] == course
        assert headers["x-singletree-break"] == "billing_header; message 0 (system)"


async def test_tools_that_are_not_sent_where_the_rule_is_off() -> None:
    off = frozenset({"compaction_tools"})
    async with serving(SCRIPTS, memory=TurnMemory(2**20), layout=LAYOUT, stability_off=off) as served:
        body = await three_turns(served)
        _, headers = await send(served, body | {"tools": []})
    assert headers["x-singletree-break"] == "tools_dropped; tools"


async def test_tools_in_another_order() -> None:  # C6
    async with serving(SCRIPTS, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        body = await three_turns(served)
        body["tools"] = [TOOL, OTHER_TOOL]
        await send(served, body)
        body["tools"] = [OTHER_TOOL, TOOL]
        _, headers = await send(served, body)
        assert headers["x-singletree-break"] == "tools_reordered; tools"
        body["tools"] = [TOOL]
        _, headers = await send(served, body)
        assert headers["x-singletree-break"] == "tools_removed; tools"
        keys = {"properties": {}, "type": "object"}
        body["tools"] = [TOOL | {"input_schema": keys}]
        _, headers = await send(served, body)
        assert headers["x-singletree-break"] == "tools_changed; tools"


async def test_a_block_that_always_stands_last() -> None:
    """OpenClaw's internal context: what the model said behind it is read again on every turn."""
    async with serving({"a": CALLS, "b": "Fine."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        context = {"role": "user", "content": "<<<CONTEXT>>> nothing runs <<<END>>>"}
        messages = [{"role": "user", "content": "[[script:a,b]] hi"}, context]
        body = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [TOOL]}
        called, _ = await send(served, body)
        result = {"type": "tool_result", "tool_use_id": called[-1]["id"], "content": "a.txt"}
        history = {"role": "assistant", "content": called}
        body["messages"] = [messages[0], history, {"role": "user", "content": [result]}, context]
        _, headers = await send(served, body)
    assert headers["x-singletree-break"] == "message_moved; message 1 (user)"


FORGETFUL = byte_model.CHAT_TEMPLATE.replace(
    "{% if message.reasoning_content %}",
    "{% if message.reasoning_content and not (messages[-1].role == 'user' and not loop.last) %}",
)


async def test_thinking_that_the_template_drops() -> None:  # C4
    template = load_chat_template(TOKENIZER, FORGETFUL)
    given: Body = {"template": template, "layout": template.layout(TOKENIZER)}
    async with serving(SCRIPTS, memory=TurnMemory(2**20), **given) as served:
        messages: list[Body] = [{"role": "user", "content": "[[script:a,b]] hi"}]
        body = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [TOOL]}
        called, _ = await send(served, body)
        result = {"type": "tool_result", "tool_use_id": called[-1]["id"], "content": "a.txt"}
        messages += [{"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
        answer, headers = await send(served, body)
        assert headers["x-singletree-course"] == "appended"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
        _, headers = await send(served, body)
    assert headers["x-singletree-break"] == "thinking_dropped; message 1 (assistant)"


async def test_a_turn_that_nobody_remembers() -> None:
    async with serving({"a": CALLS.replace('{"n": 1}', '{"n":1}')}, layout=LAYOUT) as served:
        messages: list[Body] = [{"role": "user", "content": "[[script:a]] hi"}]
        body = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [TOOL]}
        called, _ = await send(served, body)
        result = {"type": "tool_result", "tool_use_id": called[-1]["id"], "content": "a.txt"}
        messages += [{"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
        _, headers = await send(served, body)
    assert headers["x-singletree-break"] == "answer_respelled; message 1 (assistant)"


SETTING = (
    "<|im_start|>system\nThinking is {{ 'on' if enable_thinking else 'off' }}.<|im_end|>\n"
    + byte_model.CHAT_TEMPLATE
)


async def test_a_setting_that_the_template_prints() -> None:
    template = load_chat_template(TOKENIZER, SETTING)
    given: Body = {"template": template, "layout": template.layout(TOKENIZER)}
    async with serving(SCRIPTS, memory=TurnMemory(2**20), **given) as served:
        body = await three_turns(served, thinking={"type": "enabled", "budget_tokens": 100})
        body["thinking"] = {"type": "disabled"}
        _, headers = await send(served, body)
    assert headers["x-singletree-break"] == "settings; head"


SWITCHED = byte_model.CHAT_TEMPLATE.replace(
    "{% if message.reasoning_content %}",
    "{% if message.reasoning_content and enable_thinking is not false %}",
)


async def test_a_setting_that_takes_reasoning_out_of_the_history() -> None:  # C4
    """The messages are the same: it is the client's switch that drops it, not the template's policy."""
    template = load_chat_template(TOKENIZER, SWITCHED)
    assert "enable_thinking" in template.capabilities.switches
    given: Body = {"template": template, "layout": template.layout(TOKENIZER)}
    on, off = {"type": "enabled", "budget_tokens": 100}, {"type": "disabled"}
    for thinking in (on, off):
        async with serving(SCRIPTS, memory=TurnMemory(2**20), **given) as served:
            messages: list[Body] = [{"role": "user", "content": "[[script:a,b]] hi"}]
            body = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [TOOL], "thinking": on}
            called, _ = await send(served, body)
            result = {"type": "tool_result", "tool_use_id": called[-1]["id"], "content": "a.txt"}
            messages += [{"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
            _, headers = await send(served, body | {"thinking": thinking})
        if thinking == on:
            assert headers["x-singletree-course"] == "appended"
        else:
            assert headers["x-singletree-break"] == "settings; message 1 (assistant)"


def test_causes_have_names_words_and_cures() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)
    assert all(cause.reason and cause.cure for cause in CAUSES)


async def test_excerpts_stand_on_both_sides_of_the_place() -> None:
    async with serving(SCRIPTS, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        body = await three_turns(served)
        changed = copy.deepcopy(body)
        changed["system"] = SYSTEM.replace("good", "bad\x1b")
        await send(served, changed)
        steps = (await served.client.get("/v1/singletree/sessions/one")).json["steps"]
    broken = steps[-1]["break"]
    assert broken["before"].endswith("You are a ")
    assert broken["was"].startswith("good agent")
    assert broken["now"].startswith("bad\x1b agent")
