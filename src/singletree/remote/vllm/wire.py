"""Encodes requests to vLLM's ``/v1/completions`` and decodes the event stream that comes back. No I/O.

What vLLM calls the sampling, the constraint and the pictures of a job is the same at its other endpoint and in process.
Written from vLLM 0.32 (``vllm/entrypoints/openai/completion/protocol.py``) and from recordings of it;
the fields used here exist since 0.11. https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#completions-api
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Constraint, GenerationJob, LogprobRow, StopKind
from singletree.engines.token_json import encode_token_ids
from singletree.errors import SingletreeError
from singletree.pictures import PromptPicture
from singletree.remote.events import CompletionEvents, TokenId, TokenUsage
from singletree.remote.transport import RefusalWords, ServerRefusal
from singletree.remote.wire import COMMON_SAMPLING, Wire, WireReader, sampling_reader

_SAME_NAME = (*COMMON_SAMPLING, "seed", "logprobs")
_read_same = sampling_reader(*_SAME_NAME)
# Omitted also when they are empty, zero or False: then they have no effect.
_OPTIONAL = ("ignore_eos", "min_tokens", "bad_words", "allowed_token_ids")
_read_optional = attrgetter(*_OPTIONAL)

SAMPLING_FIELDS = frozenset((*_SAME_NAME, *_OPTIONAL, "max_tokens", "logit_bias"))
"""The fields of ``Sampling`` that vLLM may name in a refusal."""

FINISHES: Mapping[str, StopKind] = {
    "stop": "stop",
    "repetition": "stop",
    "length": "length",
    "abort": "cancelled",
}
"""vLLM's finish reasons of a generation that did not fail."""

UNKNOWN_PICTURE = "Cache miss for"
"""How vLLM refuses a picture that it does not have and whose bytes were not sent."""


def picture_uuid(picture: PromptPicture) -> str:
    """Return the id that takes the place of the bytes in the key of vLLM's prefix cache: so it has to be their hash."""
    return f"sha256:{picture.key}"


CONSTRAINT_KINDS = tuple(ABILITIES["vllm-completions"].constraints)
"""The kinds of constraint that vLLM supports with XGrammar, the best supported first."""

_CONSTRAINT_FIELDS = {**ABILITIES["vllm-completions"].constraints, "lark": "grammar"}  # lark: with guidance


def sampling_fields(job: GenerationJob, *, max_tokens: int) -> dict[str, Any]:
    """Return the fields of vLLM's sampling for ``job``, without the log-probabilities of the prompt.

    Args:
        max_tokens: replaces the one of ``job.sampling``; without it vLLM would stop after 16 tokens.
    """
    sampling = job.sampling
    fields = _read_same(sampling)
    fields["max_tokens"] = max_tokens
    if sampling.logit_bias:
        fields["logit_bias"] = dict(sampling.logit_bias)
    optional = _read_optional(sampling)
    if any(optional):
        fields |= {name: value for name, value in zip(_OPTIONAL, optional, strict=True) if value}
    if job.stop_token_ids:
        fields["stop_token_ids"] = list(job.stop_token_ids)
    if job.constraint is not None:
        fields["structured_outputs"] = structured_outputs(job.constraint)
    return fields


def structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """Return vLLM's ``structured_outputs`` for ``constraint``."""
    value = constraint.value
    # vLLM distinguishes Lark and GBNF by itself, and takes a structural tag only as JSON text.
    is_schema = constraint.kind == "json_schema" and isinstance(value, dict)
    return {_CONSTRAINT_FIELDS[constraint.kind]: value if is_schema else constraint.as_text()}


# The messages with which vLLM reports that a prompt is too long.
_OVERFLOWS = (
    r"maximum context length is (?P<window>\d+) tokens",
    r"longer than the maximum model length of (?P<window>\d+)",
    r"exceeds model's maximum context length \((?P<window>\d+)\)",
)
_TOKEN_ID_PREFIX = len("token_id:")


def vllm_words(path: str) -> RefusalWords:
    """Return the words of vLLM's refusals at an endpoint."""
    return RefusalWords("vLLM", path, "--api-key", _OVERFLOWS, SAMPLING_FIELDS)


_WORDS = vllm_words("/v1/completions")


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: TokenUsage | None = None
    error: ServerRefusal | None = None


class CompletionReader(CompletionEvents):
    """Decode the event stream of ``/v1/completions``.

    Args:
        echoes: whether the first log-probabilities are those of the prompt.
        max_tokens: how many tokens were asked for.
    """

    decode = msgspec.json.Decoder(_Event).decode
    finishes, oldest = FINISHES, "0.11"

    def __init__(
        self, prompt_token_ids: Sequence[int], *, echoes: bool = False, max_tokens: int = 2**31
    ) -> None:
        super().__init__(_WORDS, len(prompt_token_ids), max_tokens)
        self._prompt = prompt_token_ids
        self._expects_echo = echoes

    def _rows(self, token_ids: Sequence[int], logprobs: _Logprobs) -> Sequence[LogprobRow]:
        if not self._expects_echo:
            return _logprob_rows(token_ids, logprobs)
        self._expects_echo = False
        rows = _logprob_rows([*self._prompt, *token_ids], logprobs)
        self._has_more = True
        self._prompt_logprobs = rows[: len(self._prompt)]
        return rows[len(self._prompt) :]


def _logprob_rows(token_ids: Sequence[int], logprobs: _Logprobs) -> list[LogprobRow]:
    """Return one row of (token id, logprob) for each token: the token itself first, then its alternatives.

    vLLM sends null for NaN and -9999 for minus infinity.
    """
    rows: list[LogprobRow] = []
    for token_id, own, top in zip(token_ids, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        others = ((int(name[_TOKEN_ID_PREFIX:]), logprob) for name, logprob in (top or {}).items())
        pairs = [(token_id, own), *(pair for pair in others if pair[0] != token_id)]
        rows.append(
            [(name, logprob) for name, logprob in pairs if logprob is not None] if own is not None else ()
        )
    return rows


class CompletionsWire(Wire):
    """vLLM's ``/v1/completions``; see ``Wire``."""

    words = _WORDS
    abilities = ABILITIES["vllm-completions"]

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
        sampling = job.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": encode_token_ids(job.prompt_token_ids),
            "request_id": job.request_id,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **sampling_fields(job, max_tokens=max_tokens),
        }
        if sampling.prompt_logprobs is not None:
            # In a stream vLLM sends those of the prompt only with an echo, as many for each token as for the answer.
            body["echo"] = True
            body["logprobs"] = max(sampling.prompt_logprobs, sampling.logprobs or 0)
        if "logprobs" in body:
            body["return_tokens_as_token_ids"] = True
        if job.priority:
            body["priority"] = job.priority
        if job.cache_salt:
            body["cache_salt"] = job.cache_salt
        if job.session:
            body["session_id"] = job.session  # vLLM 0.32; older ones ignore it
        return msgspec.json.encode(body)

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        echoes = job.sampling.prompt_logprobs is not None
        return CompletionReader(job.prompt_token_ids, echoes=echoes, max_tokens=max_tokens)

    def blindness(self, refusal: SingletreeError | None) -> str | None:
        return "vLLM takes pictures with token ids only if it is started with --enable-scale-out"
