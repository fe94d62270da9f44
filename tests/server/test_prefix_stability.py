"""What harnesses vary without meaning changes no token of the prompt, on any protocol; and the counts tell it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest

from singletree.prompts.history.canonicalization import PLACEHOLDER_TOOL, RULES
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate, load_chat_template
from singletree.testing import byte_model

from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving
from .test_sessions import compacted

Body = dict[str, Any]

SCHEMA = {
    "type": "object",
    "required": ["z"],
    "properties": {"z": {"type": "string"}, "a": {"type": "integer"}},
}
TOOL = {"name": "ls", "description": "lists", "input_schema": SCHEMA}
DEFERRED = {"name": "fetch", "description": "fetches", "input_schema": SCHEMA, "defer_loading": True}
PLACEHOLDER = {
    "name": PLACEHOLDER_TOOL,
    "description": "",
    "input_schema": {"type": "object"},
    "defer_loading": True,
}

STRICT = (
    "{%- for message in messages %}"
    "{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}"
    "{%- if not loop.first and message.role == loop.previtem.role and message.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{%- endfor %}" + byte_model.CHAT_TEMPLATE
)


def strict() -> ChatTemplate:
    return load_chat_template(TOKENIZER, STRICT)


async def prompt(served: Served, path: str, asked: Body, headers: Mapping[str, str] = {}) -> str:
    """The text of the prompt that the engine gets."""
    reply = await served.client.post(path, {"model": MODEL, **asked}, headers=headers)
    assert reply.status == 200, reply.body
    return TOKENIZER.decode(served.engine.log[-1].prompt_token_ids)


def claude(**more: Any) -> Body:
    """A request as Claude Code sends it, in the middle of a tool loop."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"z": "x"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt"}
    return {
        "max_tokens": 100,
        "system": "You are good.",
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result]},
        ],
        **more,
    }


HEADER = "x-anthropic-billing-header: cc_version={}; cc_entrypoint=cli; cch={};"
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("spelled", [str, str.upper, str.title])
async def test_the_billing_header_changes_no_token(
    end: str, blocks: bool, spelled: Callable[[str], str]
) -> None:
    # C2
    async with serving() as served:
        without = await prompt(served, "/v1/messages", claude())
        for version, hash in (("2.1.101.e51", "a5145"), ("2.1.329.40b", "00000")):
            header = spelled(HEADER.format(version, hash)) + end
            given: Any = header + "You are good."
            if blocks:
                given = [{"type": "text", "text": header}, {"type": "text", "text": "You are good.", **MARK}]
            assert await prompt(served, "/v1/messages", claude(system=given)) == without


def moved_mark(asked: Body) -> None:
    asked["messages"][0]["content"] = [{"type": "text", "text": "hi", **MARK}]
    asked["system"] = [{"type": "text", "text": "You are good.", **MARK}]
    asked["tools"][0] |= MARK


def unknown_fields(asked: Body) -> None:
    asked |= {"metadata": {"user_id": "u"}, "x_unknown": [1], "service_tier": "auto", "temperature": 0.3}
    asked["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    asked["messages"][1]["x_unknown"] = 1
    asked["tools"][0] |= {"eager_input_streaming": True}


def other_ids(asked: Body) -> None:
    asked["messages"][1]["content"][1]["id"] = asked["messages"][2]["content"][0]["tool_use_id"] = "toolu_2"


VARIED: dict[str, Callable[[Body], Any]] = {
    "cache mark": moved_mark,
    "fields": unknown_fields,
    "ids": other_ids,
    "no tool": lambda asked: asked.update(tool_choice={"type": "none"}),
    "any tool": lambda asked: asked.update(tool_choice={"type": "any"}),
    "a tool": lambda asked: asked.update(tool_choice={"type": "tool", "name": "ls"}),
    "placeholder": lambda asked: asked["tools"].append(PLACEHOLDER),
    "deferred": lambda asked: asked["tools"].insert(0, DEFERRED),
}


@pytest.mark.parametrize("varied", VARIED)
async def test_what_means_nothing_changes_no_token(varied: str) -> None:  # C6
    async with serving() as served:
        plain = claude()
        before = await prompt(served, "/v1/messages", plain)
        other = copy.deepcopy(plain)
        VARIED[varied](other)
        assert await prompt(served, "/v1/messages", other) == before


def marked(asked: Body, at: int) -> Body:
    """As Claude Code marks the last message: a string becomes a block, and is a string again in the next request."""
    asked = copy.deepcopy(asked)
    content = asked["messages"][at]["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    asked["messages"][at]["content"] = [*blocks[:-1], blocks[-1] | MARK]
    return asked


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_a_cache_mark_that_moves_on_changes_no_token(path: str) -> None:  # C1
    plain = claude() if path == "/v1/messages" else chat()
    plain["messages"] += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "More"}]
    async with serving() as served:
        before = await prompt(served, path, plain)
        reported = {await prompt(served, path, marked(plain, at)) for at in range(len(plain["messages"]))}
    assert reported == {before}


