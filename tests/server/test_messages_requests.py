"""What harnesses send on the Messages API, through the whole server: what the model reads, what the client gets."""

from __future__ import annotations

from typing import Any

import pytest

from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config
from singletree.testing.scripts import Script

from .memory import Exchange, Reply, events, scope
from .serving import MODEL, TEMPLATE, TOKENIZER, body, serving

PATH = "/v1/messages"
TOOL = {"name": "ls", "description": "List.", "input_schema": {"type": "object"}}
ECHO = "[[echo:yes]]"
YES = [{"type": "text", "text": "yes", "citations": None}]


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    output = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
    return {"role": "user", "content": output}


async def ask(**fields: Any) -> tuple[Reply, str]:
    """The answer to a request with ``fields``, and the prompt that the model read for it."""
    async with serving() as served:
        reply = await served.client.post(PATH, body(PATH, ECHO) | fields)
        played = list(served.engine.log)
    return reply, TOKENIZER.decode(played[-1].prompt_token_ids) if played else ""


PLAIN: dict[str, dict[str, Any]] = {
    "web search": {
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "tool_choice": {"type": "auto"},
    },
    "a tool of the vendor's": {
        "tools": [{"type": "code_execution_20250825", "name": "code_execution"}],
        "tool_choice": {"type": "tool", "name": "code_execution"},
    },
    "max_tokens beyond the window": {"max_tokens": 10**9},
    "no limit": {"max_tokens": -1},
    "a budget beyond max_tokens": {
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 32000},
    },
    "a budget below the least": {"thinking": {"type": "enabled", "budget_tokens": 0}},
    "adaptive": {"thinking": {"type": "adaptive", "display": "updates"}, "output_config": {"effort": "high"}},
    "cache_control at the top": {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    "cache_control on a block": {
        "messages": [user({"type": "text", "text": ECHO, "cache_control": {"type": "x"}})]
    },
    "empty blocks": {"messages": [user("", ECHO, "")]},
    "unknown fields": {
        "speed": "fast",
        "service_tier": "auto",
        "inference_geo": "us",
        "betas": ["x"],
        "x": {"y": 1},
    },
    "empty stop": {"stop_sequences": [""]},
    "nulls": {"system": None, "tools": None, "metadata": None, "thinking": None, "stop_sequences": None},
    "empty system": {"system": []},
    "no tool may be called": {"tool_choice": {"type": "none"}},
}


@pytest.mark.parametrize("name", PLAIN)
async def test_accepted_and_the_prompt_is_the_plain_one(name: str) -> None:  # C26
    _, plain = await ask()
    reply, prompt = await ask(**PLAIN[name])
    assert (reply.status, reply.json["content"]) == (200, YES)
    assert reply.json["stop_reason"] == "end_turn"
    assert prompt == plain


@pytest.mark.parametrize("name", ["web search", "a tool of the vendor's"])
async def test_a_tool_that_is_ignored_is_a_warning(name: str) -> None:  # C26
    reply, _ = await ask(**PLAIN[name])
    assert PLAIN[name]["tools"][0]["type"] in reply.headers["x-singletree-warning"]


async def test_a_tool_that_the_client_runs_is_called_like_any_other() -> None:  # C26
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    async with serving({"s": call}) as served:
        asked = {"tools": [{"type": "bash_20250124", "name": "bash"}]}
        reply = await served.client.post(PATH, body(PATH, "[[script:s]]") | asked)
        prompt = TOKENIZER.decode(served.engine.log[-1].prompt_token_ids)
    assert '"name": "bash"' in prompt
    assert '"restart"' in prompt
    [used] = reply.json["content"]
    assert (used["type"], used["name"], used["input"]) == ("tool_use", "bash", {"command": "ls"})
    assert reply.json["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "extra",
    [
        {"strict": None},
        {"eager_input_streaming": True},
        {"cache_control": {"type": "ephemeral"}},
        {"type": "custom"},
    ],
)
async def test_what_a_tool_may_have_changes_no_prompt(extra: dict[str, Any]) -> None:
    (_, plain), (reply, prompt) = await ask(tools=[TOOL]), await ask(tools=[TOOL | extra])
    assert (reply.status, prompt) == (200, plain)


