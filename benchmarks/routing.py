"""How the router chooses: the prefix index, hit rate and time to first token of each mode, and many engines.

    python -m benchmarks.routing [--quick] [--parts index,engines,scale] [--engines N] [--sessions N] [--modes NAMES]

``index`` measures the index. ``engines`` runs agent sessions of recorded shape (``routing_trace``) on four simulated
engines in virtual time, once for each mode; their caches together are too small for all sessions. ``dynamo`` is one
of the modes where the packages ai-dynamo-runtime and pyzmq are installed. ``scale`` does the same with 1,000 engines.
Times of the router (``choose``, all of its work for ``a turn``) are CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, cast, get_args

from benchmarks.routing_oracle import Read, most_hits
from benchmarks.routing_trace import AgentTurn, agent_session
from benchmarks.simulated_engines import (
    BLOCK,
    EngineSpeed,
    EventFrames,
    SimulatedEngine,
    SimulatedGeneration,
    VirtualClock,
)
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Engine, GenerationJob
from singletree.engines.routing.block_chain import ChainMemory
from singletree.engines.routing.dynamo_policy import DynamoPolicy
from singletree.engines.routing.event_cache import EventCache
from singletree.engines.routing.event_stream import KvEventStream
from singletree.engines.routing.kv_events import BlockHash, BlockRemoved, BlockStored, KvEvent
from singletree.engines.routing.kv_policy import ROOM_SECONDS, KvAwarePolicy
from singletree.engines.routing.modes import RouterMode, RoutingOptions, make_policy
from singletree.engines.routing.policy import RoutingPolicy
from singletree.engines.routing.prefix_index import PrefixIndex
from singletree.engines.routing.residency import Patience
from singletree.engines.routing.worker import Worker, tokens_to_hold, tokens_to_prefill

EVENTS, UNHELD, AFFINITY = "kv (events)", "kv (no turn waits)", "dynamo (session affinity)"
MODES = (*[mode for mode in get_args(RouterMode) if mode != "dynamo"], EVENTS, UNHELD, "dynamo", AFFINITY)
_PATIENCE: Mapping[str, Patience] = {
    "kv": Patience(),
    EVENTS: Patience(),
    UNHELD: Patience(wait=0.0),
    "dynamo": Patience(),
    AFFINITY: Patience(),
}
_AFFINITY_SECONDS = 3600.0
_START_SECONDS = 20.0
_MARKS = count(1 << 31)
Settle: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    """What one mode did."""

    mode: str
    prompt: int = 0
    cached: int = 0
    predicted_off: int = 0
    firsts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    busy: list[float] = field(default_factory=list)
    choose_seconds: list[float] = field(default_factory=list)
    router_seconds: float = 0.0
    memory: int = 0
    blocks: int = 0
    reads: list[Read] = field(default_factory=list)


class Simulation:
    """Sessions that take their turns on simulated engines, as a policy routes them."""

    def __init__(
        self, mode: str, engines: int, sessions: int, turns: int | None, speed: EngineSpeed, scale: float
    ) -> None:
        self.clock = VirtualClock()
        self.engines = [SimulatedEngine(self.clock, speed) for _ in range(engines)]
        self.workers = [
            Worker(f"engine-{number}", cast(Engine, engine)) for number, engine in enumerate(self.engines)
        ]
        self.outcome = Outcome(mode)
        self._chains = ChainMemory("simulated", 1 << 40)
        self._ready: list[Callable[[], Any]] = []
        self._sessions, self._turns, self._scale = sessions, turns, scale
        self.policy = _policy(mode, Random(7), lambda: self.clock.now, scale)

    async def run(
        self, publish: Callable[[int], Callable[[list[KvEvent]], None]] | None, settle: Settle | None = None
    ) -> Outcome:
        """Run all sessions; before each choice ``settle`` waits until the router has all events."""
        await self.policy.start(self.workers)
        outcome, before = self.outcome, _resident()
        if publish is not None:
            for number, engine in enumerate(self.engines):
                engine.publish = publish(number)
        random = Random(3)
        for number in range(self._sessions):
            turns = agent_session(number, self._turns, self._scale)
            self.clock.after(random.random() * _START_SECONDS, self._later(number, turns))
        while self._ready or self.clock.step():
            ready, self._ready = self._ready, []
            for send in ready:
                if settle:
                    await settle()
                await send()
        await self.policy.close()
        outcome.seconds = self.clock.now
        outcome.busy = [engine.busy for engine in self.engines]
        outcome.memory = _resident() - before
        if isinstance(self.policy, KvAwarePolicy):
            outcome.blocks = len(self.policy.index)
        return outcome

    def _later(self, number: int, turns: Iterator[AgentTurn]) -> Callable[[], None]:
        def due() -> None:
            turn = next(turns, None)
            if turn is not None:
                self.clock.after(
                    turn.pause, lambda: self._ready.append(lambda: self._send(number, turns, turn))
                )

        return due

    async def _send(
        self,
        number: int,
        turns: Iterator[AgentTurn],
        turn: AgentTurn,
        job: GenerationJob | None = None,
        came: float | None = None,
    ) -> None:
        prompt = turn.prompt
        sampling = Sampling(max_tokens=len(turn.generated))
        job = job or GenerationJob(prompt, sampling, f"{number}", session=f"session-{number}")
        came = self.clock.now if came is None else came
        began = time.process_time()
        if isinstance(self.policy, KvAwarePolicy):
            chosen = self.policy.choose_now(job, self.workers)
            if chosen is None:
                again = partial(self._send, number, turns, turn, job, came)
                self.clock.after(ROOM_SECONDS, lambda: self._ready.append(again))
                return
            choice = chosen
        else:
            choice = await self.policy.choose(job, self.workers)
        took = time.process_time() - began
        worker, load = choice.worker, choice.worker.load
        prefill, held = tokens_to_prefill(job, choice.predicted_cached_tokens), tokens_to_hold(job)
        load.generations += 1
        load.prefill_tokens += prefill
        load.decode_tokens += held
        self.policy.sent(job, choice)
        outcome = self.outcome
        outcome.choose_seconds.append(took)
        outcome.router_seconds += time.process_time() - began

        def read(generation: SimulatedGeneration) -> None:
            nonlocal began
            load.prefill_tokens -= prefill
            began = time.process_time()
            self.policy.prompt_read(job, choice, Chunk([1], cached_tokens=generation.cached))
            outcome.router_seconds += time.process_time() - began
            outcome.prompt += len(prompt)
            outcome.cached += generation.cached
            outcome.firsts.append(generation.first - came)
            if choice.predicted_cached_tokens is not None:
                outcome.predicted_off += abs(choice.predicted_cached_tokens - generation.cached)

        def ended(generation: SimulatedGeneration) -> None:
            load.generations -= 1
            load.decode_tokens -= held
            began = time.process_time()
            self.policy.ended(job, choice, turn.generated)
            outcome.router_seconds += time.process_time() - began
            self._later(number, turns)()

        chain = self._chains.chain_of(job, BLOCK)
        after = self._chains.chain_of(job, BLOCK, turn.generated[:-1])
        # The chain grows in place; the engine needs the prompt's own.
        own = type(chain)(chain.seed, chain.unit, prompt.tobytes(), (), after.hashes[: len(prompt) // BLOCK])
        outcome.reads.append(Read(own.hashes, after.hashes[:]))
        engine = self.engines[self.workers.index(worker)]
        engine.submit(SimulatedGeneration(job, own, after, len(turn.generated), read, ended))


def _policy(mode: str, random: Random, clock: Callable[[], float], scale: float) -> RoutingPolicy:
    if mode in _PATIENCE:
        # "dynamo" gets its own policy when its endpoints are known.
        patience = _PATIENCE[mode]
        patience = replace(patience, tokens=int(patience.tokens * scale))
        return KvAwarePolicy("simulated", patience=patience, clock=clock)
    return make_policy(cast(RouterMode, mode), RoutingOptions("simulated", random=random))


async def simulate(
    mode: str, engines: int, sessions: int, turns: int | None, speed: EngineSpeed, scale: float = 1.0
) -> Outcome:
    """Run one mode."""
    simulation = Simulation(mode, engines, sessions, turns, speed, scale)
    if mode.startswith("dynamo"):
        return await _with_dynamo(simulation)
    if mode != EVENTS:
        return await simulation.run(None)
    policy = simulation.policy
    assert isinstance(policy, KvAwarePolicy)

    def publish(number: int) -> Callable[[list[KvEvent]], None]:
        stream, frames = policy.follow(simulation.workers[number]).stream, EventFrames()
        assert stream is not None

        def feed(events: list[KvEvent]) -> None:
            message = frames.encode(events)
            began = time.process_time()
            stream.feed(message)
            simulation.outcome.router_seconds += time.process_time() - began

        return feed

    return await simulation.run(publish)


async def _settled(
    simulation: Simulation, send: Callable[[int, list[KvEvent]], None], behind: set[int]
) -> None:
    """Wait until Dynamo's router has taken everything: its bookings, and the events of the engines ``behind``.

    Each of these engines stores a block of its own and drops it again; the router follows an engine's events in order,
    so it has the others when it knows this block.
    """
    policy = simulation.policy
    assert isinstance(policy, DynamoPolicy)
    while policy.unfinished:  # noqa: ASYNC110 (tasks of the policy)
        await asyncio.sleep(0.0005)
    for number in tuple(behind):
        tokens = [next(_MARKS)] * BLOCK
        asked = {"model_name": "simulated", "token_ids": [*tokens, 0]}
        seen, tries = False, 0
        while not seen:
            if tries % 100 == 0:  # the first ones are sent before the router listens
                send(number, [BlockStored([tokens[0]], None, tokens, BLOCK, medium="GPU", group_idx=0)])
            tries += 1
            await asyncio.sleep(0.0005)
            found = await policy.service.overlap_scores(asked)
            seen = any(each["worker_id"] == number and each["device_blocks"] for each in found["workers"])
        send(number, [BlockRemoved([tokens[0]], "GPU")])
    behind.clear()


async def _with_dynamo(simulation: Simulation) -> Outcome:
    """Run Dynamo's router; it gets the engines' events over ZMQ."""
    import zmq

    context: Any = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        endpoints = [f"ipc://{folder}/{number}" for number in range(len(simulation.engines))]
        sockets = []
        for endpoint in endpoints:
            socket = context.socket(zmq.PUB)
            socket.set_hwm(0)
            socket.bind(endpoint)
            sockets.append(socket)
        seconds = _AFFINITY_SECONDS if simulation.outcome.mode == AFFINITY else None
        simulation.policy = DynamoPolicy("simulated", kv_events=endpoints, affinity_seconds=seconds)
        frames, behind = [EventFrames() for _ in endpoints], set(range(len(endpoints)))

        def send(number: int, events: list[KvEvent]) -> None:
            behind.add(number)
            sockets[number].send_multipart(frames[number].encode(events))

        try:
            return await simulation.run(
                lambda number: lambda events: send(number, events),
                partial(_settled, simulation, send, behind),
            )
        finally:
            for socket in sockets:
                socket.close(0)
            context.term()


_HEAD = """\
| mode | cached | TTFT mean | p50 | p90 | all done | load spread | prediction off | choose p50 | a turn |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""


