"""Prompts of several families as token ids, to be compared with those of ``renderers``, which prime-rl trains with.

The models' own vocabularies are not available here: both get Qwen3's with the added tokens of the family.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.template_models import TEMPLATES, model, scripted

from clients.returned_turns import MODEL
from singletree.conversation import Conversation, Reasoning, Request, Text, Tool, ToolCall, ToolResult, Turn
from singletree.prompts.template.chat_template import load_chat_template
from singletree.prompts.tokenizer.tokenizer import load_tokenizer
from singletree.server.turn.prompt import write_prompt

_BEGINNINGS = ("<|begin_of_text|>", "<bos>")
_GLM = ("[gMASK]", "<sop>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3": ("trl/qwen3", ()),
    "qwen3-vl": ("trl/qwen3_vl", ()),
    "qwen3.5": ("trl/qwen3_5_think", ()),
    "qwen3.6": ("trl/qwen3_6", ()),
    "qwen3.8": ("trl/qwen3_8", ()),
    "glm-4.5": ("trl/glm4moe", _GLM),
    "glm-5": ("llama.cpp/GLM-4.7-Flash", _GLM),
    "llama-3": ("llama.cpp/meta-llama-Llama-3.1-8B-Instruct", ("<|begin_of_text|>", "<|end_of_text|>")),
    "nemotron-3": ("trl/nemotron_3_nano", ()),
    "nemotron-3-ultra": ("trl/nemotron_3_ultra", ()),
    "nemotron-3.5": ("trl/nemotron_3_5_lightning", ()),
    "gemma4": ("trl/gemma4_v5", ("<bos>", "<eos>", "<|image>", "<image|>")),
    "kimi-k2": ("llama.cpp/Kimi-K2-Instruct", ()),
}
"""The name of a renderer -> the chat template of such a model, and added tokens that the template does not have."""

_PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "read", "description": "Reads a file.", "parameters": _PATH}}
]
_ID = "functions.read:0"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helper."},
    {"role": "user", "content": "Read it."},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I read it.",
        "tool_calls": [
            {"id": _ID, "type": "function", "function": {"name": "read", "arguments": {"path": "notes.txt"}}}
        ],
    },
    {"role": "tool", "tool_call_id": _ID, "name": "read", "content": "hello"},
    {"role": "assistant", "content": "It says hello.", "reasoning_content": "Done."},
    {"role": "user", "content": "Thanks, and now?"},
]
PROMPTS = {
    "user": (1, 2, False),
    "system": (0, 2, False),
    "tools": (0, 2, True),
    "result": (0, 4, True),
    "later": (0, 6, True),
}
"""Prompts by name: the first and last of ``MESSAGES``, and whether there are ``TOOLS``."""


def _turn(message: dict[str, Any]) -> Turn:
    role, text = message["role"], message["content"]
    if role == "tool":
        return Turn("tool", (ToolResult(message["tool_call_id"], (Text(text),)),))
    parts: list[Any] = [Reasoning(message["reasoning_content"])] if role == "assistant" else []
    parts += [Text(text)] if text else []
    for call in message.get("tool_calls", ()):
        given = call["function"]
        parts.append(ToolCall(given["name"], json.dumps(given["arguments"]), call["id"]))
    return Turn(role, tuple(parts))


def prompts_of(family: str, folder: Path) -> dict[str, list[int]]:
    """Write the tokenizer of ``family`` to ``folder``, and return the token ids of each of ``PROMPTS``."""
    name, more = FAMILIES[family]
    base = scripted(TEMPLATES / f"{name}.jinja", folder).served
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = definition["added_tokens"]
    first = max(token["id"] for token in known) + 1
    missing = [text for text in more if text not in {token["content"] for token in known}]
    flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    known += [{"id": first + i, "content": text, "special": True, **flags} for i, text in enumerate(missing)]
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    source = base.template.source + "".join(more)
    if (bos := next((mark for mark in _BEGINNINGS if mark in source), None)) in more:
        config["bos_token"] = bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    served = model(tokenizer, load_chat_template(tokenizer), base.family, base.engine, remembers=False)  # type: ignore[arg-type]
    found = {}
    for title, (start, end, with_tools) in PROMPTS.items():
        function = TOOLS[0]["function"]
        tools = (Tool(function["name"], function["description"], _PATH),) if with_tools else ()  # type: ignore[index]
        turns = tuple(map(_turn, MESSAGES[start:end]))
        found[title] = list(write_prompt(served, Request(MODEL, Conversation(turns, tools))).token_ids)
    return found
