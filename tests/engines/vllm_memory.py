"""A vLLM server that is a few queues: what ``VllmEngine`` talks to in tests that open no socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engines.vllm_recording import END_OF_TURN, QUESTION, Exchange, vllm_engine
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Engine, GenerationJob
from singletree.errors import SingletreeError
from singletree.remote.engine import PROBE_ID, RemoteEngine
from singletree.remote.transport import ConnectionLost, StreamedResponse, Take

LOST = ConnectionLost("the connection broke")
DEFAULT = Sampling()


def event(
    token_ids: Sequence[int],
    finish: str | None = None,
    logprobs: int | None = None,
    echoed: Sequence[int] = (),
) -> bytes:
    """One event as vLLM writes it, with as many ``logprobs``, those of ``echoed`` before them."""
    choice = {"index": 0, "text": "x", "token_ids": token_ids, "finish_reason": finish}
    if logprobs is not None:
        known = [*echoed, *token_ids]
        tops = [{f"token_id:{t + i}": -0.1 - i for i in range(logprobs or 1)} for t in known]
        own: list[float | None] = [-0.1] * len(known)
        reported = {"token_logprobs": own, "top_logprobs": tops}
        if echoed:
            reported = {"token_logprobs": [None, *own[1:]], "top_logprobs": [None, *tops[1:]]}
        choice["logprobs"] = reported
    return b"data: %b\n\n" % json.dumps({"id": "cmpl-1", "choices": [choice]}).encode()


def ending(cached_tokens: int | None = 0) -> bytes:
    """What vLLM writes after the finish reason."""
    details = {} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": details}).encode()


class MemoryAnswer:
    """An answer whose body the test writes: bytes, or an exception to be raised in their place.

    ``gate``, if it is set, keeps it from beginning.
    """

    def __init__(
        self, status: int = 200, body: Iterable[bytes | Exception] = (), retry_after: str = ""
    ) -> None:
        self.status = status
        self.retry_after = retry_after
        self.closed = False
        self.finished = False
        self.gate: asyncio.Event | None = None
        self.failure: Exception | None = None
        self._left = asyncio.Event()
        self._pieces: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        for piece in body:
            self.write(piece)

    @classmethod
    def failing(cls, failure: Exception) -> MemoryAnswer:
        """One that never begins."""
        answer = cls()
        answer.failure = failure
        return answer

    def write(self, *pieces: bytes | Exception) -> None:
        for piece in pieces:
            self._pieces.put_nowait(piece)

    async def begin(self) -> None:
        if self.gate is not None:
            waits = [asyncio.create_task(event.wait()) for event in (self.gate, self._left)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for waiting in waits:
                waiting.cancel()
        if self.failure is not None or self.closed:
            raise self.failure or LOST

    async def read(self) -> bytes:
        piece = ConnectionLost("the connection broke") if self.closed else await self._pieces.get()
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def relay(self, take: Take) -> None:
        while take(data := await self.read()) and data:
            pass

    def finish(self) -> None:
        self.finished = True

    def close(self) -> None:
        if not self.finished:
            self.closed = True
            self._left.set()
            self.write(ConnectionLost("the connection broke"))


class MemoryTransport:
    """Answers in turn what it was given: each POST takes the next of ``answers``.

    ``gate``, while it is set to an event, keeps a POST waiting before its answer. What the engine asks at start-up is
    answered by ``probe``, and not counted; ``eyes`` answers whether the model takes pictures.
    """

    def __init__(self, *answers: MemoryAnswer | Exception) -> None:
        self.pages = {
            path: Exchange.load(name) for path, name in (("/v1/models", "models"), ("/version", "version"))
        }
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.gate: asyncio.Event | None = None
        self.probe: MemoryAnswer | Exception = MemoryAnswer(200, [event([7], "length"), ending()])
        self.eyes: tuple[int, list[bytes | Exception]] = (404, [b"", b""])
        self.probed: dict[str, Any] | None = None
        self.opened = 0
        self.closed = 0
        self.lost: ConnectionLost | None = None
        self.offers = {"/v1/completions"}

    async def open(self) -> None:
        self.opened += 1

    async def get(self, path: str) -> tuple[int, bytes]:
        if self.lost is not None:
            raise self.lost
        if path not in self.pages:
            return 404, b""
        return self.pages[path].status, self.pages[path].answer

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        if self.closed:
            raise ConnectionLost("the engine is not started, or closed")
        if path not in self.offers:
            return MemoryAnswer(404, [b'{"detail":"Not Found"}', b""])
        if "request_id" not in json.loads(body):
            return MemoryAnswer(*self.eyes)
        if json.loads(body)["request_id"] == PROBE_ID:
            self.probed = json.loads(body)
            return MemoryAnswer.failing(self.probe) if isinstance(self.probe, Exception) else self.probe
        self.bodies.append(json.loads(body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            answer = MemoryAnswer.failing(answer)
        answer.gate = self.gate
        return answer

    async def close(self) -> None:
        self.closed += 1


class ServingTransport(MemoryTransport):
    """Answers every request as a small model would, a token a millisecond.

    The tokens depend on the prompt; after 30 to 59 of them comes the end token, unless that is ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: set[tuple[int, ...]] = set()
        self._serving: set[asyncio.Task[None]] = set()

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        if json.loads(body).get("request_id", PROBE_ID) == PROBE_ID:
            return super().post(path, body, headers)
        answer = MemoryAnswer()
        self.answers.append(answer)
        serving = asyncio.create_task(self._serve(answer, json.loads(body)))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        return super().post(path, body, headers)

    async def _serve(self, answer: MemoryAnswer, output: dict[str, Any]) -> None:
        prompt = tuple(output["prompt"])
        start, length = sum(prompt), 30 + sum(prompt) % 30
        cached = len(prompt) - 1 if prompt in self._known else 0
        self._known.add(prompt)
        for i in range(output["max_tokens"]):
            await asyncio.sleep(0.001)
            if answer.closed:
                return
            ends = i == length and not output.get("ignore_eos")
            token = END_OF_TURN if ends else 100 + (start + 7 * i) % 1000
            stops = ends or token in output.get("stop_token_ids", ())
            last = stops or i + 1 == output["max_tokens"]
            finish = ("stop" if stops else "length") if last else None
            echoed = prompt if output.get("echo") and i == 0 else ()
            answer.write(event([token], finish, output.get("logprobs"), echoed))
            if last:
                break
        answer.write(ending(cached), b"")


async def started(transport: MemoryTransport, **more: Any) -> RemoteEngine:
    engine = vllm_engine(transport=transport, **more)
    await engine.start()
    return engine


async def collect(engine: Engine, prompt: Any = QUESTION, name: str = "r1", **more: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(GenerationJob(prompt, DEFAULT, name, **more))]


async def outcome(
    engine: Engine, prompt: Any = QUESTION, sampling: Sampling = DEFAULT, name: str = "r1", **more: Any
) -> tuple[list[Chunk], SingletreeError | None]:
    """The chunks that came, and the error that ended them."""
    chunks: list[Chunk] = []
    try:
        async for chunk in engine.generate(GenerationJob(prompt, sampling, name, **more)):
            chunks.append(chunk)
    except SingletreeError as error:
        return chunks, error
    return chunks, None


def tokens(chunks: list[Chunk]) -> list[int]:
    return [t for c in chunks for t in c.token_ids]
