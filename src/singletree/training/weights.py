"""An engine whose weights a trainer changes: turns wait meanwhile, and their tokens know by which weights they are.

The salt of each version is random: an engine may go back to an earlier version, or outlive this server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import structs

from singletree.engines.engine import Chunk, Deliver, Engine, GenerationJob, WeightStep, change_weights
from singletree.engines.sharing import EngineView
from singletree.errors import EngineUnfit, InvalidRequest, Overloaded
from singletree.events import WeightVersion

_MODES = ("wait", "abort", "keep")


@dataclass(slots=True, eq=False)
class _Running:
    """A generation: ``starts`` are the versions of its weights, and from which of its tokens on they were used."""

    request_id: str
    deliver: Deliver | None
    starts: list[tuple[str | None, int]]
    count: int = 0
    is_aborted: bool = False

    def take(self, token_ids: Sequence[int]) -> bool:
        assert self.deliver is not None
        self.count += len(token_ids)
        return self.deliver(token_ids)

    def versions(self) -> list[WeightVersion]:
        ends = pairwise([*self.starts, (None, self.count)])
        return [WeightVersion(name, start, end) for (name, start), (_, end) in ends if end > start]


class WeightsEngine(EngineView):
    """Passes jobs on to an engine that generates on ``workers``, but none while it is paused.

    Once a version was given, ``folder``, that of the captured sessions, has a file which says so.
    """

    def __init__(self, engine: Engine, workers: Sequence[Engine], folder: Path) -> None:
        super().__init__(engine)
        self._workers = workers
        self._mark = folder / "weights"
        self._salt = secrets.token_hex(8) if self._mark.exists() else ""
        self._version: str | None = None
        self._running: set[_Running] = set()
        self._open, self._ended = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._is_held = self._is_named = False

    def state(self) -> dict[str, Any]:
        """Return the version, whether it is paused, how many generations run, and whether prefixes are kept apart."""
        known = {"weight_version": self._version, "is_paused": not self._open.is_set()}
        return {**known, "running": len(self._running), "salts": self.info().salts}

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        await self._open.wait()
        run = _Running(job.request_id, job.deliver, [(self._version, 0)])
        salt = "/".join(filter(None, (self._salt, job.cache_salt)))
        own = structs.replace(job, cache_salt=salt, deliver=job.deliver and run.take)
        self._running.add(run)
        try:
            async with aclosing(self._engine.generate(own)) as chunks:
                async for chunk in chunks:
                    run.count += len(chunk.token_ids)
                    if run.is_aborted and chunk.finish == "cancelled":
                        raise Overloaded("the weights of the model are changed; try again")
                    if run.starts[-1][0] is not None and not (self._is_named and chunk.weight_versions):
                        chunk = replace(chunk, weight_versions=run.versions())
                    yield chunk
        finally:
            self._running.discard(run)
            self._ended.set()

    async def pause(self, mode: str) -> None:
        """Let no generation begin until ``resume``; return when those that run have ended (``wait``, ``abort``), or the
        engine holds them so that they go on with new weights (``keep``). Raises InvalidRequest where it cannot.
        """
        if mode not in _MODES:
            raise InvalidRequest(f"mode is {mode[:64]!a}; use one of {', '.join(_MODES)}", param="mode")
        self._open.clear()
        if mode == "keep":
            self._is_held = True
            try:
                await self._change("hold")
            except EngineUnfit as error:
                with suppress(EngineUnfit):  # one of several may hold
                    await self.resume()
                self._open.set()
                raise InvalidRequest(f"mode=keep: {error.message}; use mode=wait", param="mode") from None
        while mode != "keep" and self._running and not self._open.is_set():
            for run in tuple(self._running) if mode == "abort" else ():
                run.is_aborted = True
                await self._engine.abort(run.request_id)
            self._ended.clear()
            await self._ended.wait()

    async def resume(self) -> None:
        held, self._is_held = self._is_held, False
        if held:
            await self._change("continue")
        self._open.set()
        self._ended.set()

    async def name_weights(self, version: str) -> None:
        """Take note that the engine has the weights ``version`` from now on, and tell the engine. Raises OSError."""
        self._mark.touch(mode=0o600)
        try:
            await self._change("name", version)
            self._is_named = True
        except EngineUnfit:
            self._is_named = False
        self._version, self._salt = version, secrets.token_hex(8)
        for run in self._running:
            run.starts.append((version, run.count))

    async def _change(self, step: WeightStep, version: str = "") -> None:
        for worker in self._workers:
            await change_weights(worker, step, version)
