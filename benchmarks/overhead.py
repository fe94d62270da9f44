"""What the layer between harness and engine costs: CPU a streamed token, and the way from a long prompt to
its first token, of singletree and, where it is installed (``python -m benchmarks.peers``), of Dynamo.

    python -m benchmarks.overhead [--quick] [--rounds N] [--write]

``--write`` puts the tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from benchmarks import overhead_report, peers, prompt_cost, servers, token_cost
from benchmarks.processor import calibrate, resident_bytes
from benchmarks.prompt_cost import PromptCost, prompt_costs
from benchmarks.servers import Server
from benchmarks.token_cost import Load, TokenCost
from benchmarks.tool_session import Sessions
from benchmarks.wire_protocols import PROTOCOLS
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.engines.scripted.engine import ScriptedEngine
from singletree.prompts.tokenizer.tokenizer import load_tokenizer

PROMPT_TOKENS = 50_000
PACE = 0.01
"""Seconds between the tokens of a paced stream: 100 a second, a fast model."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: rounds, tokens of all streams of a load together, tokens of a paced stream."""

    rounds: int
    tokens: int
    paced: int

    def loads(self) -> list[Load]:
        """Both paces, each with 1, 16 and 64 streams."""
        counts = (1, 16, 64)
        free = [Load(count, self.tokens // (8 if count == 1 else count)) for count in counts]
        return [*(Load(count, self.paced, PACE) for count in counts), *free]


FULL = Plan(rounds=5, tokens=32_000, paced=200)
QUICK = Plan(rounds=1, tokens=16_000, paced=100)


@dataclass(slots=True)
class Measured:
    """All results. Keys are names of servers and protocols."""

    tokens: dict[tuple[str, str, Load], list[TokenCost]] = field(default_factory=lambda: defaultdict(list))
    prompts: dict[tuple[str, str], list[PromptCost]] = field(default_factory=lambda: defaultdict(list))
    engine: dict[Load, list[float]] = field(default_factory=lambda: defaultdict(list))
    engine_first: float = 0.0
    idle: dict[str, tuple[float, ...]] = field(default_factory=dict)
    resident: dict[str, int] = field(default_factory=dict)
    calibrations: list[float] = field(default_factory=list)


def measure(running: Sequence[Server], plan: Plan, tokenizer: Tokenizer, measured: Measured) -> Iterator[str]:
    """Everything, round by round, into ``measured``; yields what was just done."""
    sessions = Sessions(tokenizer, PROMPT_TOKENS)
    engine, encode = scripted_engine()
    for server in running:
        _warm(server)
        measured.idle[server.name] = token_cost.idle_rates(server)
        yield f"idle {server.name}"
    # The first peer is the one that is compared token by token; the others differ in how they read prompts.
    streaming = running[:2]
    for number in range(plan.rounds):
        for protocol in PROTOCOLS:
            for load in plan.loads():
                measured.calibrations.append(calibrate())
                for server in _alternated(streaming, number):
                    cost = token_cost.token_cost(server, protocol, load, measured.idle[server.name])
                    measured.tokens[server.name, protocol.name, load].append(cost)
                yield f"round {number + 1}, {protocol.name}, {load}"
            session = sessions.session(
                number * len(PROTOCOLS) + PROTOCOLS.index(protocol), prompt_cost.MARKER
            )
            for server in _alternated(running, number):
                measured.prompts[server.name, protocol.name] += prompt_costs(server, protocol, session)
            yield f"round {number + 1}, {protocol.name}, prompts"
        for load in plan.loads():
            measured.engine[load].append(token_cost.engine_cost(engine, encode, load))
    measured.engine_first = prompt_cost.engine_first(engine, encode, PROMPT_TOKENS)
    measured.resident = {server.name: resident_bytes(server.pid) for server in running}
    yield "done"


def _alternated(running: Sequence[Server], number: int) -> Iterable[Server]:
    return running if number % 2 == 0 else running[::-1]


def _warm(server: Server) -> None:
    """Nobody's first request counts, on any protocol."""
    for protocol in PROTOCOLS:
        token_cost.token_cost(server, protocol, Load(4, 500), (0.0,) * len(server.pids))


def scripted_engine() -> tuple[ScriptedEngine, Callable[[str], list[int]]]:
    """singletree's scripted engine in this process, and the tokenizer's encoder."""
    tokenizer = load_tokenizer(peers.QWEN3)
    return ScriptedEngine(tokenizer.encode, tokenizer.decode), tokenizer.encode


def filler() -> list[int]:
    """The tokens that the scripted engine plays, for other engines to play the same."""
    engine, encode = scripted_engine()

    async def play() -> list[int]:
        await engine.start()
        chunks = engine.generate(GenerationJob(encode("[[gen:1000:1000:0]]"), Sampling(), "filler"))
        return [token async for chunk in chunks for token in chunk.token_ids]

    return asyncio.run(play())


def _plan(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else FULL
    return Plan(options.rounds or plan.rounds, plan.tokens, plan.paced)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, help="rounds; every figure is the median of them")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = _options()
    if not peers.has_tokenizer():
        peers.install_tokenizer()
    if not peers.has_dynamo():
        print(
            "Dynamo is not installed, so singletree is measured alone: python -m benchmarks.peers", flush=True
        )
    tokenizer = Tokenizer.from_file(str(peers.QWEN3 / "tokenizer.json"))
    played = filler()
    with ExitStack() as stack:
        running = [stack.enter_context(servers.singletree())]
        if peers.has_dynamo():
            running.append(stack.enter_context(servers.dynamo("Dynamo", played)))
            fast = servers.dynamo("Dynamo, fastokens", played, ("--tokenizer", "fastokens"))
            running.append(stack.enter_context(fast))
        plan = _plan(options)
        measured = Measured()
        for done in measure(running, plan, tokenizer, measured):
            print(done, flush=True)
    report = overhead_report.report(measured, plan, [server.name for server in running])
    print(report)
    if options.write:
        overhead_report.write(report)


if __name__ == "__main__":
    main()
