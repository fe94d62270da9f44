"""Encodes requests to vLLM's ``/v1/completions`` and decodes the event stream that comes back. No I/O.

Written from vLLM 0.32 (``vllm/entrypoints/openai/completion/protocol.py``) and from recordings of it;
the fields used here exist since 0.11. https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#completions-api
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import GenerationJob, LogprobRow
from singletree.engines.remote.events import EventReader, TokenId
from singletree.engines.remote.refusals import RefusalWords, ServerRefusal, convert_refusal, decode_refusal
from singletree.engines.remote.token_json import encode_token_ids
from singletree.engines.remote.wire import WireReader, WireWithoutPictures
from singletree.engines.vllm.sampling import FINISHES, SAMPLING_FIELDS, sampling_fields
from singletree.errors import EngineUnfit, SingletreeError

# The messages with which vLLM reports that a prompt is too long.
_OVERFLOWS = tuple(
    re.compile(pattern)
    for pattern in (
        r"maximum context length is (?P<window>\d+) tokens",
        r"longer than the maximum model length of (?P<window>\d+)",
        r"exceeds model's maximum context length \((?P<window>\d+)\)",
    )
)
_NO_IDS = "version 0.11 or newer is needed"
_TOKEN_ID_PREFIX = len("token_id:")


def vllm_words(path: str) -> RefusalWords:
    """Return the words of vLLM's refusals at an endpoint."""
    return RefusalWords("vLLM", path, "--api-key", _OVERFLOWS, SAMPLING_FIELDS)


_WORDS = vllm_words("/v1/completions")


def encode_vllm_request(model: str, job: GenerationJob, *, max_tokens: int) -> bytes:
    """Encode the body of one request; ``max_tokens`` replaces the one of ``job.sampling``."""
    sampling = job.sampling
    body: dict[str, Any] = {
        "model": model,
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


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class PromptDetails(msgspec.Struct):
    """What the server reports of the prompt."""

    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class TokenUsage(msgspec.Struct):
    """Counts, in the event behind the last token."""

    prompt_tokens_details: PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: TokenUsage | None = None
    error: ServerRefusal | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


def decode_vllm_error(
    status: int, body: bytes, *, prompt_tokens: int, retry_after: str = "", path: str = _WORDS.path
) -> SingletreeError:
    """Return the error for an answer with a ``status`` other than 200.

    ``prompt_tokens`` is the length of the prompt, for ContextOverflow; ``retry_after`` the header of that name;
    ``path`` the endpoint.
    """
    words = _WORDS if path == _WORDS.path else vllm_words(path)
    return convert_refusal(words, status, decode_refusal(body), prompt_tokens, retry_after)


class CompletionReader(EventReader):
    """Decode the event stream of ``/v1/completions``.

    Args:
        prompt_token_ids: the prompt of the request.
        echoes: whether the first log-probabilities are those of the prompt.
        max_tokens: how many tokens were asked for.
        words: the server's name and the patterns of its errors, where it is another one with the same events.
    """

    __slots__ = ("_expects_echo", "_prompt")

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        echoes: bool = False,
        max_tokens: int = 2**31,
        words: RefusalWords = _WORDS,
    ) -> None:
        super().__init__(words, len(prompt_token_ids), max_tokens)
        self._prompt = prompt_token_ids
        self._expects_echo = echoes

    def _take_event(self, data: bytes, token_ids: list[int], logprobs: list[LogprobRow]) -> None:
        event = _decode_event(data)
        if event.choices and self._finish is None:
            choice = event.choices[0]
            if choice.token_ids is None:
                self._fail(EngineUnfit(f"{self._words.title} returns no token ids: {_NO_IDS}"))
            else:
                token_ids += choice.token_ids
                if choice.logprobs is not None:
                    logprobs += self._rows(choice.token_ids, choice.logprobs)
                if choice.finish_reason is not None:
                    self._finish = FINISHES.get(choice.finish_reason)
                    if self._finish is None:
                        self._unknown_finish(choice.finish_reason)
        if event.error is not None:
            self._stream_error(event.error, bool(token_ids))
        elif event.usage is not None and event.usage.prompt_tokens_details is not None:
            self.cached_tokens = event.usage.prompt_tokens_details.cached_tokens

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


class CompletionsWire(WireWithoutPictures):
    """vLLM's ``/v1/completions``; see ``Wire``."""

    path = _WORDS.path
    abilities = ABILITIES["vllm-completions"]

    def __init__(self, model: str) -> None:
        self._model = model

    def accepts(self, job: GenerationJob) -> bool:
        """Return True."""
        return True

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
        """Encode the request."""
        return encode_vllm_request(self._model, job, max_tokens=max_tokens)

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        """Return the reader of the answer."""
        echoes = job.sampling.prompt_logprobs is not None
        return CompletionReader(job.prompt_token_ids, echoes=echoes, max_tokens=max_tokens)

    def refusal(self, status: int, body: bytes, job: GenerationJob, retry_after: str) -> SingletreeError:
        """Return the error for an answer whose status is not 200."""
        prompt_tokens = len(job.prompt_token_ids)
        return decode_vllm_error(status, body, prompt_tokens=prompt_tokens, retry_after=retry_after)

    def blindness(self, refusal: SingletreeError | None) -> str | None:
        """Return the option of vLLM that offers the endpoint for pictures."""
        return "vLLM takes pictures with token ids only if it is started with --enable-scale-out"