async def test_examples_of_a_tools_input_are_shown() -> None:
    _, prompt = await ask(tools=[TOOL | {"input_examples": [{"path": "/tmp", "all": True}, {"path": "x"}]}])
    assert r"List.\n\nExamples of the input:\n{\"path\":\"/tmp\",\"all\":true}\n{\"path\":\"x\"}" in prompt
    nothings: list[Any] = [None, [], {}, "x"]
    for nothing in nothings:
        assert (await ask(tools=[TOOL | {"input_examples": nothing}]))[1] == (await ask(tools=[TOOL]))[1]


async def test_a_trailing_assistant_message_is_gone_on_with() -> None:  # C36
    messages = [user(ECHO), {"role": "assistant", "content": "So far, so"}]
    reply, prompt = await ask(messages=messages)
    assert prompt.endswith("<|im_start|>assistant\nSo far, so")
    assert reply.json["content"] == YES


async def test_reasoning_of_others_is_no_harm() -> None:  # C37
    thinking = {"type": "thinking", "thinking": "theirs", "signature": "EqQBCgIYAhIkFOREIGN=="}
    blocks = [{"type": "redacted_thinking", "data": "Emw"}, thinking, {"type": "text", "text": "k"}]
    reply, prompt = await ask(messages=[user("a"), {"role": "assistant", "content": blocks}, user(ECHO)])
    assert reply.status == 200
    assert "theirs" in prompt
    assert "FOREIGN" not in prompt
    assert "Emw" not in prompt


PDF = {"type": "base64", "media_type": "application/pdf", "data": "QUJD"}
UNSEEN: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
        "[image: this model cannot see images]",
    ),
    (
        {"type": "image", "source": {"type": "url", "url": "https://QUJD"}},
        "[image: this model cannot see images]",
    ),
    (
        {"type": "document", "title": "T", "source": PDF},
        "[document T: this model cannot read application/pdf]",
    ),
]


@pytest.mark.parametrize(("block", "words"), UNSEEN, ids=["image", "url", "document"])
async def test_what_a_model_cannot_see_leaves_a_word(block: dict[str, Any], words: str) -> None:  # C35
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    call = {"type": "tool_use", "id": "t", "name": "ls", "input": {}}
    messages = [user(ECHO, block), {"role": "assistant", "content": [call]}, user(result)]
    reply, prompt = await ask(messages=messages, tools=[TOOL])
    assert reply.status == 200
    assert prompt.count(words) == 2
    assert "QUJD" not in prompt


async def test_a_text_document_is_read() -> None:  # C35
    source = {"type": "text", "media_type": "text/plain", "data": "the text of it"}
    _, prompt = await ask(messages=[user({"type": "document", "title": "T", "source": source}, ECHO)])
    assert "T\n\nthe text of it" in prompt


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("messages", [user({"type": "hologram"})], "messages.0.content.0.type: 'hologram'"),
        ("messages", [{"role": "robot", "content": "x"}], "messages.0.role: 'robot'"),
        ("tool_choice", {"type": "any"}, "tool_choice"),
        ("thinking", {"type": "deep"}, "thinking.type: 'deep'"),
        ("output_config", {"format": {"type": "xml"}}, "output_config.format.type: 'xml'"),
    ],
)
async def test_what_cannot_be_done_is_named(field: str, value: Any, says: str) -> None:
    reply, _ = await ask(**{field: value})
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert reply.json["error"]["message"].startswith(says)


