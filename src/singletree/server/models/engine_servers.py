"""The inference servers at ``--engine-url``: what answers at each, and that all serve the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from singletree.engines.engine import Engine, EngineInfo
from singletree.engines.routing.reconnecting import ReconnectingEngine
from singletree.engines.routing.worker import Worker
from singletree.engines.weights.generation_config import read_sampling_defaults
from singletree.engines.weights.resolve import Checkpoint
from singletree.errors import BadConfiguration, SingletreeError

if TYPE_CHECKING:
    from singletree.engines.remote.engine import RemoteEngine

    # Imported for its type alone: it brings in the command-line library.
    from singletree.server.models.config import Config


class EngineServers:
    """Connect to the servers at the URLs of ``config``, and anew to one that comes back.

    Attributes:
        workers: one for each URL.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.workers = tuple(
            Worker(url, ReconnectingEngine(url, partial(self._connect, url))) for url in config.engine_url
        )
        self._titles: dict[str, str] = {}
        self._connections: dict[str, RemoteEngine] = {}
        self._first: tuple[str, EngineInfo] | None = None
        self._completion: Mapping[str, Any] | None = None

    @property
    def title(self) -> str:
        """What answers where."""
        return ", ".join(
            f"{self._titles.get(worker.name, 'no answer')} at {worker.name}" for worker in self.workers
        )

    async def start(self) -> EngineInfo:
        """Connect to all servers at once, and return what the first that answers reports.

        The workers of those that do not answer are down.

        Raises:
            BadConfiguration: a server is of a wrong kind, or two serve different models.
            EngineFailed: none answers.
        """
        results = await asyncio.gather(
            *(worker.engine.start() for worker in self.workers), return_exceptions=True
        )
        try:
            failures = []
            for worker, failure in zip(self.workers, results, strict=True):
                if isinstance(failure, BadConfiguration):
                    raise failure
                if isinstance(failure, SingletreeError):
                    worker.state = "down"
                    failures.append(failure)
                elif failure is not None:
                    raise failure
                else:
                    self._check_same(worker.name, worker.engine.info())
            if self._first is None:
                raise failures[0]
        except BaseException:
            await self.close()
            raise
        return self._first[1]

    async def complete(self, checkpoint: Checkpoint) -> None:
        """Add what the servers do not report, from the flags and from the checkpoint. Raises BadConfiguration."""
        self._completion = {
            "window": self._config.context_window or checkpoint.context_window,
            "model_defaults": await asyncio.to_thread(read_sampling_defaults, checkpoint.path),
        }
        for engine in self._connections.values():
            engine.complete(**self._completion)

    async def close(self) -> None:
        """Close the connections."""
        for worker in self.workers:
            await worker.engine.close()

    async def _connect(self, url: str) -> Engine:
        """Return a started engine on the server at ``url``. Raises EngineFailed and BadConfiguration."""
        from singletree.engines.detection import SERVERS, detect_server
        from singletree.engines.remote.engine import RemoteEngine

        config = self._config
        if config.engine in SERVERS:
            server = SERVERS[config.engine]()
        else:
            server = await detect_server(url, config.engine_api_key)
        engine = RemoteEngine(server, url, api_key=config.engine_api_key, slots=config.slots)
        await engine.start()
        try:
            if self._completion is not None:
                # Another model at one of the URLs is found at the start by ``start``, with all of them compared.
                self._check_same(url, engine.info())
                engine.complete(**self._completion)
        except BaseException:
            await engine.close()
            raise
        self._titles[url], self._connections[url] = server.title, engine
        return engine

    def _check_same(self, url: str, info: EngineInfo) -> None:
        """Raise BadConfiguration if the server at ``url`` serves another model than the first one."""
        if self._first is None:
            self._first = url, info
            return
        first_url, first = self._first
        if _model_name(first) != _model_name(info):
            raise BadConfiguration(
                f"the servers at --engine-url serve different models: {_named(first)} at {first_url}, {_named(info)} "
                f"at {url}; give a table [[models]] of --config to each model"
            )


def _model_name(info: EngineInfo) -> str:
    """Return the name by which two servers are taken to serve one model: the checkpoint's, else the served one.

    Only the last part counts: one server may have the checkpoint in a folder, the other from the hub.
    """
    name = info.checkpoint or info.name
    return name.rstrip("/").rpartition("/")[2].casefold().removesuffix(".gguf")


def _named(info: EngineInfo) -> str:
    return info.name if info.checkpoint in (None, info.name) else f"{info.name} ({info.checkpoint})"
