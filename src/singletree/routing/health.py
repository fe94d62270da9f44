"""Which engines of a pool take new generations: those that answer, and are not far slower than the others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from singletree.engines.lifetime import RestartBackoff, Revivable
from singletree.engines.workers import Worker
from singletree.errors import Overloaded, SingletreeError
from singletree.routing.policy import RoutingPolicy

_LOG = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""An engine that generates nothing for so long for a running generation is taken to have failed it, if there is
another engine. Before the first token, the time to read the prompt is added."""

READING_TOKENS_PER_SECOND = 100.0
"""The slowest speed at which an engine is expected to read a prompt."""

CHECK_SECONDS = 1.0
MAX_PAUSE_SECONDS = 5.0
"""The longest pause between two tries to connect to an engine that is down: turns may be waiting for it."""

REVIVE_SECONDS = 60.0
"""The longest that one try to connect to an engine may take."""

MEASURED_TOKENS = 64
"""So many tokens are needed before an engine's speed is compared with that of the others."""

_FORGOTTEN_TOKENS = 2048
SLOW_FACTOR = 4.0
SLOW_SECONDS = 0.05
"""An engine is slow if a token takes ``SLOW_FACTOR`` times as long as with the median of the others, and longer than
this."""

DRAIN_SECONDS = 30.0
"""For how long a slow engine takes no new generations, at first; doubled each time that it is slow again."""

_MAX_DRAIN_SECONDS = 900.0


@dataclass(slots=True, eq=False)
class RunningGeneration:
    """A generation on an engine.

    Attributes:
        last: when it began, or when its last chunk came, by ``time.monotonic``.
        tokens: how many tokens it has generated.
        stalled: whether it was ended because nothing came for too long.
    """

    worker: Worker
    request_id: str
    prompt_tokens: int
    last: float
    tokens: int = 0
    stalled: bool = False


@dataclass(slots=True)
class _Pace:
    """How long an engine takes for a token of one generation, on average over the last thousands of tokens."""

    seconds: float = 0.0
    tokens: int = 0
    drains: int = 0
    drained_until: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds += seconds
        self.tokens += tokens
        if self.tokens > _FORGOTTEN_TOKENS:
            self.seconds /= 2
            self.tokens //= 2

    @property
    def per_token(self) -> float | None:
        return self.seconds / self.tokens if self.tokens >= MEASURED_TOKENS else None


class WorkerHealth:
    """Follow the state of the engines of a pool.

    An engine that can be revived (``Revivable``) is down after a failure, and is tried again, at once first and then
    after growing pauses. Any other restarts by itself, and stays up.
    """

    def __init__(self, workers: Sequence[Worker], policy: RoutingPolicy) -> None:
        self._workers = tuple(workers)
        self._policy = policy
        self._paces = {worker: _Pace() for worker in workers}
        self._running: set[RunningGeneration] = set()
        self._reviving: dict[Worker, asyncio.Task[None]] = {}
        self._retry_at: dict[Worker, float] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        if len(self._workers) > 1:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        tasks = [*self._reviving.values(), *self._aborting]
        tasks += [self._watching] if self._watching else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._reviving.clear()
        self._watching = None

    def available(self) -> list[Worker]:
        """Return the engines that take new generations; the slow ones if there are no others."""
        return [worker for worker in self._workers if worker.state == "up"] or [
            worker for worker in self._workers if worker.state == "draining"
        ]

    def seconds_to_retry(self) -> float:
        """Return in how many seconds the next engine that is down is tried again."""
        now = asyncio.get_running_loop().time()
        return max(1.0, min((at - now for at in self._retry_at.values()), default=2.0))

    def failed(self, worker: Worker, reason: str) -> None:
        if not isinstance(worker.engine, Revivable) or worker in self._reviving:
            return
        _LOG.warning("engine %s is down: %s", worker.name, reason)
        worker.state = "down"
        self._policy.worker_lost(worker)
        self._reviving[worker] = asyncio.create_task(self._revive(worker, worker.engine))

    async def _revive(self, worker: Worker, engine: Revivable) -> None:
        backoff, clock = RestartBackoff(max_pause=MAX_PAUSE_SECONDS), asyncio.get_running_loop().time
        backoff.record_death()
        last = ""
        while True:
            try:
                backoff.check()
                backoff.record_start()
                async with asyncio.timeout(REVIVE_SECONDS):
                    await engine.revive()
                break
            except Overloaded as pause:
                self._retry_at[worker] = clock() + pause.retry_after
                await asyncio.sleep(pause.retry_after)
                continue
            except SingletreeError as error:
                reason = error.message
            except TimeoutError:
                reason = f"no answer within {REVIVE_SECONDS:g} seconds"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if reason != last:
                _LOG.warning("engine %s is still down: %s", worker.name, reason)
            last = reason
            backoff.record_death()
        self._reviving.pop(worker, None)
        self._retry_at.pop(worker, None)
        self._paces[worker] = _Pace()
        self._policy.worker_lost(worker)
        worker.state = "up"
        _LOG.info("engine %s is up again", worker.name)

    def began(self, worker: Worker, request_id: str, prompt_tokens: int) -> RunningGeneration:
        """Note that a generation begins; report its progress with ``progressed``, its end with ``ended``."""
        now = time.monotonic()
        running = RunningGeneration(worker, request_id, prompt_tokens, now)
        self._running.add(running)
        return running

    def progressed(self, running: RunningGeneration, tokens: int) -> None:
        now = time.monotonic()
        if running.tokens and tokens:
            self._paces[running.worker].add(now - running.last, tokens)
        running.last = now
        running.tokens += tokens

    def ended(self, running: RunningGeneration) -> None:
        self._running.discard(running)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """End the generations that hang, and set the state of slow engines. ``now`` is that of ``time.monotonic``."""
        for running in tuple(self._running):
            others = any(worker.state == "up" for worker in self._workers if worker is not running.worker)
            if others and not running.stalled and now - running.last > _patience(running):
                running.stalled = True
                aborting = asyncio.create_task(running.worker.engine.abort(running.request_id))
                self._aborting.add(aborting)
                aborting.add_done_callback(self._aborting.discard)
        for worker, pace in self._paces.items():
            if worker.state == "draining" and now >= pace.drained_until:
                self._paces[worker] = _Pace(drains=pace.drains)
                worker.state = "up"
            elif worker.state == "up" and self._is_slow(worker):
                pace.drained_until = now + min(DRAIN_SECONDS * 2**pace.drains, _MAX_DRAIN_SECONDS)
                pace.drains += 1
                worker.state = "draining"
                _LOG.warning(
                    "engine %s is slow, %.0f ms for a token: it takes no new generations for %.0f seconds",
                    worker.name,
                    1000 * (pace.per_token or 0.0),
                    pace.drained_until - now,
                )

    def _is_slow(self, worker: Worker) -> bool:
        own = self._paces[worker].per_token
        peers = [
            pace.per_token
            for other, pace in self._paces.items()
            if other is not worker and other.state == "up" and pace.per_token is not None
        ]
        return own is not None and bool(peers) and own > max(SLOW_FACTOR * median(peers), SLOW_SECONDS)


def _patience(running: RunningGeneration) -> float:
    reading = 0.0 if running.tokens else running.prompt_tokens / READING_TOKENS_PER_SECOND
    return STALL_SECONDS + reading
