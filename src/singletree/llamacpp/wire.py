"""Encodes requests to llama.cpp's server and decodes its answers. No I/O.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md (``POST /completion``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from singletree.engines.abilities import encode_grammar
from singletree.engines.engine import Chunk, GenerationJob, StopKind
from singletree.engines.token_json import encode_token_ids
from singletree.errors import ContextOverflow, EngineFailed, InvalidRequest, Overloaded, SingletreeError
from singletree.remote.events import TokenId
from singletree.remote.wire import COMMON_SAMPLING, sampling_reader

_SEED_RANGE = 1 << 32
_RANDOM_SEED = _SEED_RANGE - 1
_MAX_EVENT_BYTES = 2**24
_MAX_VALUES = 1_000_000  # of an event, which may hold the text of the prompt

_Form = TypeVar("_Form")

# None is left to the model's defaults (the GGUF file's, else llama.cpp's own).
_read_sampling = sampling_reader(*COMMON_SAMPLING[:-1], repetition_penalty="repeat_penalty")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_FINISH: dict[str, StopKind] = {"eos": "stop", "word": "stop", "limit": "length"}
# Without this list the last event repeats the whole prompt and all settings.
_LAST_FIELDS = ("stop", "stop_type", "tokens", "tokens_predicted", "timings")


class PromptProgress(msgspec.Struct):
    """How far the prompt has been read: ``processed`` of ``total`` tokens after ``time_ms`` milliseconds.

    ``processed`` includes ``cache`` tokens from the prefix cache.
    """

    cache: int = 0
    total: int = 0
    processed: int = 0
    time_ms: float = 0


class Timings(msgspec.Struct):
    """Counts for the whole generation, in its last event."""

    cache_n: int | None = None


class Probability(msgspec.Struct):
    """One token with its log-probability, and those of the most likely tokens."""

    id: TokenId
    logprob: float | None = None
    top_logprobs: list[Probability] = []


class ServerError(msgspec.Struct):
    """An error as llama.cpp's server sends it."""

    code: int = 500
    message: str = ""
    type: str = ""
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class StreamEvent(msgspec.Struct):
    """One event of the stream.

    Attributes:
        tokens: ids of new tokens; where several tokens form one character, llama.cpp sends only the last.
        content: the text of all of them.
        tokens_predicted: how many tokens were generated so far, whether sent or not.
        tokens_missing: set by ``StreamReader`` where ``tokens`` is incomplete.
    """

    tokens: list[TokenId] = []
    content: str = ""
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    prompt_progress: PromptProgress | None = None
    timings: Timings | None = None
    completion_probabilities: list[Probability] = []
    error: ServerError | None = None
    tokens_missing: bool = False


