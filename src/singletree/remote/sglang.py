"""Encodes requests to SGLang's ``/generate`` and decodes the event stream that comes back. No I/O.

What SGLang calls the sampling, the constraint and the pictures of a job is the same in process. Written from SGLang
0.5.23 (``srt/managers/io_struct.py``, ``srt/sampling/sampling_params.py``, ``srt/managers/tokenizer_manager.py``,
``srt/multimodal/processors/base_processor.py``) and from recordings of it.
https://docs.sglang.ai/basic_usage/native_api.html

Most of its processors look for placeholders in the text that they decode from the token ids. Text that only reads like
one makes them fail, or never answer. ``PictureSupport.reads_text`` keeps such text out of prompts.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Chunk, ConstraintKind, GenerationJob, LogprobRow, StopKind
from singletree.engines.token_json import encode_token_ids
from singletree.errors import BadConfiguration, EngineFailed, EngineUnfit, SingletreeError
from singletree.events import WeightVersion
from singletree.pictures import PromptPicture
from singletree.remote.events import EventReader, TokenId
from singletree.remote.pictures import PictureCounts, content_hash, data_url, pictures_of
from singletree.remote.transport import RefusalWords, ServerRefusal
from singletree.remote.wire import (
    COMMON_SAMPLING,
    LEAST_TOP_P,
    GetPage,
    ServerOffer,
    Wire,
    WireReader,
    ask_for_tokens,
    body_fields,
    find_model,
    read_page,
    sampling_reader,
)

_read_sampling = sampling_reader(*COMMON_SAMPLING, zeros={**LEAST_TOP_P, "top_k": -1})
SGLANG_FINISHES: Mapping[str, StopKind] = {"stop": "stop", "length": "length", "abort": "cancelled"}
"""SGLang's finish reasons of a generation that did not fail."""

SGLANG_CONSTRAINTS = ABILITIES["sglang"].constraints
"""Kinds of constraint, the best supported first, and SGLang's field for each; all take text."""

SGLANG_BACKENDS: Mapping[str, tuple[ConstraintKind, ...]] = {
    "none": (),
    "outlines": ("json_schema", "regex"),
    "llguidance": ("json_schema", "regex", "gbnf"),
}
"""The kinds that a grammar backend supports, where it supports fewer than XGrammar: llguidance takes structural tags of
an earlier form only."""


def backend_loss(backend: str | None) -> str | None:
    """Return what a grammar backend cannot hold, and the cure, for the log; None for XGrammar or an unknown one."""
    kinds = SGLANG_BACKENDS.get(backend or "")
    if kinds is None:
        return None
    return (
        f"SGLang runs with --grammar-backend {backend}, which constrains {' and '.join(kinds) or 'nothing'} alone: "
        "forced and strict tool calls may be refused; start it with --grammar-backend xgrammar (pip install xgrammar)"
    )


_SEED_RANGE = 1 << 63


def sglang_sampling(job: GenerationJob, *, max_tokens: int) -> dict[str, Any]:
    """Return SGLang's ``sampling_params`` for ``job``.

    Args:
        max_tokens: replaces the one of ``job.sampling``; without it SGLang would stop after 128 tokens.
    """
    sampling = job.sampling
    params: dict[str, Any] = {"max_new_tokens": max_tokens, **_read_sampling(sampling)}
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % _SEED_RANGE
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    if sampling.min_tokens:
        params["min_new_tokens"] = sampling.min_tokens
    if job.stop_token_ids:
        params["stop_token_ids"] = list(job.stop_token_ids)
    if job.constraint is not None:
        params[SGLANG_CONSTRAINTS[job.constraint.kind]] = job.constraint.as_text()
    return params


def sglang_request(job: GenerationJob, *, max_tokens: int) -> dict[str, Any]:
    """Return the fields of a request of SGLang for ``job``, without its id, its prompt and its priority."""
    sampling = job.sampling
    fields: dict[str, Any] = {"sampling_params": sglang_sampling(job, max_tokens=max_tokens), "stream": True}
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        fields["return_logprob"] = True
        fields["top_logprobs_num"] = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
    if sampling.prompt_logprobs is not None:
        fields["logprob_start_len"] = 0
    return fields


