"""SGLang inside this process: token ids in and out through ``sglang.Engine``, without HTTP.

SGLang's scheduler and detokenizer run in child processes. Without its tokenizer (``--skip-tokenizer-init``) SGLang has
no constraints, and so no forced tool calls: so it keeps the tokenizer, and the text that it decodes is not used.
Everything that is SGLang's is reached through ``SglangApi``, so that tests can replace it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any

from singletree.conversation import Sampling
from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, LogprobRow, StopKind, token_limit
from singletree.engines.engine_arguments import EngineSettings
from singletree.engines.handover import Handover
from singletree.engines.remote.pictures import PictureCounts, pictures_of
from singletree.engines.sglang.pictures import (
    FIRST_ANSWER_SECONDS,
    SGLANG_BLINDNESS,
    sglang_pictures,
    unread_pictures,
)
from singletree.engines.sglang.sampling import (
    SGLANG_BACKENDS,
    SGLANG_CONSTRAINTS,
    SGLANG_FINISHES,
    sglang_request,
)
from singletree.engines.sglang.startup import load_sglang, sglang_version
from singletree.engines.weights.progress import Progress, no_progress
from singletree.errors import ContextOverflow, EngineFailed, EngineUnfit, InvalidRequest, SingletreeError
from singletree.events import WeightVersion
from singletree.pictures import PromptPicture

_LOG = logging.getLogger(__name__)
_PROBE = GenerationJob((0,), Sampling(max_tokens=1, temperature=0.0), "singletree-probe")
_OVERFLOW = re.compile(r"context length \((\d+) tokens\)|maximum allowed length \((\d+) tokens")
_BAD_REQUEST = 400
_MAX_MESSAGE_LENGTH = 400
_DEFAULT_SLOTS = 256
_ENDED = object()


@dataclass(frozen=True, slots=True)
class SglangApi:
    """What this engine needs of the package ``sglang``.

    Attributes:
        load: starts SGLang and returns its ``Engine``; blocks.
        version: returns the version of SGLang.
    """

    load: Callable[[EngineSettings, Progress], Any] = load_sglang
    version: Callable[[], str] = sglang_version


class InProcessSglangEngine:
    """Generate with SGLang (0.5.23 or newer) in this process and its children.

    SGLang sends SIGQUIT to this process when a child fails. From then on every generation ends with EngineFailed, and
    the server has to be started again: SGLang cannot be started twice in one process.

    Args:
        settings: what to start.
        name: the model's name.
        progress: reports the steps of the start.
        api: what is needed of SGLang.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        name: str,
        progress: Progress = no_progress,
        api: SglangApi | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._progress = progress
        self._api = api or SglangApi()
        self._engine: Any = None
        self._info: EngineInfo | None = None
        self._defaults: dict[str, Any] = {}
        self._ranks = 1
        self._priority_sign = 0
        self._counts = PictureCounts()
        self._failure: EngineFailed | None = None
        self._in_flight: dict[str, _Generating] = {}
        self._numbers = count()

    async def start(self) -> None:
        """Start SGLang and generate one token. Raises BadConfiguration or EngineFailed with the limit and the cure."""
        self._failure = None
        self._watch_children()
        self._engine = await asyncio.to_thread(self._api.load, self._settings, self._progress)
        manager, arguments = self._engine.tokenizer_manager, self._engine.server_args
        self._defaults = dict(manager.model_config.get_default_sampling_params() or {})
        self._ranks = arguments.dp_size or 1
        if arguments.enable_priority_scheduling:
            self._priority_sign = 1 if arguments.schedule_low_priority_values_first else -1
        details = {
            "version": self._api.version(),
            "grammar_backend": arguments.grammar_backend,
            "kv_block_size": arguments.page_size,
            "in_process": True,
        }
        self._info = ABILITIES["sglang"].info(
            self._name,
            min(manager.context_len, self._settings.context_window or manager.context_len),
            arguments.max_running_requests or _DEFAULT_SLOTS,
            details,
            constraints=SGLANG_BACKENDS.get(arguments.grammar_backend, tuple(SGLANG_CONSTRAINTS)),
            blindness=None if manager.model_config.is_image_understandable_model else SGLANG_BLINDNESS,
        )
        try:
            async for _ in self.generate(_PROBE):
                pass
        except BaseException:
            await self.close()
            raise
        self._watch_children()  # With its first request SGLang has set its own handler, which ends this process.

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
        for running in self._in_flight.values():
            running.end(failure)

    async def close(self) -> None:
        """End SGLang's processes; running generations end with EngineFailed."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._end_all(EngineFailed("the engine was closed"))
        await asyncio.to_thread(engine.shutdown)

    def info(self) -> EngineInfo:
        """Return name and limits. ``details`` has the ``version`` of SGLang and its ``grammar_backend``."""
        return self._info or EngineInfo(self._name, 0)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the contract of ``Engine.generate``. The last chunk has the token that ended the turn."""
        engine = self._engine
        if self._failure is not None or engine is None:
            raise self._failure or EngineFailed("the engine is not running: start it first")
        prompt = job.prompt_token_ids
        max_tokens = token_limit(len(prompt), job.sampling.max_tokens, self.info().context_window)
        if max_tokens == 0:
            yield Chunk((), "length")
            return
        if job.pictures and self.info().pictures is None:
            raise InvalidRequest(f"this model takes no pictures: {self.info().blindness}")
        for picture in self._counts.uncounted(job):
            await self.count_picture_tokens(picture)
        # SGLang aborts all requests whose id begins with the one given: no id may begin with another.
        id = f"{job.request_id}#{next(self._numbers)}."
        reader = _OutputReader(job, self._counts)
        running = self._in_flight[id] = _Generating(job.request_id, reader)
        try:
            running.read(await engine.async_generate(**self._request(job, id, max_tokens)))
            while reader.finish is None and (output := await self._next(running, reader, job)) is not _ENDED:
                chunk = Chunk(()) if output is None else reader.take(output)
                if chunk is not None:
                    yield chunk
                    if chunk.token_ids:
                        running.handover.deliver = job.deliver
        except SingletreeError:
            raise
        except (ValueError, TypeError) as error:
            raise _refusal(str(error), len(prompt)) from error
        except Exception as error:
            raise EngineFailed(f"SGLang failed: {type(error).__name__}: {str(error)[:200]}") from error
        finally:
            del self._in_flight[id]
            if (reader.finish is None or reader.cut) and self._engine is not None:
                engine.tokenizer_manager.abort_request(id)
            await running.stop()
        if reader.finish is None:
            if isinstance(running.outcome, SingletreeError):
                raise running.outcome
            if running.outcome is None:
                raise EngineFailed("SGLang ended its stream without a finish reason")
            yield Chunk((), "cancelled")

    async def _next(self, running: _Generating, reader: _OutputReader, job: GenerationJob) -> Any:
        """Return the next output. SGLang never answers a prompt whose placeholders it miscounts: that wait ends."""
        if not job.pictures or reader.started:
            return await running.next()
        try:
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                return await running.next()
        except TimeoutError:
            raise EngineFailed(
                f"SGLang did not begin to answer a prompt with pictures within {FIRST_ANSWER_SECONDS:g} s; it may be "
                "overloaded, or may have lost the request: its log has the cause"
            ) from None

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Generate one token behind the picture: the answer has the length of the whole prompt."""
        if self.info().pictures is None:
            raise EngineUnfit(f"the engine takes no pictures: {self.info().blindness}")
        prompt, alone = picture.alone()
        job = GenerationJob(prompt, Sampling(max_tokens=1), "singletree-count", pictures=(alone,))
        counts = [chunk.picture_tokens[0] async for chunk in self.generate(job) if chunk.picture_tokens]
        if not counts:
            raise EngineFailed("SGLang reported no length of a picture; try again")
        return counts[0]

    def _request(self, job: GenerationJob, id: str, max_tokens: int) -> dict[str, Any]:
        fields = sglang_request(job, max_tokens=max_tokens)
        fields["sampling_params"] = {**self._defaults, **fields["sampling_params"]}
        fields |= {"rid": id, "input_ids": list(job.prompt_token_ids)}
        if self._priority_sign:
            fields["priority"] = self._priority_sign * job.priority
        if job.cache_salt:
            fields["cache_salt"] = job.cache_salt
        if pictures := pictures_of(job):
            fields |= sglang_pictures(pictures)
        if job.session:
            fields["session_id"] = job.session
            if self._ranks > 1:
                fields["routed_dp_rank"] = zlib.crc32(job.session.encode()) % self._ranks
        return fields

    async def abort(self, request_id: str) -> None:
        """End the generations of that id: they end with ``cancelled``."""
        for running in tuple(self._in_flight.values()):
            if running.request_id == request_id:
                running.end("cancelled")


class _Generating:
    """One running generation: its outputs in a queue, so that it can be ended while none comes.

    Attributes:
        handover: delivers tokens that need not be put into the queue.
        outcome: how it was ended before its time; None while it was not.
    """

    __slots__ = ("_outputs", "_reader", "_reading", "handover", "outcome", "request_id")

    def __init__(self, request_id: str, reader: _OutputReader) -> None:
        self.request_id = request_id
        self.handover = Handover()
        self.outcome: SingletreeError | StopKind | None = None
        self._reader = reader
        self._outputs: deque[Any] = deque()
        self._reading: asyncio.Task[None] | None = None

    def read(self, stream: Any) -> None:
        """Begin to read the outputs of SGLang's generator."""
        self._reading = asyncio.create_task(self._read(stream))

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
        """End the generation with ``outcome``, unless it has one."""
        if self.outcome is None:
            self.outcome = outcome
            self.handover.wake()

    async def next(self) -> Any:
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

    async def stop(self) -> None:
        """Stop reading: SGLang drops the generation if it still runs."""
        if self._reading is not None and not self._reading.done():
            self._reading.cancel()
            await asyncio.wait((self._reading,))


