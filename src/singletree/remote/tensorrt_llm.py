"""TensorRT-LLM: what a running ``trtllm-serve`` serves, and its ``/v1/completions`` with token ids in and out.

By source, not run: written from ``openai_protocol.py`` and ``postprocess_handlers.py`` of ``tensorrt_llm/serve``, main
branch, September 2026. The fields of the request are named one by one, because TensorRT-LLM refuses any other.
https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/index.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import ConstraintKind, GenerationJob, LogprobRow, StopKind
from singletree.engines.token_json import encode_token_ids
from singletree.errors import InvalidRequest
from singletree.remote.events import CompletionEvents, TokenId, TokenUsage
from singletree.remote.transport import RefusalWords, ServerRefusal, decode_as
from singletree.remote.wire import (
    COMMON_SAMPLING,
    GetPage,
    ServerOffer,
    Wire,
    WireReader,
    body_fields,
    find_model,
    sampling_reader,
)

# Null is refused for some of them.
_SAMPLING = (*COMMON_SAMPLING, "seed")
_read_sampling = sampling_reader(*_SAMPLING)
_FINISHES: Mapping[str, StopKind] = {"stop": "stop", "length": "length", "cancelled": "cancelled"}
_OVERFLOWS = (
    r"should not exceed max_num_tokens \((?P<window>\d+)\)",
    r"should not exceed max_seq_len \((?P<window>\d+)\)",
)
_WORDS = RefusalWords(
    "TensorRT-LLM",
    "/v1/completions",
    "API key",
    _OVERFLOWS,
    frozenset((*_SAMPLING, "max_tokens", "logit_bias")),
)
_STEPS = 1000
"""Priorities are numbers from 0 to 1 there; so many of ours, on either side of 0, are told apart."""


def _as_object(value: Any) -> dict[str, Any]:
    found = decode_as(dict[str, Any], value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise InvalidRequest("TensorRT-LLM takes a JSON schema or structural tag that is an object; give one")
    return found


_FORMATS: Mapping[ConstraintKind, Callable[[Any], dict[str, Any]]] = {
    "structural_tag": lambda value: {"type": "structural_tag", "format": _as_object(value).get("format")},
    "json_schema": lambda value: {"type": "json", "schema": _as_object(value)},
    "regex": lambda value: {"type": "regex", "regex": str(value)},
}


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: TokenUsage | None = None
    error: ServerRefusal | str | None = None


class TensorRtReader(CompletionEvents):
    """Decode the event stream of ``/v1/completions`` with ``detokenize: false``.

    The log-probability of each token is known, those of its alternatives are not: TensorRT-LLM sends them by text.
    """

    decode = msgspec.json.Decoder(_Event).decode
    finishes, oldest = _FINISHES, "1.0"

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(_WORDS, prompt_tokens, max_tokens)

    def _rows(self, token_ids: Sequence[int], logprobs: _Logprobs) -> Sequence[LogprobRow]:
        pairs = zip(token_ids, logprobs.token_logprobs, strict=True)
        return [() if own is None else ((token_id, own),) for token_id, own in pairs]


class TensorRtWire(Wire):
    """TensorRT-LLM's ``/v1/completions``; see ``Wire``."""

    words = _WORDS
    abilities = ABILITIES["tensorrt-llm"]

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
        sampling = job.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": encode_token_ids(job.prompt_token_ids),
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "detokenize": False,
            "add_special_tokens": False,
            # Without it the token that ended the turn is cut off, and the next prompt would not continue this one.
            "include_stop_str_in_output": True,
        }
        body |= _read_sampling(sampling)
        if sampling.logprobs is not None:
            body["logprobs"] = 1
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if sampling.min_tokens:
            body["min_tokens"] = sampling.min_tokens
        if job.stop_token_ids:
            body["stop_token_ids"] = list(job.stop_token_ids)
        if job.constraint is not None:
            body["response_format"] = _FORMATS[job.constraint.kind](job.constraint.value)
        if job.priority:
            # Higher goes first there, and 0.5 is the default.
            steps = max(-_STEPS, min(_STEPS, job.priority))
            body["priority"] = 0.5 - steps / (2 * _STEPS)
        if job.session and self.takes_sessions:
            body["conversation_params"] = {"conversation_id": job.session}
        return msgspec.json.encode(body)

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        return TensorRtReader(len(job.prompt_token_ids), max_tokens)


class TensorRtServer:
    """A TensorRT-LLM server, 1.0 or newer; by source, not run. See ``Server``.

    Its model list has no context window: that of the checkpoint is used, or ``--context-window``. It generates with
    ``guided_decoding_backend: xgrammar`` in ``--extra_llm_api_options`` if constraints shall have an effect.
    """

    title = _WORDS.title
    hint = "start it with `trtllm-serve MODEL` (1.0 or newer), or correct the URL"

    async def look_up(self, url: str, get: GetPage) -> ServerOffer:
        chosen, window = await find_model(url, get, self.title)
        wire = TensorRtWire(chosen.id)
        wire.takes_sessions = "conversation_params" in await body_fields(get, wire.path)
        return ServerOffer(chosen.id, (wire,), window=window, checkpoint=chosen.root or chosen.id)
