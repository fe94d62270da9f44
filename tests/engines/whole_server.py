"""``singletree serve`` as a user starts it, on each engine: one table, and what to do when the engine dies."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from clients.harness import SINGLETREE
from clients.served import running
from engines import real_sglang, real_vllm
from engines.cache_rule import VLLM_BLOCK
from server.serving import TEMPLATE

SLOTS = 2
WINDOW = 4096
PATIENCE = 300.0
"""Seconds after which a server that is silent has failed the test."""


@dataclass(frozen=True)
class Setup:
    """One way to serve the model.

    Attributes:
        name: for the test's name.
        block: how many tokens a block of the prefix cache has.
        flags: the flags of ``singletree serve``; ``{url}`` stands for the address of the engine's own server.
        program: the Python to start and its variables; None for this one.
        behind: starts the engine's own server on a port; None where the engine runs in singletree.
        child: in the name of the child process of singletree that is the engine.
        revives: whether singletree itself starts the engine again.
        weights: the version of the weights that the engine reports.
        late: whether the engine keeps a cancelled turn out of its cache for a while; see ``cached_as_predicted``.
    """

    name: str
    block: int
    flags: Callable[[], Sequence[str]]
    program: Callable[[], tuple[Path, dict[str, str]]] | None = None
    behind: Callable[[int], AbstractContextManager[real_vllm.Server]] | None = None
    child: str = ""
    revives: bool = False
    weights: str | None = "default"
    late: bool = False


def _model() -> str:
    return str(real_vllm.install()[1])


def _slots() -> list[str]:
    return ["--slots", str(SLOTS), "--context-window", str(WINDOW)]


SETUPS = (
    Setup("llamacpp", 1, lambda: ["--engine", "llamacpp", *_slots()], revives=True, weights=None),
    Setup(
        "vllm-in-process",
        VLLM_BLOCK,
        lambda: ["--engine", "vllm", "--model", _model(), *_slots(), "--", "--enforce-eager"],
        program=real_vllm.program,
        child="EngineCore",
        revives=True,
    ),
    Setup(
        "vllm-serve",
        VLLM_BLOCK,
        lambda: ["--engine-url", "{url}", "--model", _model()],
        behind=lambda port: real_vllm.running(
            "--enable-scale-out",
            *("--scheduling-policy", "priority"),
            *("--max-num-seqs", str(SLOTS)),
            max_model_len=WINDOW,
            port=port,
        ),
    ),
    Setup(
        "sglang-server",
        real_sglang.PAGE,
        lambda: ["--engine-url", "{url}", "--model", _model()],
        behind=lambda port: real_sglang.running_sglang(
            "--max-running-requests", str(SLOTS), "--grammar-backend", "xgrammar", port=port
        ),
        late=True,
    ),
    Setup(
        "sglang-in-process",
        real_sglang.PAGE,
        lambda: ["--engine", "sglang", "--model", _model(), *_slots(), "--", *real_sglang.IN_PROCESS],
        program=real_sglang.sglang_program,
        child="sglang::sched",
        late=True,
    ),
)


class WholeServer:
    """A server that runs, and the engine in or behind it; ``folder`` keeps what outlasts a restart."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self._folder = folder
        self._port, self._engine_port = real_vllm.free_port(), real_vllm.free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._engine = ExitStack()
        self._server = ExitStack()
        self._engine_pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "template.jinja").write_text(TEMPLATE.source, encoding="utf-8")

    def start(self) -> None:
        """Start the engine's server, if it has one of its own, and singletree."""
        self._start_engine()
        self._start_server()

    def _start_engine(self) -> None:
        if self.setup.behind is not None:
            self._engine_pid = self._engine.enter_context(self.setup.behind(self._engine_port)).pid

    def _start_server(self) -> None:
        own = [each.replace("{url}", f"http://127.0.0.1:{self._engine_port}") for each in self.setup.flags()]
        kept = {"--turn-memory-path": "turns.sqlite", "--store-path": "responses.sqlite"}
        flags = [word for flag, name in kept.items() for word in (flag, str(self._folder / name))]
        flags += ["--capsule-key", "a passphrase of the tests", "--model-name", real_vllm.MODEL]
        flags += ["--chat-template", str(self._folder / "template.jinja"), "--tool-call-parser", "hermes"]
        # An engine behind comes back when the test starts it, which it does after a turn was held and refused.
        flags += ["--hold-seconds", "15"] if self.setup.behind is not None else []
        python, environment = self.setup.program() if self.setup.program is not None else (None, None)
        program = (str(SINGLETREE),) if python is None else (str(python), "-m", "singletree")
        output = self._folder / "output.txt"
        server = running([*flags, *own], self._port, output, program=program, environment=environment)
        self._process = self._server.enter_context(server)

    def stop(self) -> None:
        """Stop both."""
        self._server.close()
        self._engine.close()

    def kill_engine(self) -> None:
        """Kill the engine's processes, as a crash or the kernel does."""
        if self.setup.behind is not None:
            os.killpg(self._engine_pid, signal.SIGKILL)
            return
        assert self._process is not None
        for pid in real_vllm.children(self._process.pid, self.setup.child):
            os.kill(pid, signal.SIGKILL)

    def bring_back(self) -> None:
        """Do what the operator has to do afterwards: nothing, start the engine's server, or start singletree."""
        if self.setup.behind is not None:
            self._engine.close()
            self._start_engine()
        elif not self.setup.revives:
            self._server.close()
            self._start_server()

    def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> tuple[int, bytes]:
        """Post a JSON body, and return the status and the body of the answer."""
        with Stream(self.url, path, body, headers) as stream:
            return stream.status, stream.rest()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as reply:
            page = reply.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.M))

    def until_in_flight(self, count: int) -> None:
        """Wait until so many generations are in flight."""
        waited = threading.Event()
        for _ in range(int(PATIENCE / 0.1)):
            if self.metric("singletree_generations_in_flight") == count:
                return
            waited.wait(0.1)
        raise AssertionError(
            f"there are not {count} generations in flight: {self.metric('singletree_generations_in_flight')}"
        )


