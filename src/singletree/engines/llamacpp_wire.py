"""What is said to llama.cpp's server, and what it answers. No I/O.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md (``POST /completion``).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, ConstraintKind, StopKind
from singletree.errors import ContextOverflow, EngineFailed, InvalidRequest, Overloaded, SingletreeError

CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = ("lark", "json_schema", "regex", "gbnf")

_GUIDANCE = "%llguidance"
# JSON lets white space run without end between any two tokens, and small models do run.
_WHITE_SPACE = {"whitespace_pattern": r"[ \n]{0,32}"}
_SEED_RANGE = 1 << 32
_RANDOM_SEED = _SEED_RANGE - 1
_WHOLE_CONTEXT = -1

# Ours -> llama.cpp's. What is None is left to the model's defaults (the GGUF file's, else llama.cpp's own).
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
}
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_FINISH: dict[str, StopKind] = {"eos": "stop", "word": "stop", "limit": "length"}
# The last event repeats the whole prompt and all settings unless told what to hold.
_LAST_FIELDS = ("stop", "stop_type", "tokens", "tokens_predicted", "timings")


class Progress(msgspec.Struct):
    """How far the prompt has been read; ``cache`` tokens of it were there already."""

    cache: int = 0


class Timings(msgspec.Struct):
    """Counts of the whole generation, told with its last event."""

    cache_n: int | None = None


class Probability(msgspec.Struct):
    """One token and its log-probability, and those of the most likely ones."""

    id: int
    logprob: float | None = None
    top_logprobs: list[Probability] = []


class Failure(msgspec.Struct):
    """An error as llama.cpp's server tells it."""

    code: int = 500
    message: str = ""
    type: str = ""
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class Event(msgspec.Struct):
    """One event of the stream.

    Attributes:
        tokens: new tokens; of several that spell one character llama.cpp tells the last only.
        content: the text of all of them.
        tokens_predicted: how many tokens there have been so far, told or not.
        untold: set by ``StreamReader`` where ``tokens`` lacks some.
    """

    tokens: list[int] = []
    content: str = ""
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    prompt_progress: Progress | None = None
    timings: Timings | None = None
    completion_probabilities: list[Probability] = []
    error: Failure | None = None
    untold: bool = False


class StreamReader:
    """Reads the stream of one generation: ``feed`` it bytes, complete what is untold, ``take`` the chunk.

    Args:
        limit: the most tokens to tell; one more and the generation has its length.
        stop_token_ids: tokens that end it.
        logprobs: whether chunks have log-probabilities.
    """

    def __init__(self, limit: int, stop_token_ids: Iterable[int], *, logprobs: bool) -> None:
        self.ended = False
        self._limit = limit
        self._stops = frozenset(stop_token_ids)
        self._logprobs = logprobs
        self._decode = msgspec.json.Decoder(Event).decode
        self._rest = b""
        self._predicted = 0
        self._told = 0
        self._cached: int | None = None

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete now. Raises EngineFailed for what is none and for llama.cpp's own."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        try:
            # Anything else is a comment, sent to keep the connection alive.
            events = [self._decode(block[6:]) for block in blocks if block[:6] == b"data: "]
        except msgspec.DecodeError as error:
            raise EngineFailed(f"llama.cpp's server sent an event that cannot be read: {error}") from error
        for event in events:
            if event.error is not None:
                raise failure_of(event.error)
            if event.prompt_progress is not None:
                event.tokens = []  # they mean nothing before the first is drawn
            elif not event.stop:
                event.untold = event.tokens_predicted - self._predicted != len(event.tokens)
                self._predicted = event.tokens_predicted
        return events

    def take(self, events: Sequence[Event]) -> Chunk | None:
        """What the events say, in one chunk; None if nothing."""
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
        self._told += len(ids)
        if not ids and finish is None and cached is None:
            return None
        return Chunk(ids, finish, cached, logprobs if self._logprobs else None)

    def _cut(self, ids: Sequence[int]) -> tuple[int, StopKind] | None:
        """Where the new tokens end early, and why."""
        room = self._limit - self._told
        if not self._stops.isdisjoint(ids):
            end = next(i for i, token in enumerate(ids, 1) if token in self._stops)
            if end <= room:
                return end, "stop"
        return (room, "length") if len(ids) > room else None


def _cached_tokens(event: Event) -> int | None:
    if event.prompt_progress is not None:
        return event.prompt_progress.cache
    return event.timings.cache_n if event.stop and event.timings is not None else None


def _logprobs(event: Event) -> list[list[tuple[int, float]]]:
    """One list for each token of the event; llama.cpp tells those of the last only."""
    known: dict[int, float | None] = {}
    for probability in event.completion_probabilities[-1:]:
        known[probability.id] = probability.logprob
        for alternative in probability.top_logprobs:
            known.setdefault(alternative.id, alternative.logprob)
    last = [(id, value) for id, value in known.items() if value is not None]
    return [*([] for _ in event.tokens[:-1]), last] if event.tokens else []


class _Answer(msgspec.Struct):
    error: Failure


class _Piece(msgspec.Struct):
    id: int
    piece: str | list[int]


