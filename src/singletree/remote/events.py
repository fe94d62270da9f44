"""Reads an event stream of token ids, as inference servers send it, and trusts nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from singletree.engines.engine import Chunk, Deliver, LogprobRow, StopKind
from singletree.errors import EngineFailed, EngineUnfit, SingletreeError
from singletree.events import WeightVersion
from singletree.remote.transport import RefusalWords, ServerRefusal, StreamedResponse, convert_refusal
from singletree.remote.wire import Lookup, WireReader

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A token id that can be one."""

_NO_TOKENS = Chunk(())
_EVENT_FIELDS = (b":", b"data:", b"event:", b"id:", b"retry:")
_MAX_LINE_BYTES = 2**26  # far more than the longest echoed prompt takes
_COUNTED_BYTES = 2**20  # of a line: the values of a longer one are counted before it is decoded
_MAX_VALUES = 1_000_000  # of a line, beside those of an echoed prompt
_PROMPT_VALUES = 100  # for each token of the prompt: 20 alternatives with id, text, log probability and rank
MALFORMED = (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError)
"""What decoding an event may raise. ValueError is for text that is not UTF-8 and for counts that do not match."""


class PromptDetails(msgspec.Struct):
    """What a server reports of the prompt."""

    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class TokenUsage(msgspec.Struct):
    """Counts, in the event behind the last token."""

    prompt_tokens_details: PromptDetails | None = None


class EventReader:
    """Decode one event stream, which may be cut anywhere, into chunks; see ``WireReader``.

    A subclass decodes the events, in ``_take_event``. Tokens behind the finish reason are dropped, and tokens beyond
    ``max_tokens`` end the generation with ``length``, whatever the server goes on to send.

    Attributes:
        finishes: the server's finish reasons of a generation that did not fail.
        failure: the error that the stream reported or contains; None if there is none.
        done: whether the chunk with the finish reason was returned or ``failure`` is set; nothing follows.
        cut: whether more tokens came than were asked for.
        lookup: None; all that is needed is in the stream.
        cached_tokens: how many prompt tokens were cached; None until the server reports it.

    Args:
        words: the server's name and the patterns of its errors.
        max_tokens: how many tokens were asked for.
        stops: tokens that end the generation although the server does not stop at them.
    """

    finishes: ClassVar[Mapping[str, StopKind]]
    lookup: Lookup | None = None

    def __init__(
        self, words: RefusalWords, prompt_tokens: int, max_tokens: int, stops: Iterable[int] = ()
    ) -> None:
        self._words = words
        self._prompt_tokens = prompt_tokens
        self._room = max_tokens
        self._stops = frozenset(stops)
        self._prompt_logprobs: Sequence[LogprobRow] | None = None
        self._partial: list[bytes] = []  # pieces of an incomplete line; with an echoed prompt it is long
        self._partial_bytes = 0
        self._weight_versions: Sequence[WeightVersion] = ()
        self._finish: StopKind | None = None
        self._started = False
        self._has_more = False  # whether the next chunk has more than tokens and their log-probabilities
        self._is_stream = True
        self.cached_tokens: int | None = None
        self.failure: SingletreeError | None = None
        self.done = False
        self.cut = False

    def resolve(self, status: int, body: bytes) -> Chunk | None:
        return None

    def feed(self, data: bytes) -> list[int] | Chunk | None:
        partial = self._partial
        if partial:
            partial.append(data)
            if b"\n" not in data:
                return self._wait_for_line(len(data))
            data = b"".join(partial)
            partial.clear()
            self._partial_bytes = 0
        lines = data.split(b"\n")
        rest = lines.pop()
        token_ids: list[int] = []
        logprobs: list[LogprobRow] = []
        for line in lines:
            if line[:5] == b"data:":
                if len(line) > _COUNTED_BYTES and self._has_too_many_values(line):
                    break
                try:
                    self._take_event(line[5:], token_ids, logprobs)
                except MALFORMED:
                    if line[5:].strip() == b"[DONE]":
                        self._end()
                    else:
                        self._malformed()
                if self.done:
                    break
            elif line and line.strip() and not line.startswith(_EVENT_FIELDS):
                self._is_stream = False
        if rest:
            partial.append(rest)
            if not self.done:
                self._wait_for_line(len(rest))
        self._room -= len(token_ids)
        if self._room < 0:
            self._cut(token_ids, logprobs, len(token_ids) + self._room, "length")
        if self._stops and not self._stops.isdisjoint(token_ids):
            end = next(at for at, token_id in enumerate(token_ids, 1) if token_id in self._stops)
            self._cut(token_ids, logprobs, end, "stop")
        if self.done or logprobs or self._has_more:
            return self._chunk(token_ids, logprobs)
        if token_ids:
            self._started = True
        return token_ids

    def _wait_for_line(self, size: int) -> list[int] | None:
        """Count ``size`` more bytes of an incomplete line; an endless one is a failure."""
        self._partial_bytes += size
        if self._partial_bytes <= _MAX_LINE_BYTES:
            return []
        self._fail(EngineFailed(f"{self._words.title} sent a line of more than {_MAX_LINE_BYTES} bytes"))
        return None

    def _has_too_many_values(self, line: bytes) -> bool:
        """Fail if decoding ``line`` would take seconds; return whether it would."""
        values, most = line.count(b","), _MAX_VALUES + _PROMPT_VALUES * self._prompt_tokens
        if values <= most:
            return False
        title = self._words.title
        self._fail(EngineFailed(f"{title} sent an event of {values} values; at most {most} are expected"))
        return True

    def _cut(self, token_ids: list[int], logprobs: list[LogprobRow], end: int, finish: StopKind) -> None:
        del token_ids[end:], logprobs[end:]
        self.done = self.cut = True
        self._finish, self.failure = finish, None

    def close(self, unfinished: SingletreeError | StopKind | None = None) -> Chunk | None:
        self._end(unfinished)
        return self._chunk([], [])

    def _end(self, unfinished: SingletreeError | StopKind | None = None) -> None:
        self.done = True
        if self._finish is None and self.failure is None:
            unfinished = unfinished or self._missing_end()
            if isinstance(unfinished, SingletreeError):
                self.failure = unfinished
            else:
                self._finish = unfinished

    def _missing_end(self) -> EngineFailed:
        title = self._words.title
        rest = b"".join(self._partial).lstrip()
        begins = any(rest[: len(field)] == field[: len(rest)] for field in _EVENT_FIELDS)
        if not (self._is_stream and begins):
            return EngineUnfit(f"{title} sent no event stream; check that {title} runs at --engine-url")
        return EngineFailed(f"{title} ended its stream without a finish reason")

    def _chunk(self, token_ids: list[int], logprobs: list[LogprobRow]) -> Chunk | None:
        echoed, self._prompt_logprobs = self._prompt_logprobs, None
        if self.done and self.failure is None:
            return Chunk(
                token_ids,
                self._finish,
                self.cached_tokens,
                logprobs or None,
                echoed,
                weight_versions=self._weight_versions,
            )
        if not token_ids and echoed is None:
            return None
        self._started, self._has_more = True, False
        return Chunk(token_ids, logprobs=logprobs or None, prompt_logprobs=echoed)

    def _malformed(self) -> None:
        title = self._words.title
        self._fail(
            EngineUnfit(
                f"{title} sent an event that is not a completion chunk; check that {title} runs at --engine-url"
            )
        )

    def _take_event(self, data: bytes, token_ids: list[int], logprobs: list[LogprobRow]) -> None:
        """Decode one event and append what is new in it. Raises one of ``MALFORMED``."""
        raise NotImplementedError

    def _stream_error(self, refusal: ServerRefusal, has_tokens: bool) -> None:
        """Fail with the error for its status before the first token; after it, always with an EngineFailed."""
        if self._finish is not None:
            return
        status = refusal.code if isinstance(refusal.code, int) else 500
        converted = convert_refusal(self._words, status, refusal, self._prompt_tokens)
        if (self._started or has_tokens) and not isinstance(converted, EngineFailed):
            converted = EngineFailed(f"{self._words.title} failed during the generation: {converted.message}")
        self._fail(converted)

    def _take_usage(self, error: ServerRefusal | None, usage: TokenUsage | None, *, has_tokens: bool) -> None:
        if error is not None:
            self._stream_error(error, has_tokens)
        elif usage is not None and usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _take_finish(self, reason: str) -> None:
        self._finish = self.finishes.get(reason)
        if self._finish is None:
            self._fail(
                EngineFailed(
                    f"{self._words.title} ended the generation with an unknown finish reason: {reason[:40]!r}"
                )
            )

    def _fail(self, failure: SingletreeError) -> None:
        self.failure, self.done = failure, True


