"""Memory of a server after many sessions of 50,000 tokens, beside what its flags allow; the engine is outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tokenizers import Tokenizer

from benchmarks import prompt_cost, servers
from benchmarks.processor import resident_bytes, wait_idle
from benchmarks.stream_reader import read_streams
from benchmarks.tool_session import PROTOCOLS, Sessions, grown
from singletree.prompts.tokenizer.tokenizer import CACHE_BYTES
from singletree.server.models.chat_format import _PROMPT_BYTES

_MIB = 2**20
_BOUNDS = {"--turn-memory": 64 * _MIB, "--session-memory": 32 * _MIB}
_FIXED = CACHE_BYTES + _PROMPT_BYTES
"""The caches of the tokenizer and of prompts, which no flag sets."""

_ANSWER = 4
_DIFFERENT = 40  # sessions that are made; the others differ from them in their first words


def measure(tokenizer: Tokenizer, count: int, tokens: int) -> tuple[dict[int, float], float]:
    """Send ``count`` sessions of ``tokens`` tokens, two turns each.

    Returns:
        MiB by number of sessions, and what the idle server and the flags allow together.
    """
    flags = [word for name, size in _BOUNDS.items() for word in (name, f"{size // _MIB}MiB")]
    with servers.singletree_before_vllm(flags) as server:
        wait_idle(server.pid)  # The tokenizer is loaded in the background.
        idle = resident_bytes(server.pid) / _MIB
        after: dict[int, float] = {}
        marks = {count * share // 10 for share in (1, 2, 5, 8, 10)}
        for number, requests in enumerate(_requests(tokenizer, count, tokens), 1):
            for request in requests:
                read_streams(server.port, [request], b"data: ")
            if number in marks:
                after[number] = resident_bytes(server.pid) / _MIB
        return after, idle + (sum(_BOUNDS.values()) + _FIXED) / _MIB


def _requests(tokenizer: Tokenizer, count: int, tokens: int) -> Iterator[list[bytes]]:
    """Yield the two requests of each session, the second one step later. All differ from their first words on."""
    sessions = Sessions(tokenizer, tokens)
    made = [sessions.session(number, prompt_cost.MARKER) for number in range(min(count, _DIFFERENT))]
    for number in range(count):
        base, protocol = made[number % len(made)], PROTOCOLS[number % len(PROTOCOLS)]
        session = replace(base, system=f"Session {number}. {base.system}")
        longer = grown(session, f"Result {number}. {prompt_cost.MARKER}", "next")
        yield [protocol.request(each, _ANSWER) for each in (session, longer)]
