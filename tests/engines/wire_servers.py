"""Servers of every kind in memory: each writes what its engine would, for the contract and for hostile variations.

What they write follows recordings of real servers (``vllm_wire``, ``sglang_wire``) and llama.cpp's embedded server;
that of TensorRT-LLM follows its source, not a run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.vllm_memory import MemoryAnswer
from singletree.llamacpp.llama_server import LlamaServer
from singletree.remote.engine import RemoteEngine
from singletree.remote.sglang import SglangServer
from singletree.remote.tensorrt_llm import TensorRtServer
from singletree.remote.transport import ConnectionLost, StreamedResponse
from singletree.remote.vllm.server import VllmServer
from singletree.remote.wire import Server

URL = "http://engine.test:8000"
WINDOW = 512
END_OF_TURN = 2
DONE = b"data: [DONE]\n\n"
ANY_TOKEN = 7


def frame(event: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(event).encode()


@dataclass(frozen=True)
class Asked:
    """What a request asks for, whatever its form."""

    prompt: tuple[int, ...]
    limit: int
    ignores_end: bool = False
    stops: tuple[int, ...] = ()
    logprobs: int | None = None
    scores_prompt: bool = False


@dataclass(frozen=True)
class Step:
    """One event: the new tokens, those before them, and how it ends."""

    asked: Asked
    new: Sequence[int]
    before: Sequence[int] = ()
    finish: str | None = None
    cached: int = 0


@dataclass(frozen=True)
class Dialect:
    """How one kind of server reads requests and writes answers."""

    server: Callable[[], Server]
    path: str
    pages: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Asked]
    event: Callable[[Step], bytes]
    ending: Callable[[int], bytes]
    error: Callable[[int, str], bytes]
    reports_error_in_stream: bool = True


def _logprob(token: int) -> float:
    return -0.1 - token % 3


def _alternatives(asked: Asked, token: int) -> list[int]:
    return [token + i for i in range(1, (asked.logprobs or 0) + 1)]


# vLLM


def _read_completion(output: Mapping[str, Any]) -> Asked:
    return Asked(
        tuple(output["prompt"]),
        output["max_tokens"],
        output.get("ignore_eos", False),
        tuple(output.get("stop_token_ids", ())),
        output.get("logprobs"),
        output.get("echo", False),
    )


def _completion_event(step: Step) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "text": "x",
        "token_ids": list(step.new),
        "finish_reason": step.finish,
    }
    if step.asked.logprobs is not None:
        echoed = step.asked.prompt if step.asked.scores_prompt and not step.before else ()
        known = [*echoed, *step.new]
        tops: list[Any] = [
            {f"token_id:{t}": _logprob(t) for t in (token, *_alternatives(step.asked, token))}
            for token in known
        ]
        own: list[Any] = [_logprob(token) for token in known]
        if echoed:
            tops[0] = own[0] = None
        choice["logprobs"] = {"token_logprobs": own, "top_logprobs": tops}
    return frame({"id": "cmpl-1", "choices": [choice]})


def _usage_ending(cached: int) -> bytes:
    return frame({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}) + DONE


def _openai_error(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": status}}).encode()


def _read_generate(output: Mapping[str, Any]) -> Asked:
    params = output["sampling_params"]
    return Asked(
        tuple(output["token_ids"]),
        params["max_tokens"],
        params.get("ignore_eos", False),
        tuple(params.get("stop_token_ids", ())),
        params.get("logprobs"),
    )


def _generate_event(step: Step) -> bytes:
    choice: dict[str, Any] = {"index": 0, "token_ids": list(step.new), "finish_reason": step.finish}
    choice["logprobs"] = choice["routed_experts"] = choice["weight_versions"] = None
    if step.asked.logprobs is not None:
        choice["logprobs"] = {
            "content": [
                {
                    "token_id": token,
                    "logprob": _logprob(token),
                    "rank": 1,
                    "top_logprobs": [
                        {"token_id": t, "logprob": _logprob(t), "rank": 1}
                        for t in (token, *_alternatives(step.asked, token))
                    ],
                }
                for token in step.new
            ]
        }
    if step.finish is not None:
        choice["weight_versions"] = [
            {"version": "default", "start": 0, "end": len(step.before) + len(step.new)}
        ]
    return frame({"request_id": "r", "usage": None, "output_mode": "tokens", "choices": [choice]})


_VLLM_PAGES = {
    "/v1/models": {"data": [{"id": "m", "root": "org/m", "max_model_len": WINDOW, "owned_by": "vllm"}]},
    "/version": {"version": "0.32.0"},
}


# SGLang


def _read_sglang(output: Mapping[str, Any]) -> Asked:
    params = output["sampling_params"]
    return Asked(
        tuple(output["input_ids"]),
        params["max_new_tokens"],
        params.get("ignore_eos", False),
        tuple(params.get("stop_token_ids", ())),
        output.get("top_logprobs_num") if output.get("return_logprob") else None,
        output.get("logprob_start_len") == 0,
    )


def _candidates(asked: Asked, token: int) -> list[list[Any]]:
    return [[_logprob(t), t, None] for t in (token, *_alternatives(asked, token))]


def _sglang_event(step: Step, *, cumulative: bool) -> bytes:
    asked, every = step.asked, [*step.before, *step.new]
    shown = every if cumulative else list(step.new)
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": None,
        "prompt_tokens": len(asked.prompt),
        "completion_tokens": len(every),
        "cached_tokens": step.cached,
        "weight_version": "default",
    }
    if step.finish is not None:
        meta["finish_reason"] = {"type": step.finish, "matched": every[-1] if every else None}
    if asked.logprobs is not None:
        meta["output_token_logprobs"] = [[_logprob(t), t, None] for t in shown]
        meta["output_top_logprobs"] = [_candidates(asked, t) for t in shown]
    if asked.scores_prompt:
        own = [[_logprob(t), t, None] for t in asked.prompt]
        own[0] = [None, asked.prompt[0], None]
        meta["input_token_logprobs"] = own
        meta["input_top_logprobs"] = [None, *(_candidates(asked, t) for t in asked.prompt[1:])]
    return frame({"text": "x", "output_ids": shown, "meta_info": meta})


def _sglang_error(status: int, message: str) -> bytes:
    error = {"message": message, "type": "invalid_request_error", "code": status, "retryable": False}
    return json.dumps({"error": error}).encode()


def _sglang(*, cumulative: bool) -> Dialect:
    return Dialect(
        SglangServer,
        "/generate",
        {
            "/v1/models": {"data": [{"id": "m", "root": "m", "max_model_len": WINDOW, "owned_by": "sglang"}]},
            "/server_info": {"version": "0.5.23", "model_path": "org/m", "max_running_requests": 8},
        },
        _read_sglang,
        lambda step: _sglang_event(step, cumulative=cumulative),
        lambda cached: DONE,
        _sglang_error,
    )


# TensorRT-LLM: by source, not run


def _tensorrt_event(step: Step) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "text": "",
        "token_ids": list(step.new),
        "finish_reason": step.finish,
        "logprobs": None,
    }
    if step.asked.logprobs is not None:
        own = [_logprob(token) for token in step.new]
        tops = [{"text": value} for value in own]
        choice["logprobs"] = {"text_offset": [0] * len(own), "token_logprobs": own, "top_logprobs": tops}
    return frame({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None})


def _flat_error(status: int, message: str) -> bytes:
    error = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}
    return json.dumps(error).encode()


# llama.cpp


def _read_llama(output: Mapping[str, Any]) -> Asked:
    return Asked(
        tuple(output["prompt"]),
        output["n_predict"],
        output.get("ignore_eos", False),
        (),  # it knows no stop tokens: the reader stops at them
        output.get("n_probs"),
    )


def _llama_event(step: Step) -> bytes:
    text, frames = "x" * len(step.new), b""
    if not step.before:
        progress = {"total": len(step.asked.prompt), "cache": step.cached, "processed": step.cached}
        frames += frame({"tokens": [], "content": "", "stop": False, "prompt_progress": progress})
    event: dict[str, Any] = {
        "content": text,
        "tokens": list(step.new),
        "stop": False,
        "tokens_predicted": len(step.before) + len(step.new),
    }
    if step.asked.logprobs is not None and step.new:
        last = step.new[-1]
        tops = [{"id": t, "logprob": _logprob(t)} for t in (last, *_alternatives(step.asked, last))]
        event["completion_probabilities"] = [{"id": last, "logprob": _logprob(last), "top_logprobs": tops}]
    if step.new:
        frames += frame(event)
    if step.finish is not None:
        kind = "limit" if step.finish == "length" else "eos"
        frames += frame(
            {"content": "", "tokens": [], "stop": True, "stop_type": kind, "timings": {"cache_n": 0}}
        )
    return frames


DIALECTS: Mapping[str, Dialect] = {
    "vllm-completions": Dialect(
        VllmServer,
        "/v1/completions",
        _VLLM_PAGES,
        _read_completion,
        _completion_event,
        _usage_ending,
        _openai_error,
    ),
    "vllm-generate": Dialect(
        VllmServer,
        "/inference/v1/generate",
        _VLLM_PAGES,
        _read_generate,
        _generate_event,
        _usage_ending,
        _openai_error,
    ),
    "sglang-incremental": _sglang(cumulative=False),
    "sglang-cumulative": _sglang(cumulative=True),
    "tensorrt-llm": Dialect(
        TensorRtServer,
        "/v1/completions",
        {"/v1/models": {"data": [{"id": "m", "object": "model", "owned_by": "tensorrt_llm"}]}},
        _read_completion,
        _tensorrt_event,
        _usage_ending,
        _flat_error,
    ),
    "llama-server": Dialect(
        LlamaServer,
        "/completion",
        {
            "/props": {
                "default_generation_settings": {"n_ctx": WINDOW},
                "total_slots": 4,
                "model_path": "/m/m.gguf",
            },
            "/v1/models": {"data": [{"id": "m.gguf", "owned_by": "llamacpp"}]},
        },
        _read_llama,
        _llama_event,
        lambda cached: b"",
        _openai_error,
    ),
}
"""Every wire, and both forms of SGLang's."""