def chat(**more: Any) -> Body:
    function = {"name": "ls", "description": "lists", "parameters": SCHEMA}
    made = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"z": "x"}'}}
    return {
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "I look.", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ],
        **more,
    }


def responses(**more: Any) -> Body:
    function = {"type": "function", "name": "ls", "description": "lists", "parameters": SCHEMA}
    return {
        "tools": [function],
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"z": "x"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        ],
        **more,
    }


OPENAI: list[Body] = [
    {"metadata": {"a": "b"}},
    {"user": "u", "x_unknown": {}},
    {"prompt_cache_key": "k"},
    {"store": False},
    {"tool_choice": "none"},
    {"tool_choice": "required"},
    {"parallel_tool_calls": False},
]


@pytest.mark.parametrize("more", OPENAI, ids=lambda more: next(iter(more)))
async def test_what_means_nothing_on_openais_protocols(more: Body) -> None:  # C6
    async with serving() as served:
        for path, made in (("/v1/chat/completions", chat), ("/v1/responses", responses)):
            assert await prompt(served, path, made(**more)) == await prompt(served, path, made())


async def test_one_conversation_has_one_prompt_on_three_protocols() -> None:
    async with serving() as served:
        prompts = {
            await prompt(served, "/v1/messages", claude() | {"system": ""}),
            await prompt(served, "/v1/chat/completions", chat()),
            await prompt(served, "/v1/responses", responses()),
        }
    (text,) = prompts
    assert '"required": ["z"], "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}' in text


NUDGE = "<total_tokens>{} tokens left</total_tokens>"


@pytest.mark.parametrize("template", [TEMPLATE, strict()], ids=["takes any", "strict"])
async def test_nudges_stay_where_they_stand(template: ChatTemplate) -> None:  # C1
    """Twenty turns of a tool loop, each with a system message behind its result; every other one before it."""
    async with serving({"s": "Still at it."}, template=template) as served:
        asked = claude()
        asked["messages"] = [{"role": "user", "content": "[[script:s]] hi"}]
        prompts = []
        for n in range(20):
            prompts.append(await prompt(served, "/v1/messages", asked))
            call = {"type": "tool_use", "id": f"toolu_{n}", "name": "ls", "input": {"z": "x"}}
            result = {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"result {n}"}
            nudge = {"role": "system", "content": NUDGE.format(n)}
            last = [{"role": "user", "content": [result]}, nudge]
            asked["messages"] += [{"role": "assistant", "content": [call]}, *(last if n % 2 else last[::-1])]
    for before, after in pairwise(prompts):
        assert after.startswith(before.removesuffix("<|im_start|>assistant\n"))
    places = [prompts[-1].index(fields.format(n)) for n in range(19) for fields in ("result {}", NUDGE)]
    assert places == sorted(places)


@pytest.mark.parametrize("template", [TEMPLATE, strict()], ids=["takes any", "strict"])
async def test_messages_of_one_role_behind_each_other(template: ChatTemplate) -> None:
    """OpenClaw sends several of the user's."""
    async with serving({"s": "x"}, template=template) as served:
        asked = claude(messages=[{"role": "user", "content": text} for text in ("one", "two", "three")])
        text = await prompt(served, "/v1/messages", asked)
        asked["messages"] += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "four"}]
        later = await prompt(served, "/v1/messages", asked)
    assert text.index("one") < text.index("two") < text.index("three")
    assert later.startswith(text)


