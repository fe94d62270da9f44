"""What vLLM's ``/v1/completions`` is told and what it says, as bytes. Sans-IO.

Read from and recorded on vLLM 0.32 (``vllm/entrypoints/openai/completion/protocol.py``); the fields used are
there since 0.11. https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#completions-api
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, ConstraintKind, LogprobRow, StopKind
from singletree.errors import ContextOverflow, EngineFailed, InvalidRequest, Overloaded, SingletreeError

# Fields of Sampling that vLLM knows by the same name; left out when None, so that the defaults of the model's
# own generation_config.json apply.
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
)
_FIELDS = frozenset((*_SAME_NAME, "max_tokens", "logit_bias", "ignore_eos"))

_FINISHES: dict[str, StopKind] = {
    "stop": "stop",
    "repetition": "stop",
    "length": "length",
    "abort": "cancelled",
}

# The ways in which vLLM says that a prompt is too long; the group is the window in tokens.
_OVERFLOWS = tuple(
    re.compile(pattern)
    for pattern in (
        r"maximum context length is (\d+) tokens",
        r"longer than the maximum model length of (\d+)",
        r"exceeds model's maximum context length \((\d+)\)",
    )
)
_OVERLOADED = frozenset((429, 503, 529))
_SHOWN = 400  # characters of a server's own message that are passed on
_TOKEN_ID = len("token_id:")
_LINE_BYTES = 2**26  # far beyond the longest prompt that is echoed


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _as_given(value: Any) -> Any:
    return value if isinstance(value, str | dict) else _as_text(value)


# Kind of constraint -> vLLM's field of ``structured_outputs`` and the form of its value. vLLM tells Lark from
# GBNF by itself, and takes a structural tag as JSON text only. Structural tags come first: XGrammar, vLLM's
# first choice, reads them, and not the Lark of llguidance.
_CONSTRAINTS: dict[ConstraintKind, tuple[str, Callable[[Any], Any]]] = {
    "structural_tag": ("structural_tag", _as_text),
    "lark": ("grammar", _as_text),
    "json_schema": ("json", _as_given),
    "regex": ("regex", _as_text),
    "gbnf": ("grammar", _as_text),
}
CONSTRAINT_KINDS = tuple(_CONSTRAINTS)


def encode_request(
    model: str,
    prompt_token_ids: Sequence[int],
    sampling: Sampling,
    request_id: str,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    constraint: Constraint | None = None,
    priority: int = 0,
) -> bytes:
    """The body of one request; ``max_tokens`` stands in for the one of ``sampling``."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_token_ids if isinstance(prompt_token_ids, list | tuple) else list(prompt_token_ids),
        "request_id": request_id,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        # Left out, vLLM would stop after 16.
        "max_tokens": max_tokens,
    }
    body.update((name, value) for name in _SAME_NAME if (value := getattr(sampling, name)) is not None)
    if sampling.prompt_logprobs is not None:
        # In a stream vLLM tells those of the prompt only as an echo, as many a token as of the answer.
        body["echo"] = True
        body["logprobs"] = max(sampling.prompt_logprobs, sampling.logprobs or 0)
    if "logprobs" in body:
        body["return_tokens_as_token_ids"] = True
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if stop_token_ids:
        body["stop_token_ids"] = list(stop_token_ids)
    if constraint is not None:
        field, form = _CONSTRAINTS[constraint.kind]
        body["structured_outputs"] = {field: form(constraint.value)}
    if priority:
        body["priority"] = priority
    return msgspec.json.encode(body)