class DialectTransport:
    """A server of one dialect. The n-th generation is answered with ``answers[n]``, else as a small model would.

    The tokens of that model depend on the prompt; after 30 to 59 of them comes the end token, unless it is ignored.
    """

    def __init__(
        self, dialect: Dialect, *answers: MemoryAnswer | Exception, others: Sequence[Dialect] = ()
    ) -> None:
        self.dialect = dialect
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.closed = 0
        self._offered = {each.path: each for each in (dialect, *others)}
        self._known: set[tuple[int, ...]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._is_probe = True

    async def open(self) -> None:
        """Nothing to open."""

    async def get(self, path: str) -> tuple[int, bytes]:
        page = self.dialect.pages.get(path)
        return (404, b"no") if page is None else (200, json.dumps(page).encode())

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        if self.closed:
            raise ConnectionLost("the engine is not started, or closed")
        dialect = self._offered.get(path)
        if dialect is None:
            return MemoryAnswer(404, [b'{"detail":"Not Found"}', b""])
        reply_body = json.loads(body)
        if reply_body.get("content_parts") and "request_id" not in reply_body:  # whether it takes pictures
            refusal = {"error": {"message": "Cache miss for image at index 0", "code": 400}}
            return MemoryAnswer(400, [json.dumps(refusal).encode(), b""])
        if self._is_probe:
            self._is_probe = False
        else:
            self.bodies.append(reply_body)
            if self.answers:
                answer = self.answers.pop(0)
                return MemoryAnswer.failing(answer) if isinstance(answer, Exception) else answer
        answer = MemoryAnswer()
        task = asyncio.create_task(self._serve(dialect, answer, dialect.read(reply_body)))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return answer

    async def close(self) -> None:
        self.closed += 1

    async def _serve(self, dialect: Dialect, answer: MemoryAnswer, asked: Asked) -> None:
        cached = len(asked.prompt) - 1 if asked.prompt in self._known else 0
        self._known.add(asked.prompt)
        before: list[int] = []
        start, length = sum(asked.prompt), 30 + sum(asked.prompt) % 30
        for i in range(asked.limit):
            await asyncio.sleep(0.001)
            if answer.closed:
                return
            ends = i == length and not asked.ignores_end
            token = END_OF_TURN if ends else 100 + (start + 7 * i) % 1000
            stops = ends or token in asked.stops
            finish = "stop" if stops else "length" if i + 1 == asked.limit else None
            answer.write(dialect.event(Step(asked, [token], tuple(before), finish, cached)))
            before.append(token)
            if finish is not None:
                break
        answer.write(dialect.ending(cached), b"")


def remote_engine(transport: DialectTransport, **more: Any) -> RemoteEngine:
    """An engine on a server of that dialect, not started."""
    return RemoteEngine(transport.dialect.server(), URL, transport=transport, **{"slots": 4, **more})


async def started(transport: DialectTransport, **more: Any) -> RemoteEngine:
    engine = remote_engine(transport, **more)
    await engine.start()
    engine.complete(window=WINDOW, model_defaults={})
    return engine
