"""vLLM inside this process: token ids in and out through ``AsyncLLM``, without HTTP and without a detokenizer.

vLLM's scheduler and workers run in child processes. One message of theirs has the new tokens of all streams of a
step; ``AsyncLLM`` takes them in one wake-up of the event loop, in which they are delivered to the streams
(``vllm_outputs.py``). Everything that is vLLM's is reached through ``VllmApi``, so that tests can replace it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from singletree.engines.abilities import ABILITIES
from singletree.engines.devices import installed_version
from singletree.engines.engine import Chunk, ConstraintKind, EngineInfo, GenerationJob, token_limit
from singletree.engines.lifetime import RestartBackoff
from singletree.engines.progress import Progress, no_progress
from singletree.errors import EngineFailed, EngineUnfit, InvalidRequest, SingletreeError
from singletree.in_process.engine import InProcessEngine, InProcessGeneration
from singletree.in_process.startup import EngineSettings
from singletree.in_process.vllm_outputs import GenerationOutputs, OutputBypass, vllm_chunk
from singletree.in_process.vllm_startup import PACKAGE, PicturePrompt, VllmApi, vllm_api
from singletree.pictures import PromptPicture
from singletree.remote.pictures import SentPictures, pictures_of
from singletree.remote.transport import ServerRefusal, convert_refusal
from singletree.remote.vllm.wire import (
    CONSTRAINT_KINDS,
    UNKNOWN_PICTURE,
    picture_uuid,
    sampling_fields,
    vllm_words,
)

_LOG = logging.getLogger(__name__)
_WORDS = vllm_words("the engine in this process")
_MAX_MESSAGE_LENGTH = 400

# The kinds that a backend of structured outputs supports; the others support those of XGrammar.
_BACKENDS: dict[str, tuple[ConstraintKind, ...]] = {"guidance": ("lark", "json_schema", "regex", "gbnf")}


class _VllmGeneration(InProcessGeneration):
    _owner: InProcessVllmEngine
    _outputs: GenerationOutputs | None = None
    _lengths: Sequence[int] | None = None  # of its pictures
    _reports_cached = True
    _resends = False  # whether it is sent again if it fails at once

    async def send(self) -> None:
        owner, job, max_tokens = self._owner, self.job, self._max_tokens
        prompt = job.prompt_token_ids
        token_ids = prompt if isinstance(prompt, list) else list(prompt)
        if job.pictures and owner._pictures is not None:
            self._resends = self._lengths is None
            engine_input, self._lengths = await owner._pictures.render(job, token_ids)
            read, window = len(engine_input["prompt_token_ids"]), owner.info().context_window
            max_tokens = max(1, token_limit(read, job.sampling.max_tokens, window))
        else:
            engine_input = owner._api.prompt(token_ids, job.cache_salt or None)
        fields = {**owner._defaults, **sampling_fields(job, max_tokens=max_tokens)}
        if stops := owner._defaults.get("stop_token_ids"):
            fields["stop_token_ids"] = list(dict.fromkeys([*job.stop_token_ids, *stops]))
        if job.sampling.prompt_logprobs is not None:
            fields["prompt_logprobs"] = job.sampling.prompt_logprobs
        queue = await self._engine.add_request(
            self._id,
            engine_input,
            owner._api.sampling(fields),
            priority=job.priority,
            session_id=job.session or None,
            data_parallel_rank=owner._rank_of(job),
        )
        self._outputs = GenerationOutputs(queue, owner._bypass)
        self.handover = self._outputs.handover
        if self.outcome is not None:
            await self._engine.abort(self._id)

    async def next_chunk(self) -> Chunk | None:
        assert self._outputs is not None
        output = await self._outputs.next()
        if output is None:
            return Chunk(())
        self.ended = output.finished
        reports_cached = self._reports_cached
        if output.outputs[0].finish_reason == "error" and reports_cached and self._resends:
            # vLLM's processes disagree about which pictures they have. With all bytes they agree again.
            self.ended = self._resends = False
            self._outputs.close()
            assert self._owner._pictures is not None
            self._owner._pictures.forget(self.job.pictures)
            await self.send()
            return None
        chunk = vllm_chunk(output, reports_cached, self._owner._api.encode_array)
        if self._lengths is not None and reports_cached:
            chunk.prompt_tokens, chunk.picture_tokens = len(output.prompt_token_ids), self._lengths
        if chunk.finish == "cancelled" and isinstance(self.outcome, SingletreeError):
            raise self.outcome
        if chunk.token_ids or chunk.finish or chunk.prompt_logprobs or reports_cached:
            self._reports_cached = False
            return chunk
        return None

    async def close(self) -> None:
        if not self.ended:
            await self._owner._drop(self._engine, [self._id])
        if self._outputs is not None:
            self._outputs.close()


class InProcessVllmEngine(InProcessEngine):
    """Generate with vLLM (0.32 or newer) in this process and its children. See ``InProcessEngine``.

    If vLLM's processes end, running generations fail, and the next request starts vLLM again.

    ``priority`` is vLLM's: a lower number runs earlier. A session is named to vLLM, and with several data-parallel
    ranks all its requests go to the same one, whose prefix cache has its prompts.

    ``details`` of ``info`` has the ``version`` of vLLM, ``kv_cache_tokens`` (how many tokens fit its KV cache) and the
    backend of ``structured_outputs``.

    Args:
        api: what is needed of vLLM; None to import it.
    """

    _generation = _VllmGeneration
    _api: VllmApi  # since vLLM was started

    def __init__(
        self,
        settings: EngineSettings,
        *,
        name: str,
        progress: Progress = no_progress,
        api: VllmApi | None = None,
    ) -> None:
        super().__init__(settings, name=name, progress=progress)
        self._given_api = api
        self._counted_death: Any = None  # the AsyncLLM whose end was counted last
        self._pictures: PictureInputs | None = None
        self._bypass: OutputBypass | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._backoff = RestartBackoff()

    async def _start_engine(self) -> None:
        self._backoff.record_start()
        given = self._given_api
        self._api = await asyncio.to_thread(vllm_api) if given is None else given
        await self._load(self._api.load)

    def _describe(self, engine: Any) -> EngineInfo:
        config = engine.vllm_config
        self._defaults = dict(config.model_config.get_diff_sampling_param())
        self._ranks = config.parallel_config.data_parallel_size
        sees = self._api.takes_pictures(engine)
        self._pictures = PictureInputs(engine, self._api.picture_prompt) if sees else None
        self._bypass = self._api.bypass(engine)
        blocks, block = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        backend = config.structured_outputs_config.backend
        details = {
            "version": installed_version(PACKAGE.distributions),
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
            blindness=None if sees else "vLLM runs this model without pictures",
        )

    async def close(self) -> None:
        if self._reviving is not None:
            self._reviving.cancel()
        await super().close()

    async def _drop(self, engine: Any, ids: list[str]) -> None:
        """Make vLLM end the generations: their streams get a last output at once."""
        try:
            await engine.abort(ids)
        except Exception as error:  # Its processes have ended, and with them the generations.
            _LOG.debug("vLLM did not confirm that %s ended: %s", ", ".join(ids), error)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return how many tokens vLLM's processor makes of the picture; nothing is generated."""
        await self._running()
        if self._pictures is None:
            raise EngineUnfit(f"the engine takes no pictures: {self.info().blindness}")
        return await self._pictures.count(picture)

    def _converted(self, error: Exception, prompt_tokens: int) -> SingletreeError:
        api = self._api
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

    async def _running(self) -> Any:
        """Return vLLM; if its processes have ended, start them again first.

        Raises EngineFailed when the engine is not started or does not start, Overloaded while a vLLM that keeps
        ending has to pause.
        """
        if self._engine is not None and self._engine.errored:
            if self._reviving is None or self._reviving.done():
                self._check_pause(self._engine)
                self._reviving = asyncio.create_task(self._revive(self._engine))
            # A client that leaves must not end the start that others wait for.
            await asyncio.shield(self._reviving)
        return await super()._running()

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
            await self._start_engine()
        except SingletreeError:
            self._backoff.record_death()
            raise


