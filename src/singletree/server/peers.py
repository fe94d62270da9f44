"""Questions between the server processes of one machine (``--workers``).

Each process listens on a Unix socket in a folder that only their user can read. A question is a name and arguments,
which are pickled: both ends are the same program. A process that does not answer in time is left out, so that no
request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)

Answer = Callable[..., Any]
"""Answers a question: returns a value, or an async iterator for ``stream``."""

WAIT_SECONDS = 0.5
"""How long an answer may take; a process whose event loop is busy answers late."""

_LENGTH_BYTES = 8


class Peers:
    """The other processes of a server.

    Args:
        folder: has the sockets; only this user may read it.
        number: the number of this process, from 1.
        count: how many processes there are.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self.number = number
        self.others = tuple(each for each in range(1, count + 1) if each != number)
        self._folder = folder
        self._answers: dict[str, Answer] = {}
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Future[None]] = set()

    def answer(self, question: str, answer: Answer) -> None:
        """Register what answers ``question``: a function, a coroutine function or an async generator function."""
        self._answers[question] = answer

    async def start(self) -> None:
        """Answer the questions of the others from now on."""
        path = self._path(self.number)
        path.unlink(missing_ok=True)  # that of a process that died
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        """Answer no further questions, and end the answers that are streamed."""
        if self._server is not None:
            self._server.close()
        for answering in self._answering:
            answering.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        with suppress(OSError):
            os.unlink(self._path(self.number))

    async def ask(self, question: str, *arguments: Any, seconds: float = WAIT_SECONDS) -> list[Any]:
        """Return the answers of the other processes; those that do not answer within ``seconds`` are left out."""
        if not self.others:
            return []
        asked = [asyncio.ensure_future(self._one(each, question, arguments)) for each in self.others]
        done, late = await asyncio.wait(asked, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [task.result() for task in asked if task in done and task.exception() is None]

    async def stream(self, number: int, question: str, *arguments: Any) -> AsyncIterator[Any]:
        """Yield the values with which the process ``number`` answers. Raises OSError or EOFError when it ends early."""
        reader, writer = await asyncio.open_unix_connection(self._path(number))
        with closing(writer):
            await _send(writer, (question, arguments))
            while (value := await _receive(reader)) is not None:
                yield value[0]

    async def _one(self, number: int, question: str, arguments: Iterable[Any]) -> Any:
        async with aclosing(self.stream(number, question, *arguments)) as values:  # type: ignore[type-var]
            async for value in values:
                return value
        raise EOFError

    def _path(self, number: int) -> Path:
        return self._folder / f"process-{number}.sock"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, EOFError):
            question, arguments = await _receive(reader)
            answering = asyncio.ensure_future(self._reply(writer, question, arguments))
            leaving = asyncio.ensure_future(reader.read(1))
            self._answering.add(answering)
            try:
                # A process that has left does not need the rest of an answer.
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._answering.discard(answering)
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _reply(self, writer: asyncio.StreamWriter, question: str, arguments: Iterable[Any]) -> None:
        try:
            answer = self._answers[question](*arguments)
            if hasattr(answer, "__aiter__"):
                async with aclosing(answer) as values:
                    async for value in values:
                        await _send(writer, (value,))
            else:
                value = await answer if isinstance(answer, Awaitable) else answer
                await _send(writer, (value,))
            await _send(writer, None)
        except OSError:
            pass
        except Exception:
            LOG.exception("the question %r of another process failed", question)


async def _send(writer: asyncio.StreamWriter, value: Any) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return pickle.loads(await reader.readexactly(length))
