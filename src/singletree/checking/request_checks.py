"""Checks of requests: what an endpoint has to take, what it answers to what it cannot, and what it counts."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from singletree.checking.endpoint import LOOKUP, Endpoint, NoAnswer, Refused, WholeAnswer
from singletree.checking.returned_turns import Reply, ReturnedBlock, TurnProtocol, WireBody
from singletree.checking.verdicts import Failed, NotApplicable, Undecided, demand

_BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-tool-changes-2026-07-01,thinking-token-count-2026-05-13,effort-2025-11-24"
)
_SYSTEM_BETA = {"anthropic-beta": "mid-conversation-system-2026-04-07"}
_TOO_LONG = re.compile(r"prompt is too long: \d+ tokens > \d+ maximum")
_OVERFLOWS = re.compile(
    r"context[_ ]length[_ ]exceeded|maximum context length is \d+ tokens|exceeds the context window"
    r"|exceeds the available context size|greater than the context length"
)
"""Those that pi 1.6 knows, of OpenAI, vLLM, llama.cpp and LM Studio."""
_ROLE = re.compile(r"messages\.\d+\.role")
_LONGEST_OVERFLOW = 300_000
_MARKERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "[/INST]",
)
_REPEATS = 24
_CALL = ReturnedBlock("call", '{"city":"Oslo"}', "call_1", "lookup")
_WEATHER = "How is the weather in Oslo?"
_FIELDS: Mapping[str, WireBody] = {
    "messages": {
        "metadata": {"user_id": '{"session_id":"check"}'},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    },
    "chat": {
        "store": False,
        "reasoning_effort": "medium",
        "parallel_tool_calls": True,
        "prompt_cache_key": "check",
    },
    "responses": {
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "check",
        "client_metadata": {"session": "check"},
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low"},
        "parallel_tool_calls": True,
    },
}
"""Fields of Claude Code, of OpenCode, pi and OpenClaw, and of Codex."""


@demand(
    "“System message must be at the beginning”: the session ends with an error.",
    "Claude Code and Codex send them; vllm#41114, ollama#17774, dynamo#11762, litellm#39852",
)
def check_system_turns(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """System and developer turns are taken in the middle of a conversation."""
    role = "developer" if protocol.name == "responses" else "system"
    turns = [
        ("user", "Hi"),
        (role, "The date is today."),
        ("assistant", "Hello."),
        ("user", "Bye"),
        (role, "9 left"),
    ]
    body = endpoint.request(protocol, [_turn(protocol, who, text) for who, text in turns])
    answer = endpoint.ask(protocol, body, _SYSTEM_BETA if protocol.name == "messages" else None)
    if answer.status == 400 and _ROLE.search(_message(answer)):
        return "refused in the words after which Claude Code folds them into the user's turns"
    if answer.status != 200:
        raise Failed(f"answered with {answer}")
    return "taken"


def _turn(protocol: TurnProtocol, role: str, text: str) -> WireBody:
    """Return a turn of text, on Responses as the item that Codex sends."""
    if protocol.name != "responses":
        return {"role": role, "content": text}
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


@demand(
    "Claude Code changes the shape of a message when its cache mark moves on: the cache is lost there.",
    "Claude Code 2.1.332, OpenClaw 2026.9.6",
)
def check_content_shape(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A string and a list of one text are the same prompt."""
    kind = "input_text" if protocol.name == "responses" else "text"
    contents: list[Any] = ["How are you?", [{"type": kind, "text": "How are you?"}]]
    bodies = [endpoint.request(protocol, [{"role": "user", "content": each}]) for each in contents]
    plain, listed = (endpoint.turn(protocol, body).counts.prompt for body in bodies)
    if plain is None:
        raise Undecided("it reports no prompt tokens")
    if plain != listed:
        raise Failed(f"{plain} prompt tokens as a string, {listed} as a list of one text")
    return f"{plain} prompt tokens either way"


