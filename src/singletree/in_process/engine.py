"""An engine inside this process: its life cycle, and that of a generation on it.

vLLM and SGLang are asked for other things and answer in other forms (``vllm_engine.py``, ``sglang_engine.py``). How an
engine is started, checked and closed, and how a generation is sent, read, ended and dropped, is the same for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import count
from time import monotonic, time
from typing import Any

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Deliver, EngineInfo, GenerationJob, StopKind, token_limit
from singletree.engines.progress import Progress, no_progress
from singletree.errors import EngineFailed, InvalidRequest, SingletreeError
from singletree.in_process.startup import EngineSettings

_PROBE = GenerationJob((0,), Sampling(max_tokens=1, temperature=0.0), "singletree-probe")
_CLOSE_SECONDS = 5.0
_TRIM_SECONDS = 60.0


class Handover:
    """Delivers the tokens of one generation in the call that brings them, while the consumer waits for an output.

    All else goes through the engine's queue, and so do tokens that come while the consumer is busy. After each output
    put there the engine calls ``wake``. From then on nothing is delivered until the consumer waits again, which it
    does when the queue is empty: so the tokens keep their order.

    Attributes:
        deliver: takes the tokens (``GenerationJob.deliver``); None until the consumer has its first ones.
    """

    __slots__ = ("_waiter", "deliver")

    def __init__(self) -> None:
        self.deliver: Deliver | None = None
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, token_ids: Sequence[int]) -> bool:
        """Deliver tokens; return False if they have to go through the queue."""
        if self.deliver is None or self._waiter is None or self._waiter.done():
            return False
        if token_ids and not self.deliver(token_ids):
            self.wake()
        return True

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for ``wake``, or until ``deliver`` takes no more: then the queue is empty."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class InProcessGeneration:
    """One running generation. An adapter says how it is sent, read and dropped.

    Attributes:
        handover: delivers tokens that need no chunk.
        outcome: how it was ended before its time; None while it was not.
        ended: whether its last chunk was returned.
    """

    def __init__(
        self, owner: InProcessEngine, engine: Any, job: GenerationJob, id: str, max_tokens: int
    ) -> None:
        self._owner, self._engine, self._id, self._max_tokens = owner, engine, id, max_tokens
        self.job = job
        self.handover = Handover()
        self.outcome: SingletreeError | StopKind | None = None
        self.ended = False

    async def send(self) -> None:
        raise NotImplementedError

    async def next_chunk(self) -> Chunk | None:
        """Return the next chunk that was not delivered; None for an output with nothing new."""
        raise NotImplementedError

    def end(self, outcome: SingletreeError | StopKind) -> None:
        """End the generation with ``outcome``, unless it has one."""
        self.outcome = self.outcome or outcome

    async def close(self) -> None:
        """Make the engine drop what it still has of the generation."""
        raise NotImplementedError


class InProcessEngine:
    """What engines of this process have in common. See ``Engine``.

    Args:
        progress: reports the steps of the start.
    """

    _generation: type[InProcessGeneration]

    def __init__(self, settings: EngineSettings, *, name: str, progress: Progress = no_progress) -> None:
        self._settings = settings
        self._name = name
        self._progress = progress
        self._engine: Any = None
        self._info: EngineInfo | None = None
        self._defaults: dict[str, Any] = {}
        self._ranks = 1
        self._closed = False
        self._in_flight: dict[str, InProcessGeneration] = {}
        self._numbers = count()
        self._trim: asyncio.Task[None] | None = None
        self._trim_at = 0.0

    async def start(self) -> None:
        """Start the engine and generate one token.

        Raises BadConfiguration or EngineFailed with the limit and the cure.
        """
        self._closed = False
        await self._start_engine()
        try:
            async for _ in self.generate(_PROBE):
                pass
        except BaseException:
            await self.close()
            raise

    async def _start_engine(self) -> None:
        raise NotImplementedError

    async def _load(self, load: Callable[[EngineSettings, Progress], Any]) -> None:
        loading = asyncio.create_task(asyncio.to_thread(load, self._settings, self._progress))
        try:
            engine = await asyncio.shield(loading)
        except asyncio.CancelledError:
            # The thread cannot be interrupted; what it starts must not stay behind.
            loading.add_done_callback(_shut_down_loaded)
            raise
        if self._closed:
            await asyncio.to_thread(engine.shutdown)
            raise EngineFailed("the engine was closed")
        try:
            self._info = replace(self._describe(engine), started_at=time())
        except BaseException:
            await asyncio.to_thread(engine.shutdown)
            raise
        self._engine = engine

    def _describe(self, engine: Any) -> EngineInfo:
        """Read the settings of the engine that was started, and return what it can do."""
        raise NotImplementedError

    async def close(self) -> None:
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._end_all(EngineFailed("the engine was closed"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._drop(engine, list(self._in_flight))
        await asyncio.to_thread(engine.shutdown)

    def _end_all(self, failure: EngineFailed) -> None:
        for generation in self._in_flight.values():
            generation.end(failure)

    async def _drop(self, engine: Any, ids: list[str]) -> None:
        """Make the engine end generations whose outcome is set, where it has to do so for them to end."""

    def info(self) -> EngineInfo:
        return self._info or EngineInfo(self._name, 0)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the contract of ``Engine.generate``. The last chunk has the token that ended the turn."""
        engine = await self._running()
        prompt_tokens = len(job.prompt_token_ids)
        max_tokens = token_limit(prompt_tokens, job.sampling.max_tokens, self.info().context_window)
        if max_tokens == 0:  # vLLM refuses max_tokens of 0
            yield Chunk((), "length")
            return
        if job.pictures and self.info().pictures is None:
            raise InvalidRequest(f"this model takes no pictures: {self.info().blindness}")
        # SGLang aborts all requests whose id begins with the one given: no id may begin with another.
        id = f"{job.request_id}#{next(self._numbers)}."
        generation = self._in_flight[id] = self._generation(self, engine, job, id, max_tokens)
        try:
            await generation.send()
            while not generation.ended:
                chunk = await generation.next_chunk()
                if chunk is not None:
                    yield chunk
                    if chunk.token_ids:
                        generation.handover.deliver = job.deliver
        except SingletreeError:
            raise
        except Exception as error:
            raise self._converted(error, prompt_tokens) from error
        finally:
            del self._in_flight[id]
            await generation.close()
            self._trim_saved()

    def _trim_saved(self) -> None:
        """Hold the files of the saved KV cache within their limit, now and then."""
        saved = self._settings.saved
        if saved is not None and monotonic() > self._trim_at and (self._trim is None or self._trim.done()):
            self._trim_at = monotonic() + _TRIM_SECONDS
            self._trim = asyncio.create_task(asyncio.to_thread(saved.trim))

    async def _running(self) -> Any:
        """Return the engine. Raises EngineFailed when it is not started or has failed."""
        if self._engine is None:
            raise EngineFailed("the engine is not running: start it first")
        return self._engine

    def _converted(self, error: Exception, prompt_tokens: int) -> SingletreeError:
        raise NotImplementedError

    def _rank_of(self, job: GenerationJob) -> int | None:
        """Return the data-parallel rank whose prefix cache has the job's session; None to let the engine choose."""
        return zlib.crc32(job.session.encode()) % self._ranks if job.session and self._ranks > 1 else None

    async def abort(self, request_id: str) -> None:
        for id, generation in tuple(self._in_flight.items()):
            if generation.job.request_id == request_id:
                generation.end("cancelled")
                if self._engine is not None:
                    await self._drop(self._engine, [id])


def _shut_down_loaded(loading: asyncio.Task[Any]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().shutdown()