def row(outcome: Outcome) -> str:
    """Return the outcome as a row of the table."""
    firsts, predicts = sorted(outcome.firsts), outcome.mode.startswith(("kv", "dynamo"))
    spread = max(outcome.busy) / statistics.fmean(outcome.busy)
    off = f"{outcome.predicted_off / outcome.prompt:.1%}" if predicts else "–"
    return (
        f"| {outcome.mode} | {outcome.cached / outcome.prompt:.1%} | {statistics.fmean(firsts):.2f} s "
        f"| {_at(firsts, 0.5):.2f} s | {_at(firsts, 0.9):.2f} s | {outcome.seconds:.0f} s | {spread:.2f} | {off} "
        f"| {_at(sorted(outcome.choose_seconds), 0.5) * 1e3:.2f} ms "
        f"| {outcome.router_seconds / len(firsts) * 1e3:.2f} ms |"
    )


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure_index(blocks: int) -> str:
    """Measure memory, look-ups and events of the index, with ``blocks`` blocks from events."""
    random = Random(1)
    before = _resident()
    index = PrefixIndex()
    cache = EventCache(index, 0, "m")
    stream = KvEventStream(cache)
    frames = EventFrames()
    messages = []
    per_event, per_prompt = 4, 3125
    tokens = [random.randrange(150_000) for _ in range(BLOCK * per_event)]
    parent: BlockHash | None = None
    held = 0
    for number in range(blocks // per_event):
        hashes: list[BlockHash] = [random.getrandbits(64) for _ in range(per_event)]
        if number % (per_prompt // per_event) == 0:
            parent, tokens[0] = None, number
        messages.append(BlockStored(hashes, parent, list(tokens), BLOCK, medium="GPU", group_idx=0))
        parent = hashes[-1]
        if len(messages) == 1000:
            for frame in [frames.encode([event]) for event in messages]:
                stream.feed(frame)
            messages.clear()
            held = cache.blocks
    gc.collect()
    memory = _resident() - before
    single = []
    parent = None
    for number in range(20_000):
        name = random.getrandbits(64)
        if number % per_prompt == 0:
            parent, tokens[0] = None, number + 1_000_000
        single.append(
            frames.encode([BlockStored([name], parent, tokens[:BLOCK], BLOCK, medium="GPU", group_idx=0)])
        )
        parent = name
    began = time.process_time()
    for frame in single:
        stream.feed(frame)
    rate = len(single) / (time.process_time() - began)
    prompt = array("I", [random.randrange(150_000) for _ in range(50_000)])
    grown = prompt + array("I", range(300))
    rows = (
        ("seen for the first time, which no engine holds", _answer_seconds(index, prompt, None, 0)),
        ("seen for the first time, which engines hold", _answer_seconds(index, prompt, None, 3000)),
        ("that goes on from the last one", _answer_seconds(index, grown, prompt, 3000)),
    )
    return "\n".join(
        (
            f"| blocks in the index | {held:,} |",
            "|---|--:|",
            f"| memory, with the engines' names for them | {memory / 2**20:.0f} MiB |",
            f"| events of one block each, decoded and applied, a second | {rate:,.0f} |",
            *(
                f"| answer for a prompt of 50,000 tokens {which} | {took * 1e3:.3f} ms |"
                for which, took in rows
            ),
        )
    )


def _answer_seconds(index: PrefixIndex, prompt: array[int], last: array[int] | None, held: int) -> float:
    """Return the CPU time of an answer: who holds how much of ``prompt``, of which engines hold ``held`` blocks.

    Args:
        last: the prompt before in the session; None if it is the first.
    """
    blocks = ChainMemory("m").chain_of(GenerationJob(prompt, Sampling(), "r"), BLOCK).hashes[:held]
    index.add(1, blocks)
    index.add(2, blocks[: held // 6])
    took = []
    for _ in range(25):
        chains = ChainMemory("m")
        if last is not None:
            assert chains.chain_of(GenerationJob(last, Sampling(), "r", session="s"), BLOCK).hashes
        job = GenerationJob(prompt, Sampling(), "r", session="s")
        began = time.process_time()
        found = index.matches(chains.chain_of(job, BLOCK).hashes_while(index.__contains__))
        took.append(time.process_time() - began)
        assert max((blocks for _, blocks in found), default=0) == held
    index.discard(1, blocks)
    index.discard(2, blocks)
    return statistics.median(took)


def main() -> None:
    """Run the chosen parts and print their tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer blocks, turns and engines")
    parser.add_argument("--parts", default="index,engines,scale")
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}")
    parser.add_argument("--engines", type=int, help="of the part scale (1000)")
    parser.add_argument("--sessions", type=int, help="of the part scale (four for each engine)")
    parser.add_argument(
        "--turns", type=int, help="of a session (all that were recorded; in the part scale 4)"
    )
    parser.add_argument("--blocks", type=int, help="of an engine's cache in the part engines (7000)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="share of all lengths, caches and speeds of reading in the part engines, for a shorter run (1)",
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    modes = options.modes.split(",") if options.modes else list(MODES)
    if any(mode.startswith("dynamo") for mode in modes) and (
        find_spec("dynamo") is None or find_spec("zmq") is None
    ):
        print("dynamo is left out: it needs ai-dynamo-runtime and pyzmq", flush=True)
        modes = [mode for mode in modes if not mode.startswith("dynamo")]
    if "index" in parts:
        print(f"\n{measure_index(100_000 if options.quick else 1_000_000)}", flush=True)
    if "engines" in parts:
        turns = options.turns or (10 if options.quick else None)
        whole = EngineSpeed()
        speed = EngineSpeed(
            whole.prefill * options.scale, blocks=int((options.blocks or 7000) * options.scale)
        )
        print(f"\n4 engines of {speed.blocks * BLOCK:,} tokens, 32 sessions of {turns or 'all'} turns\n")
        print(_HEAD, flush=True)
        bounds = dict[str, float]()
        for mode in modes:
            outcome = asyncio.run(simulate(mode, 4, 32, turns, speed, options.scale))
            print(row(outcome), flush=True)
            bounds[mode] = most_hits(outcome.reads, 4 * speed.blocks) * BLOCK / outcome.prompt
        told = ", ".join(f"{mode} {most:.1%}" for mode, most in bounds.items())
        print(f"\nMost that one cache of all engines could have, which knows the future: {told}")
    if "scale" in parts:
        _scale(options, modes)


def _scale(options: argparse.Namespace, modes: Sequence[str]) -> None:
    engines = options.engines or (50 if options.quick else 1000)
    sessions = options.sessions or 4 * engines
    turns = options.turns or (3 if options.quick else 4)
    speed = EngineSpeed(blocks=1000)
    print(
        f"\n{engines:,} engines of {speed.blocks * BLOCK:,} tokens, {sessions:,} sessions of {turns} turns\n"
    )
    print(_HEAD, flush=True)
    sizes = []
    for mode in modes:
        if mode.startswith("dynamo"):
            continue
        outcome = asyncio.run(simulate(mode, engines, sessions, turns, speed, 0.25))
        print(row(outcome), flush=True)
        if outcome.blocks:
            sizes.append(
                f"{mode}: {outcome.blocks:,} blocks in the index, {outcome.memory / 2**20:.0f} MiB with the engines"
            )
    print("\n".join(sizes))


if __name__ == "__main__":
    main()