class _Pieces(msgspec.Struct):
    tokens: list[_Piece]


def encode_request(
    prompt_token_ids: Sequence[int], sampling: Sampling, *, limit: int, constraint: Constraint | None
) -> bytes:
    """The body of ``POST /completion``; ``limit`` is how many tokens may follow the prompt.

    Raises InvalidRequest for a constraint that llama.cpp cannot take.
    """
    body: dict[str, Any] = {
        "prompt": list(prompt_token_ids),
        "n_predict": limit,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "cache_prompt": True,
        "response_fields": _LAST_FIELDS,
    }
    for ours, theirs in _SAMPLING.items():
        value = getattr(sampling, ours)
        if value is not None:
            body[theirs] = value
    if any(getattr(sampling, name) is not None for name in _PENALTIES):
        body["repeat_last_n"] = _WHOLE_CONTEXT
    if sampling.seed is not None:
        seed = sampling.seed % _SEED_RANGE
        body["seed"] = seed if seed != _RANDOM_SEED else 0
    if sampling.logprobs is not None:
        body["n_probs"] = max(1, sampling.logprobs)
    if sampling.logit_bias:
        body["logit_bias"] = list(sampling.logit_bias.items())
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if constraint is not None:
        body["grammar"] = grammar_of(constraint)
    return msgspec.json.encode(body)


def grammar_of(constraint: Constraint) -> str:
    """The constraint as a grammar for llama.cpp: GBNF, or Lark for the llguidance that is built into it.

    Raises InvalidRequest for a kind or a text that it cannot take.
    """
    kind, value = constraint.kind, constraint.value
    if kind == "gbnf":
        grammar = str(value)
    elif kind == "lark":
        text = str(value)
        grammar = text if text.lstrip().startswith(_GUIDANCE) else f"{_GUIDANCE} {{}}\n{text}"
    elif kind == "regex":
        pattern = re.sub(r"(?<!\\)/", r"\/", str(value)).replace("\n", r"\n")
        grammar = f"{_GUIDANCE} {{}}\nstart: /{pattern}/"
    elif kind == "json_schema":
        grammar = f"{_GUIDANCE} {{}}\nstart: %json {json.dumps(_bounded(value))}"
    else:
        kinds = ", ".join(CONSTRAINT_KINDS)
        raise InvalidRequest(f"llama.cpp takes no constraint of kind {kind!r}; it takes {kinds}")
    if grammar.lstrip().startswith(_GUIDANCE):
        _check(grammar)
    return grammar


def _bounded(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {"x-guidance": _WHITE_SPACE, **schema}


def _check(grammar: str) -> None:
    """llama.cpp generates without any constraint when llguidance refuses one, so ask llguidance first."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise InvalidRequest(
            "constraints need the package llguidance beside llama.cpp: pip install llguidance"
        ) from error
    if problem := LLMatcher.validate_grammar(grammar, None):
        raise InvalidRequest(
            f"the constraint cannot be used: {_in_words(problem)}; simplify the schema or grammar"
        )


def _in_words(problem: str) -> str:
    """llguidance's complaint on one line, without its excerpt of the grammar."""
    lines = [line.strip() for line in problem.splitlines()]
    words = " ".join(itertools.takewhile(lambda line: " | " not in line, lines))
    return words.partition(": ")[2] or words


def error_of(status: int, body: bytes) -> SingletreeError:
    """The refusal that came with an HTTP status other than 200."""
    try:
        failure = msgspec.json.decode(body, type=_Answer).error
    except msgspec.DecodeError:
        return EngineFailed(f"llama.cpp's server answered with status {status}")
    return failure_of(failure)


def failure_of(failure: Failure) -> SingletreeError:
    """llama.cpp's error in our terms."""
    if failure.type == "exceed_context_size_error":
        return ContextOverflow(failure.n_prompt_tokens, failure.n_ctx)
    if failure.type == "unavailable_error":
        return Overloaded(f"llama.cpp is not ready: {failure.message}")
    if failure.code == 400:
        return InvalidRequest(f"llama.cpp refused the request: {failure.message}")
    return EngineFailed(f"llama.cpp failed: {failure.message or failure.type}")


def encode_spelling(text: str) -> bytes:
    """The body of ``POST /tokenize`` that asks how ``text`` is spelled in tokens."""
    question = {"content": text, "with_pieces": True, "add_special": False, "parse_special": False}
    return msgspec.json.encode(question)


def decode_spelling(body: bytes, text: str) -> list[int]:
    """The token ids that spell ``text`` and nothing else.

    Some vocabularies put a space before whatever they encode; tokens before the text are left out. Raises
    EngineFailed when the answer cannot be read.
    """
    try:
        pieces = msgspec.json.decode(body, type=_Pieces).tokens
    except msgspec.DecodeError as error:
        raise EngineFailed(f"llama.cpp's server gave a spelling that cannot be read: {error}") from error
    wanted = text.encode()
    ids = [each.id for each in pieces]
    for begin in range(len(pieces)):
        spelled = b"".join(_bytes(each.piece) for each in pieces[begin:])
        if spelled == wanted:
            return ids[begin:]
    return ids


def _bytes(piece: str | list[int]) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)
