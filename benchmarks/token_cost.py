"""Processor time of a server for each token that it streams, and what thousands of slow streams cost it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from benchmarks import servers, tool_session
from benchmarks.processor import Watch, resident_bytes
from benchmarks.servers import Server
from benchmarks.stream_reader import Answer, WrongAnswer, read_streams
from benchmarks.tool_session import PROTOCOLS, Protocol, marker

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
    answers: list[Answer] = []
    failures: list[Exception] = []

    def read() -> None:
        try:
            answers.extend(read_streams(server.port, [request] * batch, protocol.mark))
        except (WrongAnswer, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(streams // batch)]
    watch = Watch(server.pids)
    for thread in threads:
        thread.start()
        time.sleep(pause)
    while any(thread.is_alive() for thread in threads):
        with suppress(OSError):
            peak = max(peak, resident_bytes(server.pid))
        time.sleep(0.25)
    spent = watch.stop()
    if len(answers) < len(threads) * batch:
        raise RuntimeError(f"{len(answers)} of {streams} streams ended: {str(failures[0])[-300:]}")
    firsts = [answer.first for answer in answers]
    return Many(
        (peak - before) / streams / 1000,
        spent.cpu[0] / spent.wall / streams * 1e3,
        statistics.quantiles(firsts, n=100)[98],
    )
