"""Requests of every protocol with a text of one's choice in every string that a client may send."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
import tokenizers

from prompts.template_sources import load_template
from singletree.conversation import Request
from singletree.errors import InvalidRequest
from singletree.parsing.family import Family
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.definition import Pipeline, TokenizerDefinition
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.protocols import chat, messages, responses
from singletree.server.models.chat_format import ChatFormat
from singletree.server.turn.prompt import write_prompt

HARMLESS = "harmless"

_SCHEMA = {
    "type": "object",
    "title": "t",
    "properties": {"path": {"type": "string", "description": "where", "enum": ["a", "b"], "default": "a"}},
    "required": ["path"],
}
_ARGUMENTS = '{"path": "a", "deep": {"list": ["b", {"c": "d"}]}}'
_FILE = {"filename": "notes.txt", "file_data": "data:text/plain;base64,aGk="}
_CUSTOM_TOOL = {
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}},
}

_CHAT: dict[str, Any] = {
    "model": "m",
    "user": "u",
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "chat_template_kwargs": {"mine": {"x": ["y"]}, "documents": [{"title": "t", "text": "w"}]},
    "tools": [
        {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": _SCHEMA}},
        {"type": "custom", "custom": _CUSTOM_TOOL},
    ],
    "messages": [
        {"role": "system", "content": "You are.", "name": "s"},
        {"role": "developer", "content": "Do."},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "hi"}, {"type": "file", "file": _FILE}],
        },
        {
            "role": "assistant",
            "name": "bob",
            "reasoning_content": "thought",
            "content": "words",
            "refusal": "no",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read", "arguments": _ARGUMENTS}},
                {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "text"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "read", "content": "result"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "more"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "again"}, {"type": "text", "text": "so"}],
        },
        {"role": "user", "content": "and?"},
        {"role": "assistant", "reasoning": "short", "content": "sum"},
        {"role": "user", "content": "and then?"},
        {
            "role": "assistant",
            "reasoning_details": [{"type": "reasoning.text", "text": "detail"}],
            "content": "up",
        },
        {"role": "user", "content": "last"},
    ],
}

_MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 10,
    "metadata": {"user_id": "u"},
    "system": [{"type": "text", "text": "You are."}],
    "tools": [{"name": "read", "description": "Reads.", "input_schema": _SCHEMA}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {
                    "type": "document",
                    "title": "title",
                    "context": "context",
                    "source": {"type": "text", "media_type": "text/plain", "data": "words"},
                },
                {
                    "type": "search_result",
                    "source": "s",
                    "title": "t",
                    "content": [{"type": "text", "text": "w"}],
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "thought", "signature": "sig"},
                {"type": "text", "text": "words"},
                {"type": "tool_use", "id": "c1", "name": "read", "input": json.loads(_ARGUMENTS)},
                {"type": "text", "text": "behind"},
                {"type": "thinking", "thinking": "second", "signature": "sig"},
                {"type": "tool_use", "id": "c2", "name": "read", "input": {"path": "b"}},
                {"type": "text", "text": "at last"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "result", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "more"}]},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "assistant", "content": "all"},
        {"role": "user", "content": "last"},
    ],
}

_RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "You are.",
    "metadata": {"a": "b"},
    "user": "u",
    "chat_template_kwargs": {"mine": {"x": "y"}},
    "tools": [
        {"type": "function", "name": "read", "description": "Reads.", "parameters": _SCHEMA},
        {"type": "custom", "name": "patch", "description": "Edits."},
        {
            "type": "namespace",
            "name": "space",
            "description": "Some.",
            "tools": [{"type": "function", "name": "far", "description": "Far.", "parameters": _SCHEMA}],
        },
    ],
    "input": [
        {"type": "message", "role": "developer", "content": "Do."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "hi"}, {"type": "input_file", **_FILE}],
        },
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "thought"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "words"}]},
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "read", "arguments": _ARGUMENTS},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "text"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "behind"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "result"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "more"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "message", "role": "user", "content": "last"},
    ],
}

Decode = Callable[[bytes], Request]
PROTOCOLS: dict[str, tuple[dict[str, Any], Decode]] = {
    "chat": (_CHAT, chat.decode),
    "messages": (_MESSAGES, messages.decode),
    "responses": (_RESPONSES, responses.decode),
}

_WORDS = frozenset({"type", "role", "model", "syntax", "media_type", "file_data"})
"""Fields that hold one of a few words, or data: with another one the request is refused, or says something else."""

_OBJECTS = ("properties", "arguments", "input", "mine")
"""Fields that hold objects whose keys are the client's own."""