@demand(
    "Clients fall back to guessed limits; some do not start.",
    "platform.openai.com/docs/api-reference/models/retrieve; SDKs escape the slash",
    once=True,
)
def check_model_metadata(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A model is found by its id, with a slash as it is and escaped."""
    if not any(each["id"] == endpoint.model for each in endpoint.models):
        raise Failed(f"/v1/models does not list {endpoint.model!r}, which it serves")
    for path in dict.fromkeys((quote(endpoint.model, safe=""), quote(endpoint.model, safe="/"))):
        answer = endpoint.get(f"/v1/models/{path}")
        found = answer.json
        if answer.status != 200 or not isinstance(found, dict) or found.get("id") != endpoint.model:
            raise Failed(f"/v1/models/{path} answers {answer}")
    return "found by its id" + ("" if "/" in endpoint.model else ", which has no slash")


@demand(
    "Codex with a login ends with a 400.",
    "Codex 0.171 (Content-Encoding: zstd on /v1/responses); RFC 9110, 15.5.16",
)
def check_compressed_bodies(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """Bodies in zstd (which Codex sends) and gzip are read, or refused as such."""
    data = json.dumps(endpoint.request(protocol, "Hi")).encode()
    taken, refused = [], {}
    for coding, body in (("gzip", gzip.compress(data)), ("zstd", stored_zstd(data))):
        try:
            answer = endpoint.ask(protocol, body, {"content-encoding": coding})
        except NoAnswer as error:
            raise Failed(f"a body in {coding} gets no answer: {error}") from None
        if answer.status >= 500:
            raise Failed(f"a body in {coding} is answered with {answer}")
        if answer.status == 200:
            taken.append(coding)
        else:
            refused[coding] = answer
    if "zstd" in refused and protocol.name == "responses" and refused["zstd"].status != 415:
        raise Failed(f"zstd, which Codex sends after a login, is answered with {refused['zstd']}")
    if refused:
        raise NotApplicable(f"takes {' and '.join(taken) or 'neither'}, and refuses {' and '.join(refused)}")
    return "takes gzip and zstd"


def stored_zstd(data: bytes) -> bytes:
    """Return a zstd frame that holds ``data`` uncompressed (RFC 8878), for at most 128 KiB."""
    head = (len(data) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\xa0" + len(data).to_bytes(4, "little") + head + data


@demand(
    "A 400: Codex ends, Claude Code drops features one by one and loses its cache at each.",
    "requests of Claude Code 2.1.332, Codex 0.171, OpenCode 1.18, pi 1.6",
)
def check_harness_fields(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """Fields that harnesses send are taken, known or not."""
    fields = _FIELDS[protocol.name]
    answer = endpoint.ask(protocol, endpoint.request(protocol, "Hi", **fields))
    if answer.status != 200:
        raise Failed(f"with {', '.join(fields)}: {answer}")
    return f"takes {', '.join(fields)}"


@demand(
    "Claude Code falls back step by step, and each step reads the whole prompt again.",
    "Claude Code 2.1.332 (anthropic-beta, /v1/messages?beta=true)",
    ("messages",),
)
def check_beta_headers(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """Unknown betas are taken."""
    body = endpoint.request(protocol, "Hi")
    answer = endpoint.ask(protocol, body, {"anthropic-beta": _BETAS}, below="?beta=true")
    if answer.status != 200:
        raise Failed(f"answered with {answer}")
    return "takes ?beta=true and unknown betas"


@demand(
    "Harnesses show “unknown error”, or try again what cannot work.",
    "https://platform.claude.com/docs/en/api/errors, platform.openai.com/docs/guides/error-codes",
)
def check_error_shape(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A malformed request is refused with 4xx and the protocol's error object."""
    answer = endpoint.ask(protocol, endpoint.request(protocol, "Hi") | {protocol.history: 7})
    if not 400 <= answer.status < 500:
        raise Failed(f"{protocol.history}: 7 is answered with {answer}")
    body = answer.json
    error = body.get("error") if isinstance(body, dict) else None
    is_named = protocol.name != "messages" or (isinstance(body, dict) and body.get("type") == "error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not is_named:
        raise Failed(f"not the protocol's error: {answer}")
    return f"{answer.status} in the protocol's shape"


@demand(
    "The session ends instead of being compacted, or goes on without its beginning.",
    "Claude Code (“prompt is too long: N tokens > M maximum”); on Chat and Responses the words that pi 1.6 knows",
)
def check_overflow_words(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A prompt that is too long is refused in the words after which harnesses compact."""
    if endpoint.window is None or endpoint.window > _LONGEST_OVERFLOW:
        raise Undecided(
            f"the window is {endpoint.window or 'not in /v1/models'}: no prompt is surely too long"
        )
    body = endpoint.request(protocol, "word " * (endpoint.window + endpoint.window // 10))
    answer = endpoint.ask(protocol, body)
    text = _message(answer)
    if answer.status == 413:
        raise Undecided(f"the body is too large for it: {answer}")
    if answer.status == 200:
        raise Failed(
            f"taken with a window of {endpoint.window}, and counted as {answer.counts.prompt} tokens"
        )
    if protocol.name == "messages":
        is_known = bool(_TOO_LONG.search(text))
    else:
        is_known = bool(_OVERFLOWS.search(answer.body.decode(errors="replace")))
    if answer.status != 400 or not is_known:
        raise Failed(f"not the words that harnesses know: {answer}")
    return text[:100]


@demand(
    "After a turn that was cut Claude Code asks for 128,000 tokens, and the session ends with a 400.",
    "Claude Code 2.1.332, qwen-code 0.24 (64,000)",
    ("messages", "chat"),
)
def check_large_max_tokens(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A limit of output above the model's own is lowered, not refused."""
    most = {"messages": 128_000, "chat": 64_000}[protocol.name]
    try:
        endpoint.stream(protocol, endpoint.request(protocol, "Hi", tokens=most), until=3)
    except Refused as refused:
        raise Failed(f"{most} is {refused}") from None
    return f"takes {most}"


@demand(
    "Claude Code's /context shows wrong figures.",
    "https://platform.claude.com/docs/en/api/messages-count-tokens; litellm#30014",
    ("messages", "responses"),
)
def check_count_tokens(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """The route that counts tokens agrees with the usage of a turn."""
    below = {"messages": "/count_tokens", "responses": "/input_tokens"}[protocol.name]
    body = endpoint.request(protocol, _WEATHER, tools=[LOOKUP])
    used = endpoint.turn(protocol, body).counts.prompt
    asked = {name: body[name] for name in ("model", protocol.history, "tools")}
    answer = endpoint.ask(protocol, asked, below=below)
    if answer.status in (404, 405, 501):
        raise NotApplicable(f"it has no {protocol.path}{below}")
    counted = (answer.json or {}).get("input_tokens")
    if counted != used:
        raise Failed(f"counts {counted}, and a turn uses {used}" if answer.status == 200 else str(answer))
    return f"{used} either way"


@demand(
    "A file that names a marker ends a turn, or speaks as the system or the user.",
    "OWASP LLM01 (prompt injection); any agent that edits chat templates",
    once=True,
)
def check_special_tokens(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """Text of a model's own markers in a tool's result is read as text."""
    empty = _result_tokens(endpoint, protocol, "")
    found = []
    for marker in _MARKERS:
        added = _result_tokens(endpoint, protocol, marker * _REPEATS) - empty
        if added <= 1.4 * _REPEATS:
            found.append(f"{_REPEATS} times {marker} are {added} tokens")
    if found:
        raise Failed(f"read as the model's own markers: {', '.join(found)}")
    return f"{len(_MARKERS)} markers of model families are read as text"


def _result_tokens(endpoint: Endpoint, protocol: TurnProtocol, result: str) -> int:
    blocks = [ReturnedBlock("text", "I look."), _CALL]
    turns = protocol.written(blocks, Reply(f"It is {result} there."))
    counted = endpoint.turn(
        protocol, endpoint.request(protocol, _WEATHER, turns, tools=[LOOKUP])
    ).counts.prompt
    if counted is None:
        raise Undecided("it reports no prompt tokens")
    return counted


@demand(
    "The second turn of every tool loop fails.",
    "content: null beside tool_calls (platform.openai.com/docs/guides/function-calling); all harnesses",
)
def check_bare_call(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A turn that is a call without text comes back with its result, and is taken."""
    turns = protocol.written([_CALL], Reply("Sunny."))
    answer = endpoint.ask(protocol, endpoint.request(protocol, _WEATHER, turns, tools=[LOOKUP]))
    if answer.status != 200:
        raise Failed(f"answered with {answer}")
    return "taken"


def _message(answer: WholeAnswer) -> str:
    body = answer.json
    error = body.get("error") if isinstance(body, dict) else None
    return (
        str(error.get("message", ""))
        if isinstance(error, dict)
        else answer.body[:400].decode(errors="replace")
    )
