"""Encodes requests to SGLang's ``/generate`` and decodes the event stream that comes back. No I/O.

Written from SGLang 0.5.23 (``srt/managers/io_struct.py``, ``srt/sampling/sampling_params.py``,
``srt/managers/tokenizer_manager.py``) and from recordings of it. https://docs.sglang.ai/basic_usage/native_api.html
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Chunk, GenerationJob, LogprobRow
from singletree.engines.remote.events import EventReader, TokenId
from singletree.engines.remote.pictures import PictureCounts, pictures_of
from singletree.engines.remote.refusals import RefusalWords, ServerRefusal, convert_refusal, decode_refusal
from singletree.engines.remote.token_json import encode_token_ids
from singletree.engines.remote.wire import DefaultWire, WireReader
from singletree.engines.sglang.pictures import FIRST_ANSWER_SECONDS, sglang_pictures, unread_pictures
from singletree.engines.sglang.sampling import (
    SGLANG_BACKENDS,
    SGLANG_FINISHES,
    SGLANG_SAMPLING,
    sglang_request,
)
from singletree.errors import EngineFailed, EngineUnfit, SingletreeError
from singletree.events import WeightVersion
from singletree.pictures import PromptPicture

_OVERFLOWS = tuple(
    re.compile(pattern)
    for pattern in (
        r"longer than the model's context length \((?P<window>\d+) tokens\)",
        r"maximum context length is (?P<window>\d+) tokens",
        r"maximum allowed length \((?P<window>\d+) tokens",
    )
)
_WORDS = RefusalWords(
    "SGLang", "/generate", "--api-key", _OVERFLOWS, frozenset((*SGLANG_SAMPLING, "logprobs", "logit_bias"))
)

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Candidate(msgspec.Struct, array_like=True):
    logprob: float | None
    token_id: TokenId


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _MetaInfo(msgspec.Struct):
    prompt_tokens: _Count = 0
    image_tokens: _Count | None = None
    completion_tokens: _Count = 0
    cached_tokens: _Count | None = None
    finish_reason: _FinishReason | None = None
    weight_versions: list[WeightVersion] | None = None
    output_token_logprobs: list[_Candidate] = []
    output_top_logprobs: list[list[_Candidate] | None] = []
    input_token_logprobs: list[_Candidate] = []
    input_top_logprobs: list[list[_Candidate] | None] = []


class _Event(msgspec.Struct):
    output_ids: list[TokenId] | None = None
    meta_info: _MetaInfo | None = None
    error: ServerRefusal | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class SglangReader(EventReader):
    """Decode the event stream of ``/generate``.

    Without ``--incremental-streaming-output`` each event repeats all tokens so far. Which of the two a stream is
    follows from its counts, event by event; a stream whose counts are neither is refused.

    Args:
        job: the generation.
        max_tokens: how many tokens were asked for.
        counts: learns how many tokens each picture takes.
    """

    __slots__ = ("_counts", "_job", "_read_tokens", "_scores_prompt", "_seen")

    def __init__(self, job: GenerationJob, max_tokens: int, counts: PictureCounts) -> None:
        # With `ignore_eos` SGLang ignores `stop_token_ids`, too.
        stops = job.stop_token_ids if job.sampling.ignore_eos else ()
        super().__init__(_WORDS, len(job.prompt_token_ids), max_tokens, stops)
        self._seen = 0
        self._scores_prompt = job.sampling.prompt_logprobs is not None
        self._job = job
        self._counts = counts
        self._read_tokens: int | None = None

    def _take_event(self, data: bytes, token_ids: list[int], logprobs: list[LogprobRow]) -> None:
        event = _decode_event(data)
        if event.error is not None:
            self._stream_error(event.error, bool(token_ids))
        elif self._finish is None:
            if event.output_ids is None or event.meta_info is None:
                self._fail(EngineUnfit("SGLang returns no token ids: version 0.5 or newer is needed"))
            else:
                self._take_output(event.output_ids, event.meta_info, token_ids, logprobs)

    def _take_output(
        self, ids: Sequence[int], meta: _MetaInfo, token_ids: list[int], logprobs: list[LogprobRow]
    ) -> None:
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort" and reason.status_code is not None:
            self._stream_error(ServerRefusal(reason.message or "", code=reason.status_code), bool(token_ids))
            return
        if self._job.pictures and not self._seen:
            if unread := unread_pictures(self._job, meta.prompt_tokens, meta.image_tokens):
                self._fail(unread)
                return
            self._has_more = True
            self._read_tokens = meta.prompt_tokens
        begin = self._begin_of_new(len(ids), meta.completion_tokens)
        if begin is not None:
            new = ids[begin:]
            self._seen += len(new)
            token_ids += new
            logprobs += _rows(new, meta.output_token_logprobs, meta.output_top_logprobs, begin)
        elif reason is None or reason.type != "abort":  # an aborted stream repeats its last token
            self._fail(
                EngineFailed(
                    f"SGLang sent {len(ids)} token ids where it counts {meta.completion_tokens} in all and "
                    f"{self._seen} were sent before"
                )
            )
            return
        if self._scores_prompt and meta.input_token_logprobs:
            self._scores_prompt = False
            self._has_more = True
            self._prompt_logprobs = _prompt_rows(meta, self._prompt_tokens)
        if meta.cached_tokens is not None:
            self.cached_tokens = meta.cached_tokens
        if meta.weight_versions:
            self._weight_versions = meta.weight_versions
        if reason is not None:
            self._take_finish(reason)

    def _chunk(self, token_ids: list[int], logprobs: list[LogprobRow]) -> Chunk | None:
        chunk = super()._chunk(token_ids, logprobs)
        if chunk is not None and self._read_tokens is not None:
            chunk.prompt_tokens = self._read_tokens
            chunk.picture_tokens = self._counts.learn(self._job, self._read_tokens)
            self._read_tokens = None
        return chunk

    def _begin_of_new(self, count: int, completion_tokens: int) -> int | None:
        """Return where the new tokens begin in an event of ``count`` ids; None for counts that fit neither form."""
        if count == completion_tokens - self._seen:
            return 0
        # An event that repeats all tokens may have more of them than it counts: SGLang counts before it serialises.
        return self._seen if count >= max(completion_tokens, self._seen) else None

    def _take_finish(self, reason: _FinishReason) -> None:
        self._finish = SGLANG_FINISHES.get(reason.type)
        if self._finish is None:
            self._unknown_finish(reason.type)


def _rows(
    ids: Sequence[int],
    own: Sequence[_Candidate],
    top: Sequence[Sequence[_Candidate] | None],
    begin: int,
) -> list[LogprobRow]:
    """Return one row of (token id, logprob) for each of ``ids``, or none where there are none."""
    if not own:
        return []
    own, top = own[begin : begin + len(ids)], top[begin : begin + len(ids)]
    alternatives = top or [None] * len(ids)
    rows: list[LogprobRow] = []
    for token_id, first, others in zip(ids, own, alternatives, strict=True):
        pairs = [(token_id, first.logprob)]
        pairs += [(each.token_id, each.logprob) for each in others or () if each.token_id != token_id]
        known = [(id, value) for id, value in pairs if value is not None]
        rows.append(known if first.logprob is not None else ())
    return rows


def _prompt_rows(meta: _MetaInfo, prompt_tokens: int) -> list[LogprobRow]:
    own = meta.input_token_logprobs
    rows = _rows([each.token_id for each in own], own, meta.input_top_logprobs, 0)
    if len(rows) != prompt_tokens:
        raise ValueError("not one row for each token of the prompt")
    return rows


class SglangWire(DefaultWire):
    """SGLang's ``/generate``; see ``Wire``.

    Args:
        blindness: why the model takes no pictures, and the cure; None if it takes them.
        priority_sign: 1 where the server runs low priorities first, -1 where it runs high ones first, and 0 where it
            does not schedule by priority and may refuse one.
        grammar_backend: the library that applies constraints there; empty where it is not known.
    """

    path = _WORDS.path
    abilities = ABILITIES["sglang-generate"]

    def __init__(self, blindness: str | None = "", priority_sign: int = 0, grammar_backend: str = "") -> None:
        kinds = SGLANG_BACKENDS.get(grammar_backend)
        if kinds is not None:
            fields = {kind: self.abilities.constraints[kind] for kind in kinds}
            self.abilities = replace(self.abilities, constraints=fields)
        self._blindness = blindness
        self._priority_sign = priority_sign
        self._counts = PictureCounts()
        self._numbers = itertools.count()

    def accepts(self, job: GenerationJob) -> bool:
        """Return True."""
        return True

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
        """Encode the request."""
        pictures = pictures_of(job)
        body: dict[str, Any] = {
            # SGLang refuses an id that it still knows, as that of a generation that was closed a moment ago.
            "rid": f"{job.request_id}-{next(self._numbers)}",
            "input_ids": encode_token_ids(job.prompt_token_ids),
            **sglang_request(job, max_tokens=max_tokens),
        }
        if self._priority_sign:
            # Also 0: a request without a priority is the last of all, and every other one interrupts it.
            body["priority"] = self._priority_sign * job.priority
        if job.cache_salt:
            body["extra_key"] = job.cache_salt
        if pictures:
            body |= sglang_pictures(pictures)
        return msgspec.json.encode(body)

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        """Return the reader of the answer."""
        return SglangReader(job, max_tokens, self._counts)

    def uncounted(self, job: GenerationJob) -> Sequence[PromptPicture]:
        """Return the pictures to count first, where more than one is new: SGLang reports the sum of their lengths."""
        return self._counts.uncounted(job)

    def first_answer_seconds(self, job: GenerationJob) -> float | None:
        """Return the limit for a prompt with pictures: SGLang never answers one whose placeholders it miscounts."""
        return FIRST_ANSWER_SECONDS if job.pictures else None

    def blindness(self, refusal: SingletreeError | None) -> str | None:
        """Return why the model takes no pictures, as the server's description of it says."""
        return self._blindness

    def refusal(self, status: int, body: bytes, job: GenerationJob, retry_after: str) -> SingletreeError:
        """Return the error for an answer whose status is not 200."""
        return convert_refusal(_WORDS, status, decode_refusal(body), len(job.prompt_token_ids), retry_after)