class Stream:
    """One request over a connection of its own, whose answer is read as it comes, or left."""

    def __init__(self, url: str, path: str, body: Any, headers: Mapping[str, str] = {}) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        sent = {"content-type": "application/json", "anthropic-version": "2023-06-01", **headers}
        self._connection.request("POST", path, json.dumps(body), sent)

    def __enter__(self) -> Stream:
        self._reply = self._connection.getresponse()
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._reply.status

    def rest(self) -> bytes:
        """The body from here to its end."""
        return self._reply.read()

    def events(self) -> Iterator[Any]:
        """The JSON of each ``data:`` line, as they come."""
        while line := self._reply.readline():
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield json.loads(line[5:])

    def leave(self) -> None:
        """Close the connection, whatever still comes."""
        self._connection.close()


@contextmanager
def killed(serve: Sequence[str], log: Path) -> Iterator[int]:
    """Serve with the flags on the port that is yielded, until SIGKILL at the end of the block."""
    port = real_vllm.free_port()
    with running(["--no-store", *serve], port, log, program=(sys.executable, "-m", "singletree")) as process:
        complete(port, range(1000, 1064), 1)  # what only the first request of an engine costs
        yield port
        process.kill()
        process.wait()


class Completion(NamedTuple):
    """An answer: seconds to its first token, cached tokens of its prompt, its tokens."""

    first: float
    cached: int
    token_ids: list[int]


def complete(port: int, prompt: Sequence[int], count: int) -> Completion:
    """Have ``count`` tokens generated behind a prompt of token ids."""
    body = {
        **{"model": "any", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True},
        **{"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True},
    }
    began, first, cached = time.monotonic(), 0.0, 0
    token_ids: list[int] = []
    with Stream(f"http://127.0.0.1:{port}", "/v1/completions", body) as stream:
        for event in stream.events():
            for choice in event["choices"]:
                token_ids += choice.get("token_ids") or []
                first = first or (time.monotonic() - began if token_ids else 0.0)
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Completion(first, cached, token_ids)
