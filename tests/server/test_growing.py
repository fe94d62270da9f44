"""A server that remembers a conversation asks the engine what one that has never seen it would ask."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from prompts.template_sources import HERMES
from singletree.conversation import Request, Tool, Turn
from singletree.lru import LruCache
from singletree.prompts.prompt_cache import Continuation, PromptCache
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import load_chat_template
from singletree.protocols import chat, wire
from singletree.server.doors import open_door
from singletree.server.turn.prompt import prompt_work, write_prompt
from singletree.server.turn.protocol import WireProtocol, protocol_for

from .carrying import FUNCTION, INTERLEAVED, LAYOUT, ONE, TOOL, capsules
from .serving import MODEL, TOKENIZER, Served, serving

Items = list[dict[str, Any]]

SCRIPTS = {
    "one": ONE,
    "interleaved": INTERLEAVED,
    "words": "<think>\nShort.\n</think>\n\nJust words.",
    "bare": "No thought.",
}
OTHER = {"name": "later", "description": "x", "parameters": {"type": "object", "default": 1}}
LIKE_OTHER = {"name": "later", "description": "x", "parameters": {"type": "object", "default": 1.0}}


def as_messages(tool: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in tool.items() if k != "parameters"} | {"input_schema": tool["parameters"]}


KEEPING = load_chat_template(TOKENIZER, HERMES)


class Harness:
    """One that keeps a conversation as ``path`` has it, and does to it what harnesses do."""

    def __init__(self, path: str, random: Random) -> None:
        self.path, self.random = path, random
        self.messages: Items = [{"role": "user", "content": "[[script:one]] Hello."}]
        self.options: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        field = "input" if self.path == "/v1/responses" else "messages"
        limit = {"max_tokens": 4000} if self.path == "/v1/messages" else {}
        return {"model": MODEL, field: self.messages, **limit, **self.options}

    def take(self, answer: dict[str, Any], number: int) -> None:
        """What the model said, and results or another question."""
        script = f"[[script:{self.random.choice(list(SCRIPTS))}]] {number} <|im_end|>"
        if self.path == "/v1/messages":
            messages: Items = [{"role": "assistant", "content": answer["content"]}]
            calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": id, "content": script} for id in reversed(calls)
            ]
            more = [{"role": "user", "content": results}] if calls else []
        elif self.path == "/v1/responses":
            messages = answer["output"]
            calls = [item["call_id"] for item in messages if item["type"] == "function_call"]
            more = [
                {"type": "function_call_output", "call_id": id, "output": script} for id in reversed(calls)
            ]
        else:
            messages = [answer["choices"][0]["message"]]
            calls = [call["id"] for call in messages[0].get("tool_calls") or ()]
            more = [{"role": "tool", "tool_call_id": id, "content": script} for id in reversed(calls)]
        if not more or self.random.random() < 0.2:
            more = [*more, {"role": "user", "content": f"Go on. {script}"}]
        self.messages = [*self.messages, *messages, *more]

    def meddle(self) -> None:
        """What harnesses do between two requests, and what is asked of the server beside the conversation."""
        self.messages = deepcopy(self.messages)
        for chance, change in (
            (0.15, self.edit),
            (0.2, self.forget_thoughts),
            (0.1, self.go_back),
            (0.5, self.ask),
        ):
            if self.random.random() < chance:
                change()

    def edit(self) -> None:
        item = self.random.choice(self.messages)
        if isinstance(item.get("content"), str):
            item["content"] += " Edited."
        elif isinstance(item.get("output"), str):
            item["output"] += " Edited."
        elif item.get("role") == "user":
            item["content"][-1]["cache_control"] = {"type": "ephemeral"}

    def forget_thoughts(self) -> None:
        for item in self.messages:
            item.pop("reasoning_content", None)
            if item.get("role") == "assistant" and isinstance(item["content"], list):
                item["content"] = [b for b in item["content"] if b["type"] != "thinking"]
        self.messages = [item for item in self.messages if item.get("type") != "reasoning"]

    def go_back(self) -> None:
        asked = [i for i, item in enumerate(self.messages) if item.get("role") == "user" and i]
        self.messages = self.messages[: self.random.choice(asked) + 1] if asked else self.messages

    def ask(self) -> None:
        tools = self.random.choice([[FUNCTION], [FUNCTION, OTHER], [FUNCTION, LIKE_OTHER]])
        thinking = self.random.random() < 0.8
        if self.path == "/v1/messages":
            edit = {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 3},
                "keep": {"type": "tool_uses", "value": 2},
            }
            self.options = {
                "tools": [TOOL, *map(as_messages, tools[1:])],
                "thinking": {"type": "enabled", "budget_tokens": 100} if thinking else {"type": "disabled"},
                "system": f"x-anthropic-billing-header: cc_version={self.random.random()};\nBe brief.",
                **({"context_management": {"edits": [edit]}} if self.random.random() < 0.3 else {}),
            }
        elif self.path == "/v1/responses":
            effort = {"effort": "high" if thinking else "none"}
            self.options = {"tools": [{"type": "function", **t} for t in tools], "reasoning": effort}
        else:
            functions = [{"type": "function", "function": tool} for tool in tools]
            self.options = {"tools": functions, "chat_template_kwargs": {"enable_thinking": thinking}}


def written_anew(
    served: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """The prompt for a server that remembers turns, and nothing else."""
    with monkeypatch.context() as patched:
        patched.setattr(wire, "_KNOWN", LruCache(0))
        protocol: WireProtocol = open_door(f"protocol {protocol_for(path, {}).name}")
        request = protocol.decode(json.dumps(body).encode(), {})
    speech = replace(served.model, prompt_cache=PromptCache(0))
    return write_prompt(speech, request).token_ids.tolist()


class AnyCheckpoint(PromptCache):
    """Gives each stage a checkpoint of any earlier prompt, another one than the other stages."""

    def __init__(self, random: Random) -> None:
        super().__init__(2**30)
        self._random = random
        self._kept: list[Mapping[type, Any]] = []

    def resume(
        self, turns: Sequence[Turn], tools: tuple[Tool, ...] = (), settings: object = None
    ) -> Continuation:
        """As a conversation that was never seen, or that was seen at another time by each stage."""
        stages = self._kept[-1] if self._kept else ()
        earlier = {kind: self._random.choice(self._kept)[kind] for kind in stages}
        return Continuation(self, tuple(turns), tools, (), earlier)

    def keep(self, work: Continuation, checkpoints: Mapping[type, Any]) -> None:
        """Keep them all."""
        self._kept.append(checkpoints)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("seed", [3])
async def test_any_checkpoint_gives_the_same_prompt(  # C7 C41
    path: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = AnyCheckpoint(Random(seed))
    settings: dict[str, Any] = {
        "template": KEEPING,
        "layout": KEEPING.layout(TOKENIZER),
        "prompt_cache": cache,
    }
    await converse(path, seed, {"memory": TurnMemory(2**20), **settings}, monkeypatch)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["forgetful", "drops thoughts", "keeps thoughts"])
async def test_prompts_are_those_of_a_server_that_begins(  # C3 C7 C41
    path: str, seed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"memory": TurnMemory(2**20), "layout": LAYOUT} if kind != "forgetful" else {}
    if kind == "keeps thoughts":
        settings |= {"template": KEEPING, "layout": KEEPING.layout(TOKENIZER)}
    await converse(path, seed, settings, monkeypatch)


async def converse(path: str, seed: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation in which the engine gets each prompt as a server would write it that begins with it."""
    harness = Harness(path, Random(seed))
    async with serving(SCRIPTS, context_window=1 << 22, capsules=capsules(), **settings) as served:
        for number in range(14):
            body = harness.body()
            expected = written_anew(served, path, body, monkeypatch)
            reply = await served.client.post(path, body)
            assert reply.status == 200, reply.body
            assert served.engine.log[-1].prompt.tolist() == expected
            harness.take(reply.json, number)
            harness.meddle()