async def test_a_format_holds_the_text_to_its_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    async with serving() as served:
        for asked in ({"output_config": {"format": {"type": "json_schema", "schema": schema}}}, {}):
            await served.client.post(PATH, body(PATH, ECHO, **asked))
        constrained = [play.constraint is not None for play in served.engine.log]
        prompts = {play.prompt_token_ids for play in served.engine.log}
    assert constrained == [True, False]
    assert len(prompts) == 1


COUNTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "system and tools": {"system": [{"type": "text", "text": "Be brief."}], "tools": [TOOL]},
    "prefill": {"messages": [user(ECHO), {"role": "assistant", "content": "So"}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "forced": {"tools": [TOOL], "tool_choice": {"type": "any"}},
    "a picture": {
        "messages": [user(ECHO, {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}})]
    },
}


@pytest.mark.parametrize("name", COUNTED)
async def test_the_count_is_that_of_the_prompt(name: str) -> None:  # C27
    async with serving({"s": Script("yes")}) as served:
        asked = body(PATH, ECHO) | COUNTED[name]
        whole = await served.client.post(PATH, asked)
        del asked["max_tokens"]
        counted = await served.client.post(f"{PATH}/count_tokens", asked)
        prompt = list(served.engine.log)[-1].prompt_token_ids
    assert whole.status == counted.status == 200
    assert counted.json == {"input_tokens": len(prompt)}


async def test_the_count_of_a_turn_that_comes_back_is_that_of_its_own_tokens() -> None:  # C27
    turn = (
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name":  "ls", "arguments":   {"path":    "a"}}\n</tool_call>'
    )
    remembering: dict[str, Any] = {"memory": TurnMemory(2**20), "layout": TEMPLATE.layout(TOKENIZER)}
    async with serving({"s": turn, "after": "Done."}, **remembering) as served:
        asked = body(PATH, "[[script:s,after]]", tools=[TOOL])
        content = (await served.client.post(PATH, asked)).json["content"]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "r"}
        asked["messages"] += [{"role": "assistant", "content": content}, user(result)]
        counted = await served.client.post(f"{PATH}/count_tokens", asked)
        again = await served.client.post(PATH, asked)
        prompt = served.engine.log[1].prompt_token_ids
    assert '"arguments":   {"path":    "a"}' in TOKENIZER.decode(prompt)
    assert counted.json == {"input_tokens": len(prompt)}
    usage = again.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)


async def test_the_list_of_models() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    async with serving(max_output_tokens=1000) as served:
        pages = [await served.client.get(f"/v1/models{end}", headers) for end in ("", "/", "?limit=1000")]
        one = await served.client.get(f"/v1/models/{MODEL}", headers)
    assert [page.json["data"] for page in pages] == [[one.json]] * 3
    assert (one.json["max_input_tokens"], one.json["max_tokens"]) == (8192, 1000)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/api/hello"])
async def test_somebody_is_there(method: str, path: str) -> None:
    async with serving(config=Config(api_key=("k",))) as served:
        assert (await served.client.request(method, path)).status == 200


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_keys_outside_ascii(encoding: str) -> None:
    async with serving(config=Config(api_key=("schlüssel",))) as served:
        for key, status in (("schlüssel", 200), ("schlüsse", 401), ("ÿþ", 401)):
            exchange, asked = Exchange(b"{}"), scope("GET", "/v1/models", {}, b"")
            asked["headers"].append((b"x-api-key", key.encode(encoding)))
            await served.client.ask(exchange, asked)
            assert exchange.status == status


async def test_a_stream_from_its_start_to_its_end() -> None:  # C11 C16
    async with serving() as served:
        stream = await served.client.post(PATH, body(PATH, ECHO, stream=True))
    streamed = events(stream.body)
    assert [name for name, _ in streamed[:2]] == ["message_start", "ping"]
    assert streamed[-2][1]["usage"].keys() < streamed[0][1]["message"]["usage"].keys()
    assert b"[DONE]" not in stream.body