class _OutputReader:
    """Turns the outputs of one generation into chunks, whether each has all tokens so far or the new ones only.

    Attributes:
        finish: why the generation ended; None while it runs.
        cut: whether it ended here, at a stop token, and SGLang still generates.
        started: whether there was an output.
    """

    __slots__ = ("_counts", "_job", "_reported", "_scored", "_seen", "_stops", "cut", "finish", "started")

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
        """Count tokens that were delivered."""
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
                raise _aborted(reason, len(self._job.prompt_token_ids))
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
    """Return one row for each (logprob, token id, text) of ``own``, with its alternatives of ``top``."""
    rows: list[LogprobRow] = []
    for index, (logprob, token_id, *_) in enumerate(own):
        if logprob is None:
            rows.append(())
            continue
        others = (top[index] if top and index < len(top) else None) or ()
        rows.append([(token_id, logprob), *((id, value) for value, id, *_ in others if id != token_id)])
    return rows


def _aborted(reason: dict[str, Any], prompt_tokens: int) -> SingletreeError:
    """Return the error for a generation that SGLang has ended with a status."""
    message = str(reason.get("message") or "no reason given")
    if int(reason["status_code"]) == _BAD_REQUEST:
        return _refusal(message, prompt_tokens)
    return EngineFailed(f"SGLang failed: {message[:_MAX_MESSAGE_LENGTH]}")


def _refusal(message: str, prompt_tokens: int) -> SingletreeError:
    if found := _OVERFLOW.search(message):
        return ContextOverflow(prompt_tokens, int(found[1] or found[2]))
    return InvalidRequest(
        f"the engine refused the request: {' '.join(message[:_MAX_MESSAGE_LENGTH].split())}"
    )