class _Error(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_error = msgspec.json.Decoder(_ErrorBody).decode


def error_of(status: int, body: bytes, *, prompt_tokens: int, retry_after: str = "") -> SingletreeError:
    """What an answer with ``status`` other than 200 means."""
    try:
        said = _decode_error(body).error
    except msgspec.DecodeError:
        said = _Error(body[:_SHOWN].decode("utf-8", "replace"))
    return _meaning(status, said, prompt_tokens, retry_after)


def _meaning(status: int, said: _Error, prompt_tokens: int, retry_after: str = "") -> SingletreeError:
    message = " ".join(said.message[:_SHOWN].split()) or "no reason given"
    if status in (400, 422):
        for pattern in _OVERFLOWS:
            if found := pattern.search(message):
                return ContextOverflow(prompt_tokens, int(found[1]))
        param = (said.param or "").removeprefix("body.")
        return InvalidRequest(
            f"the engine refused the request: {message}", param=param if param in _FIELDS else None
        )
    if status in _OVERLOADED:
        wait = {"retry_after": float(retry_after)} if retry_after.isdecimal() else {}
        return Overloaded(f"vLLM takes no request now (HTTP {status}): {message}", **wait)
    if status in (401, 403):
        return EngineFailed(
            f"vLLM refused the key (HTTP {status}): give the server's --api-key to the engine"
        )
    return EngineFailed(f"vLLM failed (HTTP {status}): {message}")


class CompletionReader:
    """Reads one event stream, cut anywhere, into chunks.

    After each ``feed`` look at ``failure`` (to be raised once the chunk is passed on: what was generated
    stands) and at ``done``.

    Attributes:
        failure: what the stream has said or shown to be wrong.
        done: the chunk with the finish reason is out, or a failure is known; nothing more is to come.
        cached_tokens: what the server told about the prompt, None as long as it told nothing.

    Args:
        echoes: the first log-probabilities are those of the prompt.
    """

    __slots__ = (
        "_finish",
        "_partial",
        "_partial_bytes",
        "_prompt",
        "_prompt_logprobs",
        "_started",
        "_unechoed",
        "cached_tokens",
        "done",
        "failure",
    )

    def __init__(self, prompt_token_ids: Sequence[int], *, echoes: bool = False) -> None:
        self._prompt = prompt_token_ids
        self._unechoed = echoes
        self._prompt_logprobs: Sequence[LogprobRow] | None = None
        self._partial: list[bytes] = []  # a line not yet at its end; the echoed prompt makes a long one
        self._partial_bytes = 0
        self._finish: StopKind | None = None
        self._started = False
        self.cached_tokens: int | None = None
        self.failure: SingletreeError | None = None
        self.done = False

    def feed(self, data: bytes) -> Chunk | None:
        """The tokens that ``data`` completed, as one chunk; None when there are none yet."""
        self._partial.append(data)
        if b"\n" not in data:
            self._partial_bytes += len(data)
            if self._partial_bytes > _LINE_BYTES:
                self._fail(EngineFailed(f"vLLM sent a line of more than {_LINE_BYTES} bytes"))
            return None
        lines = b"".join(self._partial).split(b"\n")
        rest = lines.pop()
        self._partial, self._partial_bytes = [rest], len(rest)
        token_ids: list[int] = []
        logprobs: list[LogprobRow] = []
        for line in lines:
            if line[:5] == b"data:":
                self._take(line[5:].strip(), token_ids, logprobs)
                if self.done:
                    break
        return self._chunk(token_ids, logprobs)

    def close(self, unfinished: SingletreeError | StopKind | None = None) -> Chunk | None:
        """The stream has ended: the last chunk, or None with ``failure`` set.

        ``unfinished`` is the outcome if vLLM has told no finish reason by now: for a stream that just ends
        a failure.
        """
        self._end(unfinished)
        return self._chunk([], [])

    def _end(self, unfinished: SingletreeError | StopKind | None = None) -> None:
        self.done = True
        if self._finish is None and self.failure is None:
            unfinished = unfinished or EngineFailed("vLLM ended its stream without a finish reason")
            if isinstance(unfinished, SingletreeError):
                self.failure = unfinished
            else:
                self._finish = unfinished

    def _chunk(self, token_ids: list[int], logprobs: list[LogprobRow]) -> Chunk | None:
        echoed, self._prompt_logprobs = self._prompt_logprobs, None
        if self.done and self.failure is None:
            return Chunk(token_ids, self._finish, self.cached_tokens, logprobs or None, echoed)
        if not token_ids and echoed is None:
            return None
        self._started = True
        return Chunk(token_ids, logprobs=logprobs or None, prompt_logprobs=echoed)

    def _take(self, data: bytes, token_ids: list[int], logprobs: list[LogprobRow]) -> None:
        if data == b"[DONE]":
            self._end()
            return
        try:
            event = _decode_event(data)
            if event.choices:
                self._take_choice(event.choices[0], token_ids, logprobs)
        except (msgspec.DecodeError, ValueError):
            self._fail(
                EngineFailed(
                    "vLLM sent an event that is not a completion chunk; is --engine-url a vLLM server?"
                )
            )
            return
        if event.error is not None and self._finish is None:
            self._fail(self._error(event.error, bool(token_ids)))
        elif event.usage is not None and event.usage.prompt_tokens_details is not None:
            self.cached_tokens = event.usage.prompt_tokens_details.cached_tokens

    def _take_choice(self, choice: _Choice, token_ids: list[int], logprobs: list[LogprobRow]) -> None:
        if choice.token_ids is None:
            self._fail(EngineFailed("vLLM returns no token ids: version 0.11 or newer is needed"))
            return
        token_ids += choice.token_ids
        if choice.logprobs is not None:
            logprobs += self._rows(choice.token_ids, choice.logprobs)
        if choice.finish_reason is not None:
            self._finish = _FINISHES.get(choice.finish_reason)
            if self._finish is None:
                self._fail(
                    EngineFailed(f"vLLM ended with {choice.finish_reason!r}, which is no known reason")
                )

    def _rows(self, token_ids: Sequence[int], said: _Logprobs) -> Sequence[LogprobRow]:
        if not self._unechoed:
            return _pairs(token_ids, said)
        self._unechoed = False
        rows = _pairs([*self._prompt, *token_ids], said)
        self._prompt_logprobs = rows[: len(self._prompt)]
        return rows[len(self._prompt) :]

    def _error(self, said: _Error, tokens_beside: bool) -> SingletreeError:
        """Before the first token an error is what its status says; after it, the engine broke its promise."""
        status = said.code if isinstance(said.code, int) else 500
        meaning = _meaning(status, said, len(self._prompt))
        if not (self._started or tokens_beside) or isinstance(meaning, EngineFailed):
            return meaning
        return EngineFailed(f"vLLM failed after it had begun: {meaning.message}")

    def _fail(self, failure: SingletreeError) -> None:
        self.failure, self.done = failure, True


def _pairs(token_ids: Sequence[int], said: _Logprobs) -> list[LogprobRow]:
    """(token id, logprob) of each token and its alternatives, the token itself first.

    What is not a number vLLM says as null; minus infinity it says as -9999.
    """
    rows: list[LogprobRow] = []
    for token_id, own, top in zip(token_ids, said.token_logprobs, said.top_logprobs, strict=True):
        others = ((int(name[_TOKEN_ID:]), logprob) for name, logprob in (top or {}).items())
        pairs = [(token_id, own), *(pair for pair in others if pair[0] != token_id)]
        rows.append(
            [(name, logprob) for name, logprob in pairs if logprob is not None] if own is not None else ()
        )
    return rows
