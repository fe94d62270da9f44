"""All benchmarks in one run, beside Dynamo, which is installed first: ``make bench``.

    python -m benchmarks.product [--quick] [--alone] [--parts NAMES]

Looks first whether the machine is quiet. Writes ``benchmarks/results/<version>-<machine>.json``; ``make docs`` makes
the table of the README and the page of figures from it. A run takes ten minutes on two cores, a quick one two
minutes; quick figures are rough and make no document.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date

from tokenizers import Tokenizer

from benchmarks import costs, figures, peers, servers, tool_session
from benchmarks.costs import Load
from benchmarks.figures import DYNAMO, FAST_DYNAMO, OWN, Result, verdicts
from benchmarks.processor import Watch, calibrate, machine, resident_bytes, wait_idle
from benchmarks.servers import Server
from benchmarks.stream_reader import WrongAnswer, read_streams
from benchmarks.tool_session import PROTOCOLS, marker
from singletree import __version__

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
            costs.token_cost(server, protocol, Load(4, 100, _PACE), (0.0,), 0.5)
        for pid in server.pids:
            wait_idle(pid)  # What a process does after its first requests is not its idle work.
        bench.idle[server.name] = costs.idle_rates(server)
    length = 100 if bench.is_quick else 200
    for number in range(bench.rounds):
        for protocol in PROTOCOLS:
            for count in _STREAMS:
                for server in bench.alternated(number, 2):
                    title = f"a token, {protocol.name}, {count} streams"
                    load = Load(count, max(length, costs.LEAST_TOKENS // count), _PACE)
                    try:
                        idle = bench.idle[server.name]
                        cost, others = costs.token_cost(server, protocol, load, idle, _LEAST_EVENTS)
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
            found = costs.prompt_costs(server, protocol, sessions.session(-number, costs.MARKER))
            title, ((cpu, _),) = "CPU to the first token, first long prompt of a process", found["cold"]
            bench.result.add(title, "ms", server.name, *[cpu][number:])
            wait_idle(server.pid)
    for number in range(bench.rounds):
        for at, protocol in enumerate(PROTOCOLS):
            session = sessions.session(number * len(PROTOCOLS) + at + 1, costs.MARKER)
            for server in bench.alternated(number):
                found = costs.prompt_costs(server, protocol, session)
                for kind, each in found.items():
                    cpu, first = (statistics.median(column) for column in zip(*each, strict=True))
                    where = f"{kind}, {protocol.name}"
                    bench.result.add(f"CPU to the first token, {where}", "ms", server.name, cpu)
                    bench.result.add(f"time to the first token, {where}", "ms", server.name, first)


def counts(bench: Bench) -> None:
    """CPU of ``count_tokens`` on a session of 100,000 tokens."""
    for number in range(1 if bench.is_quick else bench.rounds):
        for server in bench.alternated(number, 2):
            repeats = 3 if bench.is_quick else 8
            for kind, cpu in costs.count_costs(server, bench.tokenizer, number + 1, repeats):
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
    size, allowed = costs.sessions_memory(bench.tokenizer, count, _PROMPT_TOKENS)
    bench.result.add("memory after sessions", "of what the flags allow", OWN, size / allowed)
    bench.result.add(f"memory, after {count} sessions", "MiB", OWN, size / 2**20)


def many_streams(bench: Bench) -> None:
    """Thousands of slow streams."""
    full = (costs.STREAMS, costs.AT_ONCE, costs.SECONDS)
    slow, together = costs.many_streams(*((500, 200, 4) if bench.is_quick else full))
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

_ALONE = frozenset({"starts", "streams", "memory"})
"""Parts that start servers of their own: the others run no longer then."""

_LOOK_SECONDS = 3.0


def run(bench: Bench, names: list[str]) -> None:
    """Run the parts of those names; a part that fails is noted, and the others run."""
    for name in names:
        began = time.monotonic()
        print(f"{name}: {(PARTS[name].__doc__ or '').strip()}", flush=True)
        try:
            PARTS[name](bench)
        except (WrongAnswer, RuntimeError, OSError, SystemExit, ZeroDivisionError) as error:
            bench.result.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{name} failed: {bench.result.failed[name]}", file=sys.stderr, flush=True)
        bench.result.part_seconds[name] = round(time.monotonic() - began, 1)
        bench.result.others_meanwhile = round(statistics.median(bench.others or [0.0]), 3)
        figures.write(bench.result)  # A run that is cut keeps what it has.


def _measure(bench: Bench, names: list[str]) -> None:
    together = [name for name in names if name not in _ALONE]
    with ExitStack() as stack:
        if together:
            bench.running = [stack.enter_context(servers.singletree_before_vllm())]
            if bench.result.dynamo:
                bench.running.append(stack.enter_context(servers.dynamo(DYNAMO)))
                fast = servers.dynamo(FAST_DYNAMO, ("--tokenizer", "fastokens"))
                bench.running.append(stack.enter_context(fast))
        run(bench, together)
    run(bench, [name for name in names if name in _ALONE])


def _lines(result: Result) -> Iterator[str]:
    """Yield the medians of each figure, and which miss their targets."""
    for name, figure in result.figures.items():
        yield f"{name}, {figure.unit}: " + ", ".join(
            f"{figure.median(each):,.2f} {each}" for each in figure.values
        )
    for verdict in verdicts(result):
        if verdict.is_met is False:
            beside, most = (
                f" times {verdict.target.peer}'s" if verdict.target.peer else "",
                verdict.target.bound,
            )
            yield f"missed: {verdict.name} is {verdict.value:.2f}{beside}; the target is at most {most:g}"


def main() -> None:
    """Install, look, measure, write, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.product", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes; figures are rough")
    parser.add_argument("--alone", action="store_true", help="measure singletree without Dynamo")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"only these of {', '.join(PARTS)}")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    peers.ensure_tokenizer()
    watch = Watch(())
    time.sleep(_LOOK_SECONDS)
    others = round(watch.stop().others / _LOOK_SECONDS, 3)
    times = [calibrate() for _ in range(12)]
    spread = round(max(times) / min(times), 3)
    result = Result(__version__, date.today().isoformat(), machine(), options.quick, others, spread)
    if not result.is_quiet:
        print(
            f"The machine is not quiet: {others:.2f} cores are busy, a piece of work varies {spread:.2f} times"
        )
    try:
        if not options.alone:
            peers.install_dynamo()
            result.dynamo = peers.DYNAMO_VERSION
    except (SystemExit, OSError, subprocess.SubprocessError) as error:
        result.failed[DYNAMO] = f"it could not be installed: {error}"[:300]
    tokenizer = Tokenizer.from_file(str(peers.QWEN3 / "tokenizer.json"))
    _measure(Bench(result, (), tokenizer, 1 if options.quick else 3, options.quick), names)
    for line in _lines(result):
        print(line)
    print(f"\nwrote {figures.write(result)}; `make docs` makes the documents from it")
    raise SystemExit(int(bool(result.failed)))


if __name__ == "__main__":
    main()
