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

from singletree.engines.abilities import ABILITIES
from singletree.engines.devices import installed_version
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, LogprobRow, StopKind
from singletree.engines.progress import Progress, no_progress
from singletree.errors import EngineFailed, SingletreeError
from singletree.events import WeightVersion
from singletree.in_process.engine import InProcessEngine, InProcessGeneration
from singletree.in_process.sglang_startup import PACKAGE, load_sglang
from singletree.in_process.startup import EngineSettings
from singletree.pictures import PromptPicture
from singletree.remote.pictures import PictureCounts, count_by_generating, pictures_of, silence
from singletree.remote.sglang import (
    FIRST_ANSWER_SECONDS,
    SGLANG_BACKENDS,
    SGLANG_BLINDNESS,
    SGLANG_CONSTRAINTS,
    SGLANG_FINISHES,
    SGLANG_WORDS,
    backend_loss,
    sglang_pictures,
    sglang_request,
    unread_pictures,
)
from singletree.remote.transport import ServerRefusal, convert_refusal

_LOG = logging.getLogger(__name__)
_BAD_REQUEST = 400
_FULL = 503
_MAX_MESSAGE_LENGTH = 400
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
            self.ended = self._reader.finish is not None
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
        load: Callable[[EngineSettings, Progress], Any] = load_sglang,
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


class _OutputReader:
    """Turns the outputs of one generation into chunks, whether each has all tokens so far or the new ones only.

    Attributes:
        finish: why the generation ended; None while it runs.
        cut: whether it ended here, at a stop token, and SGLang still generates.
    """

    def __init__(self, job: GenerationJob, counts: PictureCounts) -> None:
        self._job = job
        self._counts = counts
        # With ignore_eos SGLang ignores stop tokens, too.
        self._stops = frozenset(job.stop_token_ids if job.sampling.ignore_eos else ())
        self.cut = self.started = False
        self._scored = job.sampling.prompt_logprobs is None
        self._reported = False
        self._seen = 0
        self.finish: StopKind | None = None

    def tokens_alone(self, output: dict[str, Any]) -> Sequence[int] | None:
        """Return the new tokens of an output that has nothing else to report; None if it has, as the first one."""
        meta = output["meta_info"]
        if (
            not self.started
            or not self._reported
            or not self._scored
            or meta.get("finish_reason") is not None
            or meta.get("output_token_logprobs") is not None
        ):
            return None
        new = self._new_tokens(output)
        return None if self._stops and not self._stops.isdisjoint(new) else new

    def count(self, token_ids: Sequence[int]) -> None:
        self._seen += len(token_ids)

    def _new_tokens(self, output: dict[str, Any]) -> list[int]:
        ids: list[int] = output.get("output_ids") or []
        is_new = len(ids) == output["meta_info"].get("completion_tokens", len(ids)) - self._seen
        return ids if is_new else ids[self._seen :]

    def take(self, output: dict[str, Any]) -> Chunk | None:
        """Return the chunk of one output; None when it has nothing new.

        Raises EngineFailed or InvalidRequest for one that reports an error.
        """
        meta = output["meta_info"]
        reason = meta.get("finish_reason")
        if reason is not None:
            if reason["type"] == "abort" and reason.get("status_code") is not None:
                raise _aborted(reason, len(self._job.prompt_token_ids), has_begun=self._seen > 0)
            self.finish = SGLANG_FINISHES.get(reason["type"])
            if self.finish is None:
                raise EngineFailed(
                    f"SGLang ended the generation with {reason['type']!r}; its log has the cause"
                )
        new = [] if self.finish == "cancelled" else self._new_tokens(output)
        self._seen += len(new)
        if (stop := next((n for n, id in enumerate(new) if id in self._stops), None)) is not None:
            self.cut, self.finish = self.finish is None, "stop"
            dropped = len(new) - stop - 1
        else:
            dropped = 0
        prompt_rows = None
        if not self._scored and meta.get("input_token_logprobs"):
            self._scored = True
            prompt_rows = _rows(meta["input_token_logprobs"], meta.get("input_top_logprobs"))
        own = meta.get("output_token_logprobs")
        logprobs = None
        if own is not None and new:
            # They are cumulative or not, as the ids are.
            first = len(own) - len(new) if len(own) > len(new) else 0
            logprobs = _rows(own[first:], (meta.get("output_top_logprobs") or [])[first:])
            del logprobs[len(new) - dropped :]
        read = self._read_tokens(meta)
        cached = None if self._reported else meta.get("cached_tokens")
        self._reported = self._reported or cached is not None
        if not new and self.finish is None and cached is None and prompt_rows is None and read is None:
            return None
        versions = () if self.finish is None else meta.get("weight_versions") or ()
        chunk = Chunk(
            new[: len(new) - dropped],
            self.finish,
            cached,
            logprobs,
            prompt_rows,
            weight_versions=[WeightVersion(each["version"], each["start"], each["end"]) for each in versions],
        )
        if read is not None:
            chunk.prompt_tokens, chunk.picture_tokens = read, self._counts.learn(self._job, read)
        return chunk

    def _read_tokens(self, meta: dict[str, Any]) -> int | None:
        """Return how many tokens SGLang read as a prompt with pictures; None in all outputs but the first.

        Raises EngineUnfit if it read none of the pictures.
        """
        first, self.started = not self.started, True
        if not first or not self._job.pictures:
            return None
        read = int(meta.get("prompt_tokens") or 0)
        if unread := unread_pictures(self._job, read, meta.get("image_tokens")):
            raise unread
        return read


def _rows(own: Sequence[Any], top: Sequence[Any] | None) -> list[LogprobRow]:
    rows: list[LogprobRow] = []
    for index, (logprob, token_id, *_) in enumerate(own):
        if logprob is None:
            rows.append(())
            continue
        others = (top[index] if top and index < len(top) else None) or ()
        rows.append([(token_id, logprob), *((id, value) for value, id, *_ in others if id != token_id)])
    return rows


def _aborted(reason: dict[str, Any], prompt_tokens: int, *, has_begun: bool) -> SingletreeError:
    message = str(reason.get("message") or "no reason given")
    status = int(reason["status_code"])
    # A full queue refuses a request; what has begun to generate is not sent again by whoever waits for a place.
    if status == _BAD_REQUEST or (status == _FULL and not has_begun):
        return convert_refusal(SGLANG_WORDS, status, ServerRefusal(message), prompt_tokens)
    return EngineFailed(f"SGLang failed: {message[:_MAX_MESSAGE_LENGTH]}")
