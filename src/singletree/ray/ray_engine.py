"""An engine in a replica of Ray Serve, used from a server replica like an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from msgspec import structs
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from singletree.engines.engine import Chunk, EngineInfo, GenerationJob
from singletree.errors import EngineFailed, SingletreeError
from singletree.pictures import PromptPicture

ACCEPT_SECONDS = 10.0
"""How long a replica may take to accept a generation. Ray itself waits for as long as it takes to start another."""

START_SECONDS = 3600.0
"""How long an engine may take to start, with its weights downloaded."""


class RayEngine:
    """Generate on the replica behind a handle.

    An engine whose replica dies fails its generations; ``revive`` waits for the replica that Ray starts in its place.

    Args:
        name: its name, for messages.
        handle: of a deployment of ``EngineReplica`` with one replica.
    """

    def __init__(self, name: str, handle: DeploymentHandle) -> None:
        self._name = name
        self._handle = handle
        self._info = EngineInfo(name, 0)

    async def start(self) -> None:
        """Wait until the replica runs. Raises EngineFailed if it does not."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.revive()
        except TimeoutError:
            raise EngineFailed(f"{self._name} did not start within {START_SECONDS:g} seconds") from None

    async def revive(self) -> None:
        """Wait for a replica that answers. Raises EngineFailed if it dies meanwhile."""
        self._info = await self._call(self._handle.info.remote())

    async def close(self) -> None:
        """Do nothing: Ray stops the replica, which other server replicas use too."""

    def info(self) -> EngineInfo:
        """Return what the engine reported when it was last started."""
        return self._info

    async def abort(self, request_id: str) -> None:
        """End that generation with a last chunk ``cancelled``."""
        await self._call(self._handle.abort.remote(request_id))

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return what the engine counts. Raises what it raises."""
        return int(await self._call(self._handle.count_picture_tokens.remote(picture)))

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the contract of ``Engine.generate``."""
        deliveries = self._handle.options(stream=True).generate.remote(structs.replace(job, deliver=None))
        ended = False
        try:
            async with asyncio.timeout(ACCEPT_SECONDS):
                await anext(deliveries)
            async for delivery in deliveries:
                if isinstance(delivery, SingletreeError):
                    ended = True
                    raise delivery
                for chunk in delivery:
                    ended = ended or chunk.finish is not None
                    yield chunk
        except (RayError, RayServeException, StopAsyncIteration) as error:
            ended = True
            raise self._failure(error) from error
        except TimeoutError:
            raise EngineFailed(
                f"{self._name} accepted no generation within {ACCEPT_SECONDS:g} seconds; Ray replaces its replica"
            ) from None
        finally:
            if not ended:
                deliveries.cancel()

    async def _call(self, response: DeploymentResponse) -> Any:
        try:
            return await response
        except (RayError, RayServeException) as error:
            raise self._failure(error) from error
        except asyncio.CancelledError:
            response.cancel()
            raise

    def _failure(self, error: BaseException) -> SingletreeError:
        """Return the error for one of Ray's: that of the engine, if it raised it."""
        cause = error.cause if isinstance(error, RayTaskError) else None
        if isinstance(cause, SingletreeError):
            return cause
        return EngineFailed(f"the replica of {self._name} failed ({type(error).__name__}); Ray replaces it")
