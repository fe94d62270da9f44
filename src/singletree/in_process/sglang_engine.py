"""SGLang inside this process: token ids in and out through ``sglang.Engine``, without HTTP.

SGLang's scheduler and detokenizer run in child processes. Without its tokenizer (``--skip-tokenizer-init``) SGLang has
no constraints, and so no forced tool calls: so it keeps the tokenizer, and the text that it decodes is not used.
A test replaces what loads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.devices import installed_version
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, LogprobRow, StopKind
from singletree.engines.progress import Progress, no_progress
from singletree.errors import EngineFailed, SingletreeError
from singletree.in_process.engine import InProcessEngine, InProcessGeneration
from singletree.in_process.sglang_startup import PACKAGE
from singletree.in_process.startup import EngineSettings
from singletree.pictures import PromptPicture
from singletree.remote.pictures import PictureCounts, count_by_generating, pictures_of, silence
from singletree.remote.sglang import (
    FIRST_ANSWER_SECONDS,
    SGLANG_BACKENDS,
    SGLANG_BLINDNESS,
    SGLANG_CONSTRAINTS,
    SGLANG_WORDS,
    SglangMeta,
    SglangReader,
    backend_loss,
    sglang_pictures,
    sglang_request,
)
from singletree.remote.transport import ServerRefusal, convert_refusal

_LOG = logging.getLogger(__name__)
_BAD_REQUEST = 400
_NO_LIMIT = 2**31  # SGLang keeps to the one that it is given.
_DEFAULT_SLOTS = 256
_ENDED = object()


class _SglangGeneration(InProcessGeneration):
    """Its outputs are in a queue, so that it can be ended while none comes."""

    _owner: InProcessSglangEngine

    def __init__(
        self, owner: InProcessSglangEngine, engine: Any, job: GenerationJob, id: str, max_tokens: int
    ) -> None:
        super().__init__(owner, engine, job, id, max_tokens)
        self._reader = _OutputReader(job, owner._counts)
        self._outputs: deque[Any] = deque()
        self._reading: asyncio.Task[None] | None = None

    async def send(self) -> None:
        for picture in self._owner._counts.uncounted(self.job):
            await self._owner.count_picture_tokens(picture)
        if self.outcome is None:  # It may have been ended while pictures were counted.
            stream = await self._engine.async_generate(**self._request())
            self._reading = asyncio.create_task(self._read(stream))

    def _request(self) -> dict[str, Any]:
        owner, job = self._owner, self.job
        fields = sglang_request(job, max_tokens=self._max_tokens)
        fields["sampling_params"] = {**owner._defaults, **fields["sampling_params"]}
        fields |= {"rid": self._id, "input_ids": list(job.prompt_token_ids)}
        if owner._priority_sign:
            fields["priority"] = owner._priority_sign * job.priority
        if job.cache_salt:
            fields["cache_salt"] = job.cache_salt
        if pictures := pictures_of(job):
            fields |= sglang_pictures(pictures)
        if job.session:
            fields["session_id"] = job.session
        if (rank := owner._rank_of(job)) is not None:
            fields["routed_dp_rank"] = rank
        return fields

    async def _read(self, stream: Any) -> None:
        reader, handover = self._reader, self.handover
        try:
            async with aclosing(stream):
                async for output in stream:
                    if (tokens := reader.tokens_alone(output)) is None or not handover.offer(tokens):
                        self._put(output)
                    else:
                        reader.count(tokens)
            self._put(_ENDED)
        except Exception as error:
            self._put(error)

    def _put(self, output: Any) -> None:
        self._outputs.append(output)
        self.handover.wake()

    def end(self, outcome: SingletreeError | StopKind) -> None:
        super().end(outcome)
        self.handover.wake()

    async def next_chunk(self) -> Chunk | None:
        output = await self._next() if self._reader.started or not self.job.pictures else await self._first()
        if output is None:
            return Chunk(())
        if output is not _ENDED:
            chunk = self._reader.take(output)
            self.ended = self._reader.done
            return chunk
        if isinstance(self.outcome, SingletreeError):
            raise self.outcome
        if self.outcome is None:
            raise EngineFailed("SGLang ended its stream without a finish reason")
        await self.close()
        self.ended = True
        return Chunk((), "cancelled")

    async def _first(self) -> Any:
        """Return the first output. SGLang never answers a prompt whose placeholders it miscounts: that wait ends."""
        try:
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                return await self._next()
        except TimeoutError:
            raise silence("SGLang", FIRST_ANSWER_SECONDS) from None

    async def _next(self) -> Any:
        """Return the next output that was not delivered; None where ``deliver`` takes no more.

        Returns ``_ENDED`` behind the last, and when ``end`` was called. Raises what SGLang raised.
        """
        if not self._outputs and self.outcome is None:
            await self.handover.wait()
        if self.outcome is not None:
            return _ENDED
        if not self._outputs:
            return None
        output = self._outputs.popleft()
        if isinstance(output, Exception):
            raise output
        return output

    async def close(self) -> None:
        reading, self._reading = self._reading, None
        if reading is None:
            return
        if (not self.ended or self._reader.cut) and self._owner._engine is not None:
            self._engine.tokenizer_manager.abort_request(self._id)
        if not reading.done():
            reading.cancel()
            await asyncio.wait((reading,))


class InProcessSglangEngine(InProcessEngine):
    """Generate with SGLang (0.5.23 or newer) in this process and its children. See ``InProcessEngine``.

    SGLang sends SIGQUIT to this process when a child fails. From then on every generation ends with EngineFailed, and
    the server has to be started again: SGLang cannot be started twice in one process.

    ``details`` of ``info`` has the ``version`` of SGLang and its ``grammar_backend``.

    Args:
        load: starts SGLang and returns its ``Engine``; blocks.
    """

    _generation = _SglangGeneration

    def __init__(
        self,
        settings: EngineSettings,
        *,
        name: str,
        progress: Progress = no_progress,
        load: Callable[[EngineSettings, Progress], Any] = PACKAGE.load,
    ) -> None:
        super().__init__(settings, name=name, progress=progress)
        self._load_sglang = load
        self._priority_sign = 0
        self._counts = PictureCounts()
        self._failure: EngineFailed | None = None

    async def start(self) -> None:
        self._failure = None
        self._watch_children()
        await super().start()
        self._watch_children()  # With its first request SGLang has set its own handler, which ends this process.

    async def _start_engine(self) -> None:
        await self._load(self._load_sglang)

    def _describe(self, engine: Any) -> EngineInfo:
        manager, arguments = engine.tokenizer_manager, engine.server_args
        self._defaults = dict(manager.model_config.get_default_sampling_params() or {})
        self._ranks = arguments.dp_size or 1
        if arguments.enable_priority_scheduling:
            self._priority_sign = 1 if arguments.schedule_low_priority_values_first else -1
        if (loss := backend_loss(arguments.grammar_backend)) is not None:
            _LOG.warning("%s", loss)
        details = {
            "version": installed_version(PACKAGE.distributions),
            "grammar_backend": arguments.grammar_backend,
            "kv_block_size": arguments.page_size,
            "in_process": True,
        }
        return ABILITIES["sglang"].info(
            self._name,
            min(manager.context_len, self._settings.context_window or manager.context_len),
            arguments.max_running_requests or _DEFAULT_SLOTS,
            details,
            constraints=SGLANG_BACKENDS.get(arguments.grammar_backend, tuple(SGLANG_CONSTRAINTS)),
            blindness=None if manager.model_config.is_image_understandable_model else SGLANG_BLINDNESS,
        )

    def _watch_children(self) -> None:
        """Take SIGQUIT, by which SGLang reports a failed child: by default it would end this process."""
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # Only in the main thread.
            asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._child_failed)

    def _child_failed(self) -> None:
        if self._failure is None and self._engine is not None:
            _LOG.error("a process of SGLang failed; start singletree again")
            self._end_all(EngineFailed("a process of SGLang failed; the server has to be started again"))

    def _end_all(self, failure: EngineFailed) -> None:
        self._failure = failure
        super()._end_all(failure)

    async def _running(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return await super()._running()

    def _converted(self, error: Exception, prompt_tokens: int) -> SingletreeError:
        if isinstance(error, ValueError | TypeError):
            return convert_refusal(SGLANG_WORDS, _BAD_REQUEST, ServerRefusal(str(error)), prompt_tokens)
        return EngineFailed(f"SGLang failed: {type(error).__name__}: {str(error)[:200]}")

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        return await count_by_generating(self, "SGLang", picture)


class _OutputReader(SglangReader):
    """Turns the outputs of one generation into chunks, whether each has all tokens so far or the new ones only.

    Attributes:
        started: whether the first output has come.
    """

    def __init__(self, job: GenerationJob, counts: PictureCounts) -> None:
        super().__init__(job, _NO_LIMIT, counts)
        self.started = False

    def tokens_alone(self, output: dict[str, Any]) -> Sequence[int] | None:
        """Return the new tokens of an output that has nothing else to report; None if it has, as the first one."""
        meta = output["meta_info"]
        if (
            not self.started
            or self._scores_prompt
            or meta.get("finish_reason") is not None
            or meta.get("output_token_logprobs") is not None
        ):
            return None
        ids: list[int] = output.get("output_ids") or []
        begin = self._begin_of_new(len(ids), meta.get("completion_tokens", len(ids)))
        new = None if begin is None else ids[begin:]
        return None if new and self._stops and not self._stops.isdisjoint(new) else new

    def count(self, token_ids: Sequence[int]) -> None:
        self._seen += len(token_ids)

    def take(self, output: dict[str, Any]) -> Chunk | None:
        """Return the chunk of one output; None when it has nothing new. Raises the error that an output reports."""
        token_ids: list[int] = []
        logprobs: list[LogprobRow] = []
        meta = msgspec.convert(output["meta_info"], SglangMeta)
        self._take_output(output.get("output_ids") or [], meta, token_ids, logprobs)
        self.done = self.done or self._finish is not None
        if self._stops and not self._stops.isdisjoint(token_ids):
            ended = self.done
            end = next(at for at, token_id in enumerate(token_ids, 1) if token_id in self._stops)
            self._cut(token_ids, logprobs, end, "stop")
            self.cut = not ended
        if self.failure is not None:
            raise self.failure
        cached, self.cached_tokens = self.cached_tokens, None
        chunk = self._chunk(token_ids, logprobs)
        if not self.started:
            self.started = True
            chunk = chunk or Chunk(())
            chunk.cached_tokens = cached
        return chunk

    def _stream_error(self, refusal: ServerRefusal, has_tokens: bool) -> None:
        if refusal.code == _BAD_REQUEST:  # Whenever SGLang finds it, nothing of the engine failed.
            self._fail(convert_refusal(SGLANG_WORDS, _BAD_REQUEST, refusal, self._prompt_tokens))
        else:
            super()._stream_error(refusal, has_tokens or self._seen > 0)
