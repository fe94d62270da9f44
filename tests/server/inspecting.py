"""A server with the inspector on, a harness in one session of it, and the processes of one server in memory."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from singletree.processes.other_processes import Answer, Peers
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config

from .memory import Client
from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)
API = "/inspect/api"
CALL = '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
TOOL = {"name": "ls", "description": "lists", "input_schema": {"type": "object"}}
SCRIPTS = {"call": CALL}

Body = dict[str, Any]


def inspected(
    scripts: Mapping[str, str] = SCRIPTS, *, content: bool = True, engine: Any = None, **flags: Any
) -> AbstractAsyncContextManager[Served]:
    """A server with the inspector on."""
    config = Config(inspect=True, inspect_content=content, **flags)
    return serving(scripts, config=config, engine=engine, memory=TurnMemory(2**20), layout=LAYOUT)


class InspectedHarness:
    """A client on Messages with one session. ``said`` are its messages."""

    def __init__(self, client: Client, session: str = "s", **headers: str) -> None:
        self.client = client
        self.headers = {"x-session-id": session, **headers}
        self.messages: list[Body] = []

    async def ask(self, text: Any, **more: Any) -> list[Body]:
        """One turn; the content of the answer."""
        self.messages.append({"role": "user", "content": text})
        content = await self.send(self.messages, **more)
        self.messages.append({"role": "assistant", "content": content})
        return content

    async def send(self, messages: list[Body], **more: Any) -> list[Body]:
        """One request."""
        asked = {"model": MODEL, "max_tokens": 400, "messages": messages, **more}
        reply = await self.client.post("/v1/messages", asked, headers=self.headers)
        assert reply.status == 200, reply.body
        self.link = reply.headers["x-singletree-inspect"]
        if not more.get("stream"):
            return cast(list[Body], json.loads(reply.body)["content"])
        return []

    async def answer_calls(self, content: list[Body], **more: Any) -> list[Body]:
        """One turn with the result of each call of ``content``."""
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "a b c"}
            for block in content
            if block["type"] == "tool_use"
        ]
        return await self.ask(results, **more)


async def get(client: Client, path: str, **headers: str) -> Any:
    """What the inspector answers."""
    reply = await client.get(f"{API}/{path}", headers=headers)
    assert reply.status == 200, reply.body
    return reply.json


async def only_session(client: Client) -> Any:
    """The only session with its turns."""
    (listed,) = (await get(client, "sessions"))["sessions"]
    return await get(client, f"sessions/{listed['id']}")


class PeersInMemory:
    """``Peers`` without sockets: what goes from one to another is pickled."""

    def __init__(self, number: int, together: dict[int, PeersInMemory]) -> None:
        self.number = number
        self._together = together
        self._answers: dict[str, Answer] = {}
        self.busy = False
        together[number] = self

    @property
    def others(self) -> tuple[int, ...]:
        """The numbers of the others."""
        return tuple(number for number in sorted(self._together) if number != self.number)

    def answer(self, question: str, answer: Answer) -> None:
        """See ``Peers``."""
        self._answers[question] = answer

    async def ask(self, question: str, *arguments: Any, seconds: float = 1.0) -> list[Any]:
        """See ``Peers``."""
        found = []
        for number in self.others:
            other = self._together[number]
            if not other.busy:
                value = other._answers[question](*_sent(arguments))
                found.append(_sent(await value if isinstance(value, Awaitable) else value))
        return found

    async def stream(self, number: int, question: str, *arguments: Any) -> AsyncIterator[Any]:
        """See ``Peers``."""
        async for value in self._together[number]._answers[question](*arguments):
            yield _sent(value)


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def peers_in_memory(count: int) -> list[Peers]:
    """The peers of so many processes."""
    together: dict[int, PeersInMemory] = {}
    return [cast(Peers, PeersInMemory(number, together)) for number in range(1, count + 1)]


class Reader:
    """Reads the event stream."""

    def __init__(self, client: Client, path: str = f"{API}/events") -> None:
        self._opening = client.open("GET", path)
        self._rest = b""

    async def __aenter__(self) -> Reader:
        self.exchange, self.task = await self._opening.__aenter__()
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.exchange.leave()
        await self._opening.__aexit__(None, None, None)

    async def next(self) -> tuple[str, Any]:
        """The next event: its name and data."""
        while b"\n\n" not in self._rest:
            chunk = await asyncio.wait_for(self.exchange.read(), 10)
            assert chunk is not None
            self._rest += chunk
        event, _, self._rest = self._rest.partition(b"\n\n")
        name, _, data = event.decode().partition("\ndata: ")
        return name.removeprefix("event: "), json.loads(data) if data else None

    async def until(self, status: str) -> tuple[Any, list[Any]]:
        """The first turn event with this status, and those before it."""
        before: list[Any] = []
        while True:
            name, data = await self.next()
            if name == "turn" and data["turn"]["status"] == status:
                return data, before
            before.append(data)
