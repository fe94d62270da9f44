"""Long prompts: time and CPU to the first token, CPU of ``count_tokens``, memory after many sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from benchmarks import servers, tool_session
from benchmarks.processor import Watch, resident_bytes, wait_idle
from benchmarks.servers import MODEL, Server
from benchmarks.stream_reader import post, read_streams
from benchmarks.tool_session import PROTOCOLS, Protocol, Session, grown, marker
from singletree.prompts.tokenizer.tokenizer import CACHE_BYTES
from singletree.server.models.chat_format import _PROMPT_BYTES

_ANSWER = 4  # tokens
MARKER = marker(_ANSWER)
_RESULT = 2000  # characters that a further step adds


def prompt_costs(
    server: Server, protocol: Protocol, session: Session
) -> dict[str, list[tuple[float, float]]]:
    """Send one session cold, twice again (``repeat``), and then longer by one step and by two (``grown``).

    Returns:
        CPU ms of the measured process for each request, with an answer of four tokens, and ms from the first byte sent
        to the first text read.
    """
    longer = grown(session, f"{session.steps[3].result[:_RESULT]} {MARKER}", "next")
    longest = grown(longer, f"{session.steps[5].result[:_RESULT]} {MARKER}", "last")
    costs: dict[str, list[tuple[float, float]]] = {}
    sessions = (session, session, session, longer, longest)
    for kind, each in zip(("cold", "repeat", "repeat", "grown", "grown"), sessions, strict=True):
        watch = Watch((server.pid,))
        (answer,) = read_streams(server.port, [protocol.request(each, _ANSWER)], protocol.mark)
        costs.setdefault(kind, []).append((watch.stop().cpu[0] * 1e3, answer.first * 1e3))
    return costs


_COUNTED_TOKENS = 100_000
_AT_ONCE = 25


def count_costs(
    server: Server, tokenizer: Tokenizer, number: int, repeats: int
) -> Iterator[tuple[str, float]]:
    """CPU ms of ``count_tokens``: of a new session, the same again, one step later, and 25 requests of one tool each.

    Claude Code's ``/context`` sends the last. Another ``number``, another text.
    """
    session = tool_session.Sessions(tokenizer, _COUNTED_TOKENS // 2).session(number, "")
    source, at, counted = tool_session.library(), number * 7919, 0
    while counted < _COUNTED_TOKENS // 2:
        result = source[at : at + 8000]
        at += len(result)
        counted += len(tokenizer.encode(result, add_special_tokens=False)) + 70
        session = grown(session, result, f"{number}_{at}")
    body = tool_session.MESSAGES.body(session)
    later = tool_session.MESSAGES.body(grown(session, source[:8000], "last"))
    yield "cold", _count_cost(server, [body])
    wait_idle(server.pid)  # singletree makes its tokenizer faster after the first long prompt.
    for _ in range(repeats):
        yield "known", _count_cost(server, [body])
    yield "a step later", _count_cost(server, [later])
    question = [{"role": "user", "content": "x"}]
    parts = [{"messages": question, "tools": [tool]} for tool in (body["tools"] * 2)[:_AT_ONCE]]
    for _ in range(repeats):
        yield f"{_AT_ONCE} tools at once", _count_cost(server, parts)


def _count_cost(server: Server, bodies: Sequence[Mapping[str, object]]) -> float:
    path, headers = f"{tool_session.MESSAGES.path}/count_tokens", tool_session.MESSAGES.headers
    requests = [post(path, json.dumps({"model": MODEL, **body}).encode(), headers) for body in bodies]
    watch = Watch((server.pid,))
    read_streams(server.port, requests, b'"input_tokens":')
    return watch.stop().cpu[0] * 1e3


_BOUNDS = {"--turn-memory": 64 * 2**20, "--session-memory": 32 * 2**20}
_FIXED = CACHE_BYTES + _PROMPT_BYTES
"""The caches of the tokenizer and of prompts, which no flag sets."""
_DIFFERENT = 40  # sessions that are made; the others differ from them in their first words


def sessions_memory(tokenizer: Tokenizer, count: int, tokens: int) -> tuple[float, float]:
    """Send ``count`` sessions of ``tokens`` tokens, two turns each.

    Returns:
        The bytes of the server then, and what the idle server and its flags allow together.
    """
    sessions = tool_session.Sessions(tokenizer, tokens)
    made = [sessions.session(number, MARKER) for number in range(min(count, _DIFFERENT))]
    flags = [word for name, size in _BOUNDS.items() for word in (name, f"{size >> 20}MiB")]
    with servers.singletree_before_vllm(flags) as server:
        wait_idle(server.pid)  # The tokenizer is loaded in the background.
        idle = resident_bytes(server.pid)
        for number in range(count):
            base, protocol = made[number % len(made)], PROTOCOLS[number % len(PROTOCOLS)]
            session = replace(base, system=f"Session {number}. {base.system}")
            for each in (session, grown(session, f"Result {number}. {MARKER}", "next")):
                read_streams(server.port, [protocol.request(each, _ANSWER)], b"data: ")
        return resident_bytes(server.pid), idle + sum(_BOUNDS.values()) + _FIXED
