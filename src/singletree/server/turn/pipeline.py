"""The steps of one turn: from a conversation to token ids, and from the model's tokens to events.

``prepare`` does the first half and raises for requests that cannot be served, before a response begins; ``generate``
does the second half.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from math import nan
from time import perf_counter

from singletree.conversation import Request, Sampling
from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import EngineFailed, InvalidRequest, SingletreeError
from singletree.events import Finished, FinishReason, UsageUpdate
from singletree.prompts.history import canonicalization
from singletree.prompts.history.canonicalization import ToolsOf
from singletree.server.models.chat_format import ChatFormat, learn_counts
from singletree.server.models.model import Model
from singletree.server.turn.complete_calls import CompleteCalls
from singletree.server.turn.constraints import with_constraint_field
from singletree.server.turn.generation import Batches, DeliverEvents, Generation, start_generation
from singletree.server.turn.prompt import fit_prompt

# How many tokens the engine may generate after the last call that is allowed, such as `}`, `</tool_call>` in several
# tokens and the end token,
_SPARE_TOKENS = 16
# and for how long.
_SPARE_SECONDS = 10.0


def prepare(model: Model, request: Request, tools_of: ToolsOf = canonicalization.no_session) -> Generation:
    """Do all the work on a request that comes before the engine's.

    Raises:
        ContextOverflow: the prompt does not fit the window.
        InvalidRequest: the template refuses the conversation, or a schema or tool choice is not supported.
    """
    return start_generation(model, *fit_prompt(model, request, tools_of))


def generate(generation: Generation, request_id: str) -> Batches:
    """Generate the turn: by the generation's own runner if it has one, else by ``run``."""
    return (generation.runner or run)(generation, request_id)


async def run(generation: Generation, request_id: str) -> Batches:
    """Yield the events of the turn, one batch for each chunk of the engine, and then ``Finished``.

    A batch may be empty: the tokens so far decide nothing, and more follow. If ``generation.deliver`` is set, it gets
    the batches that an engine can deliver; the others, such as the first, are yielded. Closing this frees the engine.

    Raises:
        EngineFailed: the engine ended the stream without a finish reason; other errors of the engine pass through.
        InvalidRequest: the engine refuses the request.
    """
    model, decoder, recording = generation.model, generation.decoder, generation.recorder
    logprobs, counts = generation.logprob_reader, generation.request.options.continuous_usage_stats
    calls = None if generation.request.live_arguments else CompleteCalls(generation.completed_calls)
    delivery: TokenDelivery | None = None
    if generation.deliver is not None and logprobs is None and not counts:
        delivery = TokenDelivery(generation, calls, generation.deliver)
    chunks = model.engine.generate(_job(generation, request_id, delivery))
    token_ids = generation.token_ids
    reason: FinishReason | None = None
    routed_experts: str | None = None
    try:
        async for chunk in chunks:
            if delivery is not None and delivery.error is not None:
                raise delivery.error
            _take_reports(generation, chunk)
            if not token_ids and chunk.token_ids:
                generation.first_token_at = perf_counter()
            token_ids.extend(chunk.token_ids)
            batch = decoder.feed(chunk.token_ids) if logprobs is None else logprobs.feed(chunk)
            if calls is not None and batch:
                batch = calls.feed(batch)
            reason = decoder.ended or chunk.finish
            if batch or reason is None:
                yield [UsageUpdate(generation.usage), *batch] if counts and batch else batch
            if reason is not None:
                generation.weight_versions, routed_experts = chunk.weight_versions, chunk.routed_experts
                if decoder.ended == "stop":
                    await _let_end(generation, chunk, chunks, delivery)
                break
    except InvalidRequest as refusal:
        raise with_constraint_field(refusal, generation.request) from None
    finally:
        await chunks.aclose()
    if reason is None:
        raise EngineFailed("the engine stopped without a finish reason; try again")
    if reason == "length" and not generation.fits_window:
        reason = "context_overflow"
    last = decoder.close() if logprobs is None else logprobs.close()
    generation.ended = decoder.ended or reason
    if recording is not None:
        recording.close(generation.ended)
        if model.memory is not None:
            # The next turn may be asked of another process, as soon as the client has this one.
            await model.memory.settled()
    if last and calls is not None:
        last = calls.feed(last)
    if last:
        yield last
    generation.final_usage = usage = generation.usage
    if generation.report is not None:
        usage.details, generation.report = generation.report(usage), None  # It refers to the whole answer.
    yield Finished(generation.ended, usage, decoder.stop_sequence, generation.weight_versions, routed_experts)