class StreamReader:
    """Decode the stream of one generation, without I/O.

    Call ``feed`` with bytes, replace ``tokens`` of events with ``tokens_missing``, then call ``take`` for the chunk.

    Attributes:
        ended: whether llama.cpp's last event has been taken.
        prompt_tokens: length of the prompt as llama.cpp read it, with its pictures; None until it reports it.
        read_tokens: how many tokens of the prompt have been read, the cached ones included.

    Args:
        limit: the most tokens to yield; a token more ends the generation with ``length``.
        stop_token_ids: tokens that end the generation.
    """

    def __init__(self, limit: int, stop_token_ids: Iterable[int], *, logprobs: bool) -> None:
        self.ended = False
        self.prompt_tokens: int | None = None
        self.read_tokens = 0
        self._limit = limit
        self._stops = frozenset(stop_token_ids)
        self._logprobs = logprobs
        self._decode = msgspec.json.Decoder(StreamEvent).decode
        self._rest = b""
        self._predicted = 0
        self._yielded = 0
        self._cached: int | None = None

    def feed(self, data: bytes) -> list[StreamEvent]:
        """Return the events that are complete now.

        Raises EngineFailed for a malformed event, and the matching error for an error event.
        """
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise EngineFailed(f"llama.cpp sent an event of more than {_MAX_EVENT_BYTES} bytes")
        for block in blocks:
            if len(block) > _MAX_VALUES and block.count(b",") > _MAX_VALUES:
                raise EngineFailed(f"llama.cpp sent an event of more than {_MAX_VALUES} values")
        try:
            # Other blocks are comments that keep the connection alive.
            events = [self._decode(block[6:]) for block in blocks if block[:6] == b"data: "]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise EngineFailed(f"llama.cpp sent a malformed event: {error}") from error
        for at, event in enumerate(events, 1):
            if event.error is not None:
                raise convert_error(event.error)
            if event.prompt_progress is not None:
                self.prompt_tokens = event.prompt_progress.total
                self.read_tokens = event.prompt_progress.processed
                event.tokens = []  # not valid before the first token is sampled
            elif not event.stop:
                event.tokens_missing = event.tokens_predicted - self._predicted != len(event.tokens)
                self._predicted = event.tokens_predicted
            else:
                return events[:at]  # what follows the last event is no part of the answer
        return events

    def take(self, events: Sequence[StreamEvent]) -> Chunk | None:
        """Return the content of the events as one chunk; None if there is nothing to report."""
        ids: list[int] = []
        logprobs: list[list[tuple[int, float]]] = []
        finish: StopKind | None = None
        cached: int | None = None
        for event in events:
            ids += event.tokens
            if self._logprobs:
                logprobs += _logprobs(event)
            if self._cached is None:
                cached = self._cached = _cached_tokens(event)
            if event.stop:
                self.ended = True
                finish = _FINISH.get(event.stop_type, "stop")
        cut = self._cut(ids)
        if cut is not None:
            end, finish = cut
            del ids[end:], logprobs[end:]
        self._yielded += len(ids)
        if not ids and finish is None and cached is None:
            return None
        return Chunk(ids, finish, cached, logprobs if self._logprobs else None)

    def _cut(self, ids: Sequence[int]) -> tuple[int, StopKind] | None:
        """Return how many of the new tokens to keep, and the finish reason; None to keep all and go on."""
        room = self._limit - self._yielded
        if not self._stops.isdisjoint(ids):
            end = next(i for i, token in enumerate(ids, 1) if token in self._stops)
            if end <= room:
                return end, "stop"
        return (room, "length") if len(ids) > room else None


def _cached_tokens(event: StreamEvent) -> int | None:
    if event.prompt_progress is not None:
        return event.prompt_progress.cache
    return event.timings.cache_n if event.stop and event.timings is not None else None


def _logprobs(event: StreamEvent) -> list[list[tuple[int, float]]]:
    """Return one list for each token of the event; llama.cpp sends log-probabilities of the last token only."""
    known: dict[int, float | None] = {}
    for probability in event.completion_probabilities[-1:]:
        known[probability.id] = probability.logprob
        for alternative in probability.top_logprobs:
            known.setdefault(alternative.id, alternative.logprob)
    last = [(id, value) for id, value in known.items() if value is not None]
    return [*([] for _ in event.tokens[:-1]), last] if event.tokens else []


class _ErrorBody(msgspec.Struct):
    error: ServerError


class _Piece(msgspec.Struct):
    id: TokenId
    piece: str | list[int]


class _TokenizeBody(msgspec.Struct):
    tokens: list[_Piece]


