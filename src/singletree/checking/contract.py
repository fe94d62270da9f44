"""The checks as a table: what an endpoint has to keep to so that agents work on it."""

from __future__ import annotations

from collections.abc import Sequence

from singletree.checking import cache_checks, request_checks, stream_checks
from singletree.checking.returned_turns import (
    as_given,
    calls_last,
    compact_arguments,
    joined_thoughts,
    no_thoughts,
    trimmed,
)
from singletree.checking.verdicts import Check
from singletree.errors import BadConfiguration

_STREAMING = (
    "https://platform.claude.com/docs/en/build-with-claude/streaming, platform.openai.com/docs/api-reference"
)
_MESSAGES = ("messages",)
_SLOWER = "Turns get slower as the session grows: the history is read again."

CHECKS: tuple[Check, ...] = (
    Check(
        "events",
        "a streamed turn of text has the protocol's events, in their order",
        "OpenCode ends the turn with a validation error; SDKs raise or lose text.",
        _STREAMING,
        stream_checks.check_events,
    ),
    Check(
        "tool-events",
        "a streamed call has an id, a name and JSON arguments, in one piece or in order",
        "A tool is not run, or is run with broken arguments.",
        f"{_STREAMING}; vllm#42400, claude-code-router#790",
        stream_checks.check_tool_events,
    ),
    Check(
        "stop-reason",
        "a turn with a call ends with the reason that says so",
        "The harness takes the turn for the last one and stops, with the tool not run.",
        "litellm#34692, bifrost#3638",
        stream_checks.check_stop_reason,
    ),
    Check(
        "part-order",
        "text and calls come in the order in which the model wrote them",
        "The next prompt has another order, so the cache is lost and the model sees what it did not write.",
        "both APIs have parts in order; Claude Code and Codex keep it",
        stream_checks.check_part_order,
        ("messages", "responses"),
    ),
    Check(
        "call-delay",
        "a finished call reaches the client before the rest of the turn is generated",
        "Claude Code, Codex and OpenCode run tools while the stream goes on: they wait for nothing.",
        "Claude Code 2.1.332 starts a tool at content_block_stop, Codex 0.171 at output_item.done",
        stream_checks.check_call_delay,
    ),
    Check(
        "usage",
        "input tokens are the same at the start, at the end and without streaming",
        "The harness compacts too early or too late, and bills are wrong.",
        "Claude Code takes the last counts that are not zero; litellm#22986",
        stream_checks.check_usage,
    ),
    Check(
        "count-tokens",
        "the route that counts tokens agrees with the usage of a turn",
        "Claude Code's /context shows wrong figures.",
        "https://platform.claude.com/docs/en/api/messages-count-tokens; litellm#30014",
        request_checks.check_count_tokens,
        ("messages", "responses"),
    ),
    Check(
        "system-turns",
        "system and developer turns are taken in the middle of a conversation",
        "“System message must be at the beginning”: the session ends with an error.",
        "Claude Code and Codex send them; vllm#41114, ollama#17774, dynamo#11762, litellm#39852",
        request_checks.check_system_turns,
    ),
    Check(
        "bare-call",
        "a turn that is a call without text comes back with its result, and is taken",
        "The second turn of every tool loop fails.",
        "content: null beside tool_calls (platform.openai.com/docs/guides/function-calling); all harnesses",
        request_checks.check_bare_call,
    ),
    Check(
        "content-shape",
        "a string and a list of one text are the same prompt",
        "Claude Code changes the shape of a message when its cache mark moves on: the cache is lost there.",
        "Claude Code 2.1.332, OpenClaw 2026.9.6",
        request_checks.check_content_shape,
    ),
    Check(
        "harness-fields",
        "fields that harnesses send are taken, known or not",
        "A 400: Codex ends, Claude Code drops features one by one and loses its cache at each.",
        "requests of Claude Code 2.1.332, Codex 0.171, OpenCode 1.18, pi 1.6",
        request_checks.check_fields,
    ),
    Check(
        "beta-headers",
        "unknown betas are taken",
        "Claude Code falls back step by step, and each step reads the whole prompt again.",
        "Claude Code 2.1.332 (anthropic-beta, /v1/messages?beta=true)",
        request_checks.check_betas,
        _MESSAGES,
    ),
    Check(
        "large-max-tokens",
        "a limit of output above the model's own is lowered, not refused",
        "After a turn that was cut Claude Code asks for 128,000 tokens, and the session ends with a 400.",
        "Claude Code 2.1.332, qwen-code 0.24 (64,000)",
        request_checks.check_large_limit,
        ("messages", "chat"),
    ),
    Check(
        "error-shape",
        "a malformed request is refused with 4xx and the protocol's error object",
        "Harnesses show “unknown error”, or try again what cannot work.",
        "https://platform.claude.com/docs/en/api/errors, platform.openai.com/docs/guides/error-codes",
        request_checks.check_error_shape,
    ),
    Check(
        "overflow-words",
        "a prompt that is too long is refused in the words after which harnesses compact",
        "The session ends instead of being compacted, or goes on without its beginning.",
        "Claude Code (“prompt is too long: N tokens > M maximum”); on Chat and Responses the words that pi 1.6 knows",
        request_checks.check_overflow,
    ),
    Check(
        "model-metadata",
        "a model is found by its id, with a slash as it is and escaped",
        "Clients fall back to guessed limits; some do not start.",
        "platform.openai.com/docs/api-reference/models/retrieve; SDKs escape the slash",
        request_checks.check_model_metadata,
        once=True,
    ),
    Check(
        "compressed-bodies",
        "bodies in zstd (which Codex sends) and gzip are read, or refused as such",
        "Codex with a login ends with a 400.",
        "Codex 0.171 (Content-Encoding: zstd on /v1/responses); RFC 9110, 15.5.16",
        request_checks.check_compressed,
    ),
    Check(
        "special-tokens",
        "text of a model's own markers in a tool's result is read as text",
        "A file that names a marker ends a turn, or speaks as the system or the user.",
        "OWASP LLM01 (prompt injection); any agent that edits chat templates",
        request_checks.check_special_tokens,
        once=True,
    ),
    Check(
        "disconnect",
        "clients that hang up free the engine",
        "Ctrl-C leaves the engine busy, and the next turn waits for a turn that nobody reads.",
        "every harness cancels by closing the connection",
        stream_checks.check_disconnect,
    ),
    Check(
        "cached-tokens",
        "a prompt that comes again is cached, and reported so",
        "Every turn reads the whole history, or dashboards show that it does.",
        "usage of all three APIs; litellm#22986, claude-code-router#1791",
        cache_checks.check_cached_tokens,
    ),
    Check(
        "loop-as-given",
        "a tool loop whose turns come back as they were reads nothing again",
        _SLOWER,
        "Codex 0.171, OpenCode 1.18; sglang#36877",
        cache_checks.loop(as_given),
    ),
    Check(
        "loop-calls-last",
        "… with the calls of a turn moved behind its text",
        _SLOWER,
        "Claude Code 2.1.332",
        cache_checks.loop(calls_last),
        _MESSAGES,
    ),
    Check(
        "loop-arguments",
        "… with the JSON of arguments written anew",
        _SLOWER,
        "every harness but Codex",
        cache_checks.loop(compact_arguments),
    ),
    Check(
        "loop-no-reasoning",
        "… with the reasoning left out",
        f"{_SLOWER} On hybrid models from the beginning.",
        "OpenCode 1.18 on Responses; opencode#19081, llama.cpp#21903",
        cache_checks.loop(no_thoughts),
        ("chat", "responses"),
    ),
    Check(
        "loop-trimmed",
        "… with white space trimmed from reasoning and text",
        _SLOWER,
        "qwen-code 0.24",
        cache_checks.loop(trimmed),
        ("chat",),
    ),
    Check(
        "loop-joined",
        "… with all reasoning of a turn joined into one",
        _SLOWER,
        "qwen-code 0.24, OpenClaw 2026.9.6 on Chat",
        cache_checks.loop(joined_thoughts),
        ("chat",),
    ),
    Check(
        "loop-header",
        "… with a billing header that changes at the front of the system prompt",
        "The whole prompt is read again at each turn.",
        "Claude Code before 2.1.181; vllm#36829, sglang#21064, ollama#14918",
        cache_checks.loop(as_given, header=True),
        _MESSAGES,
    ),
    Check(
        "loop-system-turn",
        "… with a system turn after each result",
        "The whole history is read again at each turn: the system turn was moved to the head.",
        "Claude Code from 2.1.233; vllm#53393, ollama#18431, omlx#3316, bifrost#4592",
        cache_checks.loop(as_given, cache_checks.system_turn),
        ("messages", "chat"),
    ),
    Check(
        "two-tenants",
        "a second key sees neither the cache nor the stored responses of the first",
        "A tenant learns what another one asked, by time or in full.",
        "cache_salt of vLLM (RFC vllm#16016); needs --second-key",
        cache_checks.check_tenants,
    ),
)


def choose(only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """Return the checks to run, in the order of the table. Raises BadConfiguration for an unknown name."""
    known = [check.name for check in CHECKS]
    for name in (*only, *skip):
        if name not in known:
            raise BadConfiguration(f"unknown check {name!r}; there are {', '.join(known)}")
    return [check for check in CHECKS if (not only or check.name in only) and check.name not in skip]
