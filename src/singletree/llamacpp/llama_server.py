"""A running ``llama-server`` of llama.cpp: what it serves, with the wire of the embedded engine.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Chunk, GenerationJob, StopKind
from singletree.errors import BadConfiguration, EngineFailed, EngineUnfit, SingletreeError
from singletree.llamacpp.wire import (
    StreamEvent,
    StreamReader,
    decode_llamacpp_error,
    decode_tokenize_response,
    encode_llamacpp_request,
    encode_prompt_tokenize_request,
    encode_tokenize_request,
)
from singletree.remote.transport import RefusalWords, decode_as
from singletree.remote.wire import (
    TOKENIZE,
    GetPage,
    Lookup,
    ServerOffer,
    Wire,
    WireReader,
    check_status,
    decode_models,
)

_WORDS = RefusalWords("llama.cpp", "/completion", "--api-key")

_Window = Annotated[int, msgspec.Meta(gt=0)]


class _Settings(msgspec.Struct):
    n_ctx: _Window


class ServerProperties(msgspec.Struct):
    """What ``/props`` reports.

    Attributes:
        default_generation_settings: with the context window of a slot.
        total_slots: how many generations run at once.
        model_path: the GGUF file, a path on the server.
        model_alias: the name that the server was told to use.
    """

    default_generation_settings: _Settings
    total_slots: _Window = 1
    model_path: str | None = None
    model_alias: str | None = None
    build_info: str | None = None


class LlamaServerReader:
    """Decode the stream of ``/completion``; see ``WireReader``.

    Where several tokens form one character, llama.cpp streams the last one only, with the text of all: the others are
    looked up by tokenizing that text.
    """

    def __init__(self, job: GenerationJob, max_tokens: int) -> None:
        logprobs = job.sampling.logprobs is not None
        self._stream = StreamReader(max_tokens, job.stop_token_ids, logprobs=logprobs)
        self._events: Sequence[StreamEvent] = ()
        self._pending: deque[StreamEvent] = deque()
        self._is_stream = False
        self.lookup: Lookup | None = None
        self.failure: SingletreeError | None = None
        self.done = False
        self.cut = False

    def feed(self, data: bytes) -> list[int] | Chunk | None:
        try:
            self._events = self._stream.feed(data)
        except SingletreeError as error:
            self._fail(error)
            return None
        self._is_stream = self._is_stream or bool(self._events)
        self._pending = deque(event for event in self._events if event.tokens_missing)
        chunk = self._go_on()
        if self.lookup is not None:
            return None
        if chunk is None:
            return []
        return list(chunk.token_ids) if _has_only_tokens(chunk) else chunk

    def resolve(self, status: int, body: bytes) -> Chunk | None:
        event = self._pending.popleft()
        try:
            if status != 200:
                raise EngineFailed(f"llama.cpp failed to tokenize (HTTP {status})")
            event.tokens = decode_tokenize_response(body, event.content)
        except SingletreeError as error:
            self._fail(error)
            return None
        return self._go_on()

    def _go_on(self) -> Chunk | None:
        if self._pending:
            self.lookup = Lookup(TOKENIZE, encode_tokenize_request(self._pending[0].content))
            return None
        self.lookup = None
        chunk = self._stream.take(self._events)
        self._events = ()
        if chunk is not None and chunk.finish is not None:
            self.done = True
            self.cut = not self._stream.ended
        return chunk

    def close(self, unfinished: SingletreeError | StopKind | None = None) -> Chunk | None:
        self.lookup = None
        if self.done:
            return None
        self.done = True
        if unfinished is None and self._is_stream:
            unfinished = EngineFailed("llama.cpp ended its stream without its last event")
        if unfinished is None:
            unfinished = EngineUnfit(
                "llama.cpp sent no event stream; check that --engine-url is a llama-server"
            )
        if isinstance(unfinished, SingletreeError):
            self.failure = unfinished
            return None
        return Chunk((), unfinished)

    def _fail(self, failure: SingletreeError) -> None:
        self.failure, self.done, self.lookup = failure, True, None


class LlamaServerWire(Wire):
    """llama.cpp's ``/completion``; see ``Wire``."""

    words = _WORDS
    abilities = ABILITIES["llama-server"]

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
        return encode_llamacpp_request(job, limit=max_tokens)

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        return LlamaServerReader(job, max_tokens)

    def refusal(self, status: int, body: bytes, job: GenerationJob, retry_after: str) -> SingletreeError:
        if status in (400, 503):
            found = decode_llamacpp_error(status, body)
            if type(found) is not EngineFailed:
                return found
        return super().refusal(status, body, job, retry_after)


class LlamaServer:
    """A ``llama-server`` of llama.cpp; tested with the one inside xllamacpp. See ``Server``.

    Its slots keep the last prompts: with fewer slots (``--parallel``) than conversations, conversations evict one
    another. It has no priorities, and it serves one model.
    """

    title = "llama.cpp"
    hint = "start it with `llama-server -m MODEL.gguf`, or correct the URL"

    async def look_up(self, url: str, get: GetPage) -> ServerOffer:
        status, body = await get("/props")
        check_status(url, status, self.title)
        properties = decode_as(ServerProperties, body)
        if properties is None:
            raise BadConfiguration(
                f"{url}/props has no properties of a model (HTTP {status}): it is not a llama-server; correct the URL"
            )
        _, listed = await get("/v1/models")
        names = [each.id for each in decode_models(listed)]
        path = properties.model_path or ""
        name = properties.model_alias or (names[0] if names else path)
        return ServerOffer(
            _file_name(name),
            (LlamaServerWire(),),
            window=properties.default_generation_settings.n_ctx,
            slots=properties.total_slots,
            details={"version": properties.build_info},
            checkpoint=path or None,
            tokenize=lambda text: Lookup(TOKENIZE, encode_prompt_tokenize_request(text)),
        )


def _has_only_tokens(chunk: Chunk) -> bool:
    return (
        chunk.finish is None
        and chunk.logprobs is None
        and chunk.cached_tokens is None
        and chunk.prompt_logprobs is None
        and chunk.prompt_tokens is None
        and chunk.route is None
    )


def _file_name(name: str) -> str:
    """Return the name without folders and ``.gguf``: an unnamed model is listed by its path."""
    return name.replace("\\", "/").rpartition("/")[2].removesuffix(".gguf")
