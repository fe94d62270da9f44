"""A harness that carries its conversation, capsules and all, from one server to another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.capsules import Capsules
from singletree.testing.scripts import Script

from .memory import events
from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving

KEY = b"k" * 32
LAYOUT = TEMPLATE.layout(TOKENIZER)
ARGUMENTS = '{"unit": "celsius",  "city": "Par\\u00eds", "days":3.0}'
CALL = f'<tool_call>\n{{"name": "get_weather",  "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>\nI need the weather.\n\nAnd more. \n</think>"
ONE = f"{THOUGHT}\n\nLet me check.\n{CALL}"
INTERLEAVED = f"{THOUGHT}\n\nChecking.\n{CALL}\n<think>\n\n Now the other.</think>\n{CALL}"
UNSAID = f"<think></think>{THOUGHT}{CALL}"
MODEL_OUTPUT = {"one": ONE, "interleaved": INTERLEAVED, "unsaid": UNSAID}
FUNCTION = {"name": "get_weather", "description": "", "parameters": {"type": "object"}}
TOOL = {"name": "get_weather", "description": "", "input_schema": {"type": "object"}}

# On Responses a client has capsules where it asks for them; the text, only to change it.
INCLUDE = ["reasoning.encrypted_content", "reasoning.content"]

Items = list[dict[str, Any]]


def unchanged(items: Items) -> Items:
    return items


def without_words(items: Items) -> Items:
    """Thoughts as OpenCode (Responses) and whoever asks for ``display: omitted`` give them back: sealed only."""
    kept: Items = []
    for item in items:
        if item["type"] == "thinking":
            item = item | {"thinking": ""}
        elif item["type"] == "reasoning":
            item = {name: item[name] for name in ("type", "encrypted_content")} | {"summary": []}
        kept.append(item)
    return kept


def rewritten(items: Items) -> Items:
    """Arguments as most harnesses write them, ids of items gone."""
    return [
        item | {"arguments": json.dumps(json.loads(item["arguments"]), separators=(",", ":"))}
        if "arguments" in item
        else item
        for item in (
            {k: v for k, v in item.items() if k != "id" or item["type"] == "tool_use"} for item in items
        )
    ]


def results(items: Items) -> Items:
    calls = [i for i in items if i["type"] in ("tool_use", "function_call")]
    if any(i["type"] == "tool_use" for i in calls):
        blocks = [{"type": "tool_result", "tool_use_id": c["id"], "content": "Sunny."} for c in calls]
        return [{"role": "user", "content": blocks}]
    return [{"type": "function_call_output", "call_id": c["call_id"], "output": "Sunny."} for c in calls]


class Client:
    """A harness on the API at ``path``, which carries its conversation from server to server."""

    def __init__(self, path: str, text: str, *, stream: bool) -> None:
        self.path, self.stream = path, stream
        self.is_messages = path == "/v1/messages"
        self.messages: Items = [{"role": "user", "content": text}]

    async def ask(self, served: Served, **more: Any) -> Items:
        field, tool = ("messages", TOOL) if self.is_messages else ("input", {"type": "function", **FUNCTION})
        carries = {"max_tokens": 4000} if self.is_messages else {"include": INCLUDE}
        given = {
            "model": MODEL,
            field: self.messages,
            "tools": [tool],
            "stream": self.stream,
            **carries,
            **more,
        }
        answer = await served.client.post(self.path, given)
        assert answer.status == 200, answer.body
        return self._read(answer.body)

    def _read(self, body: bytes) -> Items:
        if not self.stream:
            items: Items = json.loads(body)["content" if self.is_messages else "output"]
            return items
        if self.is_messages:
            return blocks(body)
        done = [data for name, data in events(body) if name == "response.output_item.done"]
        last: Items = events(body)[-1][1]["response"]["output"]
        assert [event["item"] for event in done] == last
        return last

    def take(self, items: Items) -> None:
        """The turn and the results of its calls are said."""
        turn = [{"role": "assistant", "content": items}] if self.is_messages else items
        self.messages = [*self.messages, *turn, *results(items)]


def blocks(body: bytes) -> Items:
    """The content that a stream of Messages says."""
    found: Items = []
    arguments = ""
    for name, data in events(body):
        if name == "content_block_start":
            found.append(dict(data["content_block"]))
            arguments = ""
        elif name == "content_block_delta":
            delta = data["delta"]
            arguments += delta.get("partial_json", "")
            for field in ("text", "thinking", "signature"):
                if field in delta:
                    found[-1][field] += delta[field]
        elif name == "content_block_stop" and arguments:
            found[-1]["input"] = json.loads(arguments)
    return found


def capsules(key: bytes = KEY, of: bytes = b"model", **more: Any) -> Capsules:
    return Capsules([key], of, **more)


def server(scripts: dict[str, str | Script], sealing: Capsules | None = None, **settings: Any) -> Any:
    """One that remembers nothing yet."""
    given = {"memory": TurnMemory(2**20), "layout": LAYOUT, "capsules": sealing or capsules()}
    return serving(scripts, **(given | settings))


def carried(items: Items) -> list[str]:
    return [c for i in items if (c := i.get("signature") or i.get("encrypted_content") or i.get("data"))]


def last_prompt(served: Served) -> list[int]:
    return list(served.engine.log[-1].prompt_token_ids)


def kept_in(prompt: list[int], before: list[int], generated: list[int]) -> int:
    """How many of the generated tokens stand in ``prompt`` behind those of the prompt before."""
    whole = before + generated
    pairs = enumerate(zip(prompt, whole, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(whole))) - len(before)


async def moved(
    path: str,
    output: str | Script,
    mutate: Callable[[Items], Items],
    *,
    stream: bool,
    sealing: Capsules | None = None,
) -> tuple[int, int, str]:
    """A turn on one server, the next one on another: (its tokens, how many of them came back in place, the prompt)."""
    client = Client(path, "[[script:a,b]] How is it?", stream=stream)
    async with server({"a": output, "b": "Fine."}) as served:
        items = await client.ask(served)
        before = last_prompt(served)
    client.take(mutate(items))
    async with server({"a": output, "b": "Fine."}, sealing) as served:
        await client.ask(served)
        prompt = last_prompt(served)
    generated = TOKENIZER.encode(output if isinstance(output, str) else output.text)
    return len(generated), kept_in(prompt, before, generated), TOKENIZER.decode(prompt)


PATHS = ["/v1/messages", "/v1/responses"]
MUTATIONS = [unchanged, without_words, rewritten]