async def test_only_what_is_new_takes_work() -> None:
    """A step of an agent is short work, however long its conversation is; all else may print the history anew."""
    asked = [{"role": "user", "content": "Look. " * 1000}, {"role": "assistant", "content": "I do."}]
    size = 100_000

    async with serving(SCRIPTS, context_window=1 << 22, memory=TurnMemory(2**20), layout=LAYOUT) as served:

        def request(*more: dict[str, Any], **options: Any) -> Request:
            body = {
                "model": MODEL,
                "messages": [*asked, *more],
                "tools": [{"type": "function", "function": FUNCTION}],
            }
            return chat.decode(json.dumps({**body, **options}).encode(), {})

        assert prompt_work(served.model, request(), size) == size
        write_prompt(served.model, request())
        result = {"role": "tool", "tool_call_id": "c", "content": "x" * 500}
        assert prompt_work(served.model, request(), size) == 0
        assert prompt_work(served.model, request(result), size) == 500
        asked[1:] = [{"role": "assistant", "content": "I did."}]
        assert prompt_work(served.model, request(result), size) == size, "it leaves the prompt in its middle"
        asked[1:] = [{"role": "assistant", "content": "I do."}]
        question = {"role": "user", "content": "And now?"}
        assert prompt_work(served.model, request(question), size) == size
        changes: tuple[dict[str, Any], ...] = (
            {"tools": []},
            {"chat_template_kwargs": {"enable_thinking": False}},
        )
        for change in changes:
            assert prompt_work(served.model, request(result, **change), size) == size