class PictureInputs:
    """Makes the inputs of one ``AsyncLLM`` from prompts with pictures.

    A picture is decoded once: while vLLM has it, its id is enough.
    """

    def __init__(self, llm: Any, make_prompt: PicturePrompt) -> None:
        self._llm = llm
        self._make_prompt = make_prompt
        self._sent = SentPictures()

    async def render(self, job: GenerationJob, token_ids: list[int]) -> tuple[Any, Sequence[int]]:
        """Return the engine input with the pictures expanded, and the length of each.

        Raises:
            InvalidRequest: the pictures do not fit the placeholders, or vLLM refuses them.
        """
        pictures = pictures_of(job)
        try:
            found = await self._expand(token_ids, pictures, job.cache_salt)
        except ValueError as error:
            if UNKNOWN_PICTURE not in str(error) or not self._sent.forget(pictures):
                raise _refusal(error) from error
            found = await self._expand(token_ids, pictures, job.cache_salt)
        self._sent.note(pictures)
        return found, _lengths(found)

    def forget(self, pictures: Sequence[PromptPicture]) -> None:
        self._sent.forget(pictures)

    async def count(self, picture: PromptPicture) -> int:
        """Return how many tokens vLLM's processor makes of the picture. Raises InvalidRequest if it refuses it."""
        token_ids, alone = picture.alone()
        try:
            return _lengths(await self._expand(token_ids, (alone,), counts_only=True))[0]
        except SingletreeError:
            raise
        except Exception as error:
            raise _refusal(error) from error

    async def _expand(
        self,
        token_ids: list[int],
        pictures: Sequence[PromptPicture],
        cache_salt: str = "",
        *,
        counts_only: bool = False,
    ) -> Any:
        given = [
            (picture_uuid(each), None if each in self._sent and not counts_only else each.data)
            for each in pictures
        ]
        prompt = await asyncio.to_thread(self._make_prompt, token_ids, given, cache_salt or None)
        # What is only counted never reaches vLLM's other process, so the cache that both share must not have it.
        (engine_input,) = await self._llm.renderer.render_cmpl_async([prompt], skip_mm_cache=counts_only)
        return engine_input


def _lengths(engine_input: Any) -> list[int]:
    return [place.length for place in engine_input["mm_placeholders"]["image"]]


def _refusal(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the engine refused the pictures: {str(error)[:_MAX_MESSAGE_LENGTH]}")
