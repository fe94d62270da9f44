"""vLLM inside this process: token ids in and out through ``AsyncLLM``, without HTTP and without a detokenizer.

vLLM's scheduler and workers run in child processes. One message of theirs has the new tokens of all streams of a
step; ``AsyncLLM`` takes them in one wake-up of the event loop, in which they are delivered to the streams
(``vllm/outputs.py``). Everything that is vLLM's is reached through ``VllmApi``, so that tests can replace it.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from singletree.conversation import Sampling
from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Chunk, ConstraintKind, EngineInfo, GenerationJob, token_limit
from singletree.engines.engine_arguments import EngineSettings
from singletree.engines.remote.refusals import ServerRefusal, convert_refusal
from singletree.engines.restart_backoff import RestartBackoff
from singletree.engines.vllm.outputs import GenerationOutputs, OutputBypass, bypass_processor, vllm_chunk
from singletree.engines.vllm.pictures import PictureInputs, PicturePrompt
from singletree.engines.vllm.sampling import CONSTRAINT_KINDS, sampling_fields
from singletree.engines.vllm.startup import load_vllm, vllm_version
from singletree.engines.vllm.wire import vllm_words
from singletree.engines.weights.progress import Progress, no_progress
from singletree.errors import EngineFailed, EngineUnfit, InvalidRequest, SingletreeError
from singletree.pictures import PromptPicture

_LOG = logging.getLogger(__name__)
_WORDS = vllm_words("the engine in this process")
_PROBE = GenerationJob((0,), Sampling(max_tokens=1, temperature=0.0), "singletree-probe")
_CLOSE_SECONDS = 5.0

# The kinds that a backend of structured outputs supports; the others support those of XGrammar.
_BACKENDS: dict[str, tuple[ConstraintKind, ...]] = {"guidance": ("lark", "json_schema", "regex", "gbnf")}


@dataclass(frozen=True, slots=True)
class VllmApi:
    """What this engine needs of the package ``vllm``.

    Attributes:
        load: starts vLLM and returns its ``AsyncLLM``; blocks.
        prompt: makes an engine input from a list of token ids and the salt of its cache, None for none.
        sampling: makes ``SamplingParams`` from fields.
        refused: the exceptions that mean that the request is at fault.
        full: the exceptions that mean that vLLM accepts no more requests now.
        dead: the exception that means that vLLM's processes have ended.
        encode_array: encodes an array as an ``.npy`` file in base64.
        picture_prompt: makes a prompt with pictures.
        takes_pictures: returns whether the model of an ``AsyncLLM`` does.
        bypass: makes the bypass of the output processor of an ``AsyncLLM``, None where there can be none.
    """

    load: Callable[[EngineSettings, Progress], Any]
    prompt: Callable[[list[int], str | None], Any]
    sampling: Callable[[dict[str, Any]], Any]
    refused: tuple[type[Exception], ...]
    full: tuple[type[Exception], ...]
    dead: type[Exception]
    encode_array: Callable[[Any], str]
    picture_prompt: PicturePrompt
    takes_pictures: Callable[[Any], bool]
    bypass: Callable[[Any], OutputBypass | None]


def vllm_api() -> VllmApi:
    """Import vLLM. Raises BadConfiguration when it is not installed or too old."""
    vllm_version()
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.inputs import TokensPrompt, tokens_input
    from vllm.multimodal.media import ImageMediaIO
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from vllm.utils.serial_utils import numpy2base64
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.exceptions import EngineDeadError

    def sampling(fields: dict[str, Any]) -> Any:
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        return SamplingParams.from_optional(
            **fields, detokenize=False, output_kind=RequestOutputKind.DELTA, skip_clone=True
        )

    def prompt(token_ids: list[int], cache_salt: str | None) -> Any:
        return tokens_input(token_ids, cache_salt=cache_salt)

    def picture_prompt(
        token_ids: list[int], pictures: Sequence[tuple[str, bytes | None]], cache_salt: str | None
    ) -> Any:
        reader = ImageMediaIO()
        images = [None if data is None else reader.load_bytes(data) for _, data in pictures]
        made = TokensPrompt(
            prompt_token_ids=token_ids,
            multi_modal_data={"image": images},
            multi_modal_uuids={"image": [uuid for uuid, _ in pictures]},
        )
        if cache_salt is not None:
            made["cache_salt"] = cache_salt
        return made

    def takes_pictures(llm: Any) -> bool:
        processor = llm.renderer.mm_processor
        return processor is not None and processor.info.allowed_mm_limits.get("image", 0) > 0

    return VllmApi(
        load_vllm,
        prompt,
        sampling,
        (VLLMClientError,),
        (GracefulHTTPError,),
        EngineDeadError,
        numpy2base64,
        picture_prompt,
        takes_pictures,
        lambda llm: bypass_processor(llm, EngineCoreOutput("", [])),
    )


class InProcessVllmEngine:
    """Generate with vLLM (0.32 or newer) in this process and its children.

    If vLLM's processes end, running generations fail, and the next request starts vLLM again.

    ``priority`` is vLLM's: a lower number runs earlier. A session is named to vLLM, and with several data-parallel
    ranks all its requests go to the same one, whose prefix cache has its prompts.

    Args:
        settings: what to start.
        name: the model's name.
        progress: reports the steps of the start.
        api: what is needed of vLLM; None to import it.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        name: str,
        progress: Progress = no_progress,
        api: VllmApi | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._progress = progress
        self._given_api = api
        self._api: VllmApi | None = api
        self._llm: Any = None
        self._counted_death: Any = None  # the AsyncLLM whose end was counted last
        self._info: EngineInfo | None = None
        self._defaults: dict[str, Any] = {}
        self._ranks = 1
        self._closed = False
        self._in_flight: dict[str, _Ending] = {}
        self._pictures: PictureInputs | None = None
        self._bypass: OutputBypass | None = None
        self._numbers = count()
        self._reviving: asyncio.Task[None] | None = None
        self._backoff = RestartBackoff()

    async def start(self) -> None:
        """Start vLLM and generate one token. Raises BadConfiguration or EngineFailed with the limit and the cure."""
        self._closed = False
        await self._load()
        try:
            async for _ in self.generate(_PROBE):
                pass
        except BaseException:
            await self.close()
            raise

    async def _load(self) -> None:
        self._backoff.record_start()
        if self._api is None:
            self._api = await asyncio.to_thread(vllm_api)
        api = self._api
        loading = asyncio.create_task(asyncio.to_thread(api.load, self._settings, self._progress))
        try:
            llm = await asyncio.shield(loading)
        except asyncio.CancelledError:
            # The thread cannot be interrupted; what it starts must not stay behind.
            loading.add_done_callback(_shut_down_loaded)
            raise
        if self._closed:
            await asyncio.to_thread(llm.shutdown)
            raise EngineFailed("the engine was closed")
        config = llm.vllm_config
        self._defaults = dict(config.model_config.get_diff_sampling_param())
        self._ranks = config.parallel_config.data_parallel_size
        self._pictures = PictureInputs(llm, api.picture_prompt) if api.takes_pictures(llm) else None
        self._info = self._describe(config)
        self._bypass = api.bypass(llm)
        self._llm = llm

    def _describe(self, config: Any) -> EngineInfo:
        blocks, block = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        backend = config.structured_outputs_config.backend
        details = {
            "version": vllm_version() if self._given_api is None else None,
            "kv_block_size": block,
            "kv_cache_tokens": blocks * block if blocks and block else None,
            "structured_outputs": backend,
            "in_process": True,
        }
        return ABILITIES["vllm"].info(
            self._name,
            config.model_config.max_model_len,
            config.scheduler_config.max_num_seqs,
            details,
            constraints=_BACKENDS.get(backend, CONSTRAINT_KINDS),
            blindness=None if self._pictures else "vLLM runs this model without pictures",
        )

    async def close(self) -> None:
        """End vLLM's processes; running generations end with EngineFailed."""
        self._closed = True
        llm, self._llm = self._llm, None
        if self._reviving is not None:
            self._reviving.cancel()
        if llm is None:
            return
        await self._end_all(llm, EngineFailed("the engine was closed"))
        await asyncio.to_thread(llm.shutdown)

    async def _end_all(self, llm: Any, outcome: SingletreeError) -> None:
        for ending in self._in_flight.values():
            ending.outcome = ending.outcome or outcome
        try:
            # vLLM ends the streams before it waits for its processes.
            async with asyncio.timeout(_CLOSE_SECONDS):
                await llm.abort(list(self._in_flight))
        except Exception as error:  # The processes may have ended; the streams have their outcome.
            _LOG.debug("vLLM did not confirm that its generations ended: %s", error)

    def info(self) -> EngineInfo:
        """Return name and limits.

        ``details`` has the ``version`` of vLLM, ``kv_tokens`` (how many tokens fit its KV cache) and the backend of
        ``structured_outputs``.
        """
        return self._info or EngineInfo(self._name, 0)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the contract of ``Engine.generate``. The last chunk has the token that ended the turn."""
        llm, api = await self._running()
        prompt = job.prompt_token_ids
        max_tokens = token_limit(len(prompt), job.sampling.max_tokens, self.info().context_window)
        if max_tokens == 0:  # vLLM refuses max_tokens of 0
            yield Chunk((), "length")
            return
        id = f"{job.request_id}#{next(self._numbers)}"
        ending = self._in_flight[id] = _Ending(job.request_id)
        finished = False
        outputs: GenerationOutputs | None = None
        reports_cached, may_resend = True, bool(job.pictures)
        try:
            engine_input, lengths = await self._render(api, job)
            if lengths is not None:
                max_tokens = self._room(job, engine_input)
            outputs = await self._submit(llm, api, job, engine_input, id, max_tokens)
            if ending.outcome is not None:
                await llm.abort(id)
            while not finished:
                output = await outputs.next()
                if output is None:
                    yield Chunk(())
                    continue
                finished = output.finished
                if may_resend and self._pictures and output.outputs[0].finish_reason == "error":
                    # vLLM's processes disagree about which pictures they have. With all bytes they agree again.
                    may_resend = finished = False
                    outputs.close()
                    self._pictures.forget(job.pictures)
                    engine_input, lengths = await self._render(api, job)
                    outputs = await self._submit(llm, api, job, engine_input, id, max_tokens)
                    continue
                may_resend = False
                chunk = vllm_chunk(output, reports_cached, api.encode_array)
                if lengths is not None and reports_cached:
                    chunk.prompt_tokens, chunk.picture_tokens = len(output.prompt_token_ids), lengths
                if (
                    chunk.finish == "cancelled"
                    and ending.outcome is not None
                    and ending.outcome != "cancelled"
                ):
                    raise ending.outcome
                if chunk.token_ids or chunk.finish or chunk.prompt_logprobs or reports_cached:
                    reports_cached = False
                    yield chunk
                if chunk.token_ids:
                    outputs.handover.deliver = job.deliver
        except SingletreeError:
            raise
        except Exception as error:
            raise self._converted(error, api, len(prompt)) from error
        finally:
            del self._in_flight[id]
            if not finished:
                await self._release(llm, id)
            if outputs is not None:
                outputs.close()

    def _room(self, job: GenerationJob, engine_input: Any) -> int:
        """Return how many tokens may follow the prompt with its pictures expanded. Raises ContextOverflow."""
        read_tokens = len(engine_input["prompt_token_ids"])
        return max(1, token_limit(read_tokens, job.sampling.max_tokens, self.info().context_window))

    async def _render(self, api: VllmApi, job: GenerationJob) -> tuple[Any, Sequence[int] | None]:
        """Return the engine input of a job, and the length of each of its pictures; None where it has none."""
        prompt = job.prompt_token_ids
        token_ids = prompt if isinstance(prompt, list) else list(prompt)
        if not job.pictures:
            return api.prompt(token_ids, job.cache_salt or None), None
        if self._pictures is None:
            raise InvalidRequest(f"this model takes no pictures: {self.info().blindness}")
        return await self._pictures.render(job, token_ids)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return how many tokens vLLM's processor makes of the picture; nothing is generated."""
        await self._running()
        if self._pictures is None:
            raise EngineUnfit(f"the engine takes no pictures: {self.info().blindness}")
        return await self._pictures.count(picture)

    async def _submit(
        self, llm: Any, api: VllmApi, job: GenerationJob, engine_input: Any, id: str, max_tokens: int
    ) -> GenerationOutputs:
        """Hand the job to vLLM, and return its outputs."""
        fields = {**self._defaults, **sampling_fields(job, max_tokens=max_tokens)}
        if stops := self._defaults.get("stop_token_ids"):
            fields["stop_token_ids"] = list(dict.fromkeys([*job.stop_token_ids, *stops]))
        if job.sampling.prompt_logprobs is not None:
            fields["prompt_logprobs"] = job.sampling.prompt_logprobs
        queue = await llm.add_request(
            id,
            engine_input,
            api.sampling(fields),
            priority=job.priority,
            session_id=job.session or None,
            data_parallel_rank=self._rank(job.session),
        )
        return GenerationOutputs(queue, self._bypass)

    def _rank(self, session: str) -> int | None:
        """Return the data-parallel rank for a session; None to let vLLM choose."""
        return zlib.crc32(session.encode()) % self._ranks if session and self._ranks > 1 else None

    async def _release(self, llm: Any, id: str) -> None:
        """Make vLLM drop the generation."""
        try:
            await llm.abort(id)
        except Exception as error:  # Its processes have ended, and with them the generation.
            _LOG.debug("vLLM did not confirm that %s ended: %s", id, error)

    def _converted(self, error: Exception, api: VllmApi, prompt_tokens: int) -> SingletreeError:
        if isinstance(error, api.refused):
            text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
            refusal = ServerRefusal(text, getattr(error, "parameter", None))
            return convert_refusal(_WORDS, 400, refusal, prompt_tokens)
        if isinstance(error, api.full):
            status = int(getattr(error, "http_status", 503))
            return convert_refusal(_WORDS, status, ServerRefusal(str(error)), prompt_tokens)
        if isinstance(error, api.dead):
            return EngineFailed("vLLM's processes ended; the next request starts them again")
        cause = error.__cause__ or error
        return EngineFailed(f"vLLM failed: {type(cause).__name__}: {str(cause)[:200]}")

    async def _running(self) -> tuple[Any, VllmApi]:
        """Return vLLM; if its processes have ended, start them again first.

        Raises EngineFailed when the engine is not started or does not start, Overloaded while a vLLM that keeps
        ending has to pause.
        """
        if self._llm is not None and self._llm.errored:
            if self._reviving is None or self._reviving.done():
                self._check_pause(self._llm)
                self._reviving = asyncio.create_task(self._revive(self._llm))
            # A client that leaves must not end the start that others wait for.
            await asyncio.shield(self._reviving)
        if self._llm is None or self._api is None:
            raise EngineFailed("the engine is not running: start it first")
        return self._llm, self._api

    def _check_pause(self, dead: Any) -> None:
        """Raise Overloaded while vLLM may not be started again yet; ``dead`` is the one that has ended."""
        if dead is not self._counted_death:
            self._counted_death = dead
            self._backoff.record_death()
        self._backoff.check()

    async def _revive(self, dead: Any) -> None:
        _LOG.warning("vLLM's processes ended unexpectedly; starting them again")
        await asyncio.to_thread(dead.shutdown)
        try:
            await self._load()
        except SingletreeError:
            self._backoff.record_death()
            raise

    async def abort(self, request_id: str) -> None:
        """End the generations of that id: they end with ``cancelled``."""
        for id, ending in tuple(self._in_flight.items()):
            if ending.request_id == request_id:
                ending.outcome = ending.outcome or "cancelled"
                if self._llm is not None:
                    await self._release(self._llm, id)


@dataclass(slots=True)
class _Ending:
    """How one running generation ends before its time.

    Attributes:
        request_id: the id of its job.
        outcome: what ends it; None while nothing does.
    """

    request_id: str
    outcome: Any = None


def _shut_down_loaded(loading: asyncio.Task[Any]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().shutdown()