def _job(generation: Generation, request_id: str, delivery: TokenDelivery | None) -> GenerationJob:
    prompt, request, sampling = generation.prompt, generation.request, generation.sampling
    hints = request.hints
    return GenerationJob(
        prompt.token_ids,
        sampling,
        request_id,
        stop_token_ids=_stop_token_ids(generation.model, sampling),
        constraint=generation.constraints.constraint,
        priority=hints.rank,
        pictures=prompt.pictures,
        session=generation.session_name,
        is_subagent=request.agent.is_subagent,
        cache_salt=request.cache_salt,
        expected_tokens=hints.expected_tokens,
        latency_sensitivity=hints.latency_sensitivity,
        outlook=generation.outlook,
        deliver=None if delivery is None else delivery.take,
    )


def _take_reports(generation: Generation, chunk: Chunk) -> None:
    if chunk.cached_tokens is not None:
        generation.cached_tokens = chunk.cached_tokens
    if chunk.route is not None:
        generation.route = chunk.route
    if chunk.prompt_tokens is not None:
        _take_prompt_tokens(generation, chunk)
    if chunk.logprobs and (kept := generation.token_logprobs) is not None:
        kept.extend(row[0][1] if row else nan for row in chunk.logprobs)


async def _let_end(
    generation: Generation, last: Chunk, chunks: AsyncGenerator[Chunk, None], delivery: TokenDelivery | None
) -> None:
    """Let the engine generate the end of a turn that is over because it has all calls that are allowed.

    The client has its calls already. An engine that is cancelled here does not report cached tokens (vLLM over HTTP),
    or has the turn in its prefix cache only after the next prompt has come (SGLang). A constraint leaves nothing but
    the end, and most models stop here by themselves. One that goes on, or an engine that fails or hangs, is left.

    Tokens that only close the last call belong to the turn: the next prompt has them in their place.
    """
    new, finish = array("I"), last.finish
    if delivery is not None:
        delivery.spare = new
    with suppress(SingletreeError, TimeoutError):
        async with asyncio.timeout(_SPARE_SECONDS):
            while finish is None and len(new) < _SPARE_TOKENS:
                chunk = await anext(chunks, None)
                if chunk is None:
                    break
                _take_reports(generation, chunk)
                new.extend(chunk.token_ids)
                finish = chunk.finish
    if finish != "stop" or generation.recorder is None:
        return
    # The chunk that completed the call may have tokens behind it, which were not decoded.
    turn = generation.decoder.turn
    if generation.decoder.only_closes(turn.token_ids[turn.length :] + new):
        turn.token_ids.extend(new)
        turn.length = len(turn.token_ids)


def _take_prompt_tokens(generation: Generation, chunk: Chunk) -> None:
    model, prompt, length = generation.model, generation.prompt, chunk.prompt_tokens or 0
    generation.prompt_tokens = length
    learn_counts(model.eyes, len(prompt.token_ids), prompt.pictures, chunk)
    most = generation.sampling.max_tokens or 0
    generation.fits_window = generation.fits_window and length + most <= model.context_window


def _stop_token_ids(model: Model, sampling: Sampling) -> tuple[int, ...]:
    """Return the tokens at which the engine ends the turn: with ``ignore_eos`` only those that the client names."""
    own = () if sampling.ignore_eos else model.derived(_own_stop_token_ids)
    return (*own, *sampling.stop_token_ids) if sampling.stop_token_ids else own


def _own_stop_token_ids(chat_format: ChatFormat) -> tuple[int, ...]:
    return tuple(chat_format.tokenizer.stop_token_ids)


class TokenDelivery:
    """Decodes the tokens that an engine delivers (``GenerationJob.deliver``), and delivers their events.

    Args:
        generation: the turn.
        calls: holds calls back; None where they are sent live.
        deliver: takes the events.

    Attributes:
        error: what the last call raised: the engine must not get it. To be raised when the engine yields.
        spare: takes the tokens behind the end of the turn, when it is set; they are not decoded.
    """

    __slots__ = ("_calls", "_decode", "_decoder", "_deliver", "_token_ids", "error", "spare")

    def __init__(self, generation: Generation, calls: CompleteCalls | None, deliver: DeliverEvents) -> None:
        self._token_ids = generation.token_ids
        self._decoder = generation.decoder
        self._decode = generation.decoder.feed
        self._calls = calls
        self._deliver = deliver
        self.error: Exception | None = None
        self.spare: array[int] | None = None

    def take(self, token_ids: Sequence[int]) -> bool:
        """Take the next tokens; return whether more may come so. Never raises."""
        if self.spare is not None:
            self.spare.extend(token_ids)
            return False
        try:
            self._token_ids.extend(token_ids)
            decoder, events = self._decoder, self._decode(token_ids)
            if decoder.has_calls and self._calls is not None:
                events = self._calls.feed(events)
            return (not events or self._deliver(events)) and decoder.ended is None
        except Exception as error:
            self.error = error
            return False
