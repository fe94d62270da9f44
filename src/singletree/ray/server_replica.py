"""The HTTP server in a replica of Ray Serve, with engines in other replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ray import serve
from ray.serve.handle import DeploymentHandle

from singletree.engines.routing.worker import Worker
from singletree.engines.weights.progress import Progress
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.ray.ray_engine import RayEngine
from singletree.server.answers.record_file import numbered_path
from singletree.server.http.app import App
from singletree.server.http.run import close_service, open_service
from singletree.server.models.config import Config
from singletree.server.models.loaders import ModelSource, find_model_source

_LOG = logging.getLogger(__name__)


class ServerReplica:
    """Serve HTTP for the models of ``config``.

    Args:
        config: the settings.
        engines: for each model the handles of its engines; none for one whose engines run at URLs.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: Config, engines: Sequence[Sequence[DeploymentHandle]]
    ) -> None:
        if config.trace_path is not None:
            # Each replica has a file of its own, like each process of a server with several.
            name = serve.get_replica_context().replica_tag
            config = replace(config, trace_path=numbered_path(config.trace_path, name))
        by_model = dict(zip(config.each_model or (config,), engines, strict=True))
        self._service = await open_service(config, _LOG.info, find_source=partial(_find_source, by_model))

    def __serve_build_asgi_app__(self) -> App:
        """Return the application: Ray Serve asks for it when the replica has been made."""
        return App(self._service)

    async def __del__(self) -> None:
        """Free everything: Ray Serve awaits this when the replica stops, after its last request."""
        if hasattr(self, "_service"):
            await close_service(self._service)


async def _find_source(
    engines: dict[Config, Sequence[DeploymentHandle]], config: Config, progress: Progress
) -> ModelSource:
    """Return the source of a model whose engines run in replicas; the usual one if they run at URLs."""
    source = await find_model_source(config, progress)
    handles = engines[config]
    if not handles:
        return source

    async def start_workers(tokenizer: Tokenizer) -> tuple[Worker, ...]:
        workers = tuple(
            Worker(each.deployment_name, RayEngine(each.deployment_name, each)) for each in handles
        )
        await asyncio.gather(*(each.engine.start() for each in workers))
        return workers

    return replace(
        source, start_workers=start_workers, engine=f"{source.engine} in {len(handles)} replicas of Ray"
    )
