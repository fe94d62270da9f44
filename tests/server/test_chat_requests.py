"""Chat Completions through the whole server: what each field does to the prompt, the engine and the answer."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.sdk import openai_sdk
from protocols.grammar_chat import Grammar
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.server.settings.config import Config
from singletree.testing.scripts import Script

from .memory import events
from .serving import MODEL, TOKENIZER, Served, body, serving

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
LIST = {"type": "function", "function": {"name": "list"}}
USER = {"role": "user", "content": "hi"}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def call(name: str, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"path": "a"}'}}


def written(*calls: str) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"path": "{i}"}}}}\n</tool_call>'
        for i, name in enumerate(calls)
    )


async def prompted(served: Served, *messages: Any, **more: Any) -> str:
    """What the model read."""
    reply = await served.client.post(PATH, {"model": MODEL, "messages": list(messages), **more})
    assert reply.status == 200, reply.body
    return TOKENIZER.decode(served.engine.log[-1].prompt)


ANSWER = {"role": "assistant", "content": "So"}
HEADER = "<|im_start|>assistant\n"
ASKED = "<|im_start|>user\nhi<|im_end|>\n"
OPENINGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (USER, {}, HEADER),
    (USER, {"add_generation_prompt": True}, HEADER),
    (USER, {"add_generation_prompt": False}, ""),
    (ANSWER, {}, f"{HEADER}So"),
    (ANSWER, {"continue_final_message": True, "add_generation_prompt": False}, f"{HEADER}So"),
    (ANSWER, {"continue_final_message": False}, f"{HEADER}So<|im_end|>\n{HEADER}"),
    (ANSWER, {"add_generation_prompt": True}, f"{HEADER}So<|im_end|>\n{HEADER}"),
    (ANSWER, {"add_generation_prompt": False}, f"{HEADER}So<|im_end|>\n"),
    (ANSWER | {"prefix": True}, {}, f"{HEADER}So"),
]


@pytest.mark.parametrize(("last", "fields", "end"), OPENINGS)
async def test_how_the_answer_is_opened(last: Any, fields: dict[str, Any], end: str) -> None:  # C36
    written = [USER, last] if last is not USER else [USER]
    async with serving() as served:
        assert await prompted(served, *written, **fields) == ASKED + end
        tokens = (await served.client.post("/tokenize", {"messages": written, **fields})).json["tokens"]
    assert TOKENIZER.decode(tokens) == ASKED + end, "it is counted as it is asked"


def answered(content: Any) -> list[Any]:
    calling = {"role": "assistant", "content": None, "tool_calls": [call("read", "c1")]}
    return [USER, calling, {"role": "tool", "tool_call_id": "c1", "content": content}]


MESSAGES: list[tuple[str, list[Any], str]] = [
    ("developer", [{"role": "developer", "content": "Be brief."}, USER], "<|im_start|>system\nBe brief."),
    (
        "parts",
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "a\nb",
    ),
    (
        "null beside calls",
        answered("R"),
        '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call><|im_end|>\n',
    ),
    (
        "picture",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}],
        "[image: this model cannot see images]",
    ),
    (
        "picture in a result",
        answered([{"type": "image_url", "image_url": {"url": PIXEL}}]),
        "<tool_response>\n[image: this model cannot see images]",
    ),
    ("nothing", [{"role": "user", "content": None}, {"role": "assistant", "content": []}, USER], ASKED),
]


@pytest.mark.parametrize(
    ("messages", "shown"), [row[1:] for row in MESSAGES], ids=[row[0] for row in MESSAGES]
)
async def test_every_form_of_message(messages: list[Any], shown: str) -> None:  # C35 C36
    async with serving() as served:
        assert shown in await prompted(served, *messages)


async def test_template_variables_reach_the_template() -> None:
    template = "{{ mood | default('calm') }}{% for message in messages %}{{ message.content }}{% endfor %}"
    async with serving(template=ChatTemplate(template)) as served:
        assert await prompted(served, USER, chat_template_kwargs={"mood": "glad"}) == "gladhi"
        assert await prompted(served, USER) == "calmhi"


SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "repetition_penalty": 1.1,
    "seed": 7,
    "ignore_eos": True,
}


async def test_sampling_settings_reach_the_engine() -> None:
    async with serving() as served:
        await prompted(served, USER, **SAMPLING, logit_bias={"65": -100}, stop="END", max_completion_tokens=5)
        sampling = served.engine.log[-1].sampling
        await prompted(served, USER, max_tokens=9, max_completion_tokens=6)
        newer = served.engine.log[-1].sampling
    assert {name: getattr(sampling, name) for name in SAMPLING} == SAMPLING
    assert (sampling.logit_bias, sampling.stop, sampling.max_tokens) == ({65: -100.0}, ("END",), 5)
    assert newer.max_tokens == 6, "the newer name wins"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"tools": [READ], "tool_choice": "required"},
        {"tools": [READ, LIST], "tool_choice": {"type": "function", "function": {"name": "read"}}},
        {"tools": [{"type": "function", "function": {**READ["function"], "strict": True}}]},  # type: ignore[dict-item]
    ],
)
async def test_what_the_answer_must_be_is_held(fields: dict[str, Any]) -> None:  # C42
    async with serving() as served:
        await prompted(served, USER, **fields)
        assert served.engine.log[-1].constraint is not None
        await prompted(served, USER)
        assert served.engine.log[-1].constraint is None


@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_calls_have_their_indices_and_ids(chunk: int) -> None:  # C9 C13
    asked = body(PATH, "[[script:s]]", tools=[READ, LIST])
    async with serving({"s": Script(f"I look.\n{written('read', 'list', 'read')}", chunk=chunk)}) as served:
        streamed = Grammar((await served.client.post(PATH, asked | {"stream": True})).body)
        whole = (await served.client.post(PATH, asked)).json["choices"][0]
    assert [(made["name"], made["arguments"]) for made in streamed.calls] == [
        ("read", '{"path": "0"}'),
        ("list", '{"path": "1"}'),
        ("read", '{"path": "2"}'),
    ]
    assert len({made["id"] for made in streamed.calls}) == 3
    assert [made["function"]["name"] for made in whole["message"]["tool_calls"]] == ["read", "list", "read"]
    assert whole["finish_reason"] == "tool_calls" == streamed.finish_reason


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
async def test_no_part_of_a_marker_is_reported_and_what_looks_like_one_is(chunk: int) -> None:  # C17 C18
    quoted = "if a < b: `<tool_call>` or <tool_cal"
    script = f"<think>\nHm.\n</think>\n\n{quoted} <tool_call>\nno call\n</tool_call> then\n{written('read')}"
    asked = body(PATH, "[[script:s]]", tools=[READ])
    async with serving({"s": Script(script, chunk=chunk)}) as served:
        streamed = Grammar((await served.client.post(PATH, asked | {"stream": True})).body)
        whole = (await served.client.post(PATH, asked)).json["choices"][0]["message"]
    assert streamed.text == whole["content"]
    assert whole["content"].startswith(quoted)
    assert "no call" in whole["content"], "what is no call is text"
    assert "think>" not in whole["content"]
    assert whole["content"].count("<tool_call>") == 2, "the quoted one, and that of what is no call"
    assert [made["name"] for made in streamed.calls] == ["read"]


THOUGHT = "<think>\nHm.\n</think>\n\nHi"


@pytest.mark.parametrize(
    ("flag", "sent", "fields"),
    [
        ("reasoning_content", {}, {"reasoning_content"}),
        ("reasoning", {}, {"reasoning"}),
        ("both", {}, {"reasoning", "reasoning_content"}),
        ("both", {"include_reasoning": False}, set()),
        ("reasoning_content", {"kept": "reasoning"}, {"reasoning"}),
        ("reasoning", {"kept": "reasoning_content"}, {"reasoning_content"}),
    ],
)
async def test_where_reasoning_is(flag: Any, sent: dict[str, Any], fields: set[str]) -> None:
    kept = {"role": "assistant", "content": "x", sent.pop("kept", "name"): "a"} if "kept" in sent else None
    messages = [USER, *([kept] if kept else []), {"role": "user", "content": "[[script:s]]"}]
    asked = {"model": MODEL, "messages": messages, **sent}
    async with serving({"s": THOUGHT}, config=Config(reasoning_field=flag)) as served:
        whole = (await served.client.post(PATH, asked)).json["choices"][0]["message"]
        streamed = await served.client.post(PATH, asked | {"stream": True})
    assert set(whole) - {"role", "content", "refusal", "annotations"} == fields
    assert all(whole[field].strip() == "Hm." for field in fields)
    deltas = [data["choices"][0]["delta"] for _, data in events(streamed.body)[:-1]]
    assert {name for delta in deltas for name in delta} - {"role", "content"} == fields


async def test_counts_are_reported_all_along_on_request() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    asked = body(PATH, "[[script:s]]", stream=True, stream_options=options)
    async with serving({"s": THOUGHT}) as served:
        reply = await served.client.post(PATH, asked)
        raw = {"model": MODEL, "prompt": "[[script:s]]", "stream": True, "stream_options": options}
        legacy = await served.client.post("/v1/completions", raw)
    for stream in (reply, legacy):
        chunks = [data for _, data in events(stream.body)[:-1]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
        assert len(counts) > 4
        assert counts == sorted(counts)
        assert all(chunk["choices"] for chunk in chunks[:-1])
        assert not any("obfuscation" in chunk for chunk in chunks)
    usage = [data for _, data in events(reply.body)[:-1]][-1]["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_usage_counts_what_was_cached_and_thought() -> None:  # C8
    async with serving({"s": THOUGHT}) as served:
        first = (await served.client.post(PATH, body(PATH, "[[script:s]]"))).json["usage"]
        again = (await served.client.post(PATH, body(PATH, "[[script:s]]"))).json["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1
    assert (
        again["completion_tokens_details"]["reasoning_tokens"]
        == len(TOKENIZER.encode("<think>\nHm.\n</think>")) - 1
    )
    assert again["total_tokens"] == again["prompt_tokens"] + again["completion_tokens"]


async def test_the_sdk_asks_for_all_of_it() -> None:
    async with serving({"s": THOUGHT}) as served, openai_sdk(served.client) as sdk:
        answer = await sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": "[[script:s]]"}],
            n=2,
            seed=1,
            logprobs=True,
            top_logprobs=2,
            max_completion_tokens=100,
            presence_penalty=0.1,
            extra_body={"return_token_ids": True, "prompt_logprobs": 0, "chat_template_kwargs": {}},
        )
    assert [choice.message.content for choice in answer.choices] == ["Hi", "Hi"]
    extra = answer.model_extra
    assert extra is not None
    assert len(extra["prompt_logprobs"]) == len(extra["prompt_token_ids"]) == answer.usage.prompt_tokens  # type: ignore[union-attr]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.model_extra is not None
        assert len(choice.logprobs.content or ()) == len(choice.model_extra["token_ids"])
