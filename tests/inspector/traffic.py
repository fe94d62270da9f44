"""Agents for the tests of the inspector's page: sessions of known shape, beside those of the real harnesses."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx

from clients.scripts import HERMES, think
from clients.served import MODEL, Server

TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "name": name,
        "description": description,
        "input_schema": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
    }
    for name, description, key in (
        ("Bash", "Run a command in the shell and return what it prints.", "command"),
        ("Read", "Read a file of the workspace.", "file_path"),
    )
]
SYSTEM = (
    "You are a careful agent that looks after the modules of a Python library. Read before you change anything, make "
    "the smallest change that does the work, and check it. Never touch files outside the workspace.\n"
)
HOSTILE = "<script>document.title='taken'</script></script><img src=x onerror=alert(1)><!-- &amp; \u202e"
_PACE = '#opts {"delay": 0.004, "prefill": 0.03}\n'
_numbers = itertools.count(1)


class Agent:
    """A client of Messages that keeps its conversation, and names its session as Claude Code does.

    Args:
        server: answers it.
        session: the name of its session.
        agent: the name of a sub-agent of that session; empty for the main one.
        key: the API key.
    """

    def __init__(self, server: Server, session: str, agent: str = "", key: str = "none") -> None:
        headers = {"x-claude-code-session-id": session, "user-agent": "claude-cli/2.1.329 (external, cli)"}
        if agent:
            headers["x-claude-code-agent-id"] = agent
        self.server = server
        self.system = SYSTEM
        self.tools: list[Any] = list(TOOLS)
        self.messages: list[dict[str, Any]] = []
        self._client = anthropic.Anthropic(
            base_url=server.url, api_key=key, default_headers=headers, max_retries=0
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(self, text: str, written: str) -> list[Any]:
        """Send ``text`` as the user and let the model write ``written``; return the calls of its turn."""
        return self._turn(f"{text} {self._script(written)}")

    def result(self, calls: Sequence[Any], text: str, written: str) -> list[Any]:
        """Send ``text`` as the result of all ``calls``."""
        # A text beside the results would be a new question, and the template would drop the reasoning before it.
        text = f"{text}\n{self._script(written)}"
        return self._turn(
            [{"type": "tool_result", "tool_use_id": call.id, "content": text} for call in calls]
        )

    def _script(self, written: str) -> str:
        name = f"page{next(_numbers)}"
        (self.server.scripts / f"{name}.txt").write_text(written, encoding="utf-8")
        return f"[[script:{name}]]"

    def _turn(self, content: Any) -> list[Any]:
        self.messages.append({"role": "user", "content": content})
        with self._client.messages.stream(
            model=MODEL,
            max_tokens=4096,
            system=self.system,
            tools=self.tools,
            messages=self.messages,  # type: ignore[arg-type]
        ) as stream:
            blocks = list(stream.get_final_message().content)
        self.messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in blocks]}
        )
        return [block for block in blocks if block.type == "tool_use"]


def call(name: str, thought: str, words: str = "", **arguments: str) -> str:
    """Return a turn that thinks, writes ``words`` and calls a tool."""
    return f"{_PACE}{think(thought)}{words}{HERMES.call(name, arguments)}"


def answer(words: str, thought: str = "That is all.") -> str:
    """Return a turn that thinks and answers."""
    return f"{_PACE}{think(thought)}{words}"


def work(agent: Agent, turns: int, pause: float = 0.05, changes: Mapping[int, str] | None = None) -> None:
    """Let the agent work: a question, ``turns`` calls with their results, and an answer.

    Args:
        pause: how long each call takes, in seconds.
        changes: system prompts by the number of the turn, from 0, with which they begin.
    """
    files = ("bisect.py", "colorsys.py", "fnmatch.py", "shlex.py")
    calls = agent.ask(
        "Look after the modules here.", call("Bash", "First I list the files.", command="ls -la")
    )
    for number in range(1, turns):
        time.sleep(pause)
        agent.system = (changes or {}).get(number, agent.system)
        file = files[number % len(files)]
        written = call(
            "Read",
            f"Step {number}. I read {file} whole before I change it:\n1. functions without a docstring,\n2. names that "
            "shadow a builtin.",
            f"I read `{file}`.\n",
            file_path=file,
        )
        calls = agent.result(
            calls, f"{number * 37} lines\n" + f"def f{number}(a, x):\n    return a\n" * 12, written
        )
    agent.result(calls, "done", answer("All modules are in order."))


def session_with_break(server: Server, session: str, turns: int = 4) -> None:
    """Run a session whose system prompt has a date, which changes on the third turn; then a sub-agent of it."""
    agent = Agent(server, session)
    agent.system = f"{SYSTEM}Today's date: 2026-11-21\nWorking directory: /work\n"
    work(agent, turns - 1, 0.1, changes={2: agent.system.replace("-21", "-22")})
    agent.close()
    helper = Agent(server, session, agent="helper-1")
    work(helper, 2)
    helper.close()


def hostile_session(server: Server, session: str) -> None:
    """Run a session in which user, model, tool and arguments are hostile markup."""
    agent = Agent(server, session)
    calls = agent.ask(HOSTILE, call("Bash", HOSTILE, HOSTILE, command=HOSTILE))
    agent.result(calls, HOSTILE, answer(HOSTILE))
    agent.close()


def long_session(server: Server, session: str, turns: int, conversations: int) -> None:
    """Run a session of many short turns in several conversations, as fast as the server answers."""
    headers = {"x-claude-code-session-id": session, "user-agent": "claude-cli/2.1.329 (external, cli)"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        for conversation in range(conversations):
            messages: list[dict[str, Any]] = []
            for number in range(turns // conversations):
                content = f"[[echo:Step {number} of {conversation} is done.]]"
                messages.append({"role": "user", "content": content})
                body = {"model": MODEL, "max_tokens": 64, "system": SYSTEM, "messages": messages}
                response = client.post("/v1/messages", json=body)
                response.raise_for_status()
                messages.append({"role": "assistant", "content": response.json()["content"]})


def repeated_request(server: Server, session: str) -> None:
    """Send a request, and the same again while it runs, as Claude Code does after a timeout."""
    headers = {"x-claude-code-session-id": session, "user-agent": "claude-cli/2.1.329 (external, cli)"}
    content = "Count to thirty. [[gen:30:1:0.1]]"
    body = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": content}]}
    with (
        ThreadPoolExecutor() as pool,
        httpx.Client(base_url=server.url, headers=headers, timeout=60) as client,
    ):
        first = pool.submit(client.post, "/v1/messages", json=body)
        time.sleep(0.5)
        client.post("/v1/messages", json=body).raise_for_status()
        first.result()


def turn_with_logprobs(server: Server, session: str) -> None:
    """Run a turn on Chat Completions whose client asks for log-probabilities."""
    headers = {"x-singletree-session": session}
    body = {
        "model": MODEL,
        "stream": True,
        "logprobs": True,
        "messages": [{"role": "user", "content": "[[echo:The sky is blue.]]"}],
    }
    httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).raise_for_status()


class ManyStreams:
    """Sessions that all run at once, each with a turn that lasts for ``seconds``.

    Args:
        server: answers them.
        count: how many.
    """

    def __init__(self, server: Server, count: int, seconds: float) -> None:
        self._server, self._count = server, count
        self._marker = f"[[gen:{int(seconds / 0.2)}:1:0.2]]"

    def run(self) -> None:
        """Run all of them to their ends."""
        asyncio.run(self._all())

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=self._count)
        async with httpx.AsyncClient(base_url=self._server.url, limits=limits, timeout=120) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(self._count)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        headers = {"x-singletree-session": f"stream-{number:03}", "user-agent": "opencode/1.18.33"}
        content = f"Stream {number}. {self._marker}"
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": content}]}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            async for _ in response.aiter_lines():
                pass


def api(server: Server, path: str) -> Any:
    """Return an answer of the inspector's API."""
    with urllib.request.urlopen(f"{server.url}/inspect/api/{path}", timeout=30) as response:
        return json.load(response)


def session_id(server: Server, key: str) -> str:
    """Return the inspector's id of the session that the client calls ``key``."""
    return next(_ids(server, key))


def _ids(server: Server, key: str) -> Iterator[str]:
    for session in api(server, "sessions?limit=1000")["sessions"]:
        if session["key"] == key:
            yield str(session["id"])
