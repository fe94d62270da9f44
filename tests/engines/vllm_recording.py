"""What a real vLLM said to what ``RemoteEngine`` on vLLM asked: recorded into ``vllm_wire/``, replayed in the tests.

``PYTHONPATH=tests .venv/bin/python -m engines.vllm_recording`` records everything again (it installs and
starts vLLM by itself, see ``real_vllm.py``); review the difference. One file an exchange: the request line,
the request's body, the status, and the rest is the answer's body as it came.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engines import real_vllm
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import EngineFailed, InvalidRequest, SingletreeError
from singletree.remote.engine import RemoteEngine
from singletree.remote.http_client import HttpTransport
from singletree.remote.transport import StreamedResponse, Take
from singletree.remote.vllm.server import VllmServer
from singletree.remote.wire import GetPage, ServerOffer

WIRE = Path(__file__).parent / "vllm_wire"
KEY = "k"
WINDOW = 512
URL = "http://vllm.test:8000"

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n" for SmolLM2.
QUESTION = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
END_OF_TURN = 2
OF = 282  # the token " of", the third of the answer
LONG = tuple(range(1000, 1300))

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
TAG = {
    "begin": "<tool_call>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</tool_call>",
}
STRUCTURAL_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [TAG],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
EVERYTHING = Sampling(
    max_tokens=4,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    seed=7,
    logit_bias={504: 1.5, 60: -2.0},
    ignore_eos=True,
    logprobs=0,
)


class CompletionsOnly(VllmServer):
    """A vLLM whose better endpoint is left aside."""

    async def look_up(self, url: str, get: GetPage) -> ServerOffer:
        served = await super().look_up(url, get)
        return replace(served, wires=served.wires[1:])


def vllm_engine(url: str = URL, api_key: str | None = None, **more: Any) -> RemoteEngine:
    """An engine on a vLLM server, not started."""
    return RemoteEngine(VllmServer(), url, api_key, **more)


def greedy(max_tokens: int | None = None, **more: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **more)


@dataclass(frozen=True)
class Scenario:
    """One generation asked of the engine."""

    sampling: Sampling
    prompt: Sequence[int] = QUESTION
    more: dict[str, Any] = field(default_factory=dict)


def constrained(kind: Any, value: Any) -> Scenario:
    return Scenario(greedy(64), more={"constraint": Constraint(kind, value)})


SCENARIOS: dict[str, Scenario] = {
    "answer": Scenario(greedy()),
    "stop_token": Scenario(greedy(40), more={"stop_token_ids": (OF,)}),
    "length": Scenario(greedy(5, ignore_eos=True)),
    "logprobs": Scenario(greedy(3, logprobs=2)),
    "prompt_logprobs": Scenario(greedy(2, logprobs=0, prompt_logprobs=1)),
    "everything": Scenario(EVERYTHING, more={"priority": 3}),
    "not_cached": Scenario(greedy(2, ignore_eos=True), LONG),
    "cached": Scenario(greedy(2, ignore_eos=True), LONG),
    "json_schema": constrained("json_schema", SCHEMA),
    "regex": constrained("regex", "[ab]{3,6}"),
    "gbnf": constrained("gbnf", 'root ::= "yes" | "no"'),
    "structural_tag": constrained("structural_tag", STRUCTURAL_TAG),
    "bad_gbnf": constrained("gbnf", "root ::= ( broken"),
    "bad_structural_tag": constrained("structural_tag", {"type": "structural_tag", "format": {"type": "no"}}),
    "bad_top_p": Scenario(Sampling(max_tokens=4, top_p=2.0)),
    "bad_seed": Scenario(Sampling(max_tokens=4, seed=2**70)),
    "too_many_logprobs": Scenario(Sampling(max_tokens=4, logprobs=50)),
    "out_of_vocabulary": Scenario(greedy(4), (1, 99999999)),
}


PARIS = [504, 3575, 282, 4649, 314, 7042, 30, END_OF_TURN]  # "The capital of France is Paris."

_CAPITALS = ((4649, 7042), (7158, 7268), (3085, 19081))  # France, Paris; Italy, Rome; Japan, Tokyo.


def _asked(country: int) -> tuple[int, ...]:
    return *QUESTION[:8], country, *QUESTION[9:]


# Each answer is told before it is asked for, so that how a processor rounds does not decide it. Six such exchanges make
# more than one of the blocks of 128 tokens that vLLM caches on the CPU.
_REPORTED = [(*_asked(land), *PARIS[:3], land, PARIS[4], city, *PARIS[6:], 198) for land, city in _CAPITALS]
FRANCE, ITALY, JAPAN = ((*sum(_REPORTED * 2, ()), *_asked(land)) for land, _ in _CAPITALS)

# Recorded event stream -> (tokens, finish, cached tokens, kind of failure).
STREAMS: dict[str, tuple[list[int] | None, str | None, int | None, type[SingletreeError] | None]] = {
    "answer": (PARIS, "stop", 0, None),
    "plain_answer": (PARIS, "stop", None, None),
    "stop_token": (PARIS[:3], "stop", 0, None),
    "length": (PARIS[:5], "length", 0, None),
    "logprobs": (PARIS[:3], "length", 0, None),
    "everything": (None, "length", 0, None),
    "not_cached": (None, "length", 0, None),
    "cached": (None, "length", 256, None),
    "json_schema": (None, "stop", 0, None),
    "regex": (None, "stop", 0, None),
    "gbnf": ([94, 95, END_OF_TURN], "stop", 0, None),
    "structural_tag": (None, "stop", 0, None),
    "aborted_elsewhere": (PARIS[:5], "cancelled", 0, None),
    "engine_died": (PARIS[:5], None, None, EngineFailed),
    "bad_gbnf": ([], None, None, InvalidRequest),
    "too_many_logprobs": ([], None, None, InvalidRequest),
    "out_of_vocabulary": ([], None, None, InvalidRequest),
}


GENERATE_STREAMS = (
    "answer",
    "stop_token",
    "length",
    "logprobs",
    "everything",
    "json_schema",
    "regex",
    "bad_gbnf",
)
"""Scenarios that are recorded at ``/inference/v1/generate``, too; their outcomes are those in ``STREAMS``."""


@dataclass(frozen=True)
class Exchange:
    """One request and what came back."""

    line: str
    request: bytes
    status: int
    answer: bytes

    def save(self, name: str, folder: Path = WIRE) -> None:
        head = b"%b\n%b\n%d\n" % (self.line.encode(), self.request, self.status)
        (folder / f"{name}.http").write_bytes(head + self.answer)

    @classmethod
    def load(cls, name: str, folder: Path = WIRE) -> Exchange:
        line, request, status, answer = (folder / f"{name}.http").read_bytes().split(b"\n", 3)
        return cls(line.decode(), request, int(status), answer)


class _RecordingAnswer:
    def __init__(self, inner: StreamedResponse) -> None:
        self._inner = inner
        self.status, self.retry_after = 0, ""
        self.heard = b""

    async def begin(self) -> None:
        await self._inner.begin()
        self.status, self.retry_after = self._inner.status, self._inner.retry_after

    async def relay(self, take: Take) -> None:
        def hear(data: bytes) -> bool:
            self.heard += data
            return take(data)

        await self._inner.relay(hear)

    def finish(self) -> None:
        self._inner.finish()

    def close(self) -> None:
        self._inner.close()


class RecordingTransport(HttpTransport):
    """The real transport, which keeps what goes over it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key=api_key)
        self.got: dict[str, Exchange] = {}
        self._path, self._request = "", b""
        self._answer: _RecordingAnswer | None = None

    async def get(self, path: str) -> tuple[int, bytes]:
        status, body = await super().get(path)
        self.got[path] = Exchange(f"GET {path}", b"", status, body)
        return status, body

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        self._path, self._request = path, body
        self._answer = _RecordingAnswer(super().post(path, body, headers))
        return self._answer

    def posted(self) -> Exchange:
        """The last exchange."""
        assert self._answer is not None
        return Exchange(f"POST {self._path}", self._request, self._answer.status, self._answer.heard)