FIRST_ANSWER_SECONDS = 300.0
"""How long a prompt with pictures may wait for its first token, in SGLang's own queue, too."""

SGLANG_BLINDNESS = (
    "SGLang runs this model without pictures; if the model sees them, start SGLang with --enable-multimodal"
)
"""Why a model gets no pictures."""


def sglang_pictures(pictures: Sequence[PromptPicture]) -> dict[str, Any]:
    """Return the fields of a request with ``pictures``.

    The hashes let a server with ``--mm-preprocess-cache-size-mb`` find what its processor made of a picture. SGLang
    compares them with the bytes. ``mm_hashes`` is not sent: SGLang would take it for the picture in its prefix cache.
    """
    return {
        "image_data": [data_url(picture) for picture in pictures],
        "mm_content_hashes": [content_hash(picture) for picture in pictures],
    }


def unread_pictures(job: GenerationJob, prompt_tokens: int, image_tokens: int | None) -> EngineUnfit | None:
    """Return the error if SGLang generates although it has not read the pictures of ``job``; None if it has.

    Args:
        prompt_tokens: how many tokens it read as the prompt.
        image_tokens: how many of them it counts as pictures; None if it counts none.
    """
    if image_tokens or prompt_tokens > len(job.prompt_token_ids):
        return None
    return EngineUnfit(
        f"SGLang read none of the {len(job.pictures)} pictures of the prompt: its processor for this model does not "
        f"know the placeholder (token {job.pictures[0].placeholder_id}); use a newer SGLang, or send no pictures"
    )


_OVERFLOWS = (
    r"longer than the model's context length \((?P<window>\d+) tokens\)",
    r"maximum context length is (?P<window>\d+) tokens",
    r"maximum allowed length \((?P<window>\d+) tokens",
)
SGLANG_WORDS = RefusalWords(
    "SGLang", "/generate", "--api-key", _OVERFLOWS, frozenset((*COMMON_SAMPLING, "logprobs", "logit_bias"))
)

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Candidate(msgspec.Struct, array_like=True):
    logprob: float | None
    token_id: TokenId


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class SglangMeta(msgspec.Struct):
    """What SGLang reports beside the tokens of an output."""

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
    meta_info: SglangMeta | None = None
    error: ServerRefusal | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class SglangReader(EventReader):
    """Decode the event stream of ``/generate``, whose events are the outputs of ``sglang.Engine``.

    Without ``--incremental-streaming-output`` each event repeats all tokens so far. Which of the two a stream is
    follows from its counts, event by event; a stream whose counts are neither is refused.

    Args:
        max_tokens: how many tokens were asked for.
        counts: learns how many tokens each picture takes.
    """

    finishes = SGLANG_FINISHES

    def __init__(self, job: GenerationJob, max_tokens: int, counts: PictureCounts) -> None:
        # With `ignore_eos` SGLang ignores `stop_token_ids`, too.
        stops = job.stop_token_ids if job.sampling.ignore_eos else ()
        super().__init__(SGLANG_WORDS, len(job.prompt_token_ids), max_tokens, stops)
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
        self, ids: Sequence[int], meta: SglangMeta, token_ids: list[int], logprobs: list[LogprobRow]
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
            self._take_finish(reason.type)

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


def _rows(
    ids: Sequence[int], own: Sequence[_Candidate], top: Sequence[Sequence[_Candidate] | None], begin: int
) -> list[LogprobRow]:
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


def _prompt_rows(meta: SglangMeta, prompt_tokens: int) -> list[LogprobRow]:
    own = meta.input_token_logprobs
    rows = _rows([each.token_id for each in own], own, meta.input_top_logprobs, 0)
    if len(rows) != prompt_tokens:
        raise ValueError("not one row for each token of the prompt")
    return rows


