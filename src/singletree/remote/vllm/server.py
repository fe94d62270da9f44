"""A running ``vllm serve``: what it serves, and by which of its endpoints token ids go in and out. No I/O.

Two endpoints take and stream token ids. ``/inference/v1/generate`` exists only with ``--enable-scale-out``; it costs
vLLM's API process about a tenth less for each token (150 against 167 µs, 8 streams) and takes pictures beside token
ids, does not apply the checkpoint's ``generation_config.json``, and its streams have no log-probabilities of the
prompt. It is written from vLLM 0.32 (``vllm/entrypoints/scale_out/token_in_token_out/protocol.py``) and from recordings
of it. ``/v1/completions`` is always there. Chat completions render and parse by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Chunk, GenerationJob, LogprobRow
from singletree.engines.token_json import encode_token_ids
from singletree.errors import BadConfiguration, EngineUnfit, InvalidRequest, SingletreeError
from singletree.events import WeightVersion
from singletree.remote.events import EventReader, TokenId, TokenUsage
from singletree.remote.pictures import SentPictures, data_url, pictures_of
from singletree.remote.transport import ServerRefusal
from singletree.remote.vllm.wire import (
    FINISHES,
    UNKNOWN_PICTURE,
    CompletionsWire,
    picture_uuid,
    sampling_fields,
    vllm_words,
)
from singletree.remote.wire import (
    GetPage,
    ServerOffer,
    Wire,
    WireReader,
    ask_for_tokens,
    find_model,
    read_page,
)

_SESSION_HEADER = "X-Session-ID"
_IN_HEADERS = "".join(char for char in map(chr, range(33, 127)) if char != "%")
"""Characters that a header carries as they are."""

_WORDS = vllm_words("/inference/v1/generate")


class _Candidate(msgspec.Struct):
    token_id: TokenId
    logprob: float


class _Position(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[WeightVersion] | None = None
    routed_experts: str | None = None


class _Range(msgspec.Struct):
    length: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: TokenUsage | None = None
    error: ServerRefusal | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[_Range]] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class GenerateReader(EventReader):
    """Decode the event stream of ``/inference/v1/generate``.

    vLLM reports routed experts only if it runs with ``--enable-return-routed-experts``.
    """

    finishes = FINISHES

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(_WORDS, prompt_tokens, max_tokens)
        self._routed_experts: str | None = None
        self._read_tokens: int | None = None
        self._picture_tokens: list[int] | None = None

    def _take_event(self, data: bytes, token_ids: list[int], logprobs: list[LogprobRow]) -> None:
        event = _decode_event(data)
        if event.prompt_token_ids is not None:
            self._has_more = True
            self._read_tokens = len(event.prompt_token_ids)
            self._picture_tokens = [each.length for each in (event.mm_placeholders or {}).get("image", [])]
        if event.choices and self._finish is None:
            choice = event.choices[0]
            if choice.token_ids is not None:
                token_ids += choice.token_ids
            if choice.token_ids is None or choice.logprobs is not None or choice.finish_reason is not None:
                self._take_more(choice, logprobs)
            if choice.weight_versions:
                self._weight_versions = choice.weight_versions
            if choice.routed_experts is not None:
                self._routed_experts = choice.routed_experts
        if event.error is not None or event.usage is not None:
            self._take_usage(event.error, event.usage, has_tokens=bool(token_ids))

    def _chunk(self, token_ids: list[int], logprobs: list[LogprobRow]) -> Chunk | None:
        chunk = super()._chunk(token_ids, logprobs)
        if chunk is not None and self._read_tokens is not None:
            chunk.prompt_tokens, chunk.picture_tokens = self._read_tokens, self._picture_tokens
            self._read_tokens = None
        if chunk is not None and chunk.finish is not None:
            chunk.routed_experts = self._routed_experts
        return chunk

    def _take_more(self, choice: _Choice, logprobs: list[LogprobRow]) -> None:
        if choice.token_ids is None and choice.finish_reason is None:
            self._fail(EngineUnfit("vLLM returns no token ids"))
            return
        if choice.logprobs is not None and choice.logprobs.content is not None:
            pairs = zip(choice.token_ids or (), choice.logprobs.content, strict=True)
            logprobs += [_row(token_id, position) for token_id, position in pairs]
        if choice.finish_reason is not None:
            self._take_finish(choice.finish_reason)


def _row(token_id: int, position: _Position) -> LogprobRow:
    others = ((each.token_id, each.logprob) for each in position.top_logprobs if each.token_id != token_id)
    return [(token_id, position.logprob), *others]


class GenerateWire(Wire):
    """vLLM's ``/inference/v1/generate``; see ``Wire``.

    The bytes of a picture are sent once. When vLLM no longer has it, the request is sent again with all bytes.
    """

    words = _WORDS
    abilities = ABILITIES["vllm-generate"]

    def __init__(self, model: str) -> None:
        self._model = model
        self._sent = SentPictures()

    def accepts(self, job: GenerationJob) -> bool:
        """Return whether the job asks for no log-probabilities of the prompt, which this endpoint cannot stream."""
        return job.sampling.prompt_logprobs is None

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
        # Without `detokenize: false` vLLM decodes every token to a text that is not sent.
        params = {**sampling_fields(job, max_tokens=max_tokens), "detokenize": False}
        body: dict[str, Any] = {
            "model": self._model,
            "token_ids": encode_token_ids(job.prompt_token_ids),
            "request_id": job.request_id,
            "sampling_params": params,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if pictures := pictures_of(job):
            body["content_parts"] = [
                # The id takes the place of the bytes in the key of the prefix cache: so it has to be their hash.
                {
                    "type": "image_url",
                    "url": None if picture in self._sent else data_url(picture),
                    "uuid": picture_uuid(picture),
                }
                for picture in pictures
            ]
            # For what the pictures take of the prompt.
            body |= {"return_token_ids": True, "output_mode": "tokens"}
        if job.priority:
            body["priority"] = job.priority
        if job.cache_salt:
            body["cache_salt"] = job.cache_salt
        return msgspec.json.encode(body)

    def headers(self, job: GenerationJob) -> Mapping[str, str]:
        """Name the session, which this endpoint takes from a header only (vLLM 0.32; older ones ignore it).

        A name that a header cannot carry is sent with percent signs.
        """
        return {_SESSION_HEADER: quote(job.session, safe=_IN_HEADERS)} if job.session else {}

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        return GenerateReader(len(job.prompt_token_ids), max_tokens)

    def accepted(self, job: GenerationJob) -> None:
        self._sent.note(job.pictures)

    def resends(self, job: GenerationJob, refusal: SingletreeError) -> bool:
        """Return whether vLLM no longer has a picture whose bytes were not sent; afterwards all bytes are sent."""
        return _is_unknown_picture(refusal) and self._sent.forget(job.pictures)

    def encode_picture_probe(self) -> bytes | None:
        """Encode a request with a picture that vLLM does not have, and without its bytes.

        A model with eyes refuses it, and so nothing is generated.
        """
        part = {"type": "image_url", "url": None, "uuid": "sha256:" + "0" * 64}
        params = {"max_tokens": 1}
        return msgspec.json.encode(
            {"model": self._model, "token_ids": [0], "content_parts": [part], "sampling_params": params}
        )

    def blindness(self, refusal: SingletreeError | None) -> str | None:
        """Return why the model takes no pictures; None if the probe's picture is all that vLLM lacks."""
        if refusal is None:
            return "this model takes no pictures"
        return None if _is_unknown_picture(refusal) else f"this model takes no pictures: {refusal.message}"