async def _play(engine: RemoteEngine, scenario: Scenario, name: str) -> list[Chunk]:
    return [
        c
        async for c in engine.generate(
            GenerationJob(scenario.prompt, scenario.sampling, name, **scenario.more)
        )
    ]


async def _record(engine: RemoteEngine, transport: RecordingTransport, name: str, scenario: Scenario) -> None:
    try:
        print(name, await _play(engine, scenario, name))
    except SingletreeError as error:
        print(name, type(error).__name__, error)
    transport.posted().save(name)


async def _record_interrupted(
    engine: RemoteEngine, transport: RecordingTransport, name: str, interrupt: Callable[[], Any]
) -> None:
    """A long generation in the midst of which ``interrupt`` is called."""
    seen = 0
    try:
        async for chunk in engine.generate(GenerationJob(QUESTION, greedy(ignore_eos=True), name)):
            seen += 1
            if seen == 5:
                interrupt()
            print(name, chunk)
    except SingletreeError as error:
        print(name, type(error).__name__, error)
    transport.posted().save(name)


def _kill_engine_core(pid: int) -> None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    for child in children:
        if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)


async def _record_full_server(server: real_vllm.Server) -> None:
    transport = RecordingTransport(server.url)
    engine = RemoteEngine(CompletionsOnly(), server.url, transport=transport)
    await engine.start()
    transport.got["/v1/models"].save("models")
    transport.got["/version"].save("version")
    for name, scenario in SCENARIOS.items():
        await _record(engine, transport, name, scenario)
    await _record_overflows(server.url)
    await record_generate(server.url)
    aborts: list[StreamedResponse] = []
    elsewhere = HttpTransport(server.url)
    await elsewhere.open()

    def abort() -> None:
        body = b'{"request_ids": ["cmpl-aborted_elsewhere-0"]}'
        aborts.append(elsewhere.post("/inference/v1/abort_requests", body))

    await _record_interrupted(engine, transport, "aborted_elsewhere", abort)
    await elsewhere.close()
    await _record_interrupted(engine, transport, "engine_died", lambda: _kill_engine_core(server.pid))
    await _record(engine, transport, "engine_dead", SCENARIOS["answer"])
    await engine.close()