class SglangWire(Wire):
    """SGLang's ``/generate``; see ``Wire``.

    Args:
        blindness: why the model takes no pictures, and the cure; None if it takes them.
        priority_sign: 1 where the server runs low priorities first, -1 where it runs high ones first, and 0 where it
            does not schedule by priority and may refuse one.
        grammar_backend: the library that applies constraints there; empty where it is not known.
    """

    words = SGLANG_WORDS
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

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
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
        if job.session and self.takes_sessions:
            body["session_id"] = job.session
        if pictures:
            body |= sglang_pictures(pictures)
        return msgspec.json.encode(body)

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        return SglangReader(job, max_tokens, self._counts)

    def uncounted(self, job: GenerationJob) -> Sequence[PromptPicture]:
        return self._counts.uncounted(job)

    def first_answer_seconds(self, job: GenerationJob) -> float | None:
        """Return the limit for a prompt with pictures: SGLang never answers one whose placeholders it miscounts."""
        return FIRST_ANSWER_SECONDS if job.pictures else None

    def blindness(self, refusal: SingletreeError | None) -> str | None:
        """Return why the model takes no pictures, as the server's description of it says."""
        return self._blindness


_LOG = logging.getLogger(__name__)


class _ServerInfo(msgspec.Struct):
    version: str | None = None
    model_path: str | None = None
    max_running_requests: int | None = None
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    grammar_backend: str | None = None


class _ModelInfo(msgspec.Struct):
    has_image_understanding: bool = False


class SglangServer:
    """An SGLang server, 0.5 or newer; tested with 0.5.23. See ``Server``.

    Options for ``sglang.launch_server``:

    - ``--incremental-streaming-output``: without it each event repeats all tokens so far, so that a stream's size
      grows with the square of its length.
    - ``--enable-priority-scheduling``: without it priorities are not sent, because SGLang may refuse them. They are
      sent with the sign that the server's ``--schedule-low-priority-values-first`` needs.
    - ``--enable-multimodal`` for pictures, with models that SGLang serves without them by default.
    - ``--mm-preprocess-cache-size-mb 1024``: a picture that comes again is not decoded and resized again.
    - ``--grammar-backend xgrammar`` for forced calls: ``llguidance`` has JSON schemas, regexes and EBNF only.
    - ``--enable-session-radix-cache``: what no session refers to is evicted first. Sessions are named to a server
      whose ``/openapi.json`` has the field for it (0.5.23).
    - not ``--reasoning-parser``: with it SGLang applies constraints only after it considers the reasoning complete.
    """

    title = SGLANG_WORDS.title
    hint = (
        "start it with `python -m sglang.launch_server --model-path MODEL` (0.5 or newer), or correct the URL"
    )

    async def look_up(self, url: str, get: GetPage) -> ServerOffer:
        chosen, window = await find_model(url, get, self.title)
        if chosen.parent is not None:
            raise BadConfiguration(
                f"{chosen.id!r} at {url} is an adapter: {SGLANG_WORDS.path} is asked for the model itself; name "
                f"{chosen.parent!r}, or serve the adapter merged into its model"
            )
        info = await read_page(get, _ServerInfo, "/server_info", "/get_server_info") or _ServerInfo()
        if (loss := backend_loss(info.grammar_backend)) is not None:
            _LOG.warning("%s", loss)
        described = await read_page(get, _ModelInfo, "/model_info", "/get_model_info")
        blindness = None if described and described.has_image_understanding else SGLANG_BLINDNESS
        sign = (1 if info.schedule_low_priority_values_first else -1) * info.enable_priority_scheduling
        wire = SglangWire(blindness, sign, info.grammar_backend or "")
        wire.takes_sessions = "session_id" in await body_fields(get, wire.path)
        return ServerOffer(
            chosen.id,
            (wire,),
            window=window,
            slots=info.max_running_requests,
            details={"version": info.version, **_cache_size(info)},
            checkpoint=info.model_path or chosen.root,
            tokenize=partial(ask_for_tokens, chosen.id),
            # The prompts of retracted generations are read again, by the new weights.
            weights={
                "hold": ("/pause_generation", {"mode": "retract"}),
                "continue": ("/continue_generation", {}),
                "name": ("/update_weight_version", {"abort_all_requests": False}),
            },
        )


def _cache_size(info: _ServerInfo) -> dict[str, int]:
    """Return the size of a page of the KV cache and of the whole cache, in tokens, as far as they are known."""
    sizes = {"kv_block_size": info.page_size, "kv_cache_tokens": info.max_total_num_tokens}
    return {name: size for name, size in sizes.items() if size is not None and size > 0}