def _is_unknown_picture(refusal: SingletreeError) -> bool:
    return isinstance(refusal, InvalidRequest) and UNKNOWN_PICTURE in refusal.message


class _Version(msgspec.Struct):
    version: str


class VllmServer:
    """A vLLM server, 0.11 or newer; tested with 0.32 and 0.33. See ``Server``.

    Options for ``vllm serve``:

    - ``--enable-scale-out`` for ``/inference/v1/generate``.
    - ``--enable-prompt-tokens-details``: without it vLLM does not report how much of a prompt was cached, and
      ``cached_tokens`` stays None.
    - ``--structured-outputs-config '{"backend": "xgrammar"}'`` for structural tags. With ``auto``, vLLM runs all
      constraints on the backend that suits the first one; one that suits only another is refused with InvalidRequest
      (0.33) or fails with EngineFailed (0.32). Lark is sent as EBNF: XGrammar has no directive ``%llguidance``.
    - not ``--reasoning-parser``: with it vLLM applies constraints only after it considers the reasoning complete,
      or ``"enable_in_reasoning": true`` in ``--structured-outputs-config`` beside it.
    - ``--scheduling-policy priority`` if priorities shall have an effect; otherwise vLLM accepts and ignores them.

    ``priority`` is passed to vLLM: a lower number runs earlier, 0 is the default. vLLM refuses more log-probabilities
    than ``--max-logprobs`` (20).
    """

    title = CompletionsWire.words.title
    hint = "start it with `vllm serve MODEL` (0.11 or newer), or correct the URL"

    async def look_up(self, url: str, get: GetPage) -> ServerOffer:
        chosen, window = await find_model(url, get, self.title)
        if window is None:
            raise BadConfiguration(
                f"{url} reports no max_model_len for {chosen.id!r}: it is not a vLLM server; correct the URL"
            )
        version = await read_page(get, _Version, "/version")
        generate, completions = GenerateWire(chosen.id), CompletionsWire(chosen.id)
        lost = (
            f"vLLM at {url} does not offer {generate.path}, so {completions.path} is used: it takes no pictures and "
            "costs vLLM's API process about a tenth more for each token; start vLLM with --enable-scale-out"
        )
        return ServerOffer(
            chosen.id,
            (generate, completions),
            window=window,
            details={"version": version and version.version, **await _cache_size(get)},
            checkpoint=chosen.root,
            losses={generate.path: lost},
            tokenize=partial(ask_for_tokens, chosen.id),
            # It has these routes with VLLM_SERVER_DEV_MODE=1 in its environment.
            weights={
                "hold": ("/pause?mode=keep", {}),
                "continue": ("/resume", {}),
                "name": ("/update_weight_version", {}),
            },
        )


_CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_CACHE_FIELD = re.compile(rb'(block_size|num_gpu_blocks)="(\d+)"')


async def _cache_size(get: GetPage) -> dict[str, int]:
    """Return the size of a block of the KV cache and of the whole cache, in tokens; nothing where they are hidden."""
    status, body = await get("/metrics")
    if status != 200 or (line := _CACHE.search(body)) is None:
        return {}
    found = {name: int(value) for name, value in _CACHE_FIELD.findall(line[1])}
    size, blocks = found.get(b"block_size", 0), found.get(b"num_gpu_blocks", 0)
    return {"kv_block_size": size, "kv_cache_tokens": size * blocks} if size and blocks else {}