async def record_generate(url: str) -> None:
    """The same scenarios at ``/inference/v1/generate``, as far as it serves them."""
    transport = RecordingTransport(url)
    engine = vllm_engine(url, transport=transport)
    await engine.start()
    for name in GENERATE_STREAMS:
        scenario = SCENARIOS[name]
        print(name, await _outcome(engine, scenario, name))
        transport.posted().save(f"generate_{name}")
    await engine.close()


async def _outcome(engine: RemoteEngine, scenario: Scenario, name: str) -> object:
    try:
        return await _play(engine, scenario, name)
    except SingletreeError as error:
        return error


async def _record_overflows(url: str) -> None:
    """What vLLM says when the engine takes the window for larger than it is, and to another model's name."""

    class Mistaken(RecordingTransport):
        async def get(self, path: str) -> tuple[int, bytes]:
            status, body = await super().get(path)
            return status, body.replace(b'"max_model_len":512', b'"max_model_len":600')

        def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
            return super().post(path, body.replace(b'"model":"smollm2"', b'"model":"%b"' % self.model))

        model = b"smollm2"

    transport = Mistaken(url)
    engine = vllm_engine(url, transport=transport)
    await engine.start()
    await _record(engine, transport, "overflow", Scenario(greedy(1), (504,) * (WINDOW + 1)))
    transport.model = b"gone"
    await _record(engine, transport, "model_gone", SCENARIOS["answer"])
    await engine.close()


async def _record_plain_server(server: real_vllm.Server) -> None:
    transport = RecordingTransport(server.url, KEY)
    engine = vllm_engine(server.url, transport=transport)
    await engine.start()
    await _record(engine, transport, "plain_answer", SCENARIOS["answer"])
    await engine.close()
    stranger = RecordingTransport(server.url)
    await stranger.open()
    await stranger.get("/v1/models")
    stranger.got["/v1/models"].save("unauthorized")
    await stranger.close()


def main() -> int:
    WIRE.mkdir(exist_ok=True)
    with real_vllm.running("--enable-scale-out", max_model_len=WINDOW) as server:
        asyncio.run(_record_full_server(server))
    with real_vllm.running(max_model_len=WINDOW, details=False, api_key=KEY) as server:
        asyncio.run(_record_plain_server(server))
    return 0


if __name__ == "__main__":
    sys.exit(main())
