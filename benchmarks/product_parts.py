"""The parts of ``make bench``: each measures some figures on the servers that run, into one result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from benchmarks import prompt_cost, servers, token_cost, tool_session
from benchmarks.figures import OWN, Result
from benchmarks.processor import Watch, resident_bytes, wait_idle
from benchmarks.servers import Server
from benchmarks.stream_reader import WrongAnswer, read_streams
from benchmarks.token_cost import Load
from benchmarks.tool_session import PROTOCOLS, marker

_PACE = 0.01
_LEAST_EVENTS = 0.5
"""Events for each token: fewer, and what was measured is the price of bursts."""

_STREAMS = (1, 16, 64)
_PROMPT_TOKENS = 50_000


@dataclass(slots=True)
class Bench:
    """What all parts share.

    Attributes:
        result: gets the figures.
        running: singletree first, then Dynamo with each tokenizer, where it is installed.
        rounds: how often each figure is measured.
        others: how many cores everything else kept busy, at each measurement.
    """

    result: Result
    running: Sequence[Server]
    tokenizer: Tokenizer
    rounds: int
    is_quick: bool
    idle: dict[str, tuple[float, ...]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def alternated(self, number: int, count: int | None = None) -> Sequence[Server]:
        """Return the first ``count`` servers, in another order in each round."""
        chosen = self.running[:count]
        return chosen if number % 2 == 0 else chosen[::-1]


def tokens(bench: Bench) -> None:
    """CPU of a streamed token, and of a request of almost none."""
    for server in bench.running[:2]:
        for protocol in PROTOCOLS:
            token_cost.token_cost(server, protocol, Load(4, 100, _PACE), (0.0,), 0.5)
        for pid in server.pids:
            wait_idle(pid)  # What a process does after its first requests is not its idle work.
        bench.idle[server.name] = token_cost.idle_rates(server)
    length = 100 if bench.is_quick else 200
    for number in range(bench.rounds):
        for protocol in PROTOCOLS:
            for count in _STREAMS:
                for server in bench.alternated(number, 2):
                    title = f"a token, {protocol.name}, {count} streams"
                    load = Load(count, max(length, token_cost.LEAST_TOKENS // count), _PACE)
                    try:
                        idle = bench.idle[server.name]
                        cost, others = token_cost.token_cost(server, protocol, load, idle, _LEAST_EVENTS)
                    except WrongAnswer as error:  # Too few events: the machine is too busy.
                        bench.result.failed[f"{title}, {server.name}"] = str(error)[:120]
                        continue
                    bench.result.add(title, "CPU µs", server.name, cost)
                    bench.others.append(others)


def requests(bench: Bench) -> None:
    """CPU of a request of one token, eight at a time, and how many a second one core answers."""
    count = 64 if bench.is_quick else 240
    for number in range(bench.rounds):
        for protocol in PROTOCOLS:
            request = protocol.request(tool_session.opening(marker(1)), 1)
            for server in bench.alternated(number, 2):
                watch = Watch((server.pid,))
                for _ in range(count // 8):
                    read_streams(server.port, [request] * 8, b"data: ")
                spent = watch.stop()
                each = spent.cpu[0] / count
                bench.result.add(
                    f"a request of one token, {protocol.name}", "CPU ms", server.name, each * 1e3
                )


def prompts(bench: Bench) -> None:
    """From a prompt of 50,000 tokens to its first token, after what comes once: modules, caches, a faster tokenizer."""
    sessions = tool_session.Sessions(bench.tokenizer, _PROMPT_TOKENS)
    for number, protocol in enumerate((PROTOCOLS[0], *PROTOCOLS)):
        for server in bench.running:
            costs = prompt_cost.prompt_costs(server, protocol, sessions.session(-number, prompt_cost.MARKER))
            title, ((cpu, _),) = "CPU to the first token, first long prompt of a process", costs["cold"]
            bench.result.add(title, "ms", server.name, *[cpu][number:])
            wait_idle(server.pid)
    for number in range(bench.rounds):
        for at, protocol in enumerate(PROTOCOLS):
            session = sessions.session(number * len(PROTOCOLS) + at + 1, prompt_cost.MARKER)
            for server in bench.alternated(number):
                costs = prompt_cost.prompt_costs(server, protocol, session)
                for kind, each in costs.items():
                    cpu, first = (statistics.median(column) for column in zip(*each, strict=True))
                    where = f"{kind}, {protocol.name}"
                    bench.result.add(f"CPU to the first token, {where}", "ms", server.name, cpu)
                    bench.result.add(f"time to the first token, {where}", "ms", server.name, first)


def counts(bench: Bench) -> None:
    """CPU of ``count_tokens`` on a session of 100,000 tokens."""
    for number in range(1 if bench.is_quick else bench.rounds):
        for server in bench.alternated(number, 2):
            repeats = 3 if bench.is_quick else 8
            for kind, cpu in prompt_cost.count_costs(server, bench.tokenizer, number + 1, repeats):
                bench.result.add(f"count_tokens, {kind}", "CPU ms", server.name, cpu)


def starts(bench: Bench) -> None:
    """From the start of a process to its readiness, and the memory that it takes then."""
    tries = 2 if bench.is_quick else 5
    with servers.vllm_stub() as engine:
        flags = servers.before_vllm(engine.url)
        for number in range(tries + 1):
            with servers.started(flags) as (seconds, cpu, pid):
                if number == 0:
                    continue  # Its tokenizer may not be cached yet.
                bench.result.add("start, seconds", "s", OWN, seconds)
                bench.result.add("start, CPU", "CPU s", OWN, cpu)
                wait_idle(pid)
                bench.result.add("memory, idle", "MiB", OWN, resident_bytes(pid) / 2**20)


def sessions_memory(bench: Bench) -> None:
    """Memory after many sessions."""
    count = 20 if bench.is_quick else 1000
    size, allowed = prompt_cost.sessions_memory(bench.tokenizer, count, _PROMPT_TOKENS)
    bench.result.add("memory after sessions", "of what the flags allow", OWN, size / allowed)
    bench.result.add(f"memory, after {count} sessions", "MiB", OWN, size / 2**20)


def many_streams(bench: Bench) -> None:
    """Thousands of slow streams."""
    full = (token_cost.STREAMS, token_cost.AT_ONCE, token_cost.SECONDS)
    slow, together = token_cost.many_streams(*((500, 200, 4) if bench.is_quick else full))
    bench.result.add("streams, KB each", "KB", OWN, slow.kilobytes)
    bench.result.add("streams, CPU each", "CPU ms a second", OWN, slow.cpu)
    bench.result.add("streams, 99 % of first tokens", "s", OWN, slow.first_99)
    bench.result.add("at once, 99 % of first tokens", "s", OWN, together.first_99)


PARTS: dict[str, Callable[[Bench], None]] = {
    "tokens": tokens,
    "requests": requests,
    "prompts": prompts,
    "counts": counts,
    "starts": starts,
    "streams": many_streams,
    "memory": sessions_memory,
}
"""The parts, by name, in the order in which they run."""