def encode_llamacpp_request(
    job: GenerationJob, *, limit: int, prompt: Mapping[str, Any] | None = None
) -> bytes:
    """Encode the body of ``POST /completion``.

    Args:
        limit: how many tokens may follow the prompt.
        prompt: replaces the token ids of the job: text and pictures.

    Raises InvalidRequest for a constraint that llama.cpp does not support.
    """
    sampling = job.sampling
    body: dict[str, Any] = {
        "prompt": encode_token_ids(job.prompt_token_ids) if prompt is None else prompt,
        "n_predict": limit,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "cache_prompt": True,
        "response_fields": _LAST_FIELDS,
    }
    body |= _read_sampling(sampling)
    if any(getattr(sampling, name) is not None for name in _PENALTIES):
        body["repeat_last_n"] = len(job.prompt_token_ids) + limit  # newer servers refuse -1 for all
    if sampling.seed is not None:
        seed = sampling.seed % _SEED_RANGE
        body["seed"] = seed if seed != _RANDOM_SEED else 0
    if sampling.logprobs is not None:
        body["n_probs"] = max(1, sampling.logprobs)
    if sampling.logit_bias:
        body["logit_bias"] = list(sampling.logit_bias.items())
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if job.constraint is not None:
        body["grammar"] = encode_grammar(job.constraint)
    return msgspec.json.encode(body)


_REUSES, _READS_ANEW = b'"cache_prompt":true', b'"cache_prompt":false'


def with_slot(body: bytes, slot: int, *, reuses: bool = True) -> bytes:
    """Return the body of ``encode_llamacpp_request`` with the slot to use, which llama.cpp chooses otherwise.

    Args:
        reuses: whether what the slot holds of the prompt may be used; otherwise the whole prompt is read.
    """
    if not reuses:
        # In a text of the body, the quotation marks would be escaped.
        body = body.replace(_REUSES, _READS_ANEW, 1)
    return b'{"id_slot":%d,%b' % (slot, body[1:])


def decode_llamacpp_error(status: int, body: bytes) -> SingletreeError:
    """Return the error for a response with an HTTP status other than 200."""
    try:
        failure = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return EngineFailed(f"llama.cpp answered with HTTP status {status}")
    return convert_error(failure)


def convert_error(failure: ServerError) -> SingletreeError:
    """Convert an error of llama.cpp to one of ours."""
    if failure.type == "exceed_context_size_error":
        return ContextOverflow(failure.n_prompt_tokens, failure.n_ctx)
    if failure.type == "unavailable_error":
        return Overloaded(f"llama.cpp is not ready: {failure.message}")
    if failure.code == 400:
        return InvalidRequest(f"llama.cpp refused the request: {failure.message}")
    return EngineFailed(f"llama.cpp failed: {failure.message or failure.type}")


def encode_prompt_tokenize_request(text: str, *, adds_first: bool = False) -> bytes:
    """Encode the body of ``POST /tokenize`` for a part of a prompt, in which special tokens are recognised.

    Args:
        adds_first: whether the tokens are added that llama.cpp puts before every prompt.
    """
    return msgspec.json.encode({"content": text, "add_special": adds_first, "parse_special": True})


def decode_answer(body: bytes, form: type[_Form], path: str, status: int = 200) -> _Form:
    """Return the answer to a question at ``path``. Raises EngineFailed if it is malformed, the matching error for
    another status.
    """
    if status != 200:
        raise decode_llamacpp_error(status, body)
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"llama.cpp sent a malformed answer to {path}: {error}") from error


def encode_tokenize_request(text: str) -> bytes:
    """Encode the body of ``POST /tokenize`` for ``text``."""
    body = {"content": text, "with_pieces": True, "add_special": False, "parse_special": False}
    return msgspec.json.encode(body)


def decode_tokenize_response(body: bytes, text: str) -> list[int]:
    """Return the token ids of ``text`` and nothing else, from the answer to ``POST /tokenize``.

    Some vocabularies put a space before the text that they encode; the tokens of that space are left out. Raises
    EngineFailed for a malformed answer.
    """
    pieces = decode_answer(body, _TokenizeBody, "/tokenize").tokens
    data = text.encode()
    ids = [each.id for each in pieces]
    parts = [each.piece.encode() if isinstance(each.piece, str) else bytes(each.piece) for each in pieces]
    for begin in range(len(pieces)):
        if b"".join(parts[begin:]) == data:
            return ids[begin:]
    return ids
