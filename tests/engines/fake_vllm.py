"""An ``AsyncLLM`` of this process, with the signatures of vLLM 0.33's: what the engine in process gets in tests.

``test_vllm_in_process_real.py`` runs the same checks on the real one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engines.vllm_recording import END_OF_TURN
from singletree.engines.progress import Progress
from singletree.events import WeightVersion
from singletree.in_process.startup import EngineSettings
from singletree.in_process.vllm_engine import InProcessVllmEngine
from singletree.in_process.vllm_startup import VllmApi

WINDOW = 512
PAD = 151655  # stands for a picture


class Refused(Exception):
    """vLLM's ``VLLMValidationError``."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class Full(Exception):
    """vLLM's ``QueueOverflowError``."""

    http_status = 503


class Dead(Exception):
    """vLLM's ``EngineDeadError``."""


@dataclass
class Logprob:
    """vLLM's ``Logprob``."""

    logprob: float


@dataclass
class Output:
    """What vLLM calls ``RequestOutput``, with its one ``CompletionOutput``."""

    outputs: list[Any]
    finished: bool
    num_cached_tokens: int
    prompt_token_ids: list[int]
    prompt_logprobs: list[Any] | None = None


@dataclass
class Queue:
    """vLLM's ``RequestOutputCollector``: one slot, into which deltas are merged."""

    request_id: str
    output: Output | Exception | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def put(self, output: Output | Exception) -> None:
        """See vLLM."""
        if isinstance(self.output, Exception) and isinstance(output, Output):
            return
        if isinstance(self.output, Output) and isinstance(output, Output):
            before, after = self.output.outputs[0], output.outputs[0]
            after.token_ids = [*before.token_ids, *after.token_ids]
            if before.logprobs is not None:
                after.logprobs = [*before.logprobs, *(after.logprobs or [])]
            output.prompt_logprobs = self.output.prompt_logprobs
        self.output = output
        self.ready.set()

    def get_nowait(self) -> Output | None:
        """See vLLM."""
        output, self.output = self.output, None
        self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    def close(self) -> None:
        """See vLLM."""
        self.closed = True


@dataclass
class Running:
    """A request in flight."""

    prompt: list[int]
    cached: int
    params: dict[str, Any]
    queue: Queue
    sent: int = 0

    def put(self, token_ids: list[int], finish: str | None = None, **more: Any) -> None:
        """Put an output with the tokens of a step into the queue."""
        at_the_end: dict[str, Any] = {"weight_versions": None, "routed_experts": None}
        if finish is not None:
            at_the_end = {"weight_versions": [WeightVersion("7", 0, 30)], "routed_experts": "experts"}
        completion = SimpleNamespace(
            token_ids=token_ids, finish_reason=finish, logprobs=more.get("logprobs"), **at_the_end
        )
        self.queue.put(
            Output([completion], finish is not None, self.cached, self.prompt, more.get("prompt_logprobs"))
        )


