"""Engines in virtual time, with a real prefix cache: blocks in a limited number, evicted as vLLM evicts them."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from singletree.engines.engine import EngineInfo, GenerationJob
from singletree.engines.routing.block_chain import TOKEN_BYTES, BlockChain
from singletree.engines.routing.kv_events import BlockHash, BlockRemoved, BlockStored, KvEvent

BLOCK = 16
_STEP_SECONDS = 0.02
_NAME_BITS = (1 << 64) - 1


class VirtualClock:
    """Runs callbacks in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have ``call`` run in so many seconds."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), call))

    def step(self) -> bool:
        """Run the next callback; return False when there is none."""
        if not self._due:
            return False
        self.now, _, call = heapq.heappop(self._due)
        call()
        return True


@dataclass(slots=True, eq=False)
class SimulatedGeneration:
    """A generation on a simulated engine, with the times at which it came, was read and ended."""

    job: GenerationJob
    chain: BlockChain
    after: BlockChain
    generated: int
    read: Callable[[SimulatedGeneration], None]
    ended: Callable[[SimulatedGeneration], None]
    came: float = 0.0
    first: float = 0.0
    cached: int = 0


@dataclass(slots=True)
class EngineSpeed:
    """Speeds of a simulated engine.

    Attributes:
        prefill: tokens a second, for one prompt after another.
        decode: tokens a second of one generation alone.
        together: how many generations halve each other's speed.
        blocks: in the KV cache.
    """

    prefill: float = 8000.0
    decode: float = 60.0
    together: float = 16.0
    blocks: int = 12_000


class SimulatedEngine:
    """One engine. ``publish`` gets the events of its cache, if it is set; ``busy`` counts the seconds of prefill."""

    def __init__(self, clock: VirtualClock, speed: EngineSpeed) -> None:
        self._clock, self._speed = clock, speed
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._pinned: dict[int, int] = {}
        self._queue: deque[SimulatedGeneration] = deque()
        self._reading = False
        self.running = 0
        self.busy = 0.0
        self.publish: Callable[[list[KvEvent]], None] | None = None

    def info(self) -> EngineInfo:
        """Report the size of the cache, as vLLM does."""
        return EngineInfo(
            "m", 1 << 20, details={"kv_block_size": BLOCK, "kv_cache_tokens": self._speed.blocks * BLOCK}
        )

    def submit(self, generation: SimulatedGeneration) -> None:
        """Queue a generation."""
        generation.came = self._clock.now
        self._queue.append(generation)
        self._next()

    def _next(self) -> None:
        if self._reading or not self._queue:
            return
        generation = self._queue[0]
        pinned = len(self._pinned)
        if pinned and pinned + len(generation.after.hashes) > self._speed.blocks:
            return  # until a generation ends
        self._queue.popleft()
        self._reading = True
        hashes, cached = generation.chain.hashes, 0
        usable = (len(generation.chain) - 1) // BLOCK  # the last token is always read
        for block in hashes[:usable]:
            if block not in self._blocks:
                break
            cached += 1
        generation.cached = cached * BLOCK
        for block in hashes:
            self._pinned[block] = self._pinned.get(block, 0) + 1
            if block in self._blocks:
                self._blocks.move_to_end(block)
        self._add(generation.chain, cached)
        seconds = _STEP_SECONDS + (len(generation.chain) - generation.cached) / self._speed.prefill
        self.busy += seconds
        self._clock.after(seconds, lambda: self._read(generation))

    def _read(self, generation: SimulatedGeneration) -> None:
        self._reading = False
        self.running += 1
        generation.first = self._clock.now
        generation.read(generation)
        rate = self._speed.decode / (1 + (self.running - 1) / self._speed.together)
        self._clock.after(generation.generated / rate, lambda: self._end(generation))
        self._next()

    def _end(self, generation: SimulatedGeneration) -> None:
        self.running -= 1
        for block in generation.chain.hashes:
            if self._pinned[block] == 1:
                del self._pinned[block]
            else:
                self._pinned[block] -= 1
        self._add(generation.after, len(generation.chain.hashes))
        # The last block is the first to go.
        for block in reversed(generation.after.hashes):
            if block in self._blocks:
                self._blocks.move_to_end(block)
        generation.ended(generation)
        self._next()

    def _add(self, chain: BlockChain, start: int) -> None:
        """Put the blocks of ``chain`` from ``start`` on into the cache, and evict those used longest ago."""
        blocks, pinned, events = self._blocks, self._pinned, list[KvEvent]()
        added = [at for at in range(start, len(chain.hashes)) if chain.hashes[at] not in blocks]
        gone = list[BlockHash]()
        for at in added:
            if len(blocks) >= self._speed.blocks:
                victim = next((block for block in blocks if block not in pinned), None)
                if victim is None:
                    break
                del blocks[victim]
                gone.append(_name(victim))
            blocks[chain.hashes[at]] = None
        if self.publish is None:
            return
        if gone:
            events.append(BlockRemoved(gone, "GPU"))
        events += [_stored(chain, first, last) for first, last in _runs(added)]
        if events:
            self.publish(events)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def _stored(chain: BlockChain, first: int, last: int) -> BlockStored:
    step = BLOCK * TOKEN_BYTES
    tokens = memoryview(chain.tokens)[first * step : last * step].cast("I")
    parent = _name(chain.hashes[first - 1]) if first else None
    names: list[BlockHash] = [_name(block) for block in chain.hashes[first:last]]
    return BlockStored(names, parent, list(tokens), BLOCK, medium="GPU", group_idx=0)


def _name(block: int) -> int:
    """Return the block's name in events: vLLM's are 64 bits without a sign."""
    return block & _NAME_BITS


@dataclass(slots=True)
class EventFrames:
    """Encodes events as vLLM publishes them."""

    numbers: Any = field(default_factory=count)

    def encode(self, events: list[KvEvent]) -> list[bytes]:
        """Return the frames of one message."""
        payload = msgspec.msgpack.encode([0.0, events, 0])
        return [b"kv-events", next(self.numbers).to_bytes(8, "big"), payload]