async def test_a_tool_that_is_loaded_later_leaves_the_head_as_it_was() -> None:
    """Claude Code puts it into the middle of its list, and a reference into the result of its search."""
    async with serving() as served:
        asked = claude(tools=[TOOL, PLACEHOLDER, TOOL | {"name": "write"}])
        before = await prompt(served, "/v1/messages", asked)
        assert PLACEHOLDER_TOOL not in before
        asked["tools"].insert(1, DEFERRED)
        asked["messages"] += [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_2", "name": "ls", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [{"type": "tool_reference", "tool_name": "fetch"}],
                    }
                ],
            },
        ]
        after = await prompt(served, "/v1/messages", asked)
    assert after.startswith(before)
    assert '"name": "fetch", "description": "fetches"' in after[len(before) :]
    assert PLACEHOLDER_TOOL not in after


def parallel(*order: str) -> Body:
    """Three calls at once, their results in this order."""
    calls = [{"type": "tool_use", "id": id, "name": "ls", "input": {"z": id}} for id in "abc"]
    results = [{"type": "tool_result", "tool_use_id": id, "content": f"of {id}"} for id in order]
    messages = [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    return claude(messages=[{"role": "user", "content": "hi"}, *messages])


def split_system() -> Body:
    asked = claude()
    asked["messages"].insert(2, {"role": "system", "content": "Be quick."})
    return asked


def moved_context() -> Body:
    """OpenClaw's message on what runs beside a tool loop, behind the last result."""
    asked = claude()
    context = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nnone\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    asked["messages"].append({"role": "user", "content": context})
    return asked


ACTING: dict[str, Body] = {
    "harness_context": moved_context(),
    "billing_header": claude(system=HEADER.format("1", "2") + "\nYou are good."),
    "deferred_tools": claude(tools=[TOOL, PLACEHOLDER]),
    "system_after_results": split_system(),
    "assistant_messages": claude(
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "And?"},
        ]
    ),
    "result_order": parallel("c", "a", "b"),
    "text_blocks": claude(system=[{"type": "text", "text": "You"}, {"type": "text", "text": "are good."}]),
}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
async def test_each_rule_has_a_switch_and_a_count(rule: str) -> None:
    counts = []
    for off in (frozenset[str](), frozenset({rule})):
        layout = TEMPLATE.layout(TOKENIZER)
        async with serving(
            {"call": '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'},
            stability_off=off,
            memory=TurnMemory(2**20),
            layout=layout,
        ) as served:
            if rule in ACTING:
                await prompt(served, "/v1/messages", ACTING[rule])
            else:
                await compacted(served)
            metrics = (await served.client.get("/metrics")).body.decode()
        counts.append(f'singletree_stability_rules_total{{rule="{rule}"}} 1.0' in metrics)
    assert counts == [True, False]


USAGE: dict[str, Callable[[Any], tuple[int, int]]] = {
    "/v1/messages": lambda u: (
        u["input_tokens"] + u["cache_read_input_tokens"] + u["cache_creation_input_tokens"],
        u["cache_read_input_tokens"],
    ),
    "/v1/chat/completions": lambda u: (u["prompt_tokens"], u["prompt_tokens_details"]["cached_tokens"]),
    "/v1/responses": lambda u: (u["input_tokens"], u["input_tokens_details"]["cached_tokens"]),
}


@pytest.mark.parametrize("template", [TEMPLATE, strict()], ids=["takes any", "strict"])
async def test_the_counts_add_up_and_are_the_same_on_three_protocols(template: ChatTemplate) -> None:  # C8
    reported: dict[str, list[tuple[int, int]]] = {}
    for path, made in (
        ("/v1/messages", claude),
        ("/v1/chat/completions", chat),
        ("/v1/responses", responses),
    ):
        async with serving(template=template) as served:
            asked = made() | ({"system": ""} if path == "/v1/messages" else {})
            for _ in range(2):
                reply = await served.client.post(path, {"model": MODEL, **asked})
                reported.setdefault(path, []).append(USAGE[path](json.loads(reply.body)["usage"]))
                played = served.engine.log[-1]
                assert reported[path][-1] == (len(played.prompt_token_ids), played.cached_tokens)
    first, again = next(iter(reported.values()))
    assert all(each == [first, again] for each in reported.values())
    assert (first[1], again[1]) == (0, again[0] - 1)
