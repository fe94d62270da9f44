"""A whole server in memory, from the engine's bytes to the client's: vLLM's wire on one side, ASGI on the other.

Nothing in it waits for a clock or a socket, so that the same code does the same work in every run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from engines.vllm_memory import MemoryAnswer
from engines.wire_servers import DIALECTS, DialectTransport, Step, remote_engine
from server.memory import Client, Exchange, scope
from singletree.engines.engine import Engine
from singletree.engines.lifetime import ReconnectingEngine
from singletree.engines.progress import Progress
from singletree.engines.workers import Worker
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.http.app import App
from singletree.server.http.service import Service
from singletree.server.models.catalog import load_models
from singletree.server.models.model_source import ModelSource
from singletree.server.settings.config import Config
from singletree.server.telemetry import Tracing
from singletree.testing import byte_model

MODEL = "counted"
WINDOW = 1 << 20
_SETTLING = 40  # passes of the event loop in which all that a piece of an answer starts has come to its end


class InlineExecutor(ThreadPoolExecutor):
    """Runs what it is given at once, in the thread that asks."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ``Executor.submit``."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class InMemoryServer:
    """The server; made by ``start``.

    Args:
        dialect: which of vLLM's wires the engine speaks.
    """

    def __init__(self, dialect: str) -> None:
        found = DIALECTS[dialect]
        known = {"id": "m", "root": "org/m", "max_model_len": WINDOW, "owned_by": "vllm"}
        pages = {**found.pages, "/v1/models": {"data": [known]}}
        self._dialect = replace(found, pages=pages)
        self._transport = DialectTransport(self._dialect)
        self._app: App | None = None
        self._loaded: Any = None

    async def start(self) -> None:
        """Load the model and connect to the engine, as ``serve --engine-url`` does."""
        asyncio.get_running_loop().set_default_executor(InlineExecutor())
        tokenizer = byte_model.byte_tokenizer()
        tokenizer.accelerate()  # Else a long prompt starts a thread that does it.
        config = Config(model_name=(MODEL,), store=False)
        self._loaded = await load_models(
            config, lambda line: None, find_source=partial(self._source, tokenizer)
        )
        service = Service(config, self._loaded, Tracing())
        self._app = App(service, "127.0.0.1")

    async def close(self) -> None:
        """Close the engine."""
        await self._loaded.close()

    async def _source(self, tokenizer: Tokenizer, config: Config, progress: Progress) -> ModelSource:
        async def connect() -> Engine:
            engine = remote_engine(self._transport)
            await engine.start()
            return engine

        async def workers(_: Tokenizer) -> tuple[Worker, ...]:
            worker = Worker("http://engine", ReconnectingEngine("http://engine", connect))
            await worker.engine.start()
            return (worker,)

        async def nothing() -> None:
            pass

        return ModelSource((MODEL,), lambda: tokenizer, workers, nothing, "vLLM")

    async def ask(self, path: str, body: dict[str, Any], pieces: Sequence[Sequence[int]]) -> bytes:
        """Return the whole answer to ``body``, for which the engine generates ``pieces``, one after the other.

        The client has read all that a piece brings before the next one comes.
        """
        assert self._app is not None
        engine_answer = MemoryAnswer()
        self._transport.answers.append(engine_answer)
        data = json.dumps({"model": MODEL, "stream": True, **body}).encode()
        exchange, headers = Exchange(data), {"content-type": "application/json"}
        answering = Client(self._app).ask(exchange, scope("POST", path, headers, data))
        await _settle()
        if not self._transport.bodies:
            raise RuntimeError(f"{path} asked the engine for nothing and answered {await exchange.rest()!r}")
        asked = self._dialect.read(self._transport.bodies.pop())
        before: list[int] = []
        for number, piece in enumerate(pieces, 1):
            finish = "stop" if number == len(pieces) else None
            engine_answer.write(self._dialect.event(Step(asked, piece, before, finish)))
            before.extend(piece)
            await _settle()
        # As an engine that has read all prompts before: what it did not have would have to be explained in each turn.
        engine_answer.write(self._dialect.ending(len(asked.prompt) - 1), b"")
        await answering
        return await exchange.rest()


async def _settle() -> None:
    for _ in range(_SETTLING):
        await asyncio.sleep(0)
