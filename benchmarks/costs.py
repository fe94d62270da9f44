"""What a server costs: CPU of streamed tokens, thousands of slow streams, long prompts, many sessions."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks import servers, tool_session
from benchmarks.processor import Watch, resident_bytes, wait_idle
from benchmarks.servers import MODEL, Server
from benchmarks.stream_reader import WrongAnswer, post, read_streams
from benchmarks.tool_session import PROTOCOLS, Protocol, Session, grown, marker
from singletree.server.models.chat_format import _PROMPT_BYTES

LEAST_TOKENS = 800
"""Of all streams together: fewer cost less than what else a process does meanwhile."""

STREAMS, AT_ONCE, SECONDS = 5000, 2000, 12
_SHORT = 8  # tokens of the answers that stand for what a request costs without its tokens
_BATCH = 250  # streams opened together
_BATCHES_A_SECOND = 2


class Load(NamedTuple):
    """A number of streams at once, each of ``tokens`` tokens, ``delay`` seconds apart."""

    streams: int
    tokens: int
    delay: float = 0.0


def token_cost(
    server: Server, protocol: Protocol, load: Load, idle: Sequence[float], least_events: float = 1.0
) -> tuple[float, float]:
    """Measure once: the difference between long answers and short ones, so that tokens alone count.

    Args:
        idle: CPU seconds a second of the server's processes without requests; subtracted.
        least_events: how many events there must be for each token. Where the engine is another process, tokens that
            came together leave together if the server had no time in between.

    Returns:
        CPU µs a token of the measured process, and how many cores everything else kept busy meanwhile.

    Raises:
        WrongAnswer: also when tokens did not come as an event each.
    """

    def run(tokens: int) -> tuple[float, float]:
        request = protocol.request(tool_session.opening(marker(tokens, load.delay)), tokens)
        watch = Watch(server.pids)
        answers = read_streams(server.port, [request] * load.streams, protocol.mark)
        spent = watch.stop()
        for answer in answers:
            if not tokens * least_events <= answer.events <= tokens + 16:
                raise WrongAnswer(f"{server.name} sent {answer.events} events, not {tokens}: {answer.end!r}")
        return spent.cpu[0] - idle[0] * spent.wall, spent.others / spent.wall

    short, _ = run(_SHORT)
    long, others = run(load.tokens + _SHORT)
    return (long - short) / (load.streams * load.tokens) * 1e6, others


def idle_rates(server: Server, seconds: float = 2.0) -> tuple[float, ...]:
    """CPU seconds a second of each process of a server that gets no requests."""
    watch = Watch(server.pids)
    time.sleep(seconds)
    spent = watch.stop()
    return tuple(cpu / spent.wall for cpu in spent.cpu)


class Many(NamedTuple):
    """What many streams cost: KB of memory and CPU ms a second for each, seconds to 99 % of the first tokens."""

    kilobytes: float
    cpu: float
    first_99: float


def many_streams(streams: int, at_once: int, seconds: int) -> tuple[Many, Many]:
    """Return what streams of one token a second cost that open one after the other, and those that open at once."""
    with servers.singletree_before_vllm(("--slots", "8192")) as server:
        together = _many(server, at_once, seconds, at_once)
    with servers.singletree_before_vllm(("--slots", "8192")) as server:
        return _many(server, streams, seconds, min(_BATCH, streams)), together


def _many(server: Server, streams: int, seconds: int, batch: int) -> Many:
    protocol = PROTOCOLS[0]
    token_cost(server, protocol, Load(8, 8, 0.01), (0.0,) * len(server.pids), 0.5)
    pause = batch / (_BATCH * _BATCHES_A_SECOND) if batch < streams else 0.0
    tokens = int(seconds + pause * (streams / batch - 1))
    request = protocol.request(tool_session.opening(marker(tokens, 1.0)), tokens)
    before = peak = resident_bytes(server.pid)
    batches = []
    with ThreadPoolExecutor(streams // batch) as pool:
        watch = Watch(server.pids)
        for _ in range(streams // batch):
            batches.append(pool.submit(read_streams, server.port, [request] * batch, protocol.mark))
            time.sleep(pause)
        while not all(each.done() for each in batches):
            with suppress(OSError):
                peak = max(peak, resident_bytes(server.pid))
            time.sleep(0.25)
        spent = watch.stop()
    if failures := [error for each in batches if (error := each.exception())]:
        raise RuntimeError(f"{len(failures)} of {len(batches)} batches failed: {str(failures[0])[-300:]}")
    firsts = [answer.first for each in batches for answer in each.result()]
    return Many(
        (peak - before) / streams / 1000,
        spent.cpu[0] / spent.wall / streams * 1e3,
        statistics.quantiles(firsts, n=100)[98],
    )


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


_BOUNDS = {"--turn-memory": 64 * 2**20, "--session-memory": 32 * 2**20, "--request-memory": 128 * 2**20}
_FIXED = _PROMPT_BYTES
"""The cache of prompts, which no flag sets."""
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