class FakeAsyncLLM:
    """Answers as a small model would, a token a step for all requests at once."""

    def __init__(
        self,
        ranks: int = 1,
        backend: str = "xgrammar",
        defaults: dict[str, Any] | None = None,
        *,
        sees: bool = False,
    ) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=WINDOW, get_diff_sampling_param=lambda: dict(defaults or {})
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
            cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
            structured_outputs_config=SimpleNamespace(backend=backend),
        )
        self.renderer = self
        self.sees = sees
        self.picture_lengths: dict[str, int] = {}
        self.lost_pictures: set[str] = set()
        self.drifted = False
        self.rendered: list[dict[str, Any]] = []
        self.errored = False
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.shut_down = 0
        self.refusal: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.finish = "stop"
        self.steps = asyncio.Event()
        self.running: dict[str, Running] = {}
        self._known: set[tuple[int, ...]] = set()
        self._stepping: asyncio.Task[None] | None = None

    async def add_request(self, request_id: str, prompt: Any, params: Any, **more: Any) -> Queue:
        """See vLLM; ``gate`` holds it up, ``refusal`` is raised."""
        if self.errored:
            raise Dead
        if self.refusal is not None:
            raise self.refusal
        self.asked.append({"request_id": request_id, "prompt": prompt, "params": params, **more})
        if self.gate is not None:
            await self.gate.wait()
        ids = prompt["prompt_token_ids"]
        queue = Queue(f"{request_id}-internal")
        running = Running(ids, len(ids) - 1 if tuple(ids) in self._known else 0, params, queue)
        self._known.add(tuple(ids))
        if self.drifted:
            self.drifted = False
            running.put([], "error")
            return queue
        self.running[request_id] = running
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step_on())
        return queue

    async def render_cmpl_async(self, prompts: list[Any], *, skip_mm_cache: bool) -> list[Any]:
        """See vLLM. It has the pictures whose bytes it got, except ``lost_pictures``."""
        (prompt,) = prompts
        self.rendered.append(prompt | {"counts_only": skip_mm_cache})
        places, expanded, pictures = [], [], iter(prompt["pictures"])
        for token_id in prompt["prompt_token_ids"]:
            if token_id != PAD:
                expanded.append(token_id)
                continue
            uuid, data = next(pictures)
            if data is None and uuid in self.lost_pictures:
                self.lost_pictures.discard(uuid)
                raise ValueError("Cache miss for image at index 0 but data is not provided.")
            length = self.picture_lengths[uuid]
            places.append(SimpleNamespace(offset=len(expanded), length=length))
            expanded += [PAD] * length
        return [{"type": "multimodal", "prompt_token_ids": expanded, "mm_placeholders": {"image": places}}]

    async def _step_on(self) -> None:
        while self.running:
            await asyncio.sleep(0.001)
            self.step()
        self._stepping = None

    def step(self) -> None:
        """Give every running request its next token, as one message of vLLM's scheduler does."""
        for id, running in tuple(self.running.items()):
            params, sent, prompt = running.params, running.sent, running.prompt
            ends = sent == 30 + sum(prompt) % 30 and not params.get("ignore_eos")
            token = END_OF_TURN if ends else 100 + (sum(prompt) + 7 * sent) % 1000
            stops = ends or token in params.get("stop_token_ids", ())
            last = stops or sent + 1 == params["max_tokens"]
            count = params.get("logprobs")
            row = {token: Logprob(-0.1)} | {token + 1 + i: Logprob(-1.1 - i) for i in range((count or 1) - 1)}
            echoed = [None, *({each: Logprob(-0.5)} for each in prompt[1:])] if sent == 0 else None
            running.put(
                [token],
                (self.finish if stops else "length") if last else None,
                logprobs=None if count is None else [row],
                prompt_logprobs=echoed if params.get("prompt_logprobs") is not None else None,
            )
            running.sent = sent + 1
            if last:
                self.running.pop(id, None)

    async def abort(self, request_id: str | list[str]) -> None:
        """See vLLM: the streams get their last output at once."""
        for id in [request_id] if isinstance(request_id, str) else request_id:
            self.aborted.append(id)
            if (running := self.running.pop(id, None)) is not None:
                running.put([], "abort")
        if self.errored:
            raise Dead

    def die(self) -> None:
        """End, as when vLLM's process is killed."""
        self.errored = True
        for running in self.running.values():
            running.queue.put(Dead())
        self.running.clear()

    def shutdown(self) -> None:
        """See vLLM."""
        self.shut_down += 1
        self.errored = True
        self.running.clear()


def fake_engine(*llms: FakeAsyncLLM, **settings: Any) -> InProcessVllmEngine:
    """The engine over ``llms``, each for one start; a new one for each when none is given."""
    given = list(llms)

    def load(settings: EngineSettings, progress: Progress) -> FakeAsyncLLM:
        return given.pop(0) if llms else FakeAsyncLLM()

    api = VllmApi(
        load,
        lambda ids, salt: {"type": "token", "prompt_token_ids": ids, "cache_salt": salt},
        lambda fields: fields,
        (Refused,),
        (Full,),
        Dead,
        lambda array: f"npy of {array}",
        lambda ids, pictures, salt: {"prompt_token_ids": ids, "pictures": pictures},
        lambda llm: llm.sees,
        lambda llm: None,
    )
    return InProcessVllmEngine(EngineSettings("folder"), name="m", api=api, **settings)