def one_by_one(body: Any, text: str, at: str = "") -> Iterator[tuple[str, Any]]:
    """``body`` with ``text`` in one of its strings or in the place of one of its keys; and where that is."""
    if isinstance(body, str):
        yield at, text
        if body.startswith("{"):
            for where, changed in one_by_one(json.loads(body), text, f"{at}.arguments"):
                yield where, json.dumps(changed)
                yield f"{where}, escaped", escaped(json.dumps(changed))
    elif isinstance(body, dict):
        for key in body.keys() - _WORDS:
            for where, changed in one_by_one(body[key], text, f"{at}.{key}"):
                yield where, {**body, key: changed}
            if at.rpartition(".")[2] in _OBJECTS:
                yield f"{at}.{key} (key)", {(text if each == key else each): body[each] for each in body}
    elif isinstance(body, list):
        for i, inner in enumerate(body):
            for where, changed in one_by_one(inner, text, f"{at}.{i}"):
                yield where, [*body[:i], changed, *body[i + 1 :]]


def everywhere(body: Any, text: str, at: str = "", *, write: Callable[[str], str] = str) -> Any:
    """``body`` with ``text`` in all of its strings and keys; ``write`` writes JSON that stands in a string."""
    if isinstance(body, str):
        return write(json.dumps(everywhere(json.loads(body), text, "arguments"))) if body[:1] == "{" else text
    if isinstance(body, list):
        return [everywhere(inner, text, write=write) for inner in body]
    if not isinstance(body, dict):
        return body
    own, changed = at in _OBJECTS, {}
    for i, (key, inner) in enumerate(body.items()):
        keeps = key in _WORDS or key == "metadata"  # which takes short words only
        changed[text + str(i) if own else key] = inner if keeps else everywhere(inner, text, key, write=write)
    return changed


def escaped(arguments: str) -> str:
    """JSON ``arguments`` with an escape for each character that may have one."""
    return "".join(
        c if c in '{}[]":, ' or c.isalnum() or c == "\\" else f"\\u{ord(c):04x}" for c in arguments
    )


def prefills(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each beginning of ``body`` that ends with the assistant's message, for the model to go on with."""
    messages = body.get("messages", [])
    return [
        {**body, "messages": messages[: i + 1]}
        for i, each in enumerate(messages)
        if each["role"] == "assistant"
    ]


def structure(speech: ChatFormat) -> frozenset[int]:
    """The tokens that no client may write: special ones, ends of turns, what sets turns off."""
    tokenizer, layout = speech.tokenizer, speech.layout
    around = "\n".join([*layout.headers, *layout.ends]) if layout else ""
    opens = (speech.family.reasoning or ("",))[0].strip()
    written = {id for text, id in tokenizer.added_tokens.items() if text in around and text != opens}
    special = {tokenizer.added_tokens[text] for text in tokenizer.special_tokens}
    return frozenset(special | written | set(tokenizer.stop_token_ids))


def attack(speech: ChatFormat) -> str:
    """All tokens of structure, inside words and in a row."""
    wanted = structure(speech)
    texts = sorted(
        text for text, id in speech.tokenizer.added_tokens.items() if id in wanted and text.strip()
    )
    return HARMLESS + " ".join(f"a{text}{text}" for text in texts)


def written(speech: ChatFormat, body: Mapping[str, Any], decode: Decode) -> Counter[int] | None:
    """How often each token of structure is in the prompt of ``body``; None if the request is refused."""
    try:
        request = decode(msgspec.json.encode(body))
        ids = write_prompt(speech, request).token_ids
    except InvalidRequest:
        return None
    wanted = structure(speech)
    return Counter(id for id in ids if id in wanted)


def vocabulary(tokens: Mapping[str, bool], stop: str = "") -> Tokenizer:
    """A tokenizer of bytes and ``tokens``: text -> whether it is marked as special. ``stop`` ends a turn."""
    added = tuple(AddedToken(256 + i, text, special) for i, (text, special) in enumerate(tokens.items()))
    return Tokenizer(
        TokenizerDefinition(
            pipeline=_bytes(),
            added_tokens=added,
            vocabulary_size=256 + len(added),
            named_tokens={
                "bos_token": "<s>",
                "eos_token": stop or "</s>",
                "unk_token": "<unk>",
                "pad_token": "<pad>",
            },
            stop_token_ids=frozenset(token.id for token in added if token.text == stop),
        )
    )


@cache
def _bytes() -> Pipeline:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate(alphabet)}, "merges": []}
    return Pipeline(msgspec.Raw(msgspec.json.encode(model)), None, level, level)


def speech(tokenizer: Tokenizer, source: str, family: Family, **settings: Any) -> ChatFormat:
    """How a model with that template is spoken to."""
    template = load_template(source, named_tokens=tokenizer.named_tokens)
    layout = template.layout(tokenizer)
    return ChatFormat(
        tokenizer=tokenizer, template=template, family=family, why="", layout=layout, **settings
    )
