"""Chooses the engine that has to read the fewest tokens, by what the engines' prefix caches hold.

What they hold is known from their KV events, or predicted from what each was sent. The cost of an engine is the number
of tokens to be read before the answer begins there, plus a part of the tokens that its running generations hold. Where
costs are nearly equal, affinity would only make load uneven: then the session's own engine is taken, which every
replica of the server finds alike by a rendezvous hash, without shared state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from singletree.engines.engine import Chunk, GenerationJob, KvPublisher
from singletree.engines.workers import MatcherSource, RoutingOptions, Worker
from singletree.errors import BadConfiguration
from singletree.lru import LruCache
from singletree.routing.block_chain import MIN_UNIT, BlockChain, ChainMemory, unit_of
from singletree.routing.event_cache import EventCache, KvEventStream
from singletree.routing.policy import Choice, tokens_to_hold
from singletree.routing.pool import EnginePool, pool_with
from singletree.routing.predicted_cache import (
    IDLE_SECONDS,
    WAIT_SECONDS,
    Mean,
    PredictedCache,
    PrefixIndex,
    Residency,
    blocks_by_holder,
)

if TYPE_CHECKING:
    from singletree.routing.event_subscriber import EventSubscriber

_LOG = logging.getLogger(__name__)

ROOM_SECONDS = 0.25
"""How long a turn waits for room before it looks again."""

_SESSIONS = 65536
_MEASURED_TOKENS = 1024
"""Turns with fewer tokens to read show what takes as long whatever is read, the others how fast it is read."""

UNKNOWN_CAPACITY = 1 << 20
"""Tokens in the cache of an engine that does not report its size; what it reports as cached corrects it."""


@dataclass(frozen=True, slots=True)
class CostWeights:
    """How the cost of an engine is made.

    Attributes:
        decode: the part of a running generation's tokens that counts like a token to read.
        gate: costs are equal if they differ by less than this many tokens,
        gate_share: or by less than this share of the prompt.
        resident: the part of the tokens of the sessions that live on an engine that counts for a session that does not,
            so that sessions with one system prompt do not all gather where it is cached.
        evicted: how often a token counts besides that a session would have to read at an engine without room.
        budget: the share of an engine's cache that running generations should fill at most.
    """

    decode: float = 0.05
    gate: int = 256
    gate_share: float = 0.05
    resident: float = 0.3
    evicted: float = 2.0
    budget: float = 0.9


@dataclass(slots=True, eq=False)
class WorkerCache:
    """What is known of one engine's cache: by its events, and by prediction.

    Attributes:
        number: of the engine; it is the holders ``2 * number`` (events) and ``2 * number + 1`` (prediction).
        digest: of the engine's name, for the rendezvous hash.
        capacity: size of the cache in tokens, or None.
    """

    number: int
    predicted: PredictedCache
    digest: bytes
    capacity: int | None = None
    events: EventCache | None = None
    stream: KvEventStream | None = None
    subscriber: EventSubscriber | None = None
    publisher: KvPublisher | None = None

    @property
    def unit(self) -> int | None:
        """How many tokens a block of the events has; None without events."""
        return None if self.events is None else self.events.unit

    def cached_tokens(self, matched: Mapping[int, int], *, salted: bool) -> int:
        """Return how many tokens of a prompt are expected here.

        A synchronized stream of events is the truth, except for a prompt with a salt where the engine publishes none:
        its blocks appear as everybody's.

        Args:
            matched: number of matched tokens by holder.
            salted: whether the prompt has a salt.
        """
        reported, predicted = matched.get(2 * self.number, 0), matched.get(2 * self.number + 1, 0)
        if self.events is None or self.stream is None or not self.stream.synced:
            return max(reported, predicted)
        return max(reported, predicted) if salted and not self.events.salted else reported


@dataclass(slots=True)
class _InFlight:
    choice: Choice
    chain: BlockChain
    before: tuple[int, int] | None
    began: float
    queued: int
    read: float | None = None
    corrected: bool = False


class KvAwarePolicy:
    """Choose by cost. See ``RoutingPolicy``.

    Args:
        model: the model's name, part of every block's hash.
        kv_events, kv_replay: ZMQ endpoints, in the order of the engines; none for those that the engines report.
        cache_tokens: size of each engine's cache; None for what the engine reports.
        wait: for how many seconds a session waits at most for others, where the caches are too small for all.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        model: str = "",
        *,
        kv_events: Sequence[str] = (),
        kv_replay: Sequence[str] = (),
        cache_tokens: int | None = None,
        weights: CostWeights = CostWeights(),
        wait: float = WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._cache_tokens, self._weights = model, cache_tokens, weights
        self._endpoints, self._replays = tuple(kv_events), tuple(kv_replay)
        self.index = PrefixIndex()
        self._chains = ChainMemory(model)
        self._unit = MIN_UNIT
        self._caches: dict[Worker, WorkerCache] = {}
        self._followed: list[WorkerCache] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._residency, self._clock = Residency(wait), clock
        self._overhead, self._token_seconds, self._cycle = Mean(), Mean(), Mean()
        self._ended: LruCache[Hashable, tuple[float, float]] = LruCache(entries=_SESSIONS)
        self._shared: LruCache[str, int] = LruCache(entries=_SESSIONS)

    async def start(self, workers: Sequence[Worker]) -> None:
        """Begin to receive the engines' events.

        Raises:
            BadConfiguration: the endpoints do not fit the engines, or pyzmq is not installed.
        """
        for flag, given in (("--kv-events", self._endpoints), ("--kv-replay", self._replays)):
            if given and len(given) != len(workers):
                raise BadConfiguration(
                    f"{flag} has {len(given)} endpoints for {len(workers)} engines; give one for each, in their order; "
                    "an empty one for an engine that publishes none"
                )
        sizes = [size for worker in workers if (size := _details(worker, "kv_block_size"))]
        self._unit = unit_of(max(sizes)) if sizes else MIN_UNIT
        for worker in workers:
            self.cache_of(worker)
        for number, (worker, endpoint) in enumerate(zip(workers, self._endpoints, strict=False)):
            if endpoint:
                self._follow(worker, KvPublisher(endpoint, self._replays[number] if self._replays else ""))
        for worker in workers:
            self._follow_reported(worker)

    async def close(self) -> None:
        for cache in self._caches.values():
            if cache.subscriber is not None:
                subscriber, cache.subscriber = cache.subscriber, None
                await subscriber.close()

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """Return the engine with the least cost; among nearly equal ones the session's own.

        A turn waits for a limited time if the caches have no room for its session.
        """
        came = self._clock()
        try:
            while (choice := self.choose_now(job, workers)) is None:
                await asyncio.sleep(ROOM_SECONDS)
                workers = [worker for worker in workers if worker.state == "up"] or workers
        finally:
            self._residency.gives_up(id(job))
        waited = self._clock() - came
        if waited < ROOM_SECONDS:
            return choice
        return replace(choice, reason=f"{choice.reason}; waited {waited:.1f} s for room in a cache")

    def choose_now(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice | None:
        """Return the engine; None if the turn has to wait for room, so that this has to be called again soon."""
        chain = self._chain(job)
        weights, length, hold = self._weights, len(chain), tokens_to_hold(job)
        cached, costs, caches = self._costs(job, chain, workers, hold)
        home = self._residency.place_of(_session_of(job)) if job.session else None
        places = [cache.number for cache in caches]
        stays = home in places and costs[places.index(home)] <= min(costs)
        if job.session and (ended := self._ended.pop(_session_of(job))) is not None:
            self._cycle.add(ended[1] + min(self._clock() - ended[0], IDLE_SECONDS))
        if job.session and not stays:
            if home is None and self._shared.peek(job.session) is None:
                self._shared.put(job.session, max(cached))
            rooms = [self._room(cache) for cache in caches]
            able = self._residency.with_room(self._private(job, length), rooms, places, self._clock())
            if home is None:
                rank = (job.priority, -(job.latency_sensitivity or 0.0))
                reading = self._saved_seconds(length - max(cached), rooms)
                if self._residency.waits(id(job), rank, self._clock(), has_room=bool(able), reading=reading):
                    return None
            others = 0 if home is not None else self._shared.peek(job.session) or 0
            # At most the pull of what is not the session's own is taken back: replicas agree where nothing is cached.
            # What is read where there is no room evicts as much of others, and will have to be read again.
            free = {home, *(places[at] for at in able)}
            costs = [
                cost
                + min(have, others, weights.resident * self._residency.held(place))
                + (0 if place in free else weights.evicted * (length - have))
                for cost, have, place in zip(costs, cached, places, strict=True)
            ]
        within = min(costs) + max(weights.gate, weights.gate_share * length)
        near = [number for number, cost in enumerate(costs) if cost <= within]
        chosen = near[0]
        if len(near) > 1:
            session = session_digest(job, chain)
            chosen = max(near, key=lambda number: rendezvous_weight(session, caches[number].digest))
        worker, have = workers[chosen], cached[chosen]
        return Choice(worker, have, _reason(have, length, max(cached), len(near), worker))

    def sent(self, job: GenerationJob, choice: Choice) -> None:
        cache, chain, now = self.cache_of(choice.worker), self._chain(job), self._clock()
        if job.session:
            own, room = self._private(job, len(chain)), self._room(cache, grown=True)
            self._residency.began(_session_of(job), cache.number, own, room, now)
        before, queued = cache.predicted.state(chain), choice.worker.load.prefill_tokens
        self._in_flight[id(choice)] = _InFlight(choice, chain, before, now, queued)
        cache.predicted.use(chain)

    def prompt_read(self, job: GenerationJob, choice: Choice, chunk: Chunk) -> None:
        if chunk.picture_tokens is not None:
            self._chains.learn_pictures(job, chunk.picture_tokens)
        flight = self._in_flight.get(id(choice))
        if flight is None:
            return
        flight.read = flight.read or self._clock()
        if chunk.cached_tokens is None or choice.predicted_cached_tokens is None or flight.corrected:
            return
        flight.corrected = True
        flight.queued += choice.predicted_cached_tokens - chunk.cached_tokens
        used = None if flight.before is None else flight.before[1]
        self.cache_of(choice.worker).predicted.reported(
            used, choice.predicted_cached_tokens, chunk.cached_tokens
        )

    def ended(self, job: GenerationJob, choice: Choice, generated: Sequence[int]) -> None:
        """Predict that the engine's cache keeps the prompt and what was generated."""
        flight = self._in_flight.pop(id(choice), None)
        if flight is None:
            return
        cache = self.cache_of(choice.worker)
        predicted, length = cache.predicted, len(job.prompt_token_ids) + len(generated)
        now, read = self._clock(), flight.read
        if read is not None and flight.queued < _MEASURED_TOKENS:
            self._overhead.add(read - flight.began)
        elif read is not None:
            seconds = read - flight.began - (self._overhead.value or 0.0)
            self._token_seconds.add(seconds / flight.queued)
        if job.session:
            own = 0 if read is None else self._private(job, length)
            self._residency.ended(_session_of(job), own, self._room(cache, grown=True), now)
            self._ended.put(_session_of(job), (now, 0.0 if read is None else now - read))
        if read is None:
            predicted.restore(flight.chain, flight.before)
        elif len(generated) > 1:
            # The last token was generated and not read.
            predicted.use(self._chains.chain_of(job, self._unit, generated[:-1]))

    def worker_lost(self, worker: Worker) -> None:
        """Forget the engine's cache. If the engine now publishes elsewhere, its events are received from there."""
        cache = self.cache_of(worker)
        cache.predicted.clear()
        self._residency.lost(cache.number)
        if cache.stream is not None:
            cache.stream.restart()
        self._follow_reported(worker)

    def _saved_seconds(self, unread: int, rooms: Sequence[int | None]) -> float:
        """Return how many seconds an engine needs to read so many tokens; 0.0 where a turn does not wait for room.

        To wait pays only where to read a whole engine's room anew takes longer than sessions take to come back.
        """
        sizes = [room for room in rooms if room is not None]
        token, cycle = self._token_seconds.value, self._cycle.value
        if token is None or cycle is None or token * sum(sizes) <= cycle * len(sizes):
            return 0.0
        return token * unread

    def _private(self, job: GenerationJob, length: int) -> int:
        """Return how many of so many tokens of a session are not those of others: what it adds to a cache."""
        return max(0, length - (self._shared.get(job.session) or 0))

    def _room(self, cache: WorkerCache, *, grown: bool = False) -> int | None:
        """Return how many tokens of its cache sessions may fill; None for a cache of unknown size.

        Those that are there may grow into half of the rest: else one that grows a little had another one leave.
        """
        share = (1 + self._weights.budget) / 2 if grown else self._weights.budget
        return None if cache.capacity is None else int(share * cache.capacity)

    def _chain(self, job: GenerationJob) -> BlockChain:
        return self._chains.chain_of(job, self._unit)

    def _matched(self, job: GenerationJob, chain: BlockChain) -> dict[int, int]:
        found = {holder: blocks * self._unit for holder, blocks in self._blocks_held(chain).items()}
        # The blocks of engines differ in size, or are larger than was known when the policy was started.
        for unit in {cache.unit for cache in self._followed} - {None, self._unit}:
            assert unit is not None
            own = self._chains.chain_of(job, unit)
            for holder, blocks in self._blocks_held(own).items():
                found[holder] = blocks * unit
        return found

    def _blocks_held(self, chain: BlockChain) -> dict[int, int]:
        return blocks_by_holder(self.index.matches(chain.hashes_while(self.index.__contains__)))

    def _costs(
        self, job: GenerationJob, chain: BlockChain, workers: Sequence[Worker], hold: int
    ) -> tuple[list[int], list[float], list[WorkerCache]]:
        """Return for each engine the cached tokens, the cost, and what is known of its cache. One pass: there may be
        a thousand engines.
        """
        matched, salted, length = self._matched(job, chain), bool(job.cache_salt), len(chain)
        holding = {holder >> 1 for holder in matched}
        decode, budget, known = self._weights.decode, self._weights.budget, self._caches
        cached, costs, caches = list[int](), list[float](), list[WorkerCache]()
        for worker in workers:
            cache = known.get(worker) or self.cache_of(worker)
            load, have = worker.load, 0
            if cache.number in holding:
                # An engine reads at least the last token, with its whole block.
                unit = cache.unit or self._unit
                have = min(cache.cached_tokens(matched, salted=salted), (length - 1) // unit * unit)
            cost = length - have + load.prefill_tokens + decode * load.decode_tokens
            if (
                cache.capacity is not None
                and (over := load.decode_tokens + hold - budget * cache.capacity) > 0
            ):
                cost += over  # it waits until so many tokens are freed
            cached.append(have)
            costs.append(cost)
            caches.append(cache)
        return cached, costs, caches

    def cache_of(self, worker: Worker) -> WorkerCache:
        cache = self._caches.get(worker)
        if cache is None:
            number = len(self._caches)
            capacity = self._cache_tokens or _details(worker, "kv_cache_tokens")
            predicted = PredictedCache(
                self.index,
                2 * number + 1,
                self._unit,
                capacity or UNKNOWN_CAPACITY,
                fixed=capacity is not None,
            )
            digest = blake2b(worker.name.encode(), digest_size=16).digest()
            cache = self._caches[worker] = WorkerCache(number, predicted, digest, capacity)
        return cache

    def _follow_reported(self, worker: Worker) -> None:
        """Receive the engine's events from where it reports that it publishes, unless the endpoints were given."""
        publisher, cache = worker.engine.info().kv_publisher, self.cache_of(worker)
        if self._endpoints or publisher is None or publisher == cache.publisher:
            return
        try:
            self._follow(worker, publisher)
        except BadConfiguration as error:
            _LOG.warning("the cache of engine %s is predicted: %s", worker.name, error.message)

    def _follow(self, worker: Worker, publisher: KvPublisher) -> None:
        cache = self.cache_of(worker)
        cache.publisher = publisher
        if cache.subscriber is not None:
            cache.subscriber.move(publisher.events, publisher.replay)
            return
        try:
            from singletree.routing.event_subscriber import EventSubscriber
        except ImportError:
            raise BadConfiguration(
                "--kv-events needs pyzmq: pip install 'singletree[routing]', or omit it: the engines' caches are then "
                "predicted"
            ) from None
        self.follow(worker, can_replay=bool(publisher.replay))
        assert cache.stream is not None
        cache.subscriber = EventSubscriber(cache.stream, publisher.events, publisher.replay)

    def follow(self, worker: Worker, *, can_replay: bool = False) -> WorkerCache:
        """Expect events of the engine: pass its messages to the ``stream`` of the returned cache."""
        cache = self.cache_of(worker)
        cache.events = EventCache(self.index, 2 * cache.number, self._model)
        cache.stream = KvEventStream(cache.events, worker.name, can_replay=can_replay)
        self._followed.append(cache)
        return cache


def _details(worker: Worker, name: str) -> int | None:
    value = (worker.engine.info().details or {}).get(name)
    return value if isinstance(value, int) and value > 0 else None


def _session_of(job: GenerationJob) -> Hashable:
    """Return what the session is known by: tenants may use the same name."""
    return job.session, job.cache_salt


def session_digest(job: GenerationJob, chain: BlockChain) -> bytes:
    """Return a digest of the session's name; of the prompt if it has none."""
    name = b"session:" + job.session.encode() if job.session else chain.tokens
    return blake2b(
        name, digest_size=16, salt=blake2b(job.cache_salt.encode(), digest_size=16).digest()
    ).digest()


def rendezvous_weight(session: bytes, worker: bytes) -> bytes:
    """Return the weight of an engine for a session, from their digests; the heaviest engine is the session's own."""
    return blake2b(session, digest_size=8, key=worker).digest()


def _reason(cached: int, length: int, most: int, near: int, worker: Worker) -> str:
    load = f"{worker.load.generations} generations there"
    if near > 1 and not most:
        return f"no engine has the prompt; the session's own of {near} equal ones; {load}"
    if near > 1:
        return f"{cached} of {length} tokens cached; the session's own of {near} nearly equal ones; {load}"
    if cached < most:
        return f"{cached} of {length} tokens cached; another has {most}, and more to do; {load}"
    return f"{cached} of {length} tokens cached, the most; {load}"


def make_kv_pool(
    workers: Sequence[Worker], options: RoutingOptions, matchers: MatcherSource | None
) -> EnginePool:
    """Return the engines ``workers`` as one, under ``--router-mode kv``."""
    return pool_with(make_kv_policy(options), workers, options, matchers)


def make_kv_policy(options: RoutingOptions) -> KvAwarePolicy:
    """Return the policy of ``--router-mode kv``."""
    return KvAwarePolicy(
        options.model,
        kv_events=options.kv_events,
        kv_replay=options.kv_replay,
        cache_tokens=options.cache_tokens,
        wait=WAIT_SECONDS if options.hold_seconds is None else min(WAIT_SECONDS, options.hold_seconds),
    )
