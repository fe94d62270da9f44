"""The official SDKs, connected to an application in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import httpx2
import openai

from server.memory import Client, Exchange, scope


class _Stream(httpx2.AsyncByteStream):
    """The body of an answer, chunk by chunk; to close it is to hang up."""

    def __init__(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        self._exchange = exchange
        self._task = task

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._exchange.read()) is not None:
            yield chunk

    async def aclose(self) -> None:
        self._exchange.leave()
        await asyncio.wait_for(self._task, 5)


class InMemory(httpx2.AsyncBaseTransport):
    """Carries requests to an application."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """See httpx2."""
        body = await request.aread()
        exchange = Exchange(body)
        path = request.url.raw_path.decode()
        task = self._client.ask(exchange, scope(request.method, path, dict(request.headers), body))
        await asyncio.wait_for(exchange.started.wait(), 5)
        assert exchange.status is not None
        return httpx2.Response(exchange.status, headers=exchange.headers, stream=_Stream(exchange, task))


@asynccontextmanager
async def anthropic_sdk(client: Client, key: str = "k") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's."""
    async with httpx2.AsyncClient(transport=InMemory(client)) as http:
        yield anthropic.AsyncAnthropic(
            api_key=key, base_url="http://singletree.test", max_retries=0, http_client=http
        )


@asynccontextmanager
async def openai_sdk(client: Client, key: str = "k") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's."""
    async with httpx2.AsyncClient(transport=InMemory(client)) as http:
        yield openai.AsyncOpenAI(
            api_key=key, base_url="http://singletree.test/v1", max_retries=0, http_client=http
        )