class CompletionEvents(EventReader):
    """Decode the events of a ``/v1/completions`` that has token ids, since version ``oldest``; see ``EventReader``.

    A subclass decodes the JSON of an event, and reads its log-probabilities.
    """

    decode: Callable[[bytes], Any]
    oldest: ClassVar[str]

    def _take_event(self, data: bytes, token_ids: list[int], logprobs: list[LogprobRow]) -> None:
        event = self.decode(data)
        if event.choices and self._finish is None:
            choice = event.choices[0]
            if choice.token_ids is None:
                needed = f"version {self.oldest} or newer is needed"
                self._fail(EngineUnfit(f"{self._words.title} returns no token ids: {needed}"))
            else:
                token_ids += choice.token_ids
                if choice.logprobs is not None:
                    logprobs += self._rows(choice.token_ids, choice.logprobs)
                if choice.finish_reason is not None:
                    self._take_finish(choice.finish_reason)
        if event.error is not None or event.usage is not None:
            error = ServerRefusal(event.error) if isinstance(event.error, str) else event.error
            self._take_usage(error, event.usage, has_tokens=bool(token_ids))

    def _rows(self, token_ids: Sequence[int], logprobs: Any) -> Sequence[LogprobRow]:
        raise NotImplementedError


class TokenRelay:
    """Reads an answer, and delivers its tokens where they are received, up to what is more than tokens.

    Attributes:
        deliver: takes the tokens; None while they are to be returned in chunks.
    """

    def __init__(self, reader: WireReader, answer: StreamedResponse) -> None:
        self._reader, self._answer = reader, answer
        self._new: list[int] | Chunk | None = None
        self.deliver: Deliver | None = None

    async def next_chunk(self) -> Chunk | None:
        """Return the next chunk that was not delivered; None if what came completes none. Raises ConnectionLost."""
        await self._answer.relay(self._take)
        new, self._new = self._new, None
        if isinstance(new, list):
            return Chunk(new) if new else None
        return new

    def _take(self, data: bytes) -> bool:
        self._new = new = self._reader.feed(data) if data else self._reader.close()
        deliver = self.deliver
        if deliver is None or not isinstance(new, list):
            return False
        if not new or deliver(new):
            return True
        self._new = _NO_TOKENS
        return False
